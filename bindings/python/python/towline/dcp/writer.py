"""StorageWriter for torch.distributed.checkpoint, which is also the stager of `async_save`.

Every rank saves its items as a part of the step, directly from the memory of its tensors. The coordinator saves the metadata as
the last part, which makes the whole step visible in one commit. For each save the coordinator creates an attempt, an id that
separates its parts from those of other tries, and sends it to the ranks with their plans.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import io
import json
import math
import os
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _arguments, _torch, _towline
from .._attempts import Attempts
from ..errors import Conflict, UnsupportedValue, UsageError
from ..reports import SaveReport
from ..repository import Compression, Repository, opened, save_options
from .metadata import METADATA, StorageInfo, as_bytes, encode, is_in_safetensors, manifest_of, rank_metadata
from .stager import Region, Stager, claim, release

#: Approximate bytes in one part: the host memory that GPU tensors are copied through.
BATCH = 4 << 30

#: Name with which options are checked, before the name of a save is known.
_ANY_STEP = "run/step-0"

_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._+=-]+")

#: A file and its pieces, as the engine takes them.
_File = tuple[str, list[Any]]

#: The assignment that this thread received last. It replaces the one in the plan: a planner that caches plans returns an old plan
#: with its old assignment.
_received = threading.local()
#: Number of saves without collectives by this process, by repository and name.
_times: collections.Counter[tuple[str, str]] = collections.Counter()


class StorageWriter(TorchStorageWriter, AsyncStager):
    """Saves distributed checkpoints to a repository: `dcp.save(state, checkpoint_id=NAME, storage_writer=StorageWriter(repo))`.

    `repo` is a Repository or its URL, `name` the name to save as if no `checkpoint_id` is given. As with torch's own writers, an
    existing name is replaced, in one commit once the new step is complete. `overwrite=False` raises Conflict instead, before
    anything is written. `metrics` and `labels` are stored with every step that this writer saves; set the attribute `metrics`
    before a save to give a step its own, for selectors such as `RUN@min=loss`. `key_every`, `compression` and `create` (whether a
    missing repository is created) are as for `towline.Checkpointer`.

    A tensor in shards is stored as these, each named by its offsets, such as `w@60,0`: `towline.load` and the command line list
    the shards, and StorageReader reassembles them.

    `stage="background"` makes `dcp.async_save` return before the state is copied, as for `Stager`.

    Without collectives (`use_collectives=False`) ranks exchange no plans, and match their parts by `attempt`: a value that all
    ranks share and that must change at every restart. By default they agree on one through the store of torch.distributed. All
    ranks must also save a name equally often. `batch` is the maximum number of bytes of host memory through which a rank copies
    GPU tensors.
    """

    # For torch: `stage` returns a complete copy.
    _synchronize_after_execute = False

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        name: str | None = None,
        *,
        overwrite: bool = True,
        metrics: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        key_every: int | None = None,
        compression: Compression = "auto",
        stage: str = "blocking",
        attempt: str | None = None,
        batch: int = BATCH,
        create: bool | None = None,
    ):
        super().__init__()
        if batch < 1:
            raise UsageError(f"a batch is a number of bytes, not {batch}")
        # Checks the options early.
        options = save_options(metrics, labels=labels, key_every=key_every, compression=compression)
        _arguments.check_save(_ANY_STEP, options)
        self.repository = opened(repo, create=create, caller="towline.dcp.StorageWriter")
        self.name, self.overwrite = name, overwrite
        self._metrics, self.labels = options["metrics"], dict(labels or {})
        self.key_every, self.compression, self.attempt, self.batch = key_every, compression, attempt, batch
        #: Report of this process's last save.
        self.report: SaveReport | None = None
        self._staging = stage
        self._set_up()

    def _set_up(self) -> None:
        self._stager, self._save = Stager(self._staging), _Save()

    def __getstate__(self) -> dict[str, Any]:
        transient = ("_stager", "_save", "report")
        # For `async_save` in a process: the metrics of the state that is sent with it.
        return {key: value for key, value in vars(self).items() if key not in transient} | {"_metrics": self._pending()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, report=None)
        self._set_up()

    def __repr__(self) -> str:
        return f"towline.dcp.StorageWriter({self.repository!r}, {self.name!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that are stored with the next step. Set them before each `dcp.save` or `dcp.async_save`; a save in progress
        keeps those that it began with."""
        return dict(self._metrics)

    @metrics.setter
    def metrics(self, metrics: Mapping[str, float]) -> None:
        options = save_options(metrics)
        _arguments.check_save(_ANY_STEP, options)
        self._metrics = options["metrics"]

    def _pending(self) -> dict[str, float]:
        """Metrics of the save that begins in this thread: of the state that was staged for it, else the current ones."""
        staged = self._stager.claim()
        return self.metrics if staged is None else staged

    @property
    def checkpoint_id(self) -> str | None:
        """Name that is saved."""
        return self._save.name or self.name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a valid name in a repository."""
        return all(_SEGMENT.fullmatch(segment) for segment in os.fspath(checkpoint_id).split("/"))

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # -- Staging ---------------------------------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | concurrent.futures.Future[dict[str, Any]]:
        """Copies the state to reusable host memory, once the state before is saved. The copy serves `async_save` in a thread and
        in a process, where it is moved to shared memory."""
        return self._stager.stage_with(state_dict, self.metrics)

    def synchronize_staging(self) -> None:
        """Waits until the last state is staged."""
        self._stager.synchronize_staging()

    def close(self) -> None:
        """Waits until all states are staged, and frees the staging memory. The StorageWriter can be used again."""
        self._stager.close()
        # A save in another thread keeps its memory.
        self._save.forget()

    # -- Saving, in the order of torch's calls -----------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._save.begin(None if checkpoint_id is None else os.fspath(checkpoint_id))
        _received.assignment = None
        self._stager.claim()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        save = self._save
        save.metrics = self._pending()
        save.coordinator = is_coordinator
        save.rank = kwargs.get("rank") or 0
        save.collective = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        name = self._name()
        if not self.validate_checkpoint_id(name):
            raise UsageError(
                f"a checkpoint is saved under a name in the repository, such as run-7/step-1000: segments of "
                f"[A-Za-z0-9._+=-] between slashes, not {name!r}"
            )
        asks = not self.overwrite and (self._save.coordinator or not self._save.collective)
        if asks and manifest_of(self.repository, name) is not None:
            raise Conflict(f"{name} is there already (save under another name, or allow overwrite=True)")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assignments = self._assignments(plans) if self._save.collective else [self._own_assignment()]
        # Without a scatter, this process's assignment is the only one.
        _received.assignment = assignments[0]
        return [dataclasses.replace(plan, storage_data=one) for plan, one in zip(plans, assignments, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assignment = getattr(_received, "assignment", None) or plan.storage_data
        if not isinstance(assignment, Assignment):
            raise UsageError(
                "this plan was not prepared by towline.dcp.StorageWriter.prepare_global_plan, which dcp.save calls"
            )
        save = self._save
        save.assignment, results, tensors = assignment, [], []
        for number, items in enumerate(_split(plan.items, assignment.parts)):
            stem = f"rank-{assignment.rank:05}" + (f".{number:05}" if assignment.parts > 1 else "")
            batch = _Batch(stem, items, planner, save.copies)
            results += batch.results
            claim(batch.tensors)
            if assignment.first is None or not save.collective:
                # `finish` saves it together with the metadata.
                save.held = batch
            else:
                self._put(batch.files, assignment.first + number)
                tensors += batch.tensors
        release(tensors)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._save
        assignment, held = save.planned(), save.held
        document = encode(metadata, results, assignment.world_size)
        if held is None:
            report = self._put([(METADATA, [document])], assignment.total - 1)
            if not report.complete:
                raise Conflict(
                    f"{self._name()} is not saved: part {report.waits_for} of attempt {assignment.attempt} is missing "
                    "(did every rank use this StorageWriter?)"
                )
            return
        path = METADATA if save.collective else rank_metadata(assignment.rank)
        self._put([*held.files, (path, [document])], assignment.first)
        release(held.tensors)
        save.held = None

    def _put(self, files: list[_File], part: int | None) -> SaveReport:
        """Saves files as the complete step, or as one part of it."""
        assignment = self._save.planned()
        options = save_options(
            self._save.metrics,
            labels=self.labels,
            framework="pytorch",
            key_every=self.key_every,
            compression=self.compression,
            world_size=assignment.world_size,
            part=None if part is None else (part, assignment.attempt),
            parts=None if part is None else assignment.total,
        )
        report = self.repository._engine.save_files(files, self._name(), options)
        self.report = SaveReport.read(json.loads(report))
        return self.report

    def _name(self) -> str:
        name = self.checkpoint_id
        if name is None:
            raise UsageError("no name to save as: give the StorageWriter one, or dcp.save a checkpoint_id")
        return name

    def _assignments(self, plans: list[SavePlan]) -> list[Assignment]:
        parts = [max(1, math.ceil(sum(map(_size, plan.items)) / self.batch)) for plan in plans]
        # The metadata is one part more.
        ranks, total = len(plans), sum(parts) + 1
        # The suffix tells the number of parts, which is not that of the ranks.
        attempt = f"{uuid.uuid4().hex}-of-{total}"
        if sum(parts) == 1:
            return [Assignment(attempt, 0, 1, None, 1, 1)]
        firsts = [sum(parts[:rank]) for rank in range(ranks)]
        return [Assignment(attempt, rank, ranks, firsts[rank], parts[rank], total) for rank in range(ranks)]

    def _own_assignment(self) -> Assignment:
        """Assignment of a rank that saves without collectives."""
        rank, ranks = self._save.rank, 1
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
        saved = self.repository.url, self._name()
        _times[saved] += 1
        start = Attempts(self.attempt).current() if ranks > 1 else uuid.uuid4().hex
        return Assignment(f"{start}-{_times[saved]}", rank, ranks, rank if ranks > 1 else None, 1, ranks)


class _Save(threading.local):
    """Save in progress in this thread: `async_save` may start one while another finishes."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        #: Host memory for copies of tensors that are not plain host memory.
        self.copies = Region()
        self.begin(None)

    def begin(self, name: str | None) -> None:
        self.name, self.coordinator, self.rank, self.collective = name, True, 0, True
        self.metrics: dict[str, float] = {}
        self.assignment: Assignment | None = None
        #: Files that are saved together with the metadata.
        self.held: _Batch | None = None

    def planned(self) -> Assignment:
        """The assignment that came with the plan."""
        assert self.assignment is not None
        return self.assignment


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the coordinator sends a rank with its plan (`SavePlan.storage_data`): the parts of the step that it saves."""

    attempt: str
    rank: int
    world_size: int
    #: Number of the rank's first part; None if the step is saved in one piece.
    first: int | None
    #: Number of parts that the rank saves.
    parts: int
    #: Number of parts of the step.
    total: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _received.assignment = self


class _Batch:
    """Items of a plan as files. The pieces of the files are memory of `tensors`."""

    def __init__(self, stem: str, items: Sequence[WriteItem], planner: SavePlanner, copies: Region):
        self.files: list[_File] = []
        self.results: list[WriteResult] = []
        self.tensors: list[torch.Tensor] = []
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        if tensors:
            self._add_tensors(f"{stem}.safetensors", tensors, planner, copies)
        if len(tensors) < len(items):
            self._add_bytes(f"{stem}.bytes", [item for item in items if item.type == WriteItemType.BYTE_IO], planner)

    def _add_tensors(self, path: str, items: Sequence[WriteItem], planner: SavePlanner, copies: Region) -> None:
        tensors = [_plain(item, planner.resolve_data(item)) for item in items]
        others = [at for at, tensor in enumerate(tensors) if not _torch.is_plain(tensor)]
        for at, copied in zip(others, copies.fill([tensors[at] for at in others]) if others else (), strict=True):
            tensors[at] = copied
        self.tensors = tensors
        leaves, sharding = [], {}
        taken: set[str] = set()
        for item, tensor in zip(items, tensors, strict=True):
            name, dtype, size, plain = (
                _named(item, taken),
                tensor.dtype,
                _torch.nbytes(tensor),
                is_in_safetensors(tensor.dtype),
            )
            shape = tuple(tensor.shape) if plain else as_bytes(dtype, tensor.shape)
            leaves.append((name, _torch.DTYPE_NAMES.get(dtype, "U8"), shape, size))
            data = _data(item)
            sharding[name] = {
                "saved_offsets": list(data.chunk.offsets),
                "fqn": item.index.fqn,
                "shape": list(data.size),
            }
            stored = StorageInfo(path, name, str(dtype).removeprefix("torch."), not plain)
            self.results.append(WriteResult(item.index, size, stored))
        # Same metadata as torch's writer: https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/_hf_utils.py
        metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
        header, starts, _ = _towline.lay_out(leaves, metadata)
        order = sorted(range(len(tensors)), key=starts.__getitem__)
        pieces = [(tensors[at].data_ptr(), _torch.nbytes(tensors[at])) for at in order]
        self.files.append((path, [header, *(piece for piece in pieces if piece[1])]))

    def _add_bytes(self, path: str, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        pieces, start = [], 0
        for item in items:
            value = planner.resolve_data(item)
            if not isinstance(value, io.BytesIO):
                raise UsageError(
                    f"the planner gave a {type(value).__name__} for the bytes of {item.index.fqn}, not a BytesIO"
                )
            pieces.append(value.getvalue())
            stored = StorageInfo(path, start=start, length=len(pieces[-1]))
            self.results.append(WriteResult(item.index, stored.length, stored))
            start += stored.length
        self.files.append((path, pieces))


def _plain(item: WriteItem, tensor: Any) -> torch.Tensor:
    """Tensor of an item, if it can be stored."""
    where = _shown(item.index)
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"the planner gave a {type(tensor).__name__} for the tensor {where}")
    what, help = None, "turn it into plain tensors"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        what = f"a tensor of the kind {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.device.type == "meta":
        what, help = "a tensor on the meta device, which has no elements", "materialise it first"
    elif tensor.is_quantized:
        what = "a quantised tensor"
    elif tensor.layout is not torch.strided:
        what, help = f"a tensor of the layout {tensor.layout}", "turn it into a dense one"
    if what is not None:
        error = UnsupportedValue(f"{where} cannot be saved: it is {what} ({help})")
        error.place, error.help = where, help
        raise error
    sizes = _data(item).chunk.sizes
    if tuple(tensor.shape) != tuple(sizes):
        raise UsageError(
            f"{where} has the shape {list(tensor.shape)}, not {list(sizes)} as planned: did it change during the save?"
        )
    return tensor.detach()


def _named(item: WriteItem, taken: set[str]) -> str:
    """Name of an item's tensor in its file: the same in every step, and a different one for each part of a tensor."""
    data = _data(item)
    chunk, name = data.chunk, item.index.fqn
    if chunk.sizes != data.size:
        name += "@" + ",".join(map(str, chunk.offsets))
    wanted, again = name, 1
    while name in taken or name == "__metadata__":
        again += 1
        name = f"{wanted}#{again}"
    taken.add(name)
    return name


def _data(item: WriteItem) -> TensorWriteData:
    """Description of an item that is a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _split(items: Sequence[WriteItem], parts: int) -> list[list[WriteItem]]:
    """Splits items into `parts` groups of about the same size; the order stays."""
    groups: list[list[WriteItem]] = [[] for _ in range(parts)]
    whole, before = max(1, sum(map(_size, items))), 0
    for item in items:
        groups[min(before * parts // whole, parts - 1)].append(item)
        before += _size(item)
    return groups


def _shown(index: MetadataIndex) -> str:
    return index.fqn if not index.offset else f"{index.fqn} at {list(index.offset)}"
