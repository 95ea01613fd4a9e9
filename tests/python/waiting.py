"""Free ports for servers of a test, and waits for what they do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now; all different."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def until(what: str, found: Callable[[], Any], patience: float) -> Any:
    """What `found` returns once that is true; fails with `what` after `patience` seconds."""
    end = time.monotonic() + patience
    while not (value := found()):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return value
