"""Collecting beside a training: what steps that are gone leave behind is deleted in the background."""

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

#: A collector rests so many times as long as it worked, at most `_REST_MAX` seconds: what a large repository costs a training is
#: bounded.
_REST_TIMES, _REST_MAX = 20, 600.0
#: Seconds that `close` waits for the last collect. What it does not get to is deleted by the next one.
_CLOSE_MAX = 10.0


class Collector:
    """Deletes what no name of `repository` needs, in a thread of its own, one collect at a time, whenever it was asked to. What
    makes it fail is a warning, each kind once. Where the store refuses deletes it does no more."""

    def __init__(self, repository: Repository, enabled: bool = True):
        self._repository, self._enabled = repository, enabled
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._asked, self._closing, self._abandoned = False, False, False
        self._thread: threading.Thread | None = None
        self._work: _towline.Saving | None = None
        self._rest_until = 0.0
        self._warned: set[str] = set()

    def request(self) -> None:
        """Asks for a collect; returns at once. Several requests that come while one goes on, or rests, are one."""
        if not self._enabled or os.getpid() != self._process:
            return
        with self._changed:
            self._asked = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="towline-collector", daemon=True)
                self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Does now what was asked for, waits for it `timeout` seconds, by default and at most `_CLOSE_MAX`, then stops it."""
        if os.getpid() != self._process:
            # The thread is the parent's.
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
        """Waits until a collect is due. False if none was asked for: then the thread ends."""
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
        # The names are gone already, and no safety depends on a grace.
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
                f"{self._repository.url} does not let this process delete what expired steps leave behind: {error}. Names still "
                "expire. Run `towline collect` with credentials that may delete, and pass collect=False here"
            )
        else:
            text = f"what expired steps left behind in {self._repository.url} was not deleted, a later collect does it: {error}"
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"towline: {text}", stacklevel=2)
