"""Limits of time for reads of a store that may not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from .errors import Unreachable

#: Time for the read of the version that a step got: the next save waits for it.
VERSION = timedelta(seconds=5)

T = TypeVar("T")


def within(limit: timedelta | None, read: Callable[[], T]) -> T:
    """Returns what `read` returns. Raises Unreachable if that takes longer than `limit`: its thread, which changes nothing in the
    store, then ends once the store answers."""
    if limit is None:
        return read()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(read())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="towline-read", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if failed:
        raise failed[0]
    if found:
        return found[0]
    raise Unreachable(f"store does not answer: nothing for {limit.total_seconds():g} s")
