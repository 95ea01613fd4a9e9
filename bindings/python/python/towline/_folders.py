"""Background saves of checkpoint folders that a framework writes, as steps of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import _arguments, _private, _shutdown, retention, spool
from .errors import Conflict, Denied, Exhausted, SaveFailed, Unreachable
from .handle import Handle
from .reports import SaveReport
from .repository import Compression, Repository, check_compression, opened, save_options
from .retention import Retention

#: Folder beside the checkpoints, for pending saves and restores in progress. Trainer does not upload names that begin with "_"
#: (https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py, `_push_from_checkpoint`).
OWN = "_towline"

#: Tries to save a folder of hard links while their link counts change, and seconds between them.
_TRIES, _PAUSE = 20, 0.25


def _save_linked(repository: Repository, linked: spool.SpooledStep) -> SaveReport:
    """Saves a folder of hard links. When a framework removes or adds other links of these files, such as those of an old
    checkpoint, their ctime changes and the save fails: it is retried, without storing the same data again."""
    for _ in range(_TRIES):
        try:
            return spool.save(repository, linked)
        except Conflict as error:
            if "changed while" not in str(error):
                raise
            time.sleep(_PAUSE)
    return spool.save(repository, linked)


class FolderSaver:
    """Saves folders as steps of `run`, one after the other. Each folder is first hard-linked into `PARENT/_towline`, so that the
    original may be removed, and so that the save can be finished after the process was killed."""

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        framework: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: str | Iterable[str] = (),
        keep_max: str | Iterable[str] = (),
        compression: Compression = "auto",
        collect: bool = True,
        create: bool = True,
    ):
        check_compression(compression)
        _arguments.check_run(run)
        self.repository = opened(repo, create=create)
        self.run, self._framework, self._compression = run, framework, compression
        self._retention = Retention(keep_last, keep_every, keep_min, keep_max, collect=collect)
        self._work: queue.Queue[tuple[Handle, spool.SpooledStep] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._handles: list[Handle] = []
        self._giving_up = threading.Event()

    def save(self, folder: str, step: int, metrics: Mapping[str, Any] | None, parent: str) -> Handle:
        """Saves `folder`, which must be complete, as a step; its links are in `parent`. First waits for the save before, unless
        its store does not answer. Raises SaveFailed if an earlier save failed; this step is then not saved."""
        step = _arguments.step_number(step)
        self.wait()
        handle = Handle(f"{self.run}/step-{step}", step)
        options = save_options(_finite(metrics), framework=self._framework, compression=self._compression)
        # Others may put a link in the place of the folder: it is opened once, and only what was opened is saved.
        with _private.opened(folder) as source:
            try:
                with _private.given(parent) as above, above.inside(OWN, own=True) as own:
                    linked = spool.link(own, handle.name, options, source)
            except Denied:
                raise
            except OSError:
                # No hard links possible: saves the folder itself, which must not change meanwhile.
                report = self.repository._engine.save(f"/proc/self/fd/{source}", handle.name, options)
                handle.report = SaveReport.read(json.loads(report))
                self._retention.expire(self.repository, self.run)
                handle._reach("staged", "local", "durable")
                return handle
        handle._reach("staged", "local")
        self._handles.append(handle)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towline-saver", daemon=True)
            self._thread.start()
            _shutdown.watch(self)
        self._work.put((handle, linked))
        return handle

    def save_pending(self, parent: str) -> None:
        """Saves the steps that a killed process left in `parent`; returns once they are durable."""
        with contextlib.suppress(SaveFailed):
            # After this, all pending links belong to ended processes.
            self.close()
        try:
            with _private.given(parent) as above, above.inside(OWN, own=True, create=False) as own:
                pending = spool.pending(own, self.run, 0)
        except FileNotFoundError:
            return
        for linked in pending:
            if not spool.outdated(self.repository, linked):
                _save_linked(self.repository, linked)
            spool.remove(linked)

    def steps(self) -> list[int]:
        """All saved steps, in order."""
        return retention.steps(self.repository, self.run)

    def wait(self) -> None:
        """Waits until every save is durable, except if the store does not answer; raises SaveFailed if one failed."""
        while any(not handle.done() and handle.error is None for handle in self._handles):
            time.sleep(0.01)
        self._check()

    def close(self) -> None:
        """Waits as `wait`, and ends the thread. If the store does not answer, steps stay in `_towline` for the next process."""
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

    def _save(self, handle: Handle, linked: spool.SpooledStep) -> None:
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
        handle._reach("durable")

    def _check(self) -> None:
        """Raises saves that failed since the last call, except those that stay on this node's disk."""
        failed = [handle for handle in self._handles if handle.done() and handle.error is not None]
        self._handles = [handle for handle in self._handles if not handle.done()]
        for handle in failed:
            if not handle._raised and not isinstance(handle.error, (Unreachable, Exhausted)):
                raise handle._failure()


def restore(repository: Repository, name: str, folder: str) -> None:
    """Restores a tree as `folder`, which appears once it is complete. In an existing folder, files that differ are replaced, and
    others removed."""
    parent, entry = os.path.split(os.path.abspath(folder))
    with _private.given(parent) as above, _locked(above) as own:
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = above.inside(entry, create=False)
        if found is not None:
            with found:
                repository.restore(name, found.path, overwrite=True, delete=True)
            return
        # Continues what a killed restore left.
        with own.fresh(f"restoring-{entry}") as made:
            repository.restore(name, made.at(entry), overwrite=True, delete=True)
            os.rename(entry, entry, src_dir_fd=made.descriptor, dst_dir_fd=above.descriptor)
        own.remove(f"restoring-{entry}")


@contextlib.contextmanager
def alone(parent: str) -> Iterator[None]:
    """Lock between the processes of a node: the first one restores, the others then find its result."""
    with _private.given(parent) as above, _locked(above):
        yield


@contextlib.contextmanager
def _locked(above: _private.Folder) -> Iterator[_private.Folder]:
    """Holds the lock of the folder `above`; yields the folder OWN in it."""
    with above.inside(OWN, own=True) as own:
        lock = _private.lock(own, "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield own
        finally:
            os.close(lock)


def _finite(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Finite numbers in `metrics`. Characters not allowed in names of metrics become dots."""
    found = {}
    for key, value in (metrics or {}).items():
        if isinstance(value, (int, float)) and value - value == 0:
            found["".join(c if c.isascii() and (c.isalnum() or c in "._+=-") else "." for c in key)] = float(value)
    return found


def remove(folder: str) -> None:
    """Removes a folder; renames it first, so that a partly deleted one is never taken for a checkpoint."""
    parent, entry = os.path.split(os.path.abspath(folder))
    gone = f"gone-{entry}"
    with _private.given(parent) as above, above.inside(OWN, own=True) as own:
        own.remove(gone)
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry, gone, src_dir_fd=above.descriptor, dst_dir_fd=own.descriptor)
        own.remove(gone)
