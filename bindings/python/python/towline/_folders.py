"""Background saves of checkpoint folders that a framework writes, as steps of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import _arguments, _backlog, _origins, _owners, _private, _shutdown, _tree_links, retention, spool
from ._afterwards import Afterwards
from ._backlog import Backlog, Calls, Waiting, dropped_text, finish, only_here
from ._mixing import Mixing
from ._origins import Origin, Superseded
from ._unresumed import UnresumedSteps
from ._versions import snapshot
from .errors import Busy, Conflict, Denied, Error, Exhausted, NotFound, SaveFailed, Unreachable, UsageError
from .handle import Handle
from .reports import SaveReport
from .repository import Compression, Repository, check_compression, opened, save_options
from .retention import Branch, GivenUp, Retention, number

if TYPE_CHECKING:
    from ._towline import Tree

#: Folder beside the checkpoints, for pending saves and restores in progress. Trainer does not upload names that begin with "_"
#: (https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py, `_push_from_checkpoint`).
OWN = "_towline"

#: Classes that save folders, by their frameworks.
_CALLERS = {"accelerate": "AccelerateCheckpointer", "transformers": "TowlineCallback"}
#: How a training resumes the run, by frameworks.
_CURES = {
    "accelerate": "call restore() of the AccelerateCheckpointer before the first save",
    "transformers": "pass callback.restore_latest(args.output_dir) as resume_from_checkpoint to Trainer.train",
}
#: Tries to save a folder of hard links while their link counts change, and seconds between them.
_TRIES, _PAUSE = 20, 0.25
#: Seconds that a save waits, in addition to the time without progress after which an upload ends, for the upload to end.
_GRACE = 5.0


def _save_linked(
    repository: Repository,
    linked: spool.SpooledStep,
    patience: Callable[[], float | None] = lambda: None,
    silent: Callable[[], None] | None = None,
    expected: Mapping[str, int] = MappingProxyType({}),
) -> SaveReport:
    """Saves a folder of hard links. When a framework removes or adds other links of these files, such as those of an old
    checkpoint, their ctime changes and the save fails: it is retried, without storing the same data again. `patience` and
    `silent` are as for `finish`, `expected` is of `FolderSaver._expected`."""
    for _ in range(_TRIES):
        try:
            return finish(spool.begin_save(repository, linked, expected), patience, silent)
        except Conflict as error:
            if "changed while" not in str(error):
                raise
            time.sleep(_PAUSE)
    return finish(spool.begin_save(repository, linked, expected), patience, silent)


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
        self.repository = opened(repo, create=create, caller=_CALLERS.get(framework))
        self.run, self._framework, self._compression = run, framework, compression
        self._branch, self._mixing = Branch(), Mixing(self.repository, run)
        self._retention = Retention(keep_last, keep_every, keep_min, keep_max, collect=collect)
        self._afterwards = Afterwards(self.repository, run, self._retention, self._mixing)
        self._backlog = Backlog(
            Calls(self._check_origin, self._give_up, spool.remove, self._upload, self._afterwards.request),
            self.repository.url,
        )
        self._unresumed = UnresumedSteps(self.repository, run, _CURES.get(framework, "restore its latest step first"))
        #: Version of each step that this process knows.
        self._seen: dict[str, int] | None = None
        #: Ids of the manifests of steps that this training saved, but whose new versions could not be read.
        self._unsure: dict[str, str] = {}
        #: True while a save waits for those before it.
        self._wanted = False
        self._handles: list[Handle] = []
        #: Saves that stay in `_towline` after `close`, and the path of that folder.
        self._left: list[Handle] = []
        self._own, self._owner = "", _owners.Owner()
        #: Folder of the training.
        self._parent = ""
        #: Lock of the folder that this training writes to.
        self._claim: _owners.Lock | None = None
        self._closing, self._close_retry = False, close_retry

    def save(self, folder: str, step: int, metrics: Mapping[str, Any] | None, parent: str) -> Handle:
        """Saves `folder`, which must be complete, as a step; its links are in `parent`. First waits for the save before, unless
        its store does not answer, or takes nothing for some time. Raises SaveFailed if an earlier save failed, or stayed in
        `parent` after `close`, and SaveConflict as `check`; this step is then not saved."""
        step = _arguments.step_number(step)
        self._wait(_backlog.SILENCE.total_seconds() + _GRACE)
        if self._left:
            # The next process uploads those, and would count them as later than this one.
            raise self._only_here(self._left)
        self.check(step)
        handle = Handle(f"{self.run}/step-{step}", step)
        options = save_options(_finite(metrics), framework=self._framework, compression=self._compression)
        given_up = self._branch.saved(handle.name, step)
        self._mixing.saved(handle.name)
        # Others may put a link in the place of the folder: it is opened once, and only what was opened is saved.
        with _private.opened(folder) as source:
            try:
                with _private.given(parent) as above, above.inside(OWN, own=True) as own:
                    self._own = own.shown
                    origin = _origins.known(self._seen, [])
                    linked = spool.link(own, handle.name, options, source, given_up, origin, self._owner)
            except Denied:
                raise
            except OSError:
                # No hard links possible: saves the folder itself, which must not change meanwhile.
                self._save_unlinked(source, handle, options, given_up)
                return handle
        handle._reach("staged", "local")
        self._handles.append(handle)
        _shutdown.watch(self)
        self._backlog.add(Waiting(handle, linked, given_up, origin))
        return handle

    def _save_unlinked(self, source: int, handle: Handle, options: dict[str, Any], given_up: GivenUp | None) -> None:
        """Saves the folder with the descriptor `source` before it returns. Raises SaveConflict if another process has continued
        the run."""
        self._check_order(handle, given_up)
        try:
            _origins.check(self.repository, self.run, _origins.known(self._seen, []), partial(self._is_own, []))
            self._give_up(given_up)
            # The check above found none that this training does not know. One that commits in between is replaced.
            expected = {} if self._seen is None else {"version": self._version(handle.name)}
            report = self.repository._engine.save(f"/proc/self/fd/{source}", handle.name, {**options, **expected})
        except Conflict as error:
            handle._fail(error)
            raise handle._failure() from error
        handle.report = SaveReport.read(json.loads(report))
        self._learn(handle.name, handle.report.manifest)
        self._afterwards.request()
        self._afterwards.wait(_backlog.SILENCE.total_seconds())
        handle._reach("staged", "local", "durable")

    def check(self, step: int, more: str = "") -> None:
        """Raises SaveConflict if the step was in the run when this training began, and it did not resume the run; warns, once, if
        the run has other such steps. `more` says what else becomes of the step."""
        self._unresumed.check(f"{self.run}/step-{step}", more)

    def begin(self, parent: str) -> None:
        """Records that `parent` is the folder of the training: in another one than before, another training begins."""
        parent = os.path.realpath(parent)
        if self._parent not in ("", parent):
            with contextlib.suppress(SaveFailed):
                # Steps of the one before must not count as the new one's.
                self._close(retry=0)
            self._unresumed.anew()
        self._parent = parent

    def claim(self, parent: str) -> None:
        """Locks `parent` until `close`. Raises UsageError if another process writes its states there."""
        with _private.given(parent) as above, above.inside(OWN, own=True) as own:
            self._claim = self._claim or _owners.claim(own)
        if self._claim is None:
            raise UsageError(
                f"another process writes the states of its training to {parent}, and they would be mixed: end that process, or "
                "pass another folder"
            )

    def is_claimed(self, parent: str) -> bool:
        """True if another process writes its states to `parent`."""
        with _private.given(parent) as above, above.inside(OWN, own=True) as own:
            return self._claim is None and _owners.claim(own, grace=0) is None

    def has(self, steps: Iterable[int], parent: str) -> None:
        """Records that the training has checkpoints of `steps` of its own in `parent`, or resumed them."""
        self._unresumed.has(steps, os.path.join(parent, OWN))

    def resumed(self) -> None:
        """Records that the training goes on from the run."""
        self._unresumed.resumed()

    def found(self, name: str, is_latest: bool) -> Found:
        """Step `name`, the latest or not, and the steps that a training which goes on from it gives up."""
        waiting = [handle.name for handle in self._handles if not handle.done()]
        left = [kept.step for kept, _ in list(self._backlog.left)]
        return Found(name, retention.later(self.repository, self.run, number(name), waiting, is_latest, left))

    def restored(self, found: Found) -> None:
        """Records that the training went back to a step. If it then saves one before the last of the later steps, those are
        removed right before that save."""
        self._branch.restored(number(found.name), found.later)
        self.resumed()
        # Without the record, steps that wait on this node's disk are uploaded whatever others have saved.
        self._seen = None
        self._look()

    def save_pending(self, parent: str) -> list[int]:
        """Saves the steps that an earlier process left in `parent`; returns once they are durable. Returns the steps that are
        dropped, as another process has continued the run."""
        with contextlib.suppress(SaveFailed):
            # After this, all pending links belong to ended processes: those of running ones are left to them.
            self._close(retry=0)
        try:
            with _private.given(parent) as above, above.inside(OWN, own=True, create=False) as own:
                pending = spool.pending(own, self.run, 0)
        except FileNotFoundError:
            pending = []
        dropped: list[int] = []
        for at, linked in enumerate(pending):
            try:
                self._check_left(linked, pending)
                is_outdated = spool.outdated(self.repository, linked)
                if not is_outdated:
                    self._give_up(spool.given_up(linked))
            except Busy:
                raise
            except Superseded as error:
                warnings.warn(f"towline: {dropped_text(pending[at:], error)}", stacklevel=3)
                for other in pending[at:]:
                    spool.remove(other)
                dropped = [number(other.step) for other in pending[at:]]
                break
            except Conflict as error:
                warnings.warn(f"towline: a step left at {linked} is dropped: {error}", stacklevel=3)
            else:
                if not is_outdated:
                    report = _save_linked(self.repository, linked)
                    self._made(linked, report.manifest)
            spool.remove(linked)
        self._left, self._backlog.left = [], []
        self._look()
        return dropped

    def steps(self) -> list[int]:
        """All saved steps, in order."""
        return retention.steps(self.repository, self.run)

    def wait(self) -> None:
        """Waits until every save is durable, except if the store does not answer; raises SaveFailed if one failed."""
        self._wait(None)
        # Steps that the rules remove are then not listed any more.
        self._afterwards.wait(_backlog.SILENCE.total_seconds())

    def _wait(self, silence: float | None) -> None:
        """As `wait`; with `silence` no longer than that many seconds without progress."""
        self._wanted = True
        try:
            before, since = None, time.monotonic()
            while True:
                pending = [handle for handle in self._handles if not handle.done() and handle.error is None]
                if not pending:
                    break
                now = [handle.progress() for handle in pending]
                if now != before:
                    before, since = now, time.monotonic()
                if silence is not None and time.monotonic() - since > silence:
                    break
                time.sleep(0.01)
        finally:
            self._wanted = False
        self._check()

    def close(self) -> None:
        """Waits until every save is durable, and ends the thread; raises SaveFailed if one failed. If the store takes no bytes,
        it retries for `close_retry` seconds. Then it raises SaveFailed, too: the steps stay in `_towline` for the next
        process."""
        self._close(self._close_retry)

    def _close(self, retry: float) -> None:
        self._closing, ends = True, time.monotonic() + retry
        self._backlog.close(ends)
        self._closing = False
        _shutdown.forget(self)
        self._afterwards.close(ends)
        self._owner.release()
        self._claim = None
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

    def _upload(self, waiting: Waiting) -> SaveReport:
        expected, silent = self._expected(waiting.kept), partial(self._backlog.silent, waiting)
        try:
            report = _save_linked(self.repository, waiting.kept, self._patience, silent, expected)
        except Busy:
            raise
        except Conflict as error:
            if self._is_taken(waiting.kept):
                raise _saved_by_another(waiting.handle.name) from error
            # Not a Conflict, for which the backlog would remove the links: a later process may succeed.
            raise Error(f"{error} (its files stay in {waiting.kept} for the next process)") from error
        self._made(waiting.kept, report.manifest)
        return report

    def _patience(self) -> float | None:
        if self._closing:
            return max(self._close_retry, _backlog.SLOW.total_seconds())
        return _backlog.SILENCE.total_seconds() if self._wanted else None

    def _look(self) -> None:
        """Records the current steps of the run, if the store answers: this training goes on from them."""
        with contextlib.suppress(Error):
            self._seen = dict(self.repository._engine.names(self.run, _backlog.SILENCE))
            self._unsure = {}
        self._mixing.begin(self._seen)
        self._unresumed.begin(self._seen)

    def _made(self, linked: spool.SpooledStep, manifest: str) -> None:
        """Records that a step is durable, here and for a later process; `manifest` is the id that the save gave it."""
        version = self._learn(linked.step, manifest)
        if version is not None:
            with contextlib.suppress(OSError):
                spool.set_known(linked, version)

    def _learn(self, name: str, manifest: str) -> int | None:
        """Records that this training saved the step `name`. Returns its version; None if it cannot be read."""
        self._unresumed.saved(name)
        self._unsure[name] = manifest
        with contextlib.suppress(Error):
            found = self.repository._engine.find(name, _backlog.VERSION)
            if found is not None and found[0] == name:
                self._see(name, found[1])
                return found[1]
        return None

    def _see(self, name: str, version: int) -> None:
        self._unsure.pop(name, None)
        if self._seen is not None:
            self._seen[name] = version

    def _is_as_saved(self, name: str) -> bool:
        """True if the step is the one that this training saved last under its name, although its version is not known."""
        manifest = self._unsure.get(name)
        return manifest is not None and _manifest(self.repository, name) == manifest

    def _check_origin(self, waiting: Waiting, limit: timedelta) -> None:
        """Raises Superseded for a step of the backlog if another process has continued the run."""
        is_own = partial(self._is_own, [waiting.kept])
        _origins.check(self.repository, self.run, waiting.origin, is_own, limit)

    def _check_left(self, linked: spool.SpooledStep, pending: list[spool.SpooledStep]) -> None:
        """As `_check_origin`, for a step that an earlier process left."""
        origin = spool.origin(linked)
        if origin is not None:
            origin = Origin(max(origin.known, spool.known(linked)))
            _origins.check(self.repository, self.run, origin, partial(self._is_own, pending))

    def _is_own(self, waiting: list[spool.SpooledStep], name: str, version: int) -> bool:
        """True if this training saved the step: if it has the content of one of `waiting`, it was killed, or had no answer, right
        after the save."""
        if self._seen is not None and self._seen.get(name) == version:
            return True
        if self._is_as_saved(name):
            self._see(name, version)
            return True
        for linked in waiting:
            if linked.step == name and spool.is_same(self.repository, linked, _backlog.SILENCE):
                self._see(name, version)
                spool.set_known(linked, version)
                return True
        return False

    def _expected(self, linked: spool.SpooledStep) -> dict[str, int]:
        """Options of a save that make it fail rather than replace a step that another process has saved since this training
        began or resumed. Raises Conflict if there is one already."""
        if self._seen is None:
            return {}
        version = self._version(linked.step)
        if version and not self._is_own([linked], linked.step, version):
            raise _saved_by_another(linked.step)
        return {"version": version}

    def _version(self, name: str) -> int:
        """Current version of a name; 0 if it does not exist. Raises Unreachable if the store does not answer."""
        found = self.repository._engine.find(name, _backlog.SILENCE)
        return found[1] if found is not None and found[0] == name else 0

    def _is_taken(self, linked: spool.SpooledStep) -> bool:
        """True if another process has saved the step since this training began or resumed."""
        if self._seen is None:
            return False
        with contextlib.suppress(Error):
            version = self._version(linked.step)
            return bool(version) and not self._is_own([linked], linked.step, version)
        return False

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


def _saved_by_another(name: str) -> Conflict:
    """Conflict for a step that must not be replaced."""
    help = f"give each training its own run name; to save this one's step, remove the other's: `towline rm {name}`"
    error = Conflict(f"{name} was saved by another process since this training began: it is not replaced ({help})")
    error.place, error.help = name, help
    return error


def restore(repository: Repository, name: str, folder: str) -> None:
    """Restores a tree as `folder`, which appears once it is complete. In an existing folder, files that differ are replaced, and
    others removed. Raises Denied, before anything is written, for a tree with a link that leads out of it."""
    parent, entry = os.path.split(os.path.abspath(folder))
    with _private.given(parent) as above, _locked(above) as own:
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = above.inside(entry, create=False)
        if found is not None:
            with found:
                _restore_checked(repository, name, found.path, lambda: remove(folder))
            return
        # Continues what a killed restore left.
        with own.fresh(f"restoring-{entry}") as made:
            _restore_checked(repository, name, made.at(entry), lambda: None)
            os.rename(entry, entry, src_dir_fd=made.descriptor, dst_dir_fd=above.descriptor)
        own.remove(f"restoring-{entry}")


def _restore_checked(repository: Repository, name: str, dest: str, undo: Callable[[], None]) -> None:
    """Restores a tree whose links were checked. Calls `undo` if one that was saved meanwhile was restored instead, and is not
    replaced by one that was checked."""
    restored = False

    def restore_it(tree: Tree) -> None:
        nonlocal restored
        _tree_links.check(tree)
        repository.restore(tree.name, dest, overwrite=True, delete=True)
        restored = True

    try:
        snapshot(repository._engine, name, restore_it)
    except Error:
        if restored:
            undo()
        raise


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


def _manifest(repository: Repository, name: str) -> str:
    """Id of the manifest of a step; empty if there is none. Raises Unreachable if the store does not answer."""
    try:
        return str(json.loads(repository._engine.show(name, _backlog.SILENCE))["manifest"])
    except NotFound:
        return ""


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
