"""The file system `towline://` for tests, in a repository of its own."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")
# Nothing to do where the wheel is installed, which has the entry point.
fsspec.register_implementation("towline", "towline.fsspec.TowlineFileSystem", clobber=True)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The repository that addresses are in."""
    url = str(tmp_path / "repository")
    monkeypatch.setenv("TOWLINE_REPO", url)
    return url


@pytest.fixture
def fs(url: str) -> Any:
    return fsspec.filesystem("towline", skip_instance_cache=True)


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def names(fs: Any) -> list[str]:
    return [one.name for one in fs.shared.repository.ls()]


def version(fs: Any, name: str) -> int:
    return fs.shared.engine.find(name)[1]


class Calls:
    """Counts the calls of an object's methods."""

    def __init__(self, inner: Any):
        self.inner, self.counts = inner, Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self.inner, name)
