"""CheckpointIO plugin for Lightning's Trainer (lightning 2.x or pytorch_lightning) and Fabric that saves to a repository:

    trainer = Trainer(plugins=[TowlineCheckpointIO("s3://bucket/experiments", "run-7")])

Once a checkpoint is durable, a small file that refers to it, a pointer file, is written to the path that Lightning gave, such as
`checkpoints/epoch=0-step=10.ckpt`. So everything that looks for files works as usual: `save_top_k`, `save_last`,
`ckpt_path="last"`. In any process that has imported `towline.lightning`, torch.load of the pointer file returns the checkpoint,
and so `Model.load_from_checkpoint(callback.best_model_path)` works, too.

If the file name has a step and no other file of that step was saved, the checkpoint is saved as `RUN/step-10`, a step of the run.
Otherwise it gets the name of the file, such as `RUN/last.ckpt`; a character that is not allowed in names is written as `+` and
two hexadecimal digits for each of its UTF-8 bytes. If a file of the same name in another folder has that, as with two
ModelCheckpoints, the folder is put before it, such as `RUN/periodic+2Flast.ckpt`. A path `towline://NAME` is saved as NAME,
without a pointer file; `towline://RUN/last.ckpt` loads the checkpoint of the first folder that saved a `last.ckpt`, whichever of
them is newer.

Strategies that write files themselves (FSDP with sharded states, DeepSpeed) do not use a CheckpointIO.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from . import _arguments, _backlog, _pointer_files
from ._collecting import Collector
from ._documents import document_in
from ._reading import DOCUMENT, TENSORS, Reading, read_state
from ._unresumed import UnresumedCheckpoints
from .checkpointer import Checkpointer
from .errors import Conflict, NotFound, SaveFailed, Unreachable, UsageError
from .handle import Handle
from .reports import Saved
from .repository import Compression, Repository, check_compression, opened
from .repository import open as open_repository

# The same code is published under two names (https://pypi.org/project/pytorch-lightning/): the imported one comes first.
_PACKAGES = sorted(("lightning.fabric", "lightning_fabric"), key=lambda package: package not in sys.modules)
_PACKAGE = next(package for package in _PACKAGES if find_spec(package.partition(".")[0]) or package == _PACKAGES[-1])
_plugins: Any = import_module(f"{_PACKAGE}.plugins.io")
rank_zero_only = import_module(f"{_PACKAGE}.utilities.rank_zero").rank_zero_only

__all__ = ["TowlineCheckpointIO", "load_pointer_file"]

_STEP = re.compile(r"(?:^|[-_ ])step[=_-]?(\d+)(?=$|[-_ .])")
#: Repositories that were opened in this module, by id.
_repositories: dict[str, Repository] = {}


class TowlineCheckpointIO(_plugins.CheckpointIO):
    """Saves checkpoints as steps of the run `run` in `repo`, a Repository or its URL.

    A save returns when the state is copied. An older checkpoint that Lightning removes after it stays until the new one is
    durable. If a save fails, the next save, or the end of the fit, raises SaveFailed.

    Tensors, plain values, paths, times and namespaces are saved without pickle. So are dataclasses, named tuples and
    enumerations; to load them, pass their classes to `towline.allow_classes`. With `pickle`, all other values, such as
    hyper-parameters that are objects, are pickled individually, with a warning; without it they are refused, with their path.
    Pickled values are loaded only with `weights_only=False`, passed to `Trainer.fit` or, as the default, to this class.
    On another machine, call `checkout` before `fit(..., ckpt_path="last")`. A fit that saves into a folder without a file of the
    run, and has loaded none of its checkpoints, begins anew: it warns once if the run has checkpoints, never removes them,
    and raises SaveConflict rather than replace one.

    `compression`, `collect` (whether the data of removed checkpoints is deleted) and `create` (whether a missing repository is
    created) are as for `towline.Checkpointer`.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        *,
        pickle: bool = True,
        weights_only: bool = True,
        compression: Compression = "auto",
        collect: bool = True,
        create: bool | None = None,
    ):
        _arguments.check_run(run)
        check_compression(compression)
        self.repository = opened(repo, create=create, caller="TowlineCheckpointIO")
        _repositories[self.repository.id] = self.repository
        self.run, self.pickle, self.weights_only, self.compression = run, pickle, weights_only, compression
        self.collect = collect
        for package in _PACKAGES:
            if package in sys.modules and package != _PACKAGE:
                import_module(f"{package}.plugins.io").CheckpointIO.register(type(self))
        self._unresumed = UnresumedCheckpoints(self.repository, run)
        #: Folders with pointer files that this object wrote.
        self._folders: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._checkpointer: Checkpointer | None = None
        self._follower: _Follower | None = None
        self._collector: Collector | None = None
        #: Path of the file of each name that this fit saved.
        self._saved: dict[str, str] = {}
        #: Paths and classes that were warned about.
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"repository", "run", "pickle", "weights_only", "compression", "collect"}
        return {name: value for name, value in self.__dict__.items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _repositories[self.repository.id] = self.repository
        self._unresumed = UnresumedCheckpoints(self.repository, self.run)
        self._folders = set()
        self._forget()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint; returns when it is copied."""
        if storage_options is not None:
            raise TypeError(
                "storage_options is not supported: pass options to towline.open, and the repository to TowlineCheckpointIO"
            )
        path = os.fspath(path)
        file, folder = _file(path), _folder(path)
        checkpointer, follower = self._saving()
        if not _is_url(path):
            # As TorchCheckpointIO does: Lightning links into the folder before the pointer file exists.
            os.makedirs(folder, exist_ok=True)
        name = self._name_for(path, checkpointer._seen)
        step = checkpoint.get("global_step", 0) if isinstance(checkpoint, dict) else 0
        if not _is_url(path):
            self._unresumed.check(name, path, folder)
            self._folders.add(folder)
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
        self._saved[name] = _place(path)
        self._warn_of(handle)
        follower.saved(handle, path, None if _is_url(path) else self._pointer(name, file, folder))
        if not (isinstance(checkpoint, dict) and "pytorch-lightning_version" in checkpoint):
            # Fabric or the user saved it: nobody calls `teardown`.
            handle.wait()
            follower.wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint and verifies every byte. If there is a pointer file at `path`, loads its checkpoint, else the
        checkpoint of the run that was saved under this file name: from this folder, else from one of the same name, else any; of
        several the newest. Ordinary files are loaded by Lightning.

        Devices are not saved: tensors are created on the CPU, or where `map_location` maps the CPU.
        """
        path = os.fspath(path)
        if rank_zero_only.rank == 0:
            # Finishes pending saves, and those that an earlier process left in the spool.
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
        state = _read(self.repository, name, _device(map_location), pickle)
        self._unresumed.loaded(name)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a pointer file, and its checkpoint unless another pointer file refers to it, once every save so far is
        durable."""
        path = os.fspath(path)
        if os.path.islink(path):
            os.unlink(path)
        elif not _is_url(path) and os.path.isfile(path) and _pointer_files.read(path) is None:
            _plugins.TorchCheckpointIO().remove_checkpoint(path)
        else:
            self._saving()[1].removed(path)

    def teardown(self) -> None:
        """Waits until every save is durable; raises SaveFailed if one failed."""
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
        """Returns a checkpoint as the file that Lightning would write, for programs that cannot read pointer files."""
        made = io.BytesIO()
        torch.save(self.load_checkpoint(path, weights_only=weights_only), made)
        made.seek(0)
        return made

    def checkout(self, folder: str | os.PathLike[str]) -> list[str]:
        """Writes pointer files of the run's checkpoints to `folder`, so that `ckpt_path="last"` finds them on another machine.
        Existing files stay. Of several checkpoints of one file name, the one that was saved in a folder of the same name counts,
        else the newest. A checkpoint is skipped with a warning if its file name is a path, such as `../x`, has more than 255
        bytes or does not end in `.ckpt`, or if its file cannot be written. Returns the paths written, the oldest first."""
        os.makedirs(folder, exist_ok=True)
        chosen: dict[str, tuple[Saved, str]] = {}
        for one, file, saved_in in self._checkpoints():
            if not _is_checkpoint(file):
                warnings.warn(
                    f"towline: {one.name} is left out: {file[:300]!r} is not the name of a checkpoint, one name of at most 255 "
                    "bytes that ends in .ckpt",
                    stacklevel=2,
                )
                continue
            if os.path.lexists(os.path.join(folder, file)):
                continue
            if file not in chosen or _is_alike(saved_in, folder) or not _is_alike(chosen[file][1], folder):
                # At its place in the order of time.
                chosen.pop(file, None)
                chosen[file] = (one, saved_in)
        made = []
        for file, (one, saved_in) in chosen.items():
            path = os.path.join(folder, file)
            try:
                _pointer_files.write(path, self._pointer(one.name, file, saved_in), load_pointer_file, one.saved)
            except OSError as error:
                # The author of a step chooses its name; some file systems take fewer names than others.
                warnings.warn(f"towline: {one.name} is left out: {path} cannot be written: {error}", stacklevel=2)
                continue
            made.append(path)
        self._folders.add(os.path.abspath(folder))
        return made

    def _saving(self) -> tuple[Checkpointer, _Follower]:
        if self._checkpointer is None or self._follower is None:
            # Lightning handles SIGTERM itself.
            self._checkpointer = Checkpointer(
                self.repository, self.run, pickle=self.pickle, compression=self.compression, on_sigterm=False
            )
            self._unresumed.begin(self._checkpointer._seen, self._checkpointer._starts)
            collector = self._collector = Collector(self.repository, self.collect)
            self._follower = _Follower(self._unresumed.saved, lambda path: self._remove(path, collector))
        return self._checkpointer, self._follower

    def _name_for(self, path: str, seen: Mapping[str, int] | None) -> str:
        """Name to save as: the one of the pointer file at `path`, or else the first possible one that no other file has. `seen`
        are the names that were there when this process began; None if the store did not answer."""
        *names, own = self._names(path)
        record = None if _is_url(path) else _pointer_files.read(path)
        before = record["name"] if record is not None and record["repository"] == self.repository.id else ""
        for name in sorted(names, key=lambda one: one != before):
            if self._saved.get(name, _place(path)) == _place(path) and self._is_free(name, path, seen, before):
                return name
        return own

    def _is_free(self, name: str, path: str, seen: Mapping[str, int] | None, before: str) -> bool:
        """True if no other file was saved as `name`. If the store does not answer, what this process knows decides, and the name
        `before` that the pointer file at `path` has."""
        try:
            labels = _labels(self.repository, name, _backlog.VERSION)
        except Unreachable:
            return name in self._saved or seen is None or name not in seen or name == before
        if labels.get("lightning.file", _file(path)) != _file(path):
            return False
        # A training that begins anew gets no name of its own beside those of another one: SaveConflict says so.
        return not (self._unresumed.goes_on(_folder(path)) and self._others(name, path, labels))

    def _others(self, name: str, path: str, labels: Mapping[str, str]) -> list[str]:
        """Pointer files of `name` in other folders than that of `path`: where it was saved, and where this object wrote any.
        `labels` are of the name."""
        places = {os.path.join(folder, _file(path)) for folder in (labels.get("lightning.folder", ""), *self._folders)}
        places = {place for place in places if os.path.realpath(place) != os.path.realpath(path)}
        return sorted(place for place in places if self._refers(place, name, labels))

    def _refers(self, place: str, name: str, labels: Mapping[str, str]) -> bool:
        """True if `place` is a pointer file of `name` as it is now."""
        record = _pointer_files.read(place)
        if record is None or record["repository"] != self.repository.id or record["name"] != name:
            return False
        return record["folder"] == labels.get("lightning.folder") and record["file"] == labels.get("lightning.file")

    def _names(self, path: str) -> list[str]:
        """Possible names of a file, the best first. No file in another folder has the last."""
        if path.startswith("towline:/"):
            return ["/".join(map(_quoted, path.removeprefix("towline:").strip("/").split("/")))]
        file, folder = _file(path), _folder(path)
        found = _STEP.search(file.removesuffix(".ckpt"))
        own = _quoted(file)
        if re.fullmatch(r"step-\d+", own):
            own = "+73" + own[1:]
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        names = [f"step-{int(found[1])}"] if found else []
        names += [own, _quoted(f"{os.path.basename(folder)}/{file}"), _quoted(f"{digest}/{file}")]
        return [f"{self.run}/{name}" for name in names]

    def _found(self, path: str) -> str | None:
        """Name that a file was saved as: from this folder, else from one of the same name, else any; of several the newest."""
        file, folder = _file(path), _folder(path)
        if path.startswith("towline:/"):
            (name,) = self._names(path)
            return name if self._labels(name).get("lightning.file") == file else None
        found = [
            (saved_in == folder, _is_alike(saved_in, folder), at, one.name)
            for at, (one, saved_as, saved_in) in enumerate(self._checkpoints())
            if saved_as == file
        ]
        return max(found)[-1] if found else None

    def _checkpoints(self) -> list[tuple[Saved, str, str]]:
        """Checkpoints of the run, and the files and folders that they were saved as; the oldest first."""
        versions = dict(self.repository._engine.names(self.run))
        try:
            saved = self.repository.ls(self.run)
        except NotFound:
            return []
        found = []
        # Times are of seconds.
        for one in sorted(saved, key=lambda one: (one.saved, versions.get(one.name, 0))):
            labels = self._labels(one.name)
            if file := labels.get("lightning.file"):
                found.append((one, file, labels.get("lightning.folder", "")))
        return found

    def _labels(self, name: str) -> dict[str, str]:
        return _labels(self.repository, name)

    def _pointer(self, name: str, file: str, folder: str) -> dict[str, str]:
        return {
            "repository": self.repository.id,
            "name": name,
            "file": file,
            "folder": folder,
            "url": self.repository.url,
        }

    def _record(self, path: str) -> dict[str, str] | None:
        """Content of the pointer file at `path`; None if there is none."""
        record = None if _is_url(path) else _pointer_files.read(path)
        if record is None:
            return None
        if record["repository"] != self.repository.id:
            raise UsageError(f"{path} stands for a checkpoint in another repository, {record['url']}: open that one")
        _check_present(self.repository, record, path)
        return record

    def _warn_of(self, handle: Handle) -> None:
        """Warns, once for each, about values that the default arguments do not load."""
        news = [] if not self.weights_only else [path for path in handle._pickled if path not in self._warned]
        if news:
            warnings.warn(
                f"towline: {', '.join(news)} of {handle.name} is pickled: load it with weights_only=False",
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
        try:
            record = self._record(path)
        except Conflict as error:
            warnings.warn(f"towline: only the file is removed: {error}", stacklevel=3)
            os.unlink(path)
            return
        name = self._found(path) if record is None else record["name"]
        if record is not None and name not in self._names(os.path.join(record["folder"], _file(path))):
            # Anybody who can write to the folder may have planted the pointer file to get another name removed.
            warnings.warn(
                f"towline: {path} stands for {name}, which stays: it is no checkpoint of {self.run}", stacklevel=3
            )
            name = None
        if record is None and name is not None and not _is_url(path) and not self._unresumed.may_remove(name):
            warnings.warn(
                f"towline: {name} stays: this training did not save it, and {path} does not exist (checkout({_folder(path)!r}) "
                "of the TowlineCheckpointIO makes the checkpoints of the run those of the folder)",
                stacklevel=3,
            )
            name = None
        if name is not None and not (not _is_url(path) and self._others(name, path, self._labels(name))):
            with contextlib.suppress(NotFound):
                self.repository.remove(name, now=True)
            collector.request()
        if record is not None:
            os.unlink(path)


def load_pointer_file(text: str, where: torch.Tensor) -> dict[str, Any]:
    """Loads the checkpoint of a pointer file to the device of `where`; called by torch.load. `text` is the content of the pointer
    file.

    The repository is the one of a TowlineCheckpointIO of this process, or $TOWLINE_REPO; else it is opened at the URL in the
    pointer file. With `weights_only` (torch's default) the file is not trusted: pickled values are not loaded, and no repository
    on another machine is opened because of a URL in a file.
    """
    return _load_pointer_file(text, where, trusted=True)


def _load_untrusted(text: str, where: torch.Tensor) -> dict[str, Any]:
    return _load_pointer_file(text, where, trusted=False)


# With weights_only, torch.load calls this function, and no other, by that name
# (https://docs.pytorch.org/docs/stable/notes/serialization.html#torch.serialization.add_safe_globals).
torch.serialization.add_safe_globals([(_load_untrusted, "towline.lightning.load_pointer_file")])


def _load_pointer_file(text: str, where: torch.Tensor, trusted: bool) -> dict[str, Any]:
    try:
        record = _pointer_files.parsed(text)
    except ValueError as error:
        raise UsageError("this file was not written by towline.lightning, or is damaged") from error
    repository = _repository_of(record, trusted)
    _check_present(repository, record, os.path.join(record["folder"], record["file"]))
    return _read(repository, record["name"], where.device, trusted)


def _repository_of(record: dict[str, str], trusted: bool) -> Repository:
    """Repository of a pointer file."""
    own = os.environ.get("TOWLINE_REPO")
    if record["repository"] not in _repositories and own:
        repository = open_repository(own, create=False)
        _repositories[repository.id] = repository
    if record["repository"] in _repositories:
        return _repositories[record["repository"]]
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
    tree = repository._engine.open_tree(name)
    document = document_in(repository, tree, DOCUMENT)
    try:
        state: dict[str, Any] = read_state(repository, tree, TENSORS, document, Reading(None, device, pickle)).state
        return state
    except UsageError as error:
        if pickle:
            raise
        raise UsageError(
            f"{name}: {error}; with Lightning: load with weights_only=False if you trust whoever saved it"
        ) from error


def _labels(repository: Repository, name: str, limit: timedelta | None = None) -> dict[str, str]:
    """Labels of a saved tree; `lightning.file` is empty if it was not saved here. No labels if there is no such tree. Raises
    Unreachable if the store does not answer within `limit`."""
    try:
        return {"lightning.file": "", **json.loads(repository._engine.show(name, limit))["labels"]}
    except NotFound:
        return {}


def _check_present(repository: Repository, record: dict[str, str], path: str) -> None:
    """Raises Conflict if the name in a pointer file now holds another checkpoint."""
    labels = _labels(repository, record["name"])
    if labels.get("lightning.file") not in (None, record["file"]) or labels.get("lightning.folder") not in (
        None,
        record["folder"],
    ):
        raise Conflict(
            f"{path} is gone: {record['name']} was saved again since, from {labels.get('lightning.folder', 'elsewhere')} "
            f"(`towline history {record['name']}` lists the earlier ones, and `towline undelete {record['name']} --version V "
            "--as NEW` restores one under another name; give each run, or folder of checkpoints, its own run name)"
        )


def _is_checkpoint(file: str) -> bool:
    """True for a file name of a checkpoint, without folders."""
    try:
        length = len(os.fsencode(file))
    except UnicodeEncodeError:
        return False
    return length <= 255 and file.endswith(".ckpt") and not any(char in file for char in ("/", "\0", os.sep))


class _Follower:
    """Thread for work that waits for saves, in order: writes pointer files of durable checkpoints, and removes checkpoints."""

    def __init__(self, durable: Callable[[str], None], remove: Callable[[str], None]):
        self._durable, self._remove = durable, remove
        self._work: queue.Queue[Any] = queue.Queue()
        self._failed = False
        self._awaited: Handle | None = None
        threading.Thread(target=self._run, name="towline-lightning", daemon=True).start()

    def saved(self, handle: Handle, path: str, pointer: dict[str, str] | None) -> None:
        self._work.put(lambda: self._follow(handle, path, pointer))

    def removed(self, path: str) -> None:
        self._work.put(lambda: self._failed or self._remove(path))

    def wait(self) -> None:
        """Waits until all work is done, except that for a save whose store does not answer."""
        while self._work.unfinished_tasks and (self._awaited is None or self._awaited.error is None):
            time.sleep(0.005)

    def close(self) -> None:
        """Waits until all work is done, and ends the thread; call it when no save is pending."""
        self._work.join()
        self._work.put(None)

    def _follow(self, handle: Handle, path: str, pointer: dict[str, str] | None) -> None:
        self._awaited = handle
        try:
            handle._await()
        except SaveFailed:
            # The Checkpointer raises it. Checkpoints that this save should have replaced stay.
            self._failed = True
            return
        finally:
            self._awaited = None
        self._failed = False
        self._durable(handle.name)
        if pointer is not None:
            _pointer_files.write(path, pointer, load_pointer_file)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                if work is None:
                    return
                work()
            except Exception as error:
                # The thread must survive: waiting for it would never end.
                warnings.warn(f"towline: {error}", stacklevel=2)
            finally:
                self._work.task_done()


def _is_url(path: str) -> bool:
    return "://" in path or path.startswith("towline:/")


def _file(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _folder(path: str) -> str:
    return path.rpartition("/")[0] if _is_url(path) else os.path.dirname(os.path.abspath(path))


def _place(path: str) -> str:
    """The path itself, whatever folder is the current one."""
    return path if _is_url(path) else os.path.join(_folder(path), _file(path))


def _is_alike(saved_in: str, folder: str | os.PathLike[str]) -> bool:
    """True if both folders have the same name."""
    return os.path.basename(saved_in) == os.path.basename(os.path.abspath(folder))


def _quoted(text: str) -> str:
    """Escapes text to a segment of a name, reversibly: `+` and two hexadecimal digits for `+` and bytes not allowed in names."""
    escaped = (
        char if re.fullmatch(r"[A-Za-z0-9._=-]", char) else "".join(f"+{byte:02X}" for byte in os.fsencode(char))
        for char in text
    )
    quoted = "".join(escaped)
    return quoted.replace(".", "+2E") if quoted in (".", "..") else quoted


def _metrics(checkpoint: Any, path: str) -> dict[str, float]:
    """Scores that ModelCheckpoints monitor, as of this file. Characters not allowed in names of metrics become dots."""
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    found = {}
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and state.get("monitor") and path in (state.get("best_k_models") or {}):
            score = float(state["best_k_models"][path])
            if score - score == 0:
                found[re.sub(r"[^A-Za-z0-9._+=-]", ".", state["monitor"])] = score
    return found


def _device(map_location: Any) -> torch.device | None:
    """Device that `map_location`, an argument of torch.load, maps the CPU to."""
    if callable(map_location):
        moved = map_location(torch.UntypedStorage(0), "cpu")
        return None if moved is None else torch.device(moved.device)
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    return None if map_location is None else torch.device(map_location)
