"""What the Python tests share: a repository in a folder of its own, a cache beside it, and nothing of the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import towline

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A forked child that uses OpenMP after its parent did hangs: https://gcc.gnu.org/legacy-ml/gcc-patches/2014-02/msg00813.html
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and the default repository lie in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("TOWLINE_REPO", raising=False)
    monkeypatch.setenv("TOWLINE_AGENT", "none")


@pytest.fixture
def repository(tmp_path: Path) -> towline.Repository:
    """An empty repository in a folder."""
    return towline.open(tmp_path / "repository", memory="256M")
