"""The end of a process: what is left open prints nothing, and saves nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import towline

from .spooling import in_spool, run_script

pytest.importorskip("fsspec")

#: Keeps names of modules alive at the end: torch refers to them, and they are None when the files are collected.
BEGIN = """
import torch, towline, fsspec
fsspec.register_implementation("towline", "towline.fsspec.TowlineFileSystem", clobber=True)
fs = fsspec.filesystem("towline")
"""


@pytest.mark.parametrize(
    "code",
    [
        "with fs.open('t/f.txt', 'r') as f: assert f.read() == 'abc'",
        "f = fs.open('t/f.txt', 'r'); f.read(1)",
        "f = fs.open('t/f.txt', 'rb'); f.read(1)",
        "f = fs.open('t/g.txt', 'w'); f.write('x')",
        "f = fs.open('t/g.txt', 'wb'); f.write(b'x')",
        "f = fs.open('t/g.txt', 'w', compression='gzip'); f.write('x')",
        "f = fs.open('t/g.txt', 'wb', compression='gzip'); f.write(b'x')",
        "f = fs.open('t/g.txt', 'w', compression='bz2'); g = f.buffer; f.write('x')",
        "f = fsspec.open('towline://t/g.txt', 'w', compression='xz').open(); f.write('x')",
    ],
)
def test_files_of_fsspec_that_are_there_at_the_end(tmp_path, code):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "f.txt").write_text("abc")
    repository = towline.open(tmp_path / "repository")
    repository.save(folder, "t")
    said = {**os.environ, "TOWLINE_REPO": repository.url}
    ran = subprocess.run([sys.executable, "-c", BEGIN + code], env=said, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert repository.show("t").files == 1, "what was not closed is not saved"


#: Saves to a store that is away until `close` begins, and does not call it. No library made a finalizer before: that of the first
#: folder then runs before `close` does.
AWAY = """
import sys, weakref
import torch, towline
from tests.python.spooling import Far
from towline import _backlog
weakref.finalize._registered_with_atexit = False
repository = towline.open(sys.argv[1])
repository._engine = Far(repository._engine)
checkpointer = towline.Checkpointer(repository, "run", spool=sys.argv[2])
repository._engine.away = True
checkpointer.save(1, {"a": torch.ones(9)}).wait("local")
close = _backlog.Backlog.close
def answer(*said):
    repository._engine.away = False
    close(*said)
_backlog.Backlog.close = answer
"""


def test_steps_in_the_spool_are_uploaded_at_the_end(tmp_path):
    repository = towline.open(tmp_path / "repository")
    ran = run_script(AWAY, repository.url, str(tmp_path / "spool"), stderr=subprocess.PIPE)
    assert ran.returncode == 0 and "not durable" not in ran.stderr, ran.stderr
    assert towline.Checkpointer(repository, "run").steps() == [1] and in_spool(tmp_path / "spool") == []
