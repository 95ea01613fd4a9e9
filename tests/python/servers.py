"""The real S3 server that `make test` starts, and a way to cut the line to it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest


def s3(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The server's endpoint and the address of a repository to be made; its keys are put into the environment."""
    told = os.environ.get("TOWLINE_TEST_MINISTACK")
    if told is None:
        if os.environ.get("TOWLINE_TEST_REQUIRE_SERVERS"):
            pytest.fail("TOWLINE_TEST_MINISTACK is not set: `make test` starts the server")
        pytest.skip("no S3 server: `make test` starts one")
    lines = (line.split("=", 1) for line in Path(told).read_text().splitlines() if "=" in line)
    values = {key.strip().removeprefix("export "): value.strip().strip("\"'") for key, value in lines}
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        if key in values:
            monkeypatch.setenv(key, values[key])
    endpoint = next(value for key, value in values.items() if "ENDPOINT" in key)
    return endpoint, f"s3://python-{uuid.uuid4().hex[:12]}/repository"


class Line:
    """A line to a server that can be cut, made silent and mended: a proxy on this machine."""

    def __init__(self, endpoint: str):
        there = urlsplit(endpoint)
        self._there = (there.hostname, there.port)
        self._whole = True
        self._carries = threading.Event()
        self._carries.set()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole = False
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """Carries nothing until it is mended."""
        self._carries.clear()

    def mend(self) -> None:
        self._whole = True
        self._carries.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if not self._whole:
                near.close()
                continue
            far = socket.create_connection(self._there)
            self._open |= {near, far}
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._carries.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
