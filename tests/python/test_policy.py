"""Rules of a policy about callers, and audit logs, see the user of a Python program: of one that reads the store, and of one that
reads through its node's agent."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import towline

USER = getpass.getuser()

POLICY = """version = 1
repository = '{id}'
[[site]]
name = 'home'
repositories = ['{place}', '{id}']
[[rule]]
verdict = 'deny'
callers = 'user:{user}'
names = 'private/**'
why = 'not this user'
[[rule]]
verdict = 'allow'
callers = 'user:{user}'
why = 'this user'
[[rule]]
verdict = 'deny'
why = 'nobody else'
"""


def command(*words: Any) -> str:
    """Runs `towline`; returns its output."""
    done = subprocess.run([sys.executable, "-m", "towline", *map(str, words)], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, words
    return done.stdout


@pytest.fixture
def ruled(tmp_path: Path, repository: towline.Repository, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a repository, with a policy that lets only this user read it, and not all of it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/config"))
    place = (tmp_path / "repository").resolve()
    monkeypatch.setenv("TOWLINE_REPO", str(place))
    command("identity", "init")
    command("identity", "issue", "home/a", "--to", tmp_path / "home/config/towline/identity")
    command("identity", "issue-policy", "--to", tmp_path / "key")
    for name in ("run-7/step-1", "private/step-1"):
        (tmp_path / "a.bin").write_bytes(os.urandom(1 << 20))
        repository.save(tmp_path / "a.bin", name)
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(id=repository.id, place=place, user=USER))
    command("policy", "sign", policy, "--key", tmp_path / "key")
    command("policy", "set", policy)
    for name in ("run-7", "private"):
        command("label", name, "sensitivity=restricted")
    return place


def reads(name: str, to: Path) -> str:
    """Restores a tree in a process of its own; returns its bytes and those that came from the agent, or the error."""
    program = (
        "import sys, towline\n"
        "try:\n"
        "    report = towline.open(create=False).restore(sys.argv[1], sys.argv[2])\n"
        "    print(report.bytes, report.sources.agent)\n"
        "except towline.Denied as error:\n"
        "    print('denied:', error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, name, to], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_rules_about_callers_bind_the_user_of_a_program(ruled: Path, tmp_path: Path) -> None:
    assert reads("run-7/step-1", tmp_path / "out").startswith(f"{1 << 20} ")
    assert "not this user" in reads("private/step-1", tmp_path / "none")


def test_an_agent_serves_chunks_to_the_user_at_its_socket(
    ruled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "agent.toml"
    settings.write_text(
        f'repository = "{ruled}"\nsocket = "agent.sock"\nmemory = "512M"\n'
        f'identity = "{tmp_path}/home/config/towline/identity"\n[audit]\ndir = "log"\n'
        '[cache]\ndir = "chunks"\ncapacity = "512M"\nfree_floor = "1M"\n'
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "towline", "agent", "--config", settings, "--json"], stdout=subprocess.PIPE
    )
    try:
        assert agent.stdout is not None and b"listening" in agent.stdout.readline()
        monkeypatch.setenv("TOWLINE_AGENT", str(tmp_path / "agent.sock"))
        total, through = map(int, reads("run-7/step-1", tmp_path / "out").split())
        assert total == 1 << 20 and through >= total
        assert "not this user" in reads("private/step-1", tmp_path / "none")
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()
    lines = [json.loads(line) for part in (tmp_path / "log").glob("*.jsonl") for line in part.read_text().splitlines()]
    (served,) = [line for line in lines if line.get("action") == "serve"]
    assert (served["actor"], served["name"], served["verdict"]) == (f"user:{USER}", "run-7/step-1", "allow")
    (end,) = [line for line in lines if line.get("of") == served["seq"]]
    assert end["bytes"] >= 1 << 20


def test_a_file_that_fsspec_copies_takes_its_labels_along(ruled: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("towline", repo=str(ruled), skip_instance_cache=True)
    (source,) = fs.ls("run-7/step-1", detail=False)
    fs.cp_file(source, "open/copy/file")
    fs.cp_file("run-7@latest/a.bin", "latest/copy/file")
    fs.mv("open/copy/file", "elsewhere/moved/file")
    for name in ("open/copy", "elsewhere/moved", "latest/copy"):
        labels = json.loads(command("label", name, "--json"))["labels"]
        assert labels["sensitivity"] == "restricted", (name, labels)
