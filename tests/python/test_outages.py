"""Stores that refuse, hang or are slow: what waits on the node's disk meanwhile, what is told, and how the end retries."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import towline
from towline import _backlog, _folders, spool
from towline.handle import Handle

from .spooling import Silent, Slow, a_state, check, in_spool, linked, run_script
from .spooling import far as far


def test_every_step_is_local_while_the_store_is_away(far, tmp_path):
    kept = tmp_path / "spool"
    with towline.Checkpointer(far, "run", spool=kept) as checkpointer:
        checkpointer.save(1, a_state(1)).wait()
        far._engine.away = True
        handles = [checkpointer.save(step, a_state(step)) for step in (2, 3, 4)]
        for handle in handles:
            handle.wait("local", timeout=60)
            assert not handle.done() and "no answer" in str(handle.error)
        assert len(list(kept.rglob("0-step-*.json"))) == 3
        far._engine.away = False
        handles[2].wait("durable", timeout=60)
        assert all(handle.done() and handle.error is None for handle in handles)
        assert checkpointer.steps() == [1, 2, 3, 4]
        check(checkpointer, 3)
    assert list(kept.rglob("*.json")) == []
    # Steps that are only local at the end stay in the spool for the next process.
    checkpointer = towline.Checkpointer(far, "run", spool=kept, close_retry=0.1)
    far._engine.away = True
    for step in (5, 6):
        checkpointer.save(step, a_state(step)).wait("local", timeout=60)
    with pytest.raises(
        towline.SaveFailed, match=r"run/step-5, run/step-6: not durable yet, only on the disk of this node"
    ):
        checkpointer.close()
    far._engine.away = False
    with towline.Checkpointer(far, "run", spool=kept) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]
        check(checkpointer, 6)


def test_a_silent_store_makes_way_for_the_next_state(far, tmp_path, monkeypatch):
    monkeypatch.setattr(_backlog, "SILENCE", timedelta(seconds=1))
    silent = Silent()
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        monkeypatch.setattr(far._engine, "begin_save_files", lambda *_: silent, raising=False)
        first = checkpointer.save(1, a_state(1)).wait("local", timeout=60)
        time.sleep(1.5)
        assert not silent.cancelled, "nobody waits for its memory"
        second = checkpointer.save(2, a_state(2)).wait("local", timeout=60)
        assert silent.cancelled and "did not answer for" in str(first.error)
        # The spool is uploaded by another call.
        second.wait("durable", timeout=60)
        assert first.done() and checkpointer.steps() == [1, 2]
        check(checkpointer, 1)


def test_a_store_that_hangs_before_the_upload_makes_way_too(far, tmp_path, monkeypatch):
    limits = []

    def find(path, limit=None):
        limits.append(limit)
        raise towline.Unreachable("store does not answer")

    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        with monkeypatch.context() as hanging:
            hanging.setattr(far._engine, "find", find, raising=False)
            first = checkpointer.save(1, a_state(1)).wait("local", timeout=60)
            second = checkpointer.save(2, a_state(2)).wait("local", timeout=60)
        second.wait("durable", timeout=60)
        assert first.done() and checkpointer.steps() == [1, 2]
    assert limits and set(limits) == {_backlog.SILENCE}


def test_a_silent_store_blocks_no_save_but_one(far, tmp_path, monkeypatch):
    """The next try hangs, too, for as long as the store; steps go to the spool meanwhile."""
    monkeypatch.setattr(_backlog, "SILENCE", timedelta(seconds=1))
    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    tries = []

    def hang(*_):
        tries.append(Silent())
        return tries[-1]

    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        with monkeypatch.context() as silent:
            silent.setattr(far._engine, "begin_save_files", hang, raising=False)
            silent.setattr(far._engine, "begin_save", hang, raising=False)
            first = checkpointer.save(1, a_state(1, 1))
            checkpointer.save(2, a_state(2, 1)).wait("local", timeout=60)
            while len(tries) < 2:
                time.sleep(0.01)
            assert first.error is not None and not tries[1].cancelled
            for step in (3, 4, 5):
                checkpointer.save(step, a_state(step, 1)).wait("local", timeout=60)
            assert len(tries) == 2 and not tries[1].cancelled
        # The try fails at last, and the next one succeeds.
        tries[1].cancel()
    assert checkpointer.steps() == [1, 2, 3, 4, 5]


def test_a_silent_store_does_not_stop_folders(far, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_backlog, "SILENCE", timedelta(seconds=1))
    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    saver, silent = _folders.FolderSaver(far, "run", "test"), Silent()
    with monkeypatch.context() as hanging:
        hanging.setattr(far._engine, "begin_save", lambda *_: silent, raising=False)
        first, second = linked(tmp_path, saver, 1, 2)
        assert silent.cancelled and "did not answer for 1 s" in str(first.error)
        (third,) = linked(tmp_path, saver, 3)
    saver.close()
    assert saver.steps() == [1, 2, 3] and all(handle.error is None for handle in (first, second, third))


def test_folders_do_not_wait_for_a_request_without_an_end(far, tmp_path, monkeypatch):
    monkeypatch.setattr(_backlog, "SILENCE", timedelta(seconds=0.1))
    monkeypatch.setattr(_folders, "_GRACE", 0.1)
    saver, goes_on = _folders.FolderSaver(far, "run", "test"), threading.Event()
    begin = far._engine.begin_save

    def late(*said):
        assert goes_on.wait(60)
        return begin(*said)

    monkeypatch.setattr(far._engine, "begin_save", late, raising=False)
    handles = linked(tmp_path, saver, 1, 2, 3)
    assert not any(handle.done() for handle in handles)
    goes_on.set()
    saver.close()
    assert saver.steps() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["refuses", "silent", "silent while nobody waits"])
@pytest.mark.parametrize("folders", [False, True])
def test_an_outage_is_logged_once_and_its_end(far, tmp_path, monkeypatch, caplog, kind, folders):
    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    caplog.set_level("INFO", logger="towline")
    engine, hanging = far._engine, []

    def hang(*_):
        hanging.append(Silent())
        return hanging[-1]

    if folders:
        saver = _folders.FolderSaver(far, "run", "test")
        place, save = tmp_path / "_towline", lambda step: linked(tmp_path, saver, step)[0]
    else:
        saver = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
        place, save = tmp_path / "spool", lambda step: saver.save(step, a_state(step, 1)).wait("local")
    save(1).wait()
    assert "takes" not in caplog.text and "does not" not in caplog.text, "no outage yet"
    with monkeypatch.context() as outage:
        # Only now: a loaded machine may need longer for a save.
        outage.setattr(_backlog, "SILENCE", timedelta(seconds=0.5))
        if kind == "refuses":
            outage.setattr(engine, "away", True)
        else:
            for name in ("begin_save", "begin_save_files"):
                outage.setattr(engine, name, hang, raising=False)
        for step in (2,) if "nobody" in kind else (2, 3, 4):
            save(step)
        while "does not take run/step-2" not in caplog.text:
            time.sleep(0.01)
        if "nobody" in kind:
            save(3), save(4)
    for task in hanging:
        task.cancel()
    saver.close()
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "take" in one.getMessage()]
    (said,) = warned
    assert far.url in said and f"disk of this node ({os.uname().nodename}), in {place}" in said
    (end,) = (one.getMessage() for one in caplog.records if "takes steps again" in one.getMessage())
    assert end.endswith("takes steps again: durable now: run/step-2, run/step-3, run/step-4")
    assert saver.steps() == [1, 2, 3, 4]


def test_an_end_of_an_outage_names_no_steps_where_none_became_durable(caplog):
    backlog = _backlog.Backlog(SimpleNamespace(), "s3://there")
    backlog._late = []
    with caplog.at_level("INFO", "towline"):
        backlog._tell_end()
    assert [one.getMessage() for one in caplog.records] == ["s3://there takes steps again"]


def test_closing_retries_until_the_store_answers(far, tmp_path, monkeypatch):
    """More often than before: the pause between tries has grown to an hour."""
    with towline.Checkpointer(far, "run", spool=tmp_path, close_retry=600) as checkpointer:
        far._engine.away = True
        handle = checkpointer.save(1, a_state(1)).wait("local")
        while handle.error is None:
            time.sleep(0.01)
        checkpointer._backlog._pause = 3600.0
        tries = []

        def begin_save(*said):
            tries.append(said)
            if len(tries) < 3:
                raise towline.Unreachable("no answer")
            return far._engine._engine.begin_save(*said)

        monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
        far._engine.begin_save = begin_save
        far._engine.away = False
    assert len(tries) == 3 and handle.done() and handle.error is None and in_spool(tmp_path) == []


def test_saves_that_come_often_do_not_put_off_the_next_try(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_backlog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(_backlog.Backlog, "_start", lambda self: None)
    calls = _backlog.Calls(lambda *said: None, lambda *said: None, spool.remove, lambda waiting: None, lambda: None)
    backlog = _backlog.Backlog(calls, "s3://bucket")
    kept = SimpleNamespace(run=SimpleNamespace(shown="spool/run"))
    pauses = []
    for step in range(4):
        backlog.add(_backlog.Waiting(Handle(f"run/step-{step}", step), kept), towline.Unreachable("no answer"))
        pauses.append(backlog.pause())
        now[0] += _backlog._PAUSE / 2
    assert pauses == [_backlog._PAUSE, _backlog._PAUSE / 2, 0, 0]


def test_what_stays_on_this_node_is_an_error_that_says_how_to_upload_it(far, tmp_path):
    script = """
        import sys
        import towline
        from tests.python.spooling import Far

        repository = towline.open(sys.argv[1])
        repository._engine = Far(repository._engine)
        with towline.Checkpointer(repository, "run", spool=sys.argv[2], close_retry=0) as checkpointer:
            repository._engine.away = True
            checkpointer.save(1, {"seed": 1}).wait("local")
            checkpointer.save(2, {"seed": 2})
    """
    ended = run_script(script, far.url, str(tmp_path), stderr=subprocess.PIPE)
    assert ended.returncode == 1 and len(in_spool(tmp_path)) == 4
    told = ended.stderr.splitlines()[-1]
    assert (
        f"run/step-1, run/step-2: not durable yet, only on the disk of this node ({os.uname().nodename}), in {tmp_path}"
        in told
    )
    assert "did not take all steps: no answer" in told
    call = re.search("`(towline.*)`", told)[1]
    assert call == f"towline.Checkpointer({far.url!r}, 'run', spool={str(tmp_path)!r}).close()"
    # Runs the call that the error tells, with the repository of this test.
    eval(call.replace(repr(far.url), "far"), {"towline": towline, "far": far})
    assert in_spool(tmp_path) == []
    with towline.Checkpointer(far, "run") as later:
        assert [later.restore(step)["seed"] for step in later.steps()] == [1, 2]


@pytest.mark.parametrize("call", ["begin_save_files", "begin_save"])
def test_a_silent_store_does_not_stop_the_end(far, tmp_path, monkeypatch, call):
    """While no other save waits; the first upload, or one of the backlog."""
    monkeypatch.setattr(_backlog, "SLOW", timedelta(seconds=0.5))
    silent = Silent()
    checkpointer = towline.Checkpointer(far, "run", spool=tmp_path, close_retry=1)
    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    if call == "begin_save":
        far._engine.away = True
        handle = checkpointer.save(1, a_state(1)).wait("local")
        while handle.error is None:
            time.sleep(0.01)
    setattr(far._engine, call, lambda *_: silent)
    far._engine.away = False
    if call == "begin_save_files":
        checkpointer.save(1, a_state(1)).wait("local")
    with pytest.raises(towline.SaveFailed, match="did not answer for 1 s"):
        checkpointer.close()
    assert silent.cancelled and len(in_spool(tmp_path)) == 2


@pytest.mark.parametrize("call", ["begin_save_files", "begin_save"])
def test_a_slow_store_takes_the_step_although_nobody_retries(far, tmp_path, monkeypatch, call):
    whole = getattr(far._engine, call)
    monkeypatch.setattr(far._engine, call, lambda *args: Slow(whole(*args)), raising=False)
    # A loaded machine may move nothing for as long as a close waits.
    monkeypatch.setattr(_backlog, "SLOW", timedelta(minutes=2))
    if call == "begin_save_files":
        with towline.Checkpointer(far, "run", spool=tmp_path / "spool", close_retry=0) as checkpointer:
            checkpointer.save(1, a_state(1))
    else:
        saver = _folders.FolderSaver(far, "run", "test", close_retry=0)
        linked(tmp_path, saver, 1)
        saver.close()
    assert [entry.name for entry in far.ls()] == ["run/step-1"]


@pytest.mark.parametrize("first", ["begin_save_files", "begin_save", "save"])
def test_a_step_is_not_lost_to_writers_that_are_faster(far, tmp_path, monkeypatch, first):
    """Nobody else saved it: the commit lost each race for a while. At the first upload, at one of the backlog, and of a later
    process."""
    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    engine, refused = far._engine, []

    def outrun(name):
        whole = getattr(engine, name)

        def once(*args, **more):
            if name not in refused:
                refused.append(name)
                raise towline.Busy("others commit faster than this writer can (try again when fewer write)")
            return whole(*args, **more)

        setattr(engine, name, once)

    outrun("begin_save_files")
    if first == "begin_save":
        outrun("begin_save")
    if first == "save":
        engine.away = True
        with (
            pytest.raises(towline.SaveFailed, match="only on the disk"),
            towline.Checkpointer(far, "run", spool=tmp_path, close_retry=0) as ended,
        ):
            ended.save(1, a_state(1))
        engine.away = False
        outrun("save")
        with pytest.warns(UserWarning, match="not durable yet: others commit faster"):
            towline.Checkpointer(far, "run", spool=tmp_path).close()
        assert len(in_spool(tmp_path)) == 2
        with towline.Checkpointer(far, "run", spool=tmp_path) as later:
            check(later, 1)
    else:
        with towline.Checkpointer(far, "run", spool=tmp_path) as checkpointer:
            assert checkpointer.save(1, a_state(1)).result().name == "run/step-1"
            check(checkpointer, 1)
    assert first in refused and in_spool(tmp_path) == []


@pytest.mark.parametrize("wrong", [-1, float("nan"), "60s", None])
def test_the_time_of_retries_is_checked(far, wrong):
    with pytest.raises(towline.UsageError, match="close_retry is a number of seconds from 0 on"):
        towline.Checkpointer(far, "run", close_retry=wrong)


def test_a_lookup_has_a_limit(repository, tmp_path):
    (tmp_path / "tree").mkdir()
    repository.save(tmp_path / "tree", "tree")
    # A log entry that cannot be opened while its lease lasts.
    last = max((Path(repository.url) / "log").iterdir())
    leased = last.with_name(f"{int(last.name) + 1:0{len(last.name)}}")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with open(leased, "w") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(towline.Unreachable, match="store does not answer"):
            repository._engine.find("run/step-1", timedelta(milliseconds=200))
        leased.unlink()
    signal.signal(signal.SIGIO, before)
    assert repository._engine.find("run/step-1", timedelta(minutes=1)) is None
