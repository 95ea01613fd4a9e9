"""Backlog: steps in the spool that the store did not take yet. They are uploaded in their order once it does."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import _towline, spool
from .errors import Conflict, Error, Exhausted, Unreachable
from .handle import Handle
from .reports import SaveReport

if TYPE_CHECKING:
    from .repository import Repository

#: Options for a save of a name that make it fail rather than replace another process's step. The time is for the store to answer.
Own = Callable[[str, timedelta], AbstractContextManager[dict[str, Any]]]

#: Seconds before the first and between later tries.
_PAUSE, _PAUSE_MAX = 1.0, 60.0
#: Time without progress after which an upload makes way for the next state, which then waits for its memory.
SILENCE = timedelta(seconds=20)


class Backlog:
    """Steps of one Checkpointer, used by its saver thread alone."""

    def __init__(self, repository: Repository, durable: Callable[[], None], own: Own):
        self._repository, self._durable, self._own = repository, durable, own
        self._steps: deque[tuple[Handle, spool.SpooledStep]] = deque()
        self._pause = _PAUSE

    def __bool__(self) -> bool:
        return bool(self._steps)

    def pause(self) -> float | None:
        """Seconds until the next try; None if nothing waits."""
        return self._pause if self._steps else None

    def add(self, handle: Handle, kept: spool.SpooledStep, error: BaseException | None = None) -> None:
        """Adds a step; `error` is why the store did not take it: by default, that of the steps before."""
        handle._fail(error or self._steps[0][0].error or Error("an earlier step waits for the store"), over=False)
        self._steps.append((handle, kept))

    def upload(self) -> None:
        """Uploads the steps, until one is not taken."""
        while self._steps:
            handle, kept = self._steps[0]
            try:
                with self._own(handle.name, SILENCE) as expected:
                    report = spool.save(self._repository, kept, expected)
            except (Unreachable, Exhausted) as error:
                for waiting, _ in self._steps:
                    waiting._fail(error, over=False)
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
            self._durable()
        self._pause = _PAUSE

    def give_up(self) -> None:
        """Leaves the steps to the next process."""
        for handle, _ in self._steps:
            handle._fail(handle.error or Error("it ended without a result"))
        self._steps.clear()


def finish(saving: _towline.Task, is_wanted: Callable[[], bool] | None) -> SaveReport:
    """Waits for an upload. If its state is in the spool, `is_wanted` tells if the next state waits for its memory: an upload that
    makes no progress then ends, and raises Unreachable."""
    if is_wanted is None:
        saving.wait()
    else:
        last, since = saving.progress(), time.monotonic()
        while not saving.wait(0.5):
            now = saving.progress()
            if now != last or not is_wanted():
                last, since = now, time.monotonic()
            elif time.monotonic() - since > SILENCE.total_seconds():
                saving.cancel()
                saving.wait()
                raise Unreachable(f"the store did not answer for {SILENCE.seconds} s")
    return SaveReport.read(json.loads(saving.result() or "{}"))
