"""A repository that is opened beside a running agent takes its chunks from it, and does without where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import towline

ROOT = Path(__file__).parents[2]
TOWLINE = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline"))


@pytest.fixture
def agent(
    tmp_path: Path, repository: towline.Repository, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen]:
    """An agent of the repository, with a cache."""
    if not TOWLINE.exists():
        pytest.skip(f"{TOWLINE} is not there: cargo build makes it")
    settings = tmp_path / "agent.toml"
    settings.write_text(
        f'repository = "{tmp_path}/repository"\nsocket = "agent.sock"\nmemory = "512M"\n'
        '[cache]\ndir = "cache"\ncapacity = "512M"\nfree_floor = "1M"\n'
    )
    monkeypatch.setenv("TOWLINE_AGENT", str(tmp_path / "agent.sock"))
    with (tmp_path / "agent.log").open("w") as log:
        process = subprocess.Popen(
            [TOWLINE, "agent", "--config", settings, "--json"], stdout=subprocess.PIPE, stderr=log
        )
    assert b"listening" in process.stdout.readline(), (tmp_path / "agent.log").read_text()
    yield process
    process.kill()
    process.wait()


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {"w": torch.randn(1 << 20), "b": torch.randn(1000)}


def test_what_the_agent_holds_is_not_read_again(
    tmp_path: Path, repository: towline.Repository, agent: subprocess.Popen
) -> None:
    saved = state()
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, saved)
    for _ in range(2):
        near = towline.open(tmp_path / "repository", memory="256M")
        restored = towline.Checkpointer(near, "run").restore(1)
        assert all(torch.equal(restored[name], saved[name]) for name in saved)
        # From here on only the agent has them.
        shutil.rmtree(tmp_path / "repository/pack", ignore_errors=True)


def test_without_its_agent_it_goes_on_alone(
    tmp_path: Path, repository: towline.Repository, agent: subprocess.Popen
) -> None:
    saved = state()
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, saved)
    near = towline.open(tmp_path / "repository", memory="256M")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    time.sleep(0.1)
    restored = towline.Checkpointer(near, "run").restore(1)
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
