"""Shutdown: finishes pending saves when the process ends."""

from __future__ import annotations

import atexit
import functools
import signal
import threading
import warnings
import weakref
from typing import Any, Protocol

from .errors import Error


class Closeable(Protocol):
    """An object with pending work."""

    def close(self) -> None: ...


_live: weakref.WeakSet[Closeable] = weakref.WeakSet()


def watch(unfinished: Closeable) -> None:
    """Closes the object when the process ends, unless it was garbage-collected."""
    _register()
    _live.add(unfinished)


def forget(finished: Closeable) -> None:
    """Removes an object that is closed."""
    _live.discard(finished)


@functools.cache
def _register() -> None:
    # Registers late: handlers run in reverse order, so this one runs before those of frameworks.
    atexit.register(_finish_all)


def _finish_all() -> None:
    for unfinished in list(_live):
        try:
            unfinished.close()
        except Error as error:
            # A warning, because Python would only print an exception here.
            warnings.warn(f"towline: {error}", stacklevel=2)


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that saves are finished, unless the program handles it already."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _raise_exit)


def _raise_exit(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)
