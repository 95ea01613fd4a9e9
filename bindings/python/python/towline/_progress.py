"""Progress of saves and restores: a callback, or a progress bar."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

from . import _towline
from .errors import UsageError

#: Progress of an operation: its phase; bytes done and in total (0: not known yet), uncompressed; and bytes transferred.
Snapshot = tuple[str, int, int, int]
#: A callback that takes the four values of `Snapshot`; True for a progress bar, if there is a terminal or a notebook.
Progress = Callable[[str, int, int, int], None] | bool | None

#: Seconds between two calls.
_EVERY = 0.1


def check(progress: Progress) -> None:
    """Raises UsageError unless `progress` is a callback, a boolean or None."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise UsageError(f"progress is True, or a function of (phase, done, total, moved), not {progress!r}")


@contextlib.contextmanager
def counting(progress: Progress, what: str) -> Iterator[_towline.Progress | None]:
    """Yields counters for one operation of the engine, and reports them during the block; None without a callback."""
    check(progress)
    counters = _towline.Progress() if progress else None
    with following(progress, what, counters.snapshot if counters is not None else _nothing):
        yield counters


@contextlib.contextmanager
def following(progress: Progress, what: str, look: Callable[[], Snapshot]) -> Iterator[None]:
    """Reports the result of `look` from a separate thread during the block, and once at its end."""
    callback = _Bar(what) if progress is True else progress
    if not callback or (isinstance(callback, _Bar) and not _is_watched()):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(callback, what, look, over), name="towline-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(callback: Callable[..., None], what: str, look: Callable[[], Snapshot], over: threading.Event) -> None:
    try:
        while not over.wait(_EVERY):
            callback(*look())
        callback(*look())
        if isinstance(callback, _Bar):
            callback.end()
    except Exception as error:
        warnings.warn(f"towline: progress of {what} is no longer reported: {error!r}", stacklevel=2)
        over.wait()


def _nothing() -> Snapshot:
    return ("", 0, 0, 0)


def _is_watched() -> bool:
    """True if there is a terminal or a notebook."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class _Bar:
    """Progress bar: one line on stderr, rewritten in place."""

    def __init__(self, what: str):
        self._what, self._begun, self._width = what, time.monotonic(), 0

    def __call__(self, phase: str, done: int, total: int, moved: int) -> None:
        rate = done / max(time.monotonic() - self._begun, 1e-3)
        part = f"{min(100 * done // total, 100):3}% of {_shown(total)}" if total else _shown(done)
        line = f"{self._what}: {phase or 'looking'} {part}, {_shown(rate)}/s"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def end(self) -> None:
        """Ends the line."""
        sys.stderr.write("\n")
        sys.stderr.flush()


def _shown(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
