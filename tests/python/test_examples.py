"""The examples, killed in the middle and run again, go on with the losses of the uninterrupted run, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import towline

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, DIE_AT = 12, 7


def run(example: str, folder: Path, repo: Path, *said: str) -> tuple[int, dict[int, str]]:
    """How it ended, and the losses by step."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, EXAMPLES / example, "--repo", repo, "--steps", str(STEPS), *said]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    losses = {int(step): loss for step, loss in re.findall(r"^step (\d+) (\S+)$", ended.stdout, re.MULTILINE)}
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode, losses


@pytest.mark.parametrize(
    ("example", "needs"),
    [("pytorch_loop.py", "torch"), ("lightning_fit.py", "lightning"), ("hf_trainer.py", "transformers")],
)
def test_a_killed_run_goes_on(tmp_path, monkeypatch, example, needs):
    pytest.importorskip(needs)
    ended, whole = run(example, tmp_path / "whole", tmp_path / "whole-repository")
    assert ended == 0 and list(whole) == list(range(1, STEPS + 1))
    ended, first = run(example, tmp_path / "here", tmp_path / "repository", "--die-at", str(DIE_AT))
    assert ended == -signal.SIGKILL and list(first) == list(range(1, DIE_AT + 1))
    shutil.copytree(tmp_path / "repository", tmp_path / "other-repository")
    for folder, repository in (("here", "repository"), ("another-machine", "other-repository")):
        if folder == "another-machine":
            # All that it has is the repository.
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other-cache"))
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other-state"))
        ended, second = run(example, tmp_path / folder, tmp_path / repository)
        assert ended == 0 and list(second)[-1] == STEPS
        assert 1 < min(second) <= DIE_AT + 1, "it goes on where it was, not at the beginning"
        assert {**first, **second} == whole
        assert all(first[step] == second[step] for step in first.keys() & second.keys())
        assert towline.open(tmp_path / repository).verify(data=True)["damaged"] == []
