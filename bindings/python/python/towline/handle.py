"""Handle: a save in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from . import _towline
from .errors import Busy, Conflict, Error, SaveConflict, SaveFailed, Timeout, UsageError
from .reports import SaveReport

#: Durability levels that a save reaches, in order.
LEVELS = ("staged", "local", "durable")


class Handle:
    """A save in progress. It becomes `staged` (copied: the loop may change the state), then `local` (on this node's disk:
    survives the process), then `durable` (committed in the repository: survives the node)."""

    def __init__(self, name: str, step: int):
        self.name, self.step = name, step
        #: Report of the save, set once it is durable.
        self.report: SaveReport | None = None
        #: Exception that made the save fail, or that delays it while it is only local.
        self.error: BaseException | None = None
        self._reached: set[str] = set()
        self._changed = threading.Condition()
        self._ended = False
        #: True once the failure was raised to the caller.
        self._raised = False
        #: Parts of the state that only restore if allowed: paths of pickled values, and names of classes.
        self._pickled: list[str] = []
        self._classes: list[str] = []
        self._saving: _towline.Task | None = None

    def __repr__(self) -> str:
        reached = [level for level in LEVELS if level in self._reached]
        level = reached[-1] if reached else "begun"
        return f"<save of {self.name}: {level}{'' if self.error is None else f', {self.error}'}>"

    def wait(self, level: str = "durable", timeout: float | None = None) -> Handle:
        """Waits until the save has reached the durability level `"staged"`, `"local"` or `"durable"`; returns the handle. Raises
        SaveFailed if the save failed (the next save then does not raise it again), and Timeout after `timeout` seconds (the save
        continues)."""
        try:
            return self._await(level, timeout)
        except SaveFailed:
            self._raised = True
            raise

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the save is durable; returns its report. Raises as `wait`."""
        self.wait("durable", timeout)
        if self.report is None:
            raise Error(f"{self.name} was saved by another process, which has the report")
        return self.report

    def _await(self, level: str = "durable", timeout: float | None = None) -> Handle:
        """As `wait`, but does not count as raised to the caller."""
        if level not in LEVELS:
            raise UsageError(f"level is 'staged', 'local' or 'durable', not {level!r}")
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while level not in self._reached:
                if self._ended:
                    raise self._failure()
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise Timeout(f"{self.name} is not {level} after {timeout} s")
                # Wakes up often enough to handle Ctrl-C.
                self._changed.wait(0.5 if left is None else min(left, 0.5))
        return self

    def done(self) -> bool:
        """True if the save has ended: durable, or failed."""
        return self._ended

    def progress(self) -> tuple[str, int, int, int]:
        """Phase of the save, bytes done and in total (0: not known yet), before compression, and bytes uploaded."""
        if self._saving is not None:
            return self._saving.progress()
        return ("durable" if "durable" in self._reached else "staging", 0, 0, 0)

    def _failure(self, others: Iterable[Handle] = (), name: str | None = None) -> SaveFailed:
        """Exception for the failure of this save and of `others`, raised by a save of `name`."""
        error = self.error if self.error is not None else Error("it ended without a result")
        names = [other.name for other in others]
        more = f" (and neither were {', '.join(names)})" if names else ""
        kind = SaveConflict if isinstance(error, Conflict) and not isinstance(error, Busy) else SaveFailed
        text = f"{self.name} was not saved: {error}{more}"
        if name is not None:
            text += f"; {name} was not saved either: call save again for this step, this failure is raised once"
        failed = kind(text)
        failed.__cause__ = error
        return failed

    def _is_unraised(self) -> bool:
        """True if the save failed and this was not raised yet. A step on this node's disk counts as not lost: the next
        process saves it."""
        return self._ended and self.error is not None and "local" not in self._reached and not self._raised

    def _reach(self, *levels: str) -> None:
        with self._changed:
            self._reached.update(levels)
            self._ended = self._ended or "durable" in levels
            self._changed.notify_all()

    def _drop(self) -> None:
        """Records that the state is no longer on this node's disk: another process has the step, and this one is not saved."""
        with self._changed:
            self._reached.discard("local")

    def _fail(self, error: BaseException, over: bool = True) -> None:
        with self._changed:
            self.error, self._ended = error, over
            self._changed.notify_all()


def raise_failed(handles: Iterable[Handle], name: str | None = None) -> None:
    """Raises failures that were not raised yet, once; `name` is the step whose save raises them, and is not saved for it."""
    failed = [handle for handle in handles if handle._is_unraised()]
    for handle in failed:
        handle._raised = True
    if failed:
        raise failed[0]._failure(failed[1:], name)
