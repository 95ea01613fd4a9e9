"""StorageReader for torch.distributed.checkpoint. It reads all shards that a rank needs at once, each chunk once, directly into
their tensors."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle as pickling
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from .. import _torch
from .._documents import read_document, read_documents
from ..errors import Conflict, Damaged, Exhausted, NotFound, Unsupported, UsageError
from ..repository import Repository, opened
from ..tensors import read_request
from . import _pickles, folder
from .metadata import METADATA, StorageInfo, as_bytes, decode, dtype_named, manifest_of, merge, rank_metadata
from .writer import StorageWriter

#: Byte ranges with gaps of at most this length are read together.
_GAP = 1 << 20
#: Errors of `torch.load` for an archive that is not as `torch.save` writes it.
_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class StorageReader(TorchStorageReader):
    """Loads distributed checkpoints from a repository: `dcp.load(state, storage_reader=StorageReader(repo, NAME))`. The number of
    ranks may differ from the save.

    `repo` is a Repository or its URL. `name` is a saved name, or `RUN@latest`, `RUN@upto=N`, `RUN@min=METRIC` or
    `RUN@max=METRIC`; a `checkpoint_id` given to `dcp.load` replaces it. All ranks load the same step, or all fail. Checkpoints of
    torch's FileSystemWriter that were saved as files can be loaded, too.

    torch's planner unpickles everything that is no tensor, and a pickle can run any code. So objects other than plain values are
    refused; pass `pickle=True` if you trust whoever saved the step.
    """

    def __init__(
        self, repo: Repository | str | os.PathLike[str] | None, name: str | None = None, *, pickle: bool = False
    ):
        super().__init__()
        self._pickle = pickle
        self.repository = opened(repo, create=False)
        self.name = name
        self._asked: str | None = None
        #: Step being read: its name, and its manifest when the metadata was read.
        self._step: tuple[str, str] | None = None
        self._stored: dict[MetadataIndex, StorageInfo] = {}

    def __repr__(self) -> str:
        return f"towline.dcp.StorageReader({self.repository!r}, {self.name!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """Name that is loaded."""
        return self._step[0] if self._step else self._asked or self.name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a valid name in a repository, or a selector such as `RUN@latest`."""
        return StorageWriter.validate_checkpoint_id(os.fspath(checkpoint_id).partition("@")[0])

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._asked = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._step, self._stored = None, {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of all ranks. If they saved without collectives, pass `rank`: its metadata takes precedence."""
        asked = self._asked or self.name
        if asked is None:
            raise UsageError("no name to load: give the StorageReader one, or dcp.load a checkpoint_id")
        name = self.repository._engine.resolve(asked)
        shown = self.repository.show(name)
        self._step = name, shown.manifest
        files = {entry.path for entry in shown.entries}
        rank = kwargs.get("rank")
        if METADATA in files:
            metadata = decode(read_document(self.repository, name, METADATA))
        elif rank is not None and rank_metadata(0) in files:
            metadata = self._of_ranks(name, rank, files)
        elif folder.METADATA in files:
            tensors = self.repository.tensors(name)
            metadata = folder.decode(read_document(self.repository, name, folder.METADATA, folder.MARKS), tensors)
        else:
            why = "its ranks saved without collectives" if rank_metadata(0) in files else "was it saved by towline.dcp?"
            raise NotFound(f"{name} has no {METADATA} ({why})")
        metadata.storage_meta = StorageMeta(checkpoint_id=name)
        return metadata

    def _of_ranks(self, name: str, rank: int, files: set[str]) -> Metadata:
        paths = [path for path in sorted(files) if path.startswith("rank-") and path.endswith(".json")]
        own = rank_metadata(rank)
        paths.sort(key=lambda path: path != own)
        return merge(map(decode, read_documents(self.repository, name, paths)))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        steps = {plan.storage_data for plan in plans}
        if len(steps) > 1:
            names = ", ".join(f"{name} ({manifest[:12]})" for name, manifest in sorted(steps))
            raise Conflict(
                f"the ranks found different steps, because one was saved while they started to load: {names} (load again)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._step is None:
            raise UsageError("this plan was not prepared by towline.dcp.StorageReader.prepare_global_plan")
        name, manifest = self._step
        self._read_bytes(name, [item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)
        self._read_tensors(name, [item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner)
        if manifest_of(self.repository, name) != manifest:
            raise Conflict(
                f"{name} was saved anew or removed while it was loaded: the loaded state may mix both (load again)"
            )
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_bytes(self, name: str, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        for path, start, end, wanted in _ranges([(item, self._stored[item.storage_index]) for item in items]):
            if end - start > self.repository._engine.memory():
                raise Exhausted(
                    f"{path} of {name} has objects of {end - start} bytes, more than the limit of the memory (open the "
                    "repository with a larger `memory`)"
                )
            held = memoryview(self.repository.read(name, path, start, end))
            for item, stored in wanted:
                at = stored.start - start
                planner.load_bytes(item, self._without_code(name, item, held[at : at + stored.length]))

    def _without_code(self, name: str, item: ReadItem, held: memoryview) -> io.BytesIO:
        """Bytes of an object, loaded with weights_only=True and saved again, so that unpickling them runs no code."""
        if self._pickle:
            return io.BytesIO(held)
        fqn = item.storage_index.fqn
        try:
            loaded = torch.load(_pickles.checked(held), weights_only=True)
        except pickling.UnpicklingError as error:
            raise Unsupported(
                f"{name} has an object at {fqn} that needs unpickling, and a pickle can run any code: "
                "pass towline.dcp.StorageReader(..., pickle=True) if you trust whoever saved it"
            ) from error
        except (Damaged, *_MALFORMED) as error:
            raise Damaged(f"{name} has an object at {fqn} that torch cannot load: {error}") from error
        made = io.BytesIO()
        try:
            torch.save(loaded, made)
        except (pickling.PicklingError, *_MALFORMED) as error:
            raise Unsupported(
                f"{name} has an object at {fqn} that torch loads but cannot save again, as is done before it is unpickled: "
                f"{error} (pass towline.dcp.StorageReader(..., pickle=True) if you trust whoever saved it)"
            ) from error
        made.seek(0)
        return made

    def _read_tensors(self, name: str, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        reading, commits = _Reading(self.repository, name), []
        for item in items:
            target = planner.resolve_tensor(item).detach()
            commits.append((item, target))
            if tuple(target.shape) != tuple(item.lengths):
                raise UsageError(
                    f"{item.storage_index.fqn} does not fit: {list(item.lengths)} is read into a tensor of {list(target.shape)}"
                )
            stored = self._stored[item.storage_index]
            if stored.tensor is not None:
                reading.add(item, stored, target)
                continue
            read = self.repository.read(name, stored.path, stored.start, stored.start + stored.length)
            try:
                held = folder.read(read)
            except (pickling.UnpicklingError, Damaged, *_MALFORMED) as error:
                raise Damaged(
                    f"{name} has a tensor at {item.storage_index.fqn} that torch cannot load: {error}"
                ) from error
            box = tuple(
                map(slice, item.storage_offsets, map(sum, zip(item.storage_offsets, item.lengths, strict=True)))
            )
            target.copy_(held[box])
        reading.finish()
        for item, target in commits:
            planner.commit_tensor(item, target)


class _Reading:
    """Reads of shards into their tensors. Shards that are converted or copied to a GPU go through host memory: at most as much
    as the engine's memory budget, in several reads if needed."""

    def __init__(self, repository: Repository, name: str):
        self._engine, self._name = repository._engine, name
        self._room = self._engine.memory()
        self._requests: list[tuple[Any, ...]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._beside = 0

    def add(self, item: ReadItem, stored: StorageInfo, target: torch.Tensor) -> None:
        if target.numel() == 0:
            return
        assert stored.dtype is not None
        dtype = dtype_named(stored.dtype)
        direct = type(target) is torch.Tensor and target.dtype == dtype and _torch.is_plain(target)
        there = target if direct else torch.empty(tuple(item.lengths), dtype=dtype)
        self._requests.append(_read_request(item, stored, dtype, there))
        if not direct:
            self._copies.append((target, there))
            self._beside += _torch.nbytes(there)
            if self._beside >= self._room:
                self.finish()

    def finish(self) -> None:
        if self._requests:
            self._engine.read_tensors(self._name, self._requests)
        with torch.no_grad():
            for target, there in self._copies:
                target.copy_(there)
        self._requests, self._copies, self._beside = [], [], 0


def _read_request(item: ReadItem, stored: StorageInfo, dtype: torch.dtype, there: torch.Tensor) -> tuple[Any, ...]:
    """Read of an item, as the engine takes it."""
    window = None
    if item.lengths:
        origin = stored.origin or (0,) * len(item.lengths)
        offsets = tuple(begin + offset for begin, offset in zip(origin, item.storage_offsets, strict=True))
        window = offsets, tuple(item.lengths)
        if stored.as_bytes:
            window = as_bytes(dtype, offsets), as_bytes(dtype, item.lengths)
    assert stored.tensor is not None
    return read_request(stored.tensor, stored.path, window, there.data_ptr(), _torch.nbytes(there))


def _ranges(
    items: list[tuple[ReadItem, StorageInfo]],
) -> Iterable[tuple[str, int, int, list[tuple[ReadItem, StorageInfo]]]]:
    """Merges items to byte ranges of files; yields each range with its items."""
    found: list[tuple[str, int, int, list[tuple[ReadItem, StorageInfo]]]] = []
    for item, stored in sorted(items, key=lambda one: (one[1].path, one[1].start)):
        end = stored.start + stored.length
        if found and found[-1][0] == stored.path and stored.start <= found[-1][2] + _GAP:
            path, start, before, wanted = found[-1]
            found[-1] = path, start, max(before, end), [*wanted, (item, stored)]
        else:
            found.append((stored.path, stored.start, end, [(item, stored)]))
    return found
