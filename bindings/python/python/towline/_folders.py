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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from . import _arguments, _private, _shutdown, retention, spool
from ._backlog import Backlog, Calls, Waiting, finish, only_here
from .errors import Busy, Conflict, Denied, Error, Exhausted, SaveFailed, Unreachable
from .handle import Handle
from .reports import SaveReport
from .repository import Compression, Repository, check_compression, opened, save_options
from .retention import Branch, GivenUp, Retention, number

#: Folder beside the checkpoints, for pending saves and restores in progress. Trainer does not upload names that begin with "_"
#: (https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py, `_push_from_checkpoint`).
OWN = "_towline"

#: Tries to save a folder of hard links while their link counts change, and seconds between them.
_TRIES, _PAUSE = 20, 0.25


def _save_linked(
    repository: Repository, linked: spool.SpooledStep, patience: Callable[[], float | None] = lambda: None
) -> SaveReport:
    """Saves a folder of hard links. When a framework removes or adds other links of these files, such as those of an old
    checkpoint, their ctime changes and the save fails: it is retried, without storing the same data again. `patience` is as for
    `finish`."""
    for _ in range(_TRIES):
        try:
            return finish(spool.begin_save(repository, linked, {}), patience)
        except Conflict as error:
            if "changed while" not in str(error):
                raise
            time.sleep(_PAUSE)
    return finish(spool.begin_save(repository, linked, {}), patience)


@dataclass
class Found:
    """Step to restore."""

    name: str
    #: Later steps, and their versions, as in `GivenUp`.
    later: dict[str, int | None]


class FolderSaver:
    """Saves folders as steps of `run`, one after the other. Each folder is first hard-linked into `PARENT/_towline`, so that the
    original may be removed, and so that the save can be finished after the process was killed. `close` retries for `close_retry`
    seconds if the store takes no bytes."""

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
        create: bool | None = None,
        close_retry: float = 60.0,
    ):
        check_compression(compression)
        _arguments.check_run(run)
        _arguments.check_close_retry(close_retry)
        self.repository = opened(repo, create=create)
        self.run, self._framework, self._compression = run, framework, compression
        self._branch = Branch()
        self._retention = Retention(keep_last, keep_every, keep_min, keep_max, collect=collect)
        self._work: queue.Queue[Waiting | None] = queue.Queue()
        self._backlog = Backlog(Calls(self._give_up, self._upload, self._expire))
        self._thread: threading.Thread | None = None
        self._handles: list[Handle] = []
        #: Saves that stay in `_towline` after `close`, and the path of that folder.
        self._left: list[Handle] = []
        self._own = ""
        self._closing, self._close_retry = False, close_retry
        #: Time (of time.monotonic) until which `close` retries saves.
        self._ends = 0.0

    def save(self, folder: str, step: int, metrics: Mapping[str, Any] | None, parent: str) -> Handle:
        """Saves `folder`, which must be complete, as a step; its links are in `parent`. First waits for the save before, unless
        its store does not answer. Raises SaveFailed if an earlier save failed, or stayed in `parent` after `close`; this step is
        then not saved."""
        step = _arguments.step_number(step)
        self.wait()
        if self._left:
            # The next process uploads those, and would count them as later than this one.
            raise self._only_here(self._left)
        handle = Handle(f"{self.run}/step-{step}", step)
        options = save_options(_finite(metrics), framework=self._framework, compression=self._compression)
        given_up = self._branch.saved(handle.name, step)
        # Others may put a link in the place of the folder: it is opened once, and only what was opened is saved.
        with _private.opened(folder) as source:
            try:
                with _private.given(parent) as above, above.inside(OWN, own=True) as own:
                    self._own = own.shown
                    linked = spool.link(own, handle.name, options, source, given_up)
            except Denied:
                raise
            except OSError:
                # No hard links possible: saves the folder itself, which must not change meanwhile.
                self._check_order(handle, given_up)
                self._give_up(given_up)
                report = self.repository._engine.save(f"/proc/self/fd/{source}", handle.name, options)
                handle.report = SaveReport.read(json.loads(report))
                self._expire()
                handle._reach("staged", "local", "durable")
                return handle
        handle._reach("staged", "local")
        self._handles.append(handle)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towline-saver", daemon=True)
            self._thread.start()
            _shutdown.watch(self)
        self._work.put(Waiting(handle, linked, given_up))
        return handle

    def found(self, name: str, is_latest: bool) -> Found:
        """Step `name`, the latest or not, and the steps that a training which goes on from it gives up."""
        waiting = [handle.name for handle in self._handles if not handle.done()]
        left = [kept.step for kept, _ in list(self._backlog.left)]
        return Found(name, retention.later(self.repository, self.run, number(name), waiting, is_latest, left))

    def restored(self, found: Found) -> None:
        """Records that the training went back to a step. If it then saves one before the last of the later steps, those are
        removed right before that save."""
        self._branch.restored(number(found.name), found.later)

    def save_pending(self, parent: str) -> None:
        """Saves the steps that an earlier process left in `parent`; returns once they are durable."""
        with contextlib.suppress(SaveFailed):
            # After this, all pending links belong to ended processes.
            self._close(retry=0)
        try:
            with _private.given(parent) as above, above.inside(OWN, own=True, create=False) as own:
                pending = spool.pending(own, self.run, 0)
        except FileNotFoundError:
            pending = []
        for linked in pending:
            if not spool.outdated(self.repository, linked):
                try:
                    self._give_up(spool.given_up(linked))
                except Busy:
                    raise
                except Conflict as error:
                    warnings.warn(f"towline: a step left at {linked} is dropped: {error}", stacklevel=3)
                else:
                    _save_linked(self.repository, linked)
            spool.remove(linked)
        self._left, self._backlog.left = [], []

    def steps(self) -> list[int]:
        """All saved steps, in order."""
        return retention.steps(self.repository, self.run)

    def wait(self) -> None:
        """Waits until every save is durable, except if the store does not answer; raises SaveFailed if one failed."""
        while any(not handle.done() and handle.error is None for handle in self._handles):
            time.sleep(0.01)
        self._check()

    def close(self) -> None:
        """Waits until every save is durable, and ends the thread; raises SaveFailed if one failed. If the store takes no bytes,
        it retries for `close_retry` seconds. Then it raises SaveFailed, too: the steps stay in `_towline` for the next
        process."""
        self._close(self._close_retry)

    def _close(self, retry: float) -> None:
        if self._thread is not None:
            self._ends = time.monotonic() + retry
            self._closing = True
            self._work.put(None)
            self._thread.join()
            self._thread, self._closing = None, False
            _shutdown.forget(self)
        self._retention.close()
        left = [handle for handle in self._handles if _stays(handle.error)]
        self._left += left
        try:
            self._check()
        except SaveFailed:
            if left:
                warnings.warn(f"towline: {self._only_here(left)}", stacklevel=2)
            raise
        if left:
            raise self._only_here(left) from left[0].error

    def _only_here(self, handles: list[Handle]) -> SaveFailed:
        """Exception for steps that are only in `_towline`."""
        return only_here(
            handles, self.repository.url, self._own, "start the training here again: it uploads them first"
        )

    def _run(self) -> None:
        while True:
            try:
                waiting = self._work.get(timeout=self._backlog.pause())
            except queue.Empty:
                self._backlog.upload()
                continue
            if waiting is None:
                self._backlog.close(self._ends)
                return
            # Others wait for the next try.
            is_first = not self._backlog
            self._backlog.add(waiting)
            if is_first:
                self._backlog.upload()

    def _upload(self, waiting: Waiting) -> SaveReport:
        try:
            return _save_linked(self.repository, waiting.kept, lambda: self._close_retry if self._closing else None)
        except Busy:
            raise
        except Conflict as error:
            # Not a Conflict, for which the backlog would remove the links: a later process may succeed.
            raise Error(f"{error} (its files stay in {waiting.kept} for the next process)") from error

    def _expire(self) -> None:
        self._retention.expire(self.repository, self.run)

    def _give_up(self, given_up: GivenUp | None, limit: timedelta | None = None) -> None:
        retention.give_up(self.repository, self.run, given_up, limit)
        if given_up is not None:
            self._backlog.drop_left(given_up)

    def _check_order(self, handle: Handle, given_up: GivenUp | None) -> None:
        """Raises Unreachable for a folder that cannot be linked, if it gives up steps while some wait: those would become durable
        later, and count as the latest."""
        waiting = [other.name for other in self._handles if not other.done()]
        if given_up is not None and waiting:
            raise Unreachable(
                f"{handle.name} would replace later steps, but {', '.join(waiting)} wait in {self._own} until the store answers "
                "(save it again once they are durable)"
            )

    def _check(self) -> None:
        """Raises saves that failed since the last call, except those that stay on this node's disk."""
        failed = [handle for handle in self._handles if handle.done() and handle.error is not None]
        self._handles = [handle for handle in self._handles if not handle.done()]
        for handle in failed:
            if not handle._raised and not _stays(handle.error):
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


def _stays(error: BaseException | None) -> bool:
    """True for the error of a save that a later try may not have."""
    return isinstance(error, (Unreachable, Exhausted, Busy))


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
