"""Stores that are away, silent or slow, disks that are small, and states that wait on a node's disk."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import towline
from towline import _folders, spool
from towline.handle import Handle

MIB = 1 << 20


def a_state(seed: int, mib: int = 16) -> dict:
    """As large as it is stored."""
    noise = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return {"noise": noise, "seed": seed}


def check(checkpointer: towline.Checkpointer, seed: int, mib: int = 16) -> None:
    back = checkpointer.restore(seed)
    assert back["seed"] == seed and torch.equal(back["noise"], a_state(seed, mib)["noise"])


class Far:
    """A repository's engine as if its store were not on this node, and sometimes away."""

    def __init__(self, engine):
        self._engine, self.away = engine, False

    def is_local(self):
        return False

    def __getattr__(self, name):
        if self.away and name in ("begin_save", "begin_save_files", "expire", "find", "names", "save"):
            raise towline.Unreachable("no answer")
        return getattr(self._engine, name)


@pytest.fixture
def far(repository) -> towline.Repository:
    repository._engine = Far(repository._engine)
    return repository


class Silent:
    """A save to a store that takes nothing."""

    def __init__(self):
        self.cancelled = False

    def wait(self, timeout=None):
        time.sleep(min(timeout or 0.1, 0.1))
        return self.cancelled

    def progress(self):
        return ("uploading", 7, 8, 9)

    def cancel(self):
        self.cancelled = True

    def result(self):
        raise towline.Unreachable("no answer")


class Slow:
    """An upload that a busy machine delays: it moves nothing for a while, then ends."""

    def __init__(self, upload):
        self.upload, self.began = upload, time.monotonic()

    def wait(self, timeout=None):
        time.sleep(min(timeout or 2, 2))
        return time.monotonic() - self.began > 2 and self.upload.wait(timeout)

    def progress(self):
        return ("uploading", 0, 0, 0)

    def __getattr__(self, name):
        return getattr(self.upload, name)


def run_script(text: str, *args: str, **more) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", textwrap.dedent(text), *args]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, **more)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 96 MiB."""
    folder, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, b"size=96m") != 0:
        pytest.skip(f"no disk of its own here: {os.strerror(ctypes.get_errno())}")
    yield folder
    # Lazily: something may still be open.
    libc.umount2(str(folder).encode(), 2)


def fill(folder: Path, leave: int) -> Path:
    ballast = folder / "ballast"
    free = os.statvfs(folder)
    with open(ballast, "wb") as file:
        for _ in range((free.f_bavail * free.f_frsize - leave) // MIB):
            file.write(bytes(MIB))
    return ballast


def linked(parent: Path, saver: _folders.FolderSaver, *steps: int) -> list[Handle]:
    handles = []
    for step in steps:
        folder = parent / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes([step]) * 1000)
        handles.append(saver.save(str(folder), step, None, str(parent)))
    return handles


def leave(far: towline.Repository, folder: Path, value: bytes) -> str:
    """What a killed process left."""
    document = json.dumps({"towline": 1, "state": value.decode()}).encode()
    header = towline._towline.lay_out([])[0]
    files = [("state.safetensors", [header]), ("state.json", [document])]
    return str(spool.put(spool_of(far, folder), "run/step-1", {"metrics": {}}, files))


def spool_of(far: towline.Repository, folder: Path) -> str:
    return str(folder / far._engine.spool_name())


def in_spool(spool: Path) -> list[Path]:
    # Steps that were set aside have other names.
    return list(spool.rglob("0-step-*"))
