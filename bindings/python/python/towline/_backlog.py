"""Backlog: steps in the spool that the store did not take yet. They are uploaded in their order once it does."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import _towline, spool
from .errors import Conflict, Error, Exhausted, Unreachable
from .handle import Handle
from .reports import SaveReport
from .retention import GivenUp

if TYPE_CHECKING:
    from .repository import Repository

#: Seconds before the first and between later tries.
_PAUSE, _PAUSE_MAX = 1.0, 60.0
#: Time without progress after which an upload makes way for the next state, which then waits for its memory.
SILENCE = timedelta(seconds=20)


@dataclass
class Calls:
    """Functions of a Checkpointer that the saves of its backlog call. Their times are for the store to answer."""

    #: Removes the steps that a training gives up.
    give_up: Callable[[GivenUp | None, timedelta], None]
    #: Returns options for a save of a name that make it fail rather than replace another process's step.
    own: Callable[[str, timedelta], AbstractContextManager[dict[str, Any]]]
    #: Is called after each save.
    durable: Callable[[], None]
    #: Returns the seconds without progress after which an upload is to end; None if it may go on.
    patience: Callable[[], float | None]


@dataclass
class Waiting:
    """A step in the spool."""

    handle: Handle
    kept: spool.SpooledStep
    #: Steps to remove before this one is saved.
    given_up: GivenUp | None = None


class Backlog:
    """Steps of one Checkpointer, used by its saver thread alone."""

    def __init__(self, repository: Repository, calls: Calls):
        self._repository, self._calls = repository, calls
        self._steps: deque[Waiting] = deque()
        self._pause = _PAUSE

    def __len__(self) -> int:
        return len(self._steps)

    def pause(self) -> float | None:
        """Seconds until the next try; None if nothing waits."""
        return self._pause if self._steps else None

    def add(self, step: Waiting, error: BaseException | None = None) -> None:
        """Adds a step; `error` is why the store did not take it: by default, that of the steps before."""
        step.handle._fail(
            error or self._steps[0].handle.error or Error("an earlier step waits for the store"), over=False
        )
        self._steps.append(step)

    def upload(self) -> None:
        """Uploads the steps, until one is not taken."""
        while self._steps:
            step = self._steps[0]
            handle, kept = step.handle, step.kept
            try:
                self._calls.give_up(step.given_up, SILENCE)
                with self._calls.own(handle.name, SILENCE) as expected:
                    handle._saving = spool.begin_save(self._repository, kept, expected)
                    report = finish(handle._saving, self._calls.patience)
            except (Unreachable, Exhausted) as error:
                for waiting in self._steps:
                    waiting.handle._fail(error, over=False)
                self._pause = min(self._pause * 2, _PAUSE_MAX)
                return
            except Conflict as error:
                # Another process has the step: the next one on this node must not replace it.
                self._steps.popleft()
                spool.remove(kept)
                handle._drop()
                handle._fail(error)
                continue
            except BaseException as error:
                # It stays in the spool for the next process.
                self._steps.popleft()
                handle._fail(error)
                continue
            self._steps.popleft()
            spool.remove(kept)
            handle.report, handle.error = report, None
            handle._reach("local", "durable")
            self._calls.durable()
        self._pause = _PAUSE

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
