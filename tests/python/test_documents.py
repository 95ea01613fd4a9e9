"""docs/operations.md, typed: the settings of the unit for systemd start an agent, and its API answers what is shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import towline

OPERATIONS = (Path(__file__).parents[2] / "docs/operations.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", OPERATIONS, re.MULTILINE | re.DOTALL)


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """What a command prints on a machine with the agent of the unit, whose folders lie in the test's own."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    towline.open(tmp_path / "repository")
    for folder in ("run", "lib", "ckpt/step-100"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ckpt/step-100/model.safetensors").write_bytes(os.urandom(100_000))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {
        "/run/towline": f"{tmp_path}/run",
        "/var/lib/towline": f"{tmp_path}/lib",
        "/etc/towline": str(tmp_path),
        "/usr/local/bin": str(Path(sys.executable).parent),
        "s3://bucket/prefix": f"{tmp_path}/repository",
        "127.0.0.1:7070": f"127.0.0.1:{port}",
        "/ckpt/": f"{tmp_path}/ckpt/",
    }

    def here(text: str) -> str:
        for there, place in places.items():
            text = text.replace(there, place)
        return text

    (settings,) = [block for block in blocks("toml") if block.startswith("# /etc/towline/agent.toml\n")]
    (tmp_path / "agent.toml").write_text(here(settings))
    (unit,) = blocks("ini")
    start = here(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1]).split(" ")
    log = (tmp_path / "agent.log").open("w")
    agent = subprocess.Popen([*start, "--json"], stdout=subprocess.PIPE, stderr=log, text=True)
    assert "listening" in agent.stdout.readline(), (tmp_path / "agent.log").read_text()

    def typed(command: str) -> str:
        # Silent, but not about failures.
        script = "set -euo pipefail\n" + here(command).replace("curl -s ", "curl -sSf ")
        ran = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    yield typed
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0, (tmp_path / "agent.log").read_text()


def test_the_api_answers_what_is_shown(typed, tmp_path):
    first, second = [block for block in blocks("console") if "$S " in block]
    given, *commands = [line[2:] for line in first.splitlines() if line.startswith("$ ")]
    assert given.startswith("S=") and len(commands) == 2
    answers = [json.loads(typed(f"{given}\n{command}")) for command in commands]
    assert answers[0] and "tasks" in answers[1]

    save, follow, read = [line[2:] for line in second.splitlines() if line.startswith("$ ")]
    begun = json.loads(typed(f"{given}\n{save}"))
    shown = json.loads(re.search(r"^(\{.*?),\.\.\.\}$", second, re.MULTILINE)[1] + "}")
    assert shown.keys() <= begun.keys() and (begun["kind"], begun["name"]) == (shown["kind"], shown["name"])
    events = typed(f"{given}\n" + follow.replace("01KB3...", begun["id"]))
    end = json.loads(re.search(r"^event: end\ndata: (.*)$", events, re.MULTILINE)[1])
    assert end["state"] == "done" and end["report"]["name"] == begun["name"], events
    typed(f"{given}\n{read}")
    assert (tmp_path / "head").read_bytes() == (tmp_path / "ckpt/step-100/model.safetensors").read_bytes()[:1024]
