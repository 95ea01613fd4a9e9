"""The `towline` command that the wheel brings is the one that the binary is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import towline

COMMAND = Path(sys.executable).parent / "towline"
MODULE = [sys.executable, "-m", "towline"]


def run(*said: str | bytes | Path, **more) -> subprocess.CompletedProcess:
    return subprocess.run([COMMAND, *said], capture_output=True, timeout=120, check=False, **more)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    made.mkdir()
    (made / "a.bin").write_bytes(os.urandom(300_000))
    (made / "b.txt").write_text("b")
    return made


def test_it_saves_lists_and_restores(tmp_path, tree):
    saved = run("save", tree, "run/step-1", "--metric", "loss=0.5")
    assert saved.returncode == 0, saved.stderr
    (listed,) = json.loads(run("ls", "--json").stdout)["refs"]
    assert (listed["name"], listed["metrics"]) == ("run/step-1", {"loss": 0.5})
    assert run("restore", "run@latest", tmp_path / "back").returncode == 0
    assert (tmp_path / "back/a.bin").read_bytes() == (tree / "a.bin").read_bytes()
    # The package sees the same repository.
    assert [one.name for one in towline.open().ls()] == ["run/step-1"]


def test_python_m_towline_is_the_same(tree):
    for command in ([COMMAND], MODULE):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert said.stdout == f"towline {towline.__version__}\n"
    helped = [
        subprocess.run([*command, "help", "save"], capture_output=True, check=True) for command in ([COMMAND], MODULE)
    ]
    assert helped[0].stdout == helped[1].stdout and b"Usage: towline save" in helped[0].stdout


def test_it_ends_as_the_binary_does(tmp_path, tree):
    for code, said in ((2, ["frobnicate"]), (2, ["save"]), (3, ["show", "nothing"]), (0, ["--help"])):
        ended = run(*said)
        assert ended.returncode == code and b"Traceback" not in ended.stderr, (said, ended.stderr)
    wrong = json.loads(run("show", "nothing", "--json").stderr)["error"]
    assert wrong["kind"] == "not-found"
    assert json.loads(run("save", "--json").stderr)["error"]["kind"] == "usage"
    run("save", tree, "name")
    reader = subprocess.Popen([COMMAND, "cat", "name:a.bin"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reader.stdout.close()
    assert reader.stderr.read() == b"" and reader.wait() == 0, "a reader that goes away is no error"


def test_file_names_need_not_be_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(os.fsdecode(path)).write_bytes(b"text")
    assert run("save", path, "name").returncode == 0
    assert run("cat", b"name:caf\xe9").stdout == b"text"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_watch_in_good_order(tmp_path, tree, number):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoint-1").mkdir()
    (tmp_path / "out/checkpoint-1/trainer_state.json").write_text("{}")
    process = subprocess.Popen(
        [COMMAND, "watch", tmp_path / "out", "run", "--settle", "5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # It hears signals before it says anything.
    lines = [process.stderr.readline()]
    process.send_signal(number)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 0, [*lines, rest]
    assert b"Traceback" not in rest and b"KeyboardInterrupt" not in rest
    assert [one.name for one in towline.open().ls()] == ["run/step-1"]


def test_ctrl_c_interrupts_a_save(tmp_path):
    with (tmp_path / "large.bin").open("wb") as large:
        for _ in range(192):
            large.write(os.urandom(1 << 20))
    towline.open(tmp_path / "repository")
    said = ["save", tmp_path / "large.bin", "name", "--repo", tmp_path / "repository", "-vv"]
    process = subprocess.Popen([COMMAND, *said], stderr=subprocess.PIPE)
    # The log begins while it opens the repository: from then on it hears signals.
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    # As the binary: the code of an error, or the one that shells know for SIGINT.
    assert process.wait(120) in (1, 130), [line, rest]
    assert b"interrupted" in rest and b"Traceback" not in rest, [line, rest]
    assert towline.open(tmp_path / "repository").ls() == []


def test_the_command_waits_for_nothing_of_python(tree):
    script = (
        "import sys, towline._towline, towline.__main__\n"
        "print(sorted(name for name in ('torch', 'numpy', 'fsspec', 'asyncio') if name in sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
