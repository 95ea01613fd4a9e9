"""Background collects: deletes the data of removed steps while a training runs."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

from .errors import Cancelled, Denied, Error

if TYPE_CHECKING:
    from . import _towline
    from .repository import Repository

#: Pause after a collect, as a multiple of its duration, and maximum in seconds: it limits the load that a large repository
#: causes.
_REST_TIMES, _REST_MAX = 20, 600.0
#: Seconds that `close` waits for the last collect; the next collect deletes the rest.
_CLOSE_MAX = 10.0


class Collector:
    """Deletes data that no name of `repository` needs, in its own thread, one collect at a time, on request. A failure is only a
    warning, once for each kind. If the store refuses deletes, no further collects run."""

    def __init__(self, repository: Repository, enabled: bool = True):
        self._repository, self._enabled = repository, enabled
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._asked, self._closing, self._abandoned = False, False, False
        self._thread: threading.Thread | None = None
        self._work: _towline.Task | None = None
        self._rest_until = 0.0
        self._warned: set[str] = set()

    def request(self) -> None:
        """Requests a collect; returns at once. Requests during a collect, or the pause after it, are merged to one."""
        if not self._enabled or os.getpid() != self._process:
            return
        with self._changed:
            self._asked = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="towline-collector", daemon=True)
                self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Runs a requested collect now, waits for it `timeout` seconds (default and maximum: `_CLOSE_MAX`), then stops it."""
        if os.getpid() != self._process:
            # In a forked child: the thread belongs to the parent.
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            longest = _CLOSE_MAX if timeout is None else min(timeout, _CLOSE_MAX)
            if not self._changed.wait_for(lambda: self._thread is None, longest):
                self._abandoned = True
                if self._work is not None:
                    self._work.cancel()
                self._changed.wait_for(lambda: self._thread is None, 1.0)
            self._closing = False

    def _run(self) -> None:
        while self._next():
            begun = time.monotonic()
            try:
                self._collect()
            except Cancelled:
                pass
            except Exception as error:
                self._warn(error)
            self._rest_until = time.monotonic() + min(_REST_TIMES * (time.monotonic() - begun), _REST_MAX)

    def _next(self) -> bool:
        """Waits until a collect is due. False if none is requested: the thread then ends."""
        with self._changed:
            if self._asked and not self._closing:
                self._changed.wait_for(lambda: self._closing, self._rest_until - time.monotonic())
            if self._asked and self._enabled and not self._abandoned:
                self._asked = False
                return True
            self._asked, self._abandoned, self._thread = False, False, None
            self._changed.notify_all()
            return False

    def _collect(self) -> None:
        # The names are removed already; remaining names are safe without a grace period.
        work = self._repository._engine.begin_collect(timedelta(0))
        with self._changed:
            self._work = work
            if self._abandoned:
                work.cancel()
        work.wait()
        self._work = None
        work.result()

    def _warn(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, Error) else type(error).__name__
        if isinstance(error, Denied):
            self._enabled = False
            text = (
                f"{self._repository.url} does not let this process delete the data of expired steps: {error}. Names are still "
                "removed. Run `towline collect` with credentials that may delete, and pass collect=False here"
            )
        else:
            text = (
                f"data of expired steps in {self._repository.url} was not deleted; a later collect deletes it: {error}"
            )
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"towline: {text}", stacklevel=2)
