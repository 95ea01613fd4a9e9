"""Shutdown: saves that are unfinished when the process ends are finished."""

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
    """An object with work that may be unfinished."""

    def close(self) -> None: ...


_live: weakref.WeakSet[Closeable] = weakref.WeakSet()


def watch(unfinished: Closeable) -> None:
    """Closes it when the process ends, unless it is gone by then."""
    _register()
    _live.add(unfinished)


def forget(finished: Closeable) -> None:
    """Removes what needs no more closing."""
    _live.discard(finished)


@functools.cache
def _register() -> None:
    # Not before it is needed: what is registered last is called first, while frameworks are still there.
    atexit.register(_finish_all)


def _finish_all() -> None:
    for unfinished in list(_live):
        try:
            unfinished.close()
        except Error as error:
            # An exception here would only be printed, too; this says it once.
            warnings.warn(f"towline: {error}", stacklevel=2)


def exit_on_sigterm() -> None:
    """Makes SIGTERM an orderly exit, so that saves are finished, unless the program handles it already."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _raise_exit)


def _raise_exit(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)
