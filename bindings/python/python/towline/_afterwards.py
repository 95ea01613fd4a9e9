"""What follows a save: steps are expired, and those of other processes noticed. This reads the store, which may not answer, so no
save waits for it."""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING

from ._backlog import SLOW

if TYPE_CHECKING:
    from ._mixing import Mixing
    from .repository import Repository
    from .retention import Retention


class Afterwards:
    """Expires steps and looks for those of others, in a thread of its own, one run at a time. Requests during a run are merged to
    one."""

    def __init__(self, repository: Repository, run: str, retention: Retention, mixing: Mixing):
        self._repository, self._run, self._retention, self._mixing = repository, run, retention, mixing
        self._changed = threading.Condition()
        self._asked = self._running = False

    def request(self) -> None:
        """Requests a run; returns at once."""
        with self._changed:
            self._asked = True
            if not self._running:
                self._running = True
                threading.Thread(target=self._follow, name="towline-afterwards", daemon=True).start()

    def wait(self, timeout: float) -> bool:
        """Waits until the requested runs have ended, `timeout` seconds at most; returns whether they have."""
        until = time.monotonic() + timeout
        with self._changed:
            while self._running and (left := until - time.monotonic()) > 0:
                # Wakes up often enough to handle Ctrl-C.
                self._changed.wait(min(left, 0.5))
            return not self._running

    def close(self, ends: float, until: float | None = None) -> None:
        """Waits for requested runs, and then a short time for deletes. The runs have until the time `ends` (of time.monotonic),
        or as long as a slow store needs; both have until the time `until`."""
        now = time.monotonic()
        longest = max(ends - now, SLOW.total_seconds())
        if not self.wait(longest if until is None else min(longest, until - now)) and self._retention.has_rules():
            warnings.warn(
                f"towline: steps of {self._run} were not expired: {self._repository.url} does not answer (the next process that "
                "saves steps of the run with these rules expires them)",
                stacklevel=3,
            )
        self._retention.close(None if until is None else until - time.monotonic())

    def _follow(self) -> None:
        while self._next():
            try:
                self._retention.expire(self._repository, self._run)
                self._mixing.look()
            except Exception as error:
                # The save itself succeeded.
                warnings.warn(f"towline: {error}", stacklevel=2)

    def _next(self) -> bool:
        """True if a run is requested; else the thread ends."""
        with self._changed:
            self._running, self._asked = self._asked, False
            self._changed.notify_all()
            return self._running
