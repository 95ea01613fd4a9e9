"""Progress of saves and restores: told to a callable, or drawn where somebody sees it."""

from __future__ import annotations

import io
import sys
import threading

import pytest
import torch
import towline
from towline import _progress


class Told:
    """What was told."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.threads: set[int] = set()

    def __call__(self, *told):
        self.calls.append(told)
        self.threads.add(threading.get_ident())

    def check(self, least: int) -> None:
        """Each call is whole, and the last says that all was done."""
        assert all(isinstance(call[0], str) and all(type(number) is int for number in call[1:]) for call in self.calls)
        _, done, total, moved = self.calls[-1]
        assert done == total >= least and moved > 0
        assert threading.get_ident() not in self.threads


class Terminal(io.StringIO):
    def isatty(self):
        return True


STATE = {"a": torch.arange(1 << 20, dtype=torch.float32)}


def test_saves_and_restores_of_a_checkpointer(repository):
    saving, restoring = Told(), Told()
    with towline.Checkpointer(repository, "run", compression="off") as checkpointer:
        checkpointer.save(1, STATE, progress=saving)
        checkpointer.close()
        saving.check(4 << 20)
        assert torch.equal(checkpointer.restore(progress=restoring)["a"], STATE["a"])
        restoring.check(4 << 20)


def test_a_state_that_is_not_staged_is_told_too(repository, monkeypatch):
    monkeypatch.setattr(towline.Checkpointer, "_can_stage", lambda self, length: False)
    told = Told()
    with towline.Checkpointer(repository, "run", compression="off") as checkpointer, pytest.warns(UserWarning):
        checkpointer.save(1, STATE, progress=told)
    told.check(4 << 20)


def test_files_and_folders(repository, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)
    saving, restoring = Told(), Told()
    repository.save(tmp_path / "file", "name", progress=saving)
    repository.restore("name", tmp_path / "out", progress=restoring)
    saving.check(1 << 20)
    restoring.check(1 << 20)


def test_a_bar_where_there_is_a_terminal(repository, monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, STATE, progress=True).wait()
        checkpointer.restore(progress=True)
    lines = stderr.getvalue().split("\n")
    assert lines[-1] == "" and len(lines) == 3
    assert all(line.startswith("\rrun/step-1: ") and "100% of 4.0 MiB" in line for line in lines[:2])


def test_no_bar_where_nobody_sees_it(repository, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, STATE, progress=True).wait()
        checkpointer.restore(progress=True)
    assert stderr.getvalue() == ""
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = type(sys)("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert _progress._is_watched(), "a notebook shows it"


def test_a_callable_that_fails_fails_nothing_else(repository):
    def broken(*_):
        raise RuntimeError("no")

    with towline.Checkpointer(repository, "run") as checkpointer:
        with pytest.warns(UserWarning, match="progress of run/step-1 is no longer reported.*no"):
            checkpointer.save(1, STATE, progress=broken).wait()
            checkpointer.close()
        with pytest.warns(UserWarning, match="no longer reported"):
            assert torch.equal(checkpointer.restore(progress=broken)["a"], STATE["a"])


def test_other_things_are_refused_at_once(repository):
    with towline.Checkpointer(repository, "run") as checkpointer:
        for save in (lambda: checkpointer.save(1, STATE, progress="yes"), lambda: checkpointer.restore(progress=5)):
            with pytest.raises(towline.UsageError, match="progress is True, or a function"):
                save()
    assert repository.ls() == []
