"""Checkpoints of Lightning's Trainer (lightning 2.x or pytorch_lightning) and Fabric, kept in a repository:

    trainer = Trainer(plugins=[TowlineCheckpointIO("s3://bucket/experiments", "run-7")])

Lightning goes on as with files. Where it names a checkpoint, `checkpoints/epoch=0-step=10.ckpt`, lies a stand-in of some bytes
as soon as the checkpoint is durable, so that what looks for files finds them: `save_top_k`, `save_last`, `ckpt_path="last"`.
torch.load reads the checkpoint through it, and so does `Model.load_from_checkpoint(callback.best_model_path)`, in any process
that has imported `towline.lightning`.

The checkpoint is the tree `RUN/step-10`, one step of the run, where the file name has the step and no other file took it;
else it has the name of the file, as `RUN/last.ckpt`, in which a character that a name cannot have is `+` and two hexadecimal
digits for each of its bytes in UTF-8. A path `towline://NAME` is that name, without a stand-in.

Strategies that write by themselves (FSDP with sharded states, DeepSpeed) do not ask a CheckpointIO.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from . import _given, _stand_ins
from ._collecting import Collector
from ._documents import read_document
from .checkpointer import DOCUMENT, TENSORS, Checkpointer, Reading, read_state
from .errors import Conflict, NotFound, SaveFailed, UsageError
from .handle import Handle
from .repository import Compression, Repository
from .repository import open as open_repository

# The same code, published under two names (https://pypi.org/project/pytorch-lightning/): the one that is in use comes first.
_PACKAGES = sorted(("lightning.fabric", "lightning_fabric"), key=lambda package: package not in sys.modules)
_PACKAGE = next(package for package in _PACKAGES if find_spec(package.partition(".")[0]) or package == _PACKAGES[-1])
_plugins: Any = import_module(f"{_PACKAGE}.plugins.io")
rank_zero_only = import_module(f"{_PACKAGE}.utilities.rank_zero").rank_zero_only

__all__ = ["TowlineCheckpointIO", "load_stand_in"]

_STEP = re.compile(r"(?:^|[-_ ])step[=_-]?(\d+)(?=$|[-_ .])")
#: Repositories that this process was given here, by their ids.
_given_here: dict[str, Repository] = {}


class TowlineCheckpointIO(_plugins.CheckpointIO):
    """Keeps checkpoints as steps of the run `run` of `repo`, a repository or its address.

    A save returns when the state is copied. Until it is durable the checkpoints that Lightning removes for it stay, and what
    makes it fail is raised by the next save, or at the end of the fit.

    Tensors, plain values, paths, times and namespaces are kept without pickle, and so are dataclasses, named tuples and
    enumerations, which are loaded once `towline.allow_classes` was given their classes. With `pickle` other values, such as
    hyper-parameters that are objects, are pickled one by one, and a warning says so; without it they are refused, with their
    path. Pickled values are loaded only with `weights_only=False`, of `Trainer.fit` or, where that says nothing, given here.
    `compression` says how small checkpoints are stored, and `collect` whether what removed checkpoints leave behind is deleted,
    as for `towline.Checkpointer`.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        *,
        pickle: bool = True,
        weights_only: bool = True,
        compression: Compression = None,
        collect: bool = True,
    ):
        _given.check_run(run)
        self.repository = repo if isinstance(repo, Repository) else open_repository(repo)
        _given_here[self.repository.id] = self.repository
        self.run, self.pickle, self.weights_only, self.compression = run, pickle, weights_only, compression
        self.collect = collect
        for package in _PACKAGES:
            if package in sys.modules and package != _PACKAGE:
                import_module(f"{package}.plugins.io").CheckpointIO.register(type(self))
        self._forget()

    def _forget(self) -> None:
        self._checkpointer: Checkpointer | None = None
        self._follower: _Follower | None = None
        self._collector: Collector | None = None
        #: Of names that this process saved as: the file.
        self._saved: dict[str, str] = {}
        #: Of what a warning was given.
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"repository", "run", "pickle", "weights_only", "compression", "collect"}
        return {name: value for name, value in self.__dict__.items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _given_here[self.repository.id] = self.repository
        self._forget()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves what Lightning keeps of a training."""
        if storage_options is not None:
            raise TypeError(
                "storage_options is for other storage: say what there is to say when the repository is opened"
            )
        path = os.fspath(path)
        file, folder = _file(path), _folder(path)
        name = self._name_for(path, file)
        if not _is_url(path):
            # As of an ordinary save. Lightning links into the folder before the stand-in is there.
            os.makedirs(folder, exist_ok=True)
        step = checkpoint.get("global_step", 0) if isinstance(checkpoint, dict) else 0
        checkpointer, follower = self._saving()
        handle = checkpointer._save_as(
            name,
            step,
            checkpoint,
            _metrics(checkpoint, path),
            labels={"lightning.file": file, "lightning.folder": folder},
            stateful=False,
        )
        # None only with when_busy="skip", which this Checkpointer does not have.
        assert handle is not None
        self._saved[name] = file
        self._warn_of(handle)
        follower.saved(handle, path, None if _is_url(path) else self._stand_in(name, file, folder))
        if not (isinstance(checkpoint, dict) and "pytorch-lightning_version" in checkpoint):
            # No trainer wrote it, so nobody calls `teardown` for it.
            handle.wait()
            follower.wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint, every byte checked: that of the stand-in at `path`, or, without one, that of the run which was
        saved as a file of this name. An ordinary file is left to Lightning.

        States are kept without their devices: all come on the CPU, or where `map_location` puts what was there.
        """
        path = os.fspath(path)
        if rank_zero_only.rank == 0:
            # What an earlier process left on this node's disk becomes durable, what is under way too.
            self._saving()[1].wait()
        record = self._record(path)
        if record is None and not _is_url(path) and os.path.isfile(path):
            options = {} if weights_only is None else {"weights_only": weights_only}
            loaded: dict[str, Any] = _plugins.TorchCheckpointIO().load_checkpoint(
                path, map_location=map_location, **options
            )
            return loaded
        name = self._found(path) if record is None else record["name"]
        if name is None:
            raise NotFound(
                f"no checkpoint {path}: {self.run} in {self.repository.url} has none that was saved as such a file"
            )
        pickle = not (self.weights_only if weights_only is None else weights_only)
        return _read(self.repository, name, _device(map_location), pickle)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Takes a checkpoint and its stand-in away, once every save so far is durable."""
        path = os.fspath(path)
        if os.path.islink(path):
            os.unlink(path)
        elif not _is_url(path) and os.path.isfile(path) and self._record(path) is None:
            _plugins.TorchCheckpointIO().remove_checkpoint(path)
        else:
            self._saving()[1].removed(path)

    def teardown(self) -> None:
        """Waits until every save is durable, and raises what failed."""
        checkpointer, follower, collector = self._checkpointer, self._follower, self._collector
        self._forget()
        if checkpointer is not None and follower is not None:
            try:
                checkpointer.close()
            finally:
                follower.close()
                if collector is not None:
                    collector.close()

    def open(self, path: str | os.PathLike[str], weights_only: bool | None = None) -> io.BytesIO:
        """A checkpoint as the file that Lightning writes, for what reads one by itself and does not know towline."""
        made = io.BytesIO()
        torch.save(self.load_checkpoint(path, weights_only=weights_only), made)
        made.seek(0)
        return made

    def checkout(self, folder: str | os.PathLike[str]) -> list[str]:
        """Puts stand-ins of the run's checkpoints into `folder`, so that `ckpt_path="last"` finds them on another machine than
        that which saved them. What lies there stays; a checkpoint whose file name would lead elsewhere is left out, with a
        warning. Their paths, the oldest first."""
        os.makedirs(folder, exist_ok=True)
        try:
            saved = self.repository.ls(self.run)
        except NotFound:
            return []
        made = []
        for one in sorted(saved, key=lambda one: one.saved):
            labels = self._labels(one.name)
            file, saved_in = labels.get("lightning.file"), labels.get("lightning.folder", "")
            if file and not _is_plain(file):
                warnings.warn(f"towline: {one.name} is left out: {file!r} is not a file name", stacklevel=2)
                continue
            path = os.path.join(folder, file or "")
            if not file or os.path.lexists(path):
                continue
            stand_in = self._stand_in(one.name, file, saved_in)
            _stand_ins.write(path, stand_in, load_stand_in, one.saved)
            made.append(path)
        return made

    def _saving(self) -> tuple[Checkpointer, _Follower]:
        if self._checkpointer is None or self._follower is None:
            # Lightning hears SIGTERM itself.
            self._checkpointer = Checkpointer(
                self.repository, self.run, pickle=self.pickle, compression=self.compression, on_sigterm=False
            )
            collector = self._collector = Collector(self.repository, self.collect)
            self._follower = _Follower(lambda path: self._remove(path, collector))
        return self._checkpointer, self._follower

    def _name_for(self, path: str, file: str) -> str:
        """What to save as: of the names that a file may have the first that no other file has."""
        *steps, own = self._names(path)
        for name in steps:
            if self._saved.get(name, file) == file and self._labels(name).get("lightning.file", file) == file:
                return name
        return own

    def _names(self, path: str) -> list[str]:
        if path.startswith("towline:/"):
            return ["/".join(map(_quoted, path.removeprefix("towline:").strip("/").split("/")))]
        file = _file(path)
        found = _STEP.search(file.removesuffix(".ckpt"))
        own = _quoted(file)
        if re.fullmatch(r"step-\d+", own):
            own = "+73" + own[1:]
        return [*([f"{self.run}/step-{int(found[1])}"] if found else []), f"{self.run}/{own}"]

    def _found(self, path: str) -> str | None:
        """The name that a file was saved as."""
        file = _file(path)
        return next((name for name in self._names(path) if self._labels(name).get("lightning.file") == file), None)

    def _labels(self, name: str) -> dict[str, str]:
        return _labels(self.repository, name)

    def _stand_in(self, name: str, file: str, folder: str) -> dict[str, str]:
        return {
            "repository": self.repository.id,
            "name": name,
            "file": file,
            "folder": folder,
            "url": self.repository.url,
        }

    def _record(self, path: str) -> dict[str, str] | None:
        """What the stand-in at `path` says, if one is there."""
        record = None if _is_url(path) else _stand_ins.read(path)
        if record is None:
            return None
        if record["repository"] != self.repository.id:
            raise UsageError(f"{path} stands for a checkpoint in another repository, {record['url']}: open that one")
        _check_present(self.repository, record, path)
        return record

    def _warn_of(self, handle: Handle) -> None:
        """Says, once, what is not loaded by the defaults that saved it."""
        news = [] if not self.weights_only else [path for path in handle._pickled if path not in self._warned]
        if news:
            warnings.warn(
                f"towline: {', '.join(news)} of {handle.name} is pickled: it is loaded with weights_only=False only",
                stacklevel=3,
            )
        classes = [name for name in handle._classes if name not in self._warned]
        if classes:
            warnings.warn(
                f"towline: {handle.name} holds objects of {', '.join(classes)}: call towline.allow_classes with these classes "
                "before it is loaded in another process",
                stacklevel=3,
            )
        self._warned.update(news, classes)

    def _remove(self, path: str, collector: Collector) -> None:
        record = self._record(path)
        name = self._found(path) if record is None else record["name"]
        if record is not None and name not in self._names(path):
            # Whoever may write to the folder could have put it there to have any name removed.
            warnings.warn(
                f"towline: {path} stands for {name}, which stays: it is no checkpoint of {self.run}", stacklevel=3
            )
            name = None
        if name is not None:
            with contextlib.suppress(NotFound):
                self.repository.remove(name)
            collector.request()
        if record is not None:
            os.unlink(path)


def load_stand_in(text: str, where: torch.Tensor) -> dict[str, Any]:
    """What torch.load calls for a stand-in: the checkpoint that it stands for, named by `text`, on the device of `where`.

    Its repository is one that a TowlineCheckpointIO of this process has, or that of $TOWLINE_REPO; else the one at the address
    that the stand-in names. With `weights_only` (torch's default) a file is not trusted: then no pickled value is loaded, and
    a repository that is not on this machine is not opened only because a file says so.
    """
    return _load_stand_in(text, where, trusted=True)


def _load_untrusted(text: str, where: torch.Tensor) -> dict[str, Any]:
    return _load_stand_in(text, where, trusted=False)


# torch.load with weights_only calls nothing else by that name
# (https://docs.pytorch.org/docs/stable/notes/serialization.html#torch.serialization.add_safe_globals).
torch.serialization.add_safe_globals([(_load_untrusted, "towline.lightning.load_stand_in")])


def _load_stand_in(text: str, where: torch.Tensor, trusted: bool) -> dict[str, Any]:
    try:
        record = _stand_ins.parsed(text)
    except ValueError as error:
        raise UsageError("this file was not written by towline.lightning, or is damaged") from error
    repository = _repository_of(record, trusted)
    _check_present(repository, record, os.path.join(record["folder"], record["file"]))
    return _read(repository, record["name"], where.device, trusted)


def _repository_of(record: dict[str, str], trusted: bool) -> Repository:
    """The repository of a stand-in."""
    own = os.environ.get("TOWLINE_REPO")
    if record["repository"] not in _given_here and own:
        repository = open_repository(own, create=False)
        _given_here[repository.id] = repository
    if record["repository"] in _given_here:
        return _given_here[record["repository"]]
    if not trusted and _is_url(record["url"]):
        raise UsageError(
            f"the checkpoint is {record['name']} in {record['url']}, which this process has not opened: call "
            f"towline.lightning.TowlineCheckpointIO({record['url']!r}, RUN) before, or load with weights_only=False"
        )
    repository = open_repository(record["url"], create=False)
    if repository.id != record["repository"]:
        raise NotFound(
            f"the checkpoint {record['name']} was saved to another repository than that at {record['url']} now"
        )
    return repository


def _read(repository: Repository, name: str, device: torch.device | None, pickle: bool) -> dict[str, Any]:
    document = read_document(repository, name, DOCUMENT)
    try:
        state: dict[str, Any] = read_state(repository, name, TENSORS, document, Reading(None, device, pickle)).state
        return state
    except UsageError as error:
        if pickle:
            raise
        raise UsageError(f"{name}: {error}; here: load with weights_only=False, if you trust who saved it") from error


def _labels(repository: Repository, name: str) -> dict[str, str]:
    """What is options of a saved tree; of one that something else saved, that it is no file's. Nothing, if there is none."""
    try:
        return {"lightning.file": "", **repository.show(name).labels}
    except NotFound:
        return {}


def _check_present(repository: Repository, record: dict[str, str], path: str) -> None:
    """Raises Conflict, if what a stand-in stands for is another checkpoint now."""
    labels = _labels(repository, record["name"])
    if labels.get("lightning.file") not in (None, record["file"]) or labels.get("lightning.folder") not in (
        None,
        record["folder"],
    ):
        raise Conflict(
            f"{path} is gone: {record['name']} was saved again since, from {labels.get('lightning.folder', 'elsewhere')} "
            "(give each run, or folder of checkpoints, a run name of its own)"
        )


def _is_plain(file: str) -> bool:
    """Is it the name of one file, which leads nowhere?"""
    return file not in ("", ".", "..") and not any(char in file for char in ("/", "\0", os.sep))


class _Follower:
    """A thread that does what waits for saves, in order: stand-ins of what is durable, and what was to be removed."""

    def __init__(self, remove: Callable[[str], None]):
        self._remove = remove
        self._work: queue.Queue[Any] = queue.Queue()
        self._failed = False
        self._awaited: Handle | None = None
        threading.Thread(target=self._run, name="towline-lightning", daemon=True).start()

    def saved(self, handle: Handle, path: str, stand_in: dict[str, str] | None) -> None:
        self._work.put(lambda: self._follow(handle, path, stand_in))

    def removed(self, path: str) -> None:
        self._work.put(lambda: self._failed or self._remove(path))

    def wait(self) -> None:
        """Waits until all is done, but not for a store that does not answer."""
        while self._work.unfinished_tasks and (self._awaited is None or self._awaited.error is None):
            time.sleep(0.005)

    def close(self) -> None:
        """Waits until all is done, once no save goes on."""
        self._work.join()
        self._work.put(None)

    def _follow(self, handle: Handle, path: str, stand_in: dict[str, str] | None) -> None:
        self._awaited = handle
        try:
            handle._await()
        except SaveFailed:
            # The Checkpointer raises it. What was to go for this save stays.
            self._failed = True
            return
        finally:
            self._awaited = None
        self._failed = False
        if stand_in is not None:
            _stand_ins.write(path, stand_in, load_stand_in)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                if work is None:
                    return
                work()
            except Exception as error:
                # Waiting for a thread that is gone would never end.
                warnings.warn(f"towline: {error}", stacklevel=2)
            finally:
                self._work.task_done()


def _is_url(path: str) -> bool:
    return "://" in path or path.startswith("towline:/")


def _file(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _folder(path: str) -> str:
    return path.rpartition("/")[0] if _is_url(path) else os.path.dirname(os.path.abspath(path))


def _quoted(text: str) -> str:
    """A segment of a name for any text, another for each: `+` and two digits for a byte that a name cannot have, and for `+`."""
    escaped = (
        char if re.fullmatch(r"[A-Za-z0-9._=-]", char) else "".join(f"+{byte:02X}" for byte in os.fsencode(char))
        for char in text
    )
    quoted = "".join(escaped)
    return quoted.replace(".", "+2E") if quoted in (".", "..") else quoted


def _metrics(checkpoint: Any, path: str) -> dict[str, float]:
    """What a ModelCheckpoint watches, as it was for this file. A character that a metric's name cannot have is a dot."""
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    found = {}
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and state.get("monitor") and path in (state.get("best_k_models") or {}):
            score = float(state["best_k_models"][path])
            if score - score == 0:
                found[re.sub(r"[^A-Za-z0-9._+=-]", ".", state["monitor"])] = score
    return found


def _device(map_location: Any) -> torch.device | None:
    """Where `map_location`, as torch.load takes it, puts what was on the CPU."""
    if callable(map_location):
        moved = map_location(torch.UntypedStorage(0), "cpu")
        return None if moved is None else torch.device(moved.device)
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    return None if map_location is None else torch.device(map_location)
