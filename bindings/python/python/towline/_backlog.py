"""Backlog: steps in the spool that the store did not take yet. They are uploaded in their order once it does."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from . import _towline, spool
from ._origins import Origin, Superseded
from .errors import Busy, Conflict, Error, Exhausted, SaveFailed, Unreachable
from .handle import Handle
from .reports import SaveReport
from .retention import GivenUp

_logger = logging.getLogger("towline")

#: Seconds before the first and between later tries.
_PAUSE, _PAUSE_MAX = 1.0, 60.0
#: Time without progress after which an upload makes way for the next state, which then waits for its memory.
SILENCE = timedelta(seconds=20)
#: Time for the read of the version that a step got: the next save waits for it.
VERSION = timedelta(seconds=5)
#: Time without progress that an upload has at least while `close` waits: a store on a busy machine is slow, not away.
SLOW = timedelta(seconds=10)


@dataclass
class Calls:
    """Functions that the saves of a backlog call. The time is for the store to answer."""

    #: Raises Superseded if another process has continued the run of a step.
    check: Callable[[Waiting, timedelta], None]
    #: Removes the steps that a training gives up.
    give_up: Callable[[GivenUp | None, timedelta], None]
    #: Takes a step out of the spool that must not be uploaded any more; returns the path at which its files stay, if they do.
    drop: Callable[[spool.SpooledStep], str | None]
    #: Uploads a step.
    save: Callable[[Waiting], SaveReport]
    #: Is called after each save; returns at once.
    durable: Callable[[], None]


@dataclass
class Waiting:
    """A step in the spool."""

    handle: Handle
    kept: spool.SpooledStep
    #: Steps to remove before this one is saved.
    given_up: GivenUp | None = None
    #: What is known of its run.
    origin: Origin | None = None


class Backlog:
    """Steps of one Checkpointer or FolderSaver, uploaded to the store at `url` by a thread of its own, so that others are put on
    this node's disk meanwhile."""

    def __init__(self, calls: Calls, url: str):
        self._calls, self._url = calls, url
        self._steps: deque[Waiting] = deque()
        #: Steps that failed for good and stay in the spool for whoever looks next. Their handles, if this process saved them.
        self.left: list[tuple[spool.SpooledStep, Handle | None]] = []
        self._pause = _PAUSE
        #: Time (of time.monotonic) of the next try.
        self._next = 0.0
        #: Time until which `close` retries.
        self._until: float | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Steps that became durable since the log said that the store takes none; None if it does.
        self._late: list[str] | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def pause(self) -> float | None:
        """Seconds until the next try; None if nothing waits."""
        return max(0.0, self._next - time.monotonic()) if self._steps else None

    def add(self, step: Waiting, error: BaseException | None = None) -> None:
        """Adds a step. With `error`, why the store did not take it, the next try is after a pause. After other steps it waits for
        theirs."""
        with self._changed:
            if not self._steps:
                self._next = time.monotonic() + (0.0 if error is None else self._pause)
            elif error is None:
                error = self._steps[0].handle.error
            if error is not None:
                step.handle._fail(error, over=False)
                self._tell(step, error)
            self._steps.append(step)
            self._start()
            self._changed.notify_all()

    def follow(self, step: Waiting) -> bool:
        """Adds a step if others wait: steps are uploaded in their order."""
        with self._changed:
            if self._steps:
                self.add(step)
                return True
        return False

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towline-backlog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Runs the thread: tries again and again, until `close`."""
        while True:
            with self._changed:
                while self._until is None and (not self._steps or self._next > time.monotonic()):
                    self._changed.wait(self.pause())
                if self._until is not None and not self._goes_on(self._until):
                    return
            self.upload()
            with self._changed:
                if self._steps and self._until is not None and (left := self._until - time.monotonic()) > 0:
                    self._changed.wait(min(self._pause, left))

    def _goes_on(self, until: float) -> bool:
        """True if `close` tries again: each step is tried at least once."""
        return bool(self._steps) and (until > time.monotonic() or self._steps[0].handle.error is None)

    def upload(self) -> None:
        """Uploads the steps, until one is not taken."""
        while self._steps:
            step = self._steps[0]
            handle, kept = step.handle, step.kept
            try:
                if handle.error is not None:
                    # It waited: meanwhile another process may have continued the run.
                    self._calls.check(step, SILENCE)
                self._calls.give_up(step.given_up, SILENCE)
                report = self._calls.save(step)
            except (Unreachable, Exhausted, Busy) as error:
                self._later(error)
                return
            except Superseded as error:
                self._drop(error)
                continue
            except Conflict as error:
                # Another process has the step: the next one on this node must not replace it.
                spool.remove(kept)
                handle._drop()
                self._ended(handle, error)
                continue
            except BaseException as error:
                self.leave(kept, handle)
                self._ended(handle, error)
                continue
            spool.remove(kept)
            handle.report, handle.error = report, None
            handle._reach("local", "durable")
            self._note(handle)
            self._pop()
            self._calls.durable()
        self._pause = _PAUSE
        self._tell_end()

    def _pop(self) -> None:
        with self._changed:
            self._steps.popleft()

    def _ended(self, handle: Handle, error: BaseException) -> None:
        self._pop()
        handle._fail(error)

    def _later(self, error: Error) -> None:
        """Puts off the next try because of `error`."""
        with self._changed:
            for waiting in self._steps:
                waiting.handle._fail(error, over=False)
            self._tell(self._steps[0], error)
            self._pause = min(self._pause * 2, _PAUSE_MAX)
            self._next = time.monotonic() + self._pause

    def silent(self, step: Waiting) -> None:
        """Logs that the store does not answer, although the upload of this step goes on."""
        with self._changed:
            self._tell(step, Unreachable(f"no answer for {SILENCE.total_seconds():g} s"))

    def durable(self, handle: Handle) -> None:
        """Records that a step became durable that was not added here: the store takes steps."""
        self._note(handle)
        self._tell_end()

    def _note(self, handle: Handle) -> None:
        if self._late is not None:
            self._late.append(handle.name)

    def _tell_end(self) -> None:
        if self._late is not None:
            durable = f": durable now: {', '.join(self._late)}" if self._late else ""
            _logger.info("%s takes steps again%s", self._url, durable)
            self._late = None

    def _tell(self, step: Waiting, error: BaseException) -> None:
        """Logs, once until it does again, that the store does not take steps."""
        if self._late is None:
            self._late = []
            _logger.warning(
                "%s does not take %s: %s. It and the steps after it are only on the disk of this node (%s), in %s, until the "
                "store takes them",
                self._url, step.handle.name, error, os.uname().nodename, step.kept.run.shown,
            )  # fmt: skip

    def _drop(self, error: Superseded) -> None:
        """Drops all steps: another process has continued their run."""
        with self._changed:
            dropped = list(self._steps)
            stay = [self._calls.drop(step.kept) for step in dropped]
            for step in dropped:
                step.handle._drop()
                step.handle._fail(error)
            self._steps.clear()
        _logger.warning("%s", dropped_text([step.kept for step in dropped], error, stay))

    def leave(self, kept: spool.SpooledStep, handle: Handle) -> None:
        """Leaves a step that failed for good in the spool, for whoever looks next."""
        self.left.append((kept, handle))
        spool.leave(kept)

    def drop_left(self, given_up: GivenUp) -> None:
        """Removes steps that stay in the spool, if the training gave them up: the next process would upload them, and resume the
        last one."""
        for one in list(self.left):
            kept, handle = one
            if kept.step not in given_up.versions:
                continue
            try:
                spool.remove(kept)
            except OSError as error:
                _logger.warning("%s is given up, but stays at %s: %s", kept.step, kept, error)
                continue
            self.left.remove(one)
            if handle is not None:
                # Nobody waits for it any more.
                handle._raised = True
                handle._drop()
            _logger.warning("%s is given up: it is not durable, and no longer on this node's disk either", kept.step)

    def close(self, until: float) -> None:
        """Retries until the time `until` (of time.monotonic); leaves the remaining steps to the next process."""
        with self._changed:
            self._pause, self._until = _PAUSE, until
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._until = None, None
        for handle in (step.handle for step in self._steps):
            handle._fail(handle.error or Error("it ended without a result"))
        self._steps.clear()


def dropped_text(dropped: Sequence[spool.SpooledStep], error: Superseded, stay: Sequence[str | None] = ()) -> str:
    """Text about steps that leave the spool, as another process has continued their run; `stay` are paths of their files."""
    names, places = [kept.step for kept in dropped], sorted({kept.run.shown for kept in dropped})
    return (
        f"{', '.join(names)}: only on this node's disk, in {', '.join(places)}, and dropped: another process has continued the "
        f"run meanwhile, and they would count as later steps: {error}{_stay_text(stay)}"
    )


def _stay_text(stay: Sequence[str | None]) -> str:
    """Text about files of dropped steps."""
    places = [place for place in stay if place is not None]
    if not places:
        return ""
    return f" (their files stay at {', '.join(places)}: remove them once nobody needs them, or save them under other names)"


def finish(
    saving: _towline.Task, patience: Callable[[], float | None], silent: Callable[[], None] | None = None
) -> SaveReport:
    """Waits for an upload. `patience` returns the seconds without progress after which it ends, and raises Unreachable; None if
    it may go on. They count from when it is not None. `silent` is called after some time without progress."""
    last = saving.progress()
    since = moved = time.monotonic()
    while not saving.wait(0.5):
        now, most = saving.progress(), patience()
        if now != last:
            moved = time.monotonic()
        elif silent is not None and time.monotonic() - moved > SILENCE.total_seconds():
            silent()
            silent = None
        if now != last or most is None:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > most:
            saving.cancel()
            saving.wait()
            raise Unreachable(f"the store did not answer for {most:g} s")
    return SaveReport.read(json.loads(saving.result() or "{}"))


def only_here(handles: Sequence[Handle], url: str, place: str, remedy: str) -> SaveFailed:
    """Exception for steps that the store at `url` did not take: they are only in the folder `place`."""
    names, remedy = ", ".join(handle.name for handle in handles), f"once the store answers, {remedy}"
    failed = SaveFailed(
        f"{names}: not durable yet, only on the disk of this node ({os.uname().nodename}), in {place}; lost if the node goes "
        f"away. {url} did not take all steps: {handles[0].error or 'the upload is not over yet'} ({remedy})"
    )
    failed.place, failed.help = place, remedy
    return failed
