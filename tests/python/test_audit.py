"""The audit log of what Python saves and reads, where `TOWLINE_AUDIT` names a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import towline

fsspec = pytest.importorskip("fsspec")
# Nothing to do where the wheel is installed, which has the entry point.
fsspec.register_implementation("towline", "towline.fsspec.TowlineFileSystem", clobber=True)


def entries(log: Path) -> list[dict[str, Any]]:
    lines = [line for part in sorted(log.glob("*.jsonl")) for line in part.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def decisions(log: Path) -> list[tuple[str, str, int | None]]:
    """Action, name, and the bytes of the end; None if it has none."""
    all = entries(log)
    ends = {entry["of"]: entry["bytes"] for entry in all if entry["kind"] == "end"}
    made = [entry for entry in all if entry["kind"] == "decision"]
    return [(entry["action"], entry["name"], ends.get(entry["seq"])) for entry in made]


def saved(repository: towline.Repository, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.bin").write_bytes(b"0123456789" * 1000)
    repository.save(tmp_path / "tree", "run/step-1")


def test_saves_and_reads_are_recorded(
    repository: towline.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("TOWLINE_AUDIT", str(log))
    saved(repository, tmp_path)
    repository.restore("run/step-1", tmp_path / "out")
    assert repository.read("run/step-1", "a.bin", 0, 10) == b"0123456789"
    repository.copy("run/step-1", "run/step-2")
    repository.remove("run/step-2")
    assert decisions(log) == [
        ("save", "run/step-1", 10000),
        ("restore", "run/step-1", 10000),
        ("read", "run/step-1", 10),
        ("copy", "run/step-1", 0),
        ("copy", "run/step-2", 0),
        ("remove", "run/step-2", 0),
    ]


def test_nothing_is_recorded_without_the_variable(repository: towline.Repository, tmp_path: Path) -> None:
    saved(repository, tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_what_cannot_be_recorded_is_not_done(
    repository: towline.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(repository, tmp_path)
    (tmp_path / "log").write_text("a file in its place")
    monkeypatch.setenv("TOWLINE_AUDIT", str(tmp_path / "log"))
    with pytest.raises(towline.Error):
        repository.read("run/step-1", "a.bin")
    with pytest.raises(towline.Error):
        repository.remove("run/step-1")
    assert [one.name for one in repository.ls()] == ["run/step-1"]


def test_a_tree_of_fsspec_is_one_entry_that_ends_with_python(repository: towline.Repository, tmp_path: Path) -> None:
    saved(repository, tmp_path)
    log = tmp_path / "log"
    program = (
        "import fsspec\n"
        "fsspec.register_implementation('towline', 'towline.fsspec.TowlineFileSystem', clobber=True)\n"
        "file = fsspec.open('towline://run/step-1/a.bin').open()\n"
        "got = [file.read(100), file.seek(5000), file.read(10)]\n"
        "assert got[0] == b'0123456789' * 10, got\n"
    )
    environment = os.environ | {"TOWLINE_AUDIT": str(log), "TOWLINE_REPO": str(tmp_path / "repository")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    [(action, name, count)] = decisions(log)
    assert (action, name) == ("read", "run/step-1")
    assert count is not None and count >= 110
