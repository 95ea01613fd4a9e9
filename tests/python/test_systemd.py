"""deploy/systemd: the documents show it, it is as closed as they say, and an agent needs nothing that it forbids."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import safetensors.numpy

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/systemd"
BUILT = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline"))
UNIT = (DEPLOY / "towline.service").read_text()
#: Of 10, as the documents say.
EXPOSURE = 1.3
# `make test` sets this: what it installs and builds must be there then.
REQUIRED = "TOWLINE_TEST_REQUIRE_SERVERS" in os.environ


# A machine with another init system has no use for the unit.
ANALYZE = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
STRACE = pytest.mark.skipif(
    not REQUIRED and not (shutil.which("strace") and BUILT.exists()),
    reason=f"no strace (tests/servers/setup.sh), or no {BUILT} (cargo build)",
)


def test_the_documents_show_the_files_as_they_are():
    shown = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs/operations.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [text for language, text in shown if language == "ini"] == [UNIT]
    assert (DEPLOY / "agent.toml").read_text() in [text for language, text in shown if language == "toml"]


def analyze(*words: str | Path) -> str:
    run = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, env=os.environ | {"LANG": "C"})
    return run.stdout + run.stderr


@ANALYZE
def test_the_unit_is_as_closed_as_the_documents_say():
    told = analyze("security", "--offline=true", DEPLOY / "towline.service")
    assert float(re.search(r"Overall exposure level for towline.service: ([\d.]+)", told)[1]) <= EXPOSURE
    assert f"rates the unit {EXPOSURE} of 10" in (ROOT / "docs/operations.md").read_text().replace("\n", " ")


def calls_of(groups: str) -> set[str]:
    """System calls of groups such as `@system-service`, as systemd defines them."""
    found: set[str] = set()
    for line in analyze("syscall-filter", *groups.split()).splitlines():
        word = line.strip()
        if line.startswith(" ") and not word.startswith("#"):
            found |= calls_of(word) if word.startswith("@") else {word}
    return found


@pytest.fixture(scope="module")
def traced() -> Iterator[str]:
    """Trace of an agent with the unit's folders in a folder of this machine, which has saved, warmed, served and ended."""
    # A socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="unit-", dir="/tmp"))
    places = {"run/towline": "/run/towline", "var/lib/towline": "/var/lib/towline", "etc/towline": "/etc/towline"}
    settings = (DEPLOY / "agent.toml").read_text()
    settings = settings.replace("s3://bucket/prefix", str(folder / "repository")).replace(
        "127.0.0.1:7070", "127.0.0.1:0"
    )
    for place, there in places.items():
        (folder / place).mkdir(parents=True, mode=0o700)
        settings = settings.replace(there, str(folder / place))
    (folder / "etc/towline/agent.toml").write_text(settings + 'free_floor = "0"\n[staging]\nmemory = "64M"\n')
    (folder / "ckpt").mkdir()
    tensors = {"w": numpy.random.default_rng(1).random(1 << 20, dtype=numpy.float32)}
    safetensors.numpy.save_file(tensors, folder / "ckpt/model.safetensors")
    environment = os.environ | {
        "HOME": str(folder / "var/lib/towline"),
        "STATE_DIRECTORY": str(folder / "var/lib/towline"),
        "XDG_CACHE_HOME": str(folder / "var/lib/towline/index"),
        "TOWLINE_REPO": str(folder / "repository"),
        "TOWLINE_AGENT": str(folder / "run/towline/agent.sock"),
    }

    def towline(*words: str) -> str:
        run = subprocess.run([BUILT, *words], env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, (words, run.stderr)
        return run.stdout

    towline("init", str(folder / "repository"))
    command = re.search(r"^ExecStart=\S+ (.*)$", UNIT, re.MULTILINE)[1].replace(
        "/etc/towline", str(folder / "etc/towline")
    )
    trace, log = folder / "trace", (folder / "log").open("w")
    agent = subprocess.Popen(
        ["strace", "-f", "-qq", "-y", "-o", trace, BUILT, *command.split()],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while subprocess.run([BUILT, "top", "--ready"], env=environment, capture_output=True).returncode != 0:
            assert agent.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.2)
        body = json.dumps({"path": str(folder / "ckpt"), "name": "run/step-1"})
        call = ["curl", "-sSf", "--unix-socket", environment["TOWLINE_AGENT"], "http://localhost/v1/save", "-d", body]
        subprocess.run(call, check=True, capture_output=True)
        while "run/step-1" not in towline("ls"):
            assert time.monotonic() < end
            time.sleep(0.2)
        towline("warm", "run/step-1", "--wait", "--pin", "1h")
        towline("restore", "run/step-1", str(folder / "restored"))
        towline("stage", "run/step-1")
        os.killpg(agent.pid, signal.SIGTERM)
        assert agent.wait(60) == 0, (folder / "log").read_text()
        yield trace.read_text(errors="replace").replace(str(folder), "")
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        shutil.rmtree(folder)


@STRACE
@ANALYZE
def test_an_agent_makes_no_call_that_the_unit_forbids(traced):
    filters = re.findall(r"^SystemCallFilter=(.*)$", UNIT, re.MULTILINE)
    allowed, forbidden = (calls_of(groups.removeprefix("~")) for groups in filters)
    assert "openat" in allowed and "setpriority" in forbidden
    made = set(re.findall(r"^\d+ +([a-z_0-9]+)\(", traced, re.MULTILINE))
    assert {"memfd_create", "accept4", "bind", "statx"} <= made
    # The program is started by systemd, before the filter.
    assert made - {"execve"} <= allowed - forbidden, made - allowed | made & forbidden
    assert not re.search(r"PROT_WRITE\|PROT_EXEC", traced)
    families = set(re.findall(r"socket\((AF_\w+)", traced))
    assert families <= set(re.search(r"^RestrictAddressFamilies=(.*)$", UNIT, re.MULTILINE)[1].split())


@STRACE
def test_an_agent_writes_to_its_own_folders_alone(traced):
    opened = re.findall(r"openat\((?:AT_FDCWD|\d+)?<?([^>,]*)>?, \"([^\"]*)\", [^)]*O_(?:WRONLY|RDWR|CREAT)", traced)
    written = {(name if name.startswith("/") else f"{at}/{name}") for at, name in opened}
    own = ("/run/towline", "/var/lib/towline", "/repository", "/dev/null")
    assert any(path.startswith("/var/lib/towline/cache") for path in written)
    assert [path for path in written if not path.startswith(own)] == []
