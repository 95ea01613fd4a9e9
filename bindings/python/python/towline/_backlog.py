"""Backlog: steps in the spool that the store did not take yet. They are uploaded in their order once it does."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from . import _towline, spool
from .errors import Busy, Conflict, Error, Exhausted, SaveFailed, Unreachable
from .handle import Handle
from .reports import SaveReport
from .retention import GivenUp

_logger = logging.getLogger("towline")

#: Seconds before the first and between later tries.
_PAUSE, _PAUSE_MAX = 1.0, 60.0
#: Time without progress after which an upload makes way for the next state, which then waits for its memory.
SILENCE = timedelta(seconds=20)


@dataclass
class Calls:
    """Functions that the saves of a backlog call. The time is for the store to answer."""

    #: Removes the steps that a training gives up.
    give_up: Callable[[GivenUp | None, timedelta], None]
    #: Uploads a step.
    save: Callable[[Waiting], SaveReport]
    #: Is called after each save.
    durable: Callable[[], None]


@dataclass
class Waiting:
    """A step in the spool."""

    handle: Handle
    kept: spool.SpooledStep
    #: Steps to remove before this one is saved.
    given_up: GivenUp | None = None


class Backlog:
    """Steps of one Checkpointer or FolderSaver, used by its saver thread alone."""

    def __init__(self, calls: Calls):
        self._calls = calls
        self._steps: deque[Waiting] = deque()
        #: Steps that failed for good and stay in the spool for the next process. Their handles, if this process saved them.
        self.left: list[tuple[spool.SpooledStep, Handle | None]] = []
        self._pause = _PAUSE
        #: Time (of time.monotonic) of the next try.
        self._next = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def pause(self) -> float | None:
        """Seconds until the next try; None if nothing waits."""
        return max(0.0, self._next - time.monotonic()) if self._steps else None

    def add(self, step: Waiting, error: BaseException | None = None) -> None:
        """Adds a step; `error` is why the store did not take it: by default, that of the steps before."""
        if not self._steps:
            self._next = time.monotonic() + self._pause
        elif error is None:
            error = self._steps[0].handle.error or Error("an earlier step waits for the store")
        if error is not None:
            step.handle._fail(error, over=False)
        self._steps.append(step)

    def upload(self) -> None:
        """Uploads the steps, until one is not taken."""
        while self._steps:
            step = self._steps[0]
            handle, kept = step.handle, step.kept
            try:
                self._calls.give_up(step.given_up, SILENCE)
                report = self._calls.save(step)
            except (Unreachable, Exhausted, Busy) as error:
                self._later(error)
                return
            except Conflict as error:
                # Another process has the step: the next one on this node must not replace it.
                self._steps.popleft()
                spool.remove(kept)
                handle._drop()
                handle._fail(error)
                continue
            except BaseException as error:
                self._steps.popleft()
                self.left.append((kept, handle))
                handle._fail(error)
                continue
            self._steps.popleft()
            spool.remove(kept)
            handle.report, handle.error = report, None
            handle._reach("local", "durable")
            self._calls.durable()
        self._pause = _PAUSE

    def _later(self, error: Error) -> None:
        """Puts off the next try because of `error`."""
        for waiting in self._steps:
            waiting.handle._fail(error, over=False)
        self._pause = min(self._pause * 2, _PAUSE_MAX)
        self._next = time.monotonic() + self._pause

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
        self._pause = _PAUSE
        while self._steps and (left := until - time.monotonic()) > 0:
            self.upload()
            if self._steps:
                time.sleep(min(self._pause, left))
        for handle in (step.handle for step in self._steps):
            handle._fail(handle.error or Error("it ended without a result"))
        self._steps.clear()


def finish(saving: _towline.Task, patience: Callable[[], float | None]) -> SaveReport:
    """Waits for an upload. `patience` returns the seconds without progress after which it ends, and raises Unreachable; None if
    it may go on. They count from when it is not None."""
    last, since = saving.progress(), time.monotonic()
    while not saving.wait(0.5):
        now, most = saving.progress(), patience()
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
