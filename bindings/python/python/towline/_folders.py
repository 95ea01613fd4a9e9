"""Checkpoints that something else writes as folders, saved as the steps of a run while the training goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import _given, _private, _shutdown, retention, spool
from .errors import Conflict, Denied, Exhausted, SaveFailed, Unreachable
from .handle import Handle
from .reports import SaveReport
from .repository import Compression, Repository, save_options
from .repository import open as open_repository
from .retention import Retention

#: Beside the checkpoints: what waits to be saved, and what is being restored. Trainer uploads nothing that begins so
#: (https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py, `_push_from_checkpoint`).
OWN = "_towline"

#: Tries to save a folder of links while their number changes, and seconds between them.
_TRIES, _PAUSE = 20, 0.25


def _save_linked(repository: Repository, linked: str) -> SaveReport:
    """Saves a folder of hard links. When the files' other links are made or removed, as frameworks do with checkpoints that they
    have enough of, the kernel says that the files changed: what was stored by then is not stored again."""
    for _ in range(_TRIES):
        try:
            return spool.save(repository, linked)
        except Conflict as error:
            if "changed while" not in str(error):
                raise
            time.sleep(_PAUSE)
    return spool.save(repository, linked)


class FolderSaver:
    """Saves folders as steps of `run`, one after the other. What is to be saved is linked into `PARENT/_towline` first, so
    that it may be taken away meanwhile, and goes on after the process was killed."""

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        framework: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: Iterable[str] = (),
        keep_max: Iterable[str] = (),
        compression: Compression = None,
        collect: bool = True,
    ):
        # Says now what is wrong with it.
        save_options(compression=compression)
        _given.check_run(run)
        self.repository = repo if isinstance(repo, Repository) else open_repository(repo)
        self.run, self._framework, self._compression = run, framework, compression
        self._retention = Retention(keep_last, keep_every, keep_min, keep_max, collect=collect)
        self._work: queue.Queue[tuple[Handle, str] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._handles: list[Handle] = []
        self._giving_up = threading.Event()

    def save(self, folder: str, step: int, metrics: Mapping[str, Any] | None, parent: str) -> Handle:
        """Saves `folder`, which is complete, as a step; it waits as links in `parent`. Raises SaveFailed if an earlier save
        failed meanwhile: then this step is not saved. Waits for the save before, unless that waits for a store that does not
        answer."""
        step = _given.step_number(step)
        self.wait()
        handle = Handle(f"{self.run}/step-{step}", step)
        options = save_options(_finite(metrics), framework=self._framework, compression=self._compression)
        try:
            linked = spool.link(_private.make(os.path.join(parent, OWN)), handle.name, options, folder)
        except Denied:
            raise
        except OSError:
            # Another file system, or one without links: then the folder must not change until it is saved.
            report = self.repository._engine.save(folder, handle.name, options)
            handle.report = SaveReport.read(json.loads(report))
            self._retention.expire(self.repository, self.run)
            handle._keep("staged", "local", "durable")
            return handle
        handle._keep("staged", "local")
        self._handles.append(handle)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towline-saver", daemon=True)
            self._thread.start()
            _shutdown.watch(self)
        self._work.put((handle, linked))
        return handle

    def save_left_over(self, parent: str) -> None:
        """Makes durable what an earlier process that was killed left in `parent`; returns once it is."""
        with contextlib.suppress(SaveFailed):
            # What waits after this is nobody's.
            self.close()
        if not os.path.lexists(os.path.join(parent, OWN)):
            return
        for linked in spool.left(_private.make(os.path.join(parent, OWN)), self.run, 0):
            if not spool.outdated(self.repository, linked):
                _save_linked(self.repository, linked)
            spool.remove(linked)

    def steps(self) -> list[int]:
        """The steps that are saved, in order."""
        return retention.steps(self.repository, self.run)

    def wait(self) -> None:
        """Waits until every save is durable, and raises what failed; but not for a store that does not answer."""
        while any(not handle.done() and handle.error is None for handle in self._handles):
            time.sleep(0.01)
        self._check()

    def close(self) -> None:
        """As `wait`, and ends. What a store that does not answer lacks stays beside the checkpoints, for the next process."""
        if self._thread is not None:
            self._giving_up.set()
            self._work.put(None)
            self._thread.join()
            self._thread = None
            self._giving_up.clear()
            _shutdown.forget(self)
        self._retention.close()
        self._check()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._save(*work)

    def _save(self, handle: Handle, linked: str) -> None:
        pause = 1.0
        while True:
            try:
                handle.report = _save_linked(self.repository, linked)
                break
            except (Unreachable, Exhausted) as error:
                handle._fail(error, over=False)
                if self._giving_up.wait(pause):
                    warnings.warn(
                        f"towline: {handle.name} is not durable yet: it waits at {linked}: {error}", stacklevel=2
                    )
                    handle._fail(error)
                    return
                pause = min(pause * 2, 60.0)
            except BaseException as error:
                handle._fail(error)
                return
        spool.remove(linked)
        self._retention.expire(self.repository, self.run)
        handle.error = None
        handle._keep("durable")

    def _check(self) -> None:
        """Raises what failed since the last call, but not what waits on this node's disk."""
        failed = [handle for handle in self._handles if handle.done() and handle.error is not None]
        self._handles = [handle for handle in self._handles if not handle.done()]
        for handle in failed:
            if not handle._raised and not isinstance(handle.error, (Unreachable, Exhausted)):
                raise handle._failure()


def restore(repository: Repository, name: str, folder: str) -> None:
    """Restores a tree as `folder`, which appears when it is complete. If it is there, it becomes as it was saved: what differs
    is replaced."""
    parent, own = os.path.split(os.path.abspath(folder))
    with alone(parent):
        if os.path.lexists(folder):
            # Through the open folder: nobody can put a link in its place meanwhile.
            with _private.opened(folder) as descriptor:
                repository.restore(name, f"/proc/self/fd/{descriptor}", overwrite=True, delete=True)
            return
        made = os.path.join(parent, OWN, f"restoring-{own}")
        repository.restore(name, made, overwrite=True, delete=True)
        os.rename(made, folder)


@contextlib.contextmanager
def alone(parent: str) -> Iterator[None]:
    """Of the processes of a node one at a time: the others then find what the first one restored."""
    with open(os.path.join(_private.make(os.path.join(parent, OWN)), "lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _finite(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers of `metrics`. A character that a metric's name cannot have is a dot."""
    found = {}
    for key, value in (metrics or {}).items():
        if isinstance(value, (int, float)) and value - value == 0:
            found["".join(c if c.isascii() and (c.isalnum() or c in "._+=-") else "." for c in key)] = float(value)
    return found


def remove(folder: str) -> None:
    """Takes a folder away: first its name, so that half of it is never taken for a checkpoint."""
    gone = os.path.join(os.path.dirname(folder), OWN, f"gone-{os.path.basename(folder)}")
    with contextlib.suppress(FileNotFoundError):
        _private.make(os.path.dirname(gone))
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
