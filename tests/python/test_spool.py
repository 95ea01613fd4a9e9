"""What waits on a node's disk, and disks that are full: what is told, and what becomes of it later."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import towline
from towline import _backlog, _folders, spool
from towline.handle import Handle

MIB = 1 << 20


def a_state(seed: int, mib: int = 16) -> dict:
    """As large as it is stored."""
    noise = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return {"noise": noise, "seed": seed}


def check(checkpointer: towline.Checkpointer, seed: int, mib: int = 16) -> None:
    back = checkpointer.restore(seed)
    assert back["seed"] == seed and torch.equal(back["noise"], a_state(seed, mib)["noise"])


class Far:
    """A repository's engine as if its store were not on this node, and sometimes away."""

    def __init__(self, engine):
        self._engine, self.away = engine, False

    def is_local(self):
        return False

    def __getattr__(self, name):
        if self.away and name in ("begin_save", "begin_save_files", "expire", "find", "names", "save"):
            raise towline.Unreachable("no answer")
        return getattr(self._engine, name)


@pytest.fixture
def far(repository) -> towline.Repository:
    repository._engine = Far(repository._engine)
    return repository


def run_script(text: str, *args: str, **more) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", textwrap.dedent(text), *args]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, **more)


def goes_on_after(checkpointer: towline.Checkpointer, make_room, kind: type[Exception]) -> None:
    """A save fails for a full disk, is told, and the training goes on."""
    handle = checkpointer.save(2, a_state(2))
    while not handle.done():
        time.sleep(0.01)
    assert isinstance(handle.error, kind), repr(handle.error)
    told = "run/step-2 was not saved: .*; run/step-3 was not saved either: call save again"
    with pytest.raises(towline.SaveFailed, match=told) as caught:
        checkpointer.save(3, a_state(3))
    assert caught.value.__cause__ is handle.error
    assert str(caught.value).count("(os error ") == 1, str(caught.value)
    assert checkpointer.steps() == [1]
    make_room()
    checkpointer.save(3, a_state(3)).wait()
    # The same step again, too.
    checkpointer.save(2, a_state(2)).wait()
    assert checkpointer.steps() == [1, 2, 3]
    for seed in (1, 2, 3):
        check(checkpointer, seed)
    verified = checkpointer.repository.verify(data=True)
    assert verified["damaged"] == []


def limited(url: str) -> None:
    """Run in a process of its own, whose files may only be so long."""
    import resource

    with towline.Checkpointer(url, "run") as checkpointer:
        checkpointer.save(1, a_state(1)).wait()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        goes_on_after(checkpointer, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)), towline.Error)


def test_files_that_may_not_grow(repository):
    script = """
        import sys
        from tests.python.test_spool import limited
        limited(sys.argv[1])
        print("all is well")
    """
    assert run_script(script, repository.url).stdout == "all is well\n"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 96 MiB."""
    folder, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, b"size=96m") != 0:
        pytest.skip(f"no disk of its own here: {os.strerror(ctypes.get_errno())}")
    yield folder
    # Lazily: something may still be open.
    libc.umount2(str(folder).encode(), 2)


def fill(folder: Path, leave: int) -> Path:
    ballast = folder / "ballast"
    free = os.statvfs(folder)
    with open(ballast, "wb") as file:
        for _ in range((free.f_bavail * free.f_frsize - leave) // MIB):
            file.write(bytes(MIB))
    return ballast


def test_a_full_disk_under_the_repository(small_disk):
    repository = towline.open(small_disk / "repository", memory="64M")
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, a_state(1)).wait()
        ballast = fill(small_disk, 4 * MIB)
        goes_on_after(checkpointer, ballast.unlink, towline.Exhausted)


def test_a_full_disk_under_the_spool_is_no_end(small_disk, far):
    fill(small_disk, 4 * MIB)
    with towline.Checkpointer(far, "run", spool=small_disk) as checkpointer:
        with pytest.warns(
            UserWarning, match=rf"run/step-1 cannot be spooled to this node's disk.*No space.*{small_disk}"
        ):
            checkpointer.save(1, a_state(1)).wait()
        check(checkpointer, 1)
        checkpointer.save(2, a_state(2, mib=1)).wait("local").wait()
        far._engine.away = True
        # The warning comes from the saver's thread, at any moment from the save on.
        with (
            pytest.raises(towline.SaveFailed, match="no answer"),
            pytest.warns(UserWarning, match="step-3 cannot be spooled"),
        ):
            checkpointer.save(3, a_state(3)).wait("local")
        far._engine.away = False
        assert checkpointer.steps() == [1, 2]
        # Who waited was told, and loses no other step for it.
        checkpointer.save(4, a_state(4, mib=1)).wait()
        assert checkpointer.steps() == [1, 2, 4]
    assert [path for path in small_disk.rglob("*") if path.is_file() and path.name != "ballast"] == []


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


class Silent:
    """A save to a store that takes nothing."""

    def __init__(self):
        self.cancelled = False

    def wait(self, timeout=None):
        time.sleep(min(timeout or 0.1, 0.1))
        return self.cancelled

    def progress(self):
        return ("uploading", 7, 8, 9)

    def cancel(self):
        self.cancelled = True

    def result(self):
        raise towline.Unreachable("no answer")


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


def linked(parent: Path, saver: _folders.FolderSaver, *steps: int) -> list[Handle]:
    handles = []
    for step in steps:
        folder = parent / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes([step]) * 1000)
        handles.append(saver.save(str(folder), step, None, str(parent)))
    return handles


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
    assert end.endswith("durable are now run/step-2, run/step-3, run/step-4") and saver.steps() == [1, 2, 3, 4]


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
        from tests.python.test_spool import Far

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


class Slow:
    """An upload that a busy machine delays: it moves nothing for a while, then ends."""

    def __init__(self, upload):
        self.upload, self.began = upload, time.monotonic()

    def wait(self, timeout=None):
        time.sleep(min(timeout or 2, 2))
        return time.monotonic() - self.began > 2 and self.upload.wait(timeout)

    def progress(self):
        return ("uploading", 0, 0, 0)

    def __getattr__(self, name):
        return getattr(self.upload, name)


@pytest.mark.parametrize("call", ["begin_save_files", "begin_save"])
def test_a_slow_store_takes_the_step_although_nobody_retries(far, tmp_path, monkeypatch, call):
    whole = getattr(far._engine, call)
    monkeypatch.setattr(far._engine, call, lambda *args: Slow(whole(*args)), raising=False)
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
    # A log entry that never ends.
    last = max((Path(repository.url) / "log").iterdir())
    endless = last.with_name(f"{int(last.name) + 1:0{len(last.name)}}")
    os.mkfifo(endless)
    with pytest.raises(towline.Unreachable, match="store does not answer"):
        repository._engine.find("run/step-1", timedelta(milliseconds=200))
    endless.unlink()
    assert repository._engine.find("run/step-1", timedelta(minutes=1)) is None


@pytest.mark.parametrize("at", ["_sync", "_write_record", "os.rename"])
def test_killed_before_a_state_is_whole_on_the_disk(far, tmp_path, at):
    """What was on its way to the disk is forgotten, and what was there before is kept."""
    script = """
        import os, signal, sys
        import towline
        from towline import spool
        from tests.python.test_spool import Far, a_state

        repository = towline.open(sys.argv[1])
        repository._engine = Far(repository._engine)
        repository._engine.away = True
        checkpointer = towline.Checkpointer(repository, "run", spool=sys.argv[2])
        checkpointer.save(1, a_state(1)).wait("local")

        def kill(*said, **more):
            os.kill(os.getpid(), signal.SIGKILL)

        module, _, name = ("towline.spool." + sys.argv[3]).rpartition(".")
        setattr(os if module.endswith("os") else spool, name, kill)
        print("local", flush=True)
        # As the saver does it, which tries again and again to save the first.
        spool.put(checkpointer._spool, "run/step-2", {"metrics": {}}, [("state.json", [b"half of it"])])
    """
    ended = run_script(script, far.url, str(tmp_path / "spool"), at)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "local\n")
    folders = [path.name for path in (tmp_path / "spool").rglob("0-step-*") if path.is_dir()]
    assert len(folders) == 2, "the kill came too early or too late"
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.steps() == [1]
        check(checkpointer, 1)
    assert list((tmp_path / "spool").rglob("0-step-*")) == []


def test_killed_before_a_linked_folder_is_whole(repository, tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "weights").write_bytes(b"1" * 1000)
    script = """
        import os, signal, sys
        from towline import _private, spool
        spool._write_record = lambda *said: os.kill(os.getpid(), signal.SIGKILL)
        source = os.open(sys.argv[2] + "/checkpoint-1", os.O_RDONLY)
        own = _private.given(sys.argv[2]).inside("_towline", own=True)
        spool.link(own, "run/step-1", {"metrics": {}}, source)
    """
    assert run_script(script, repository.url, str(tmp_path)).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "_towline").rglob("weights"))) == 1
    saver = _folders.FolderSaver(repository, "run", "test")
    saver.save_pending(str(tmp_path))
    assert repository.ls() == [] and list((tmp_path / "_towline").rglob("weights")) == []
    assert (tmp_path / "checkpoint-1" / "weights").read_bytes() == b"1" * 1000


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(repository, tmp_path):
    """S9: "A link that they put in the place of a checkpoint [...] is not followed: nothing outside the folder is saved"."""
    (tmp_path / "outside" / "keys").mkdir(parents=True)
    (tmp_path / "outside" / "keys" / "secret").write_bytes(b"secret")
    out = tmp_path / "out"
    out.mkdir()
    saver = _folders.FolderSaver(repository, "run", "test")
    (out / "checkpoint-1").symlink_to(tmp_path / "outside")
    with pytest.raises(towline.Denied, match="planted"):
        saver.save(str(out / "checkpoint-1"), 1, None, str(out))
    # Within a checkpoint, links stay links.
    (out / "checkpoint-2" / "sub").mkdir(parents=True)
    (out / "checkpoint-2" / "sub" / "weights").write_bytes(b"2" * 1000)
    (out / "checkpoint-2" / "to-folder").symlink_to(tmp_path / "outside" / "keys")
    (out / "checkpoint-2" / "to-file").symlink_to(tmp_path / "outside" / "keys" / "secret")
    saver.save(str(out / "checkpoint-2"), 2, None, str(out))
    saver.close()
    assert [one.name for one in repository.ls()] == ["run/step-2"]
    repository.restore("run/step-2", tmp_path / "back")
    assert (tmp_path / "back" / "to-folder").is_symlink() and (tmp_path / "back" / "to-file").is_symlink()
    assert (tmp_path / "back" / "sub" / "weights").read_bytes() == b"2" * 1000


def test_a_link_in_the_place_of_a_spool_is_not_followed(far, tmp_path):
    """S9: "nothing outside of the folder is saved, changed or deleted"."""
    other = tmp_path / "shared"
    other.mkdir(mode=0o755)
    (tmp_path / "spool").mkdir()
    place = Path(spool_of(far, tmp_path / "spool"))
    place.symlink_to(other)
    with pytest.warns(UserWarning, match=f"{re.escape(str(place))} is a link"):
        checkpointer = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    with pytest.warns(UserWarning, match="the save continues without it"):
        checkpointer.save(1, a_state(1, 1)).wait()
    checkpointer.close()
    assert list(other.iterdir()) == [] and other.stat().st_mode & 0o777 == 0o755


def leave(far: towline.Repository, folder: Path, value: bytes) -> str:
    """What a killed process left."""
    document = json.dumps({"towline": 1, "state": value.decode()}).encode()
    header = towline._towline.lay_out([])[0]
    files = [("state.safetensors", [header]), ("state.json", [document])]
    return str(spool.put(spool_of(far, folder), "run/step-1", {"metrics": {}}, files))


def spool_of(far: towline.Repository, folder: Path) -> str:
    return str(folder / far._engine.spool_name())


def test_what_was_left_does_not_replace_what_was_saved_since(far, tmp_path):
    left, earlier = leave(far, tmp_path / "spool", b"of the past"), time.time() - 5
    os.utime(left + ".json", (earlier, earlier))
    # Another node went on meanwhile.
    with towline.Checkpointer(far, "run", spool=tmp_path / "elsewhere") as checkpointer:
        checkpointer.save(1, "of now").wait()
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.restore(1) == "of now"
    assert list((tmp_path / "spool").rglob("0-step-*")) == []
    # What was left later counts.
    left = leave(far, tmp_path / "spool", b"later")
    later = time.time() + 5
    os.utime(left + ".json", (later, later))
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.restore(1) == "later"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"name": "models/base", "options": {}}, "is of 'models/base', expected 'run/step-1'"),
        ({"name": "run/step-1", "options": {"metrics": 5}}, "options of another version"),
        ({"name": "run/step-1"}, "cannot be read"),
        ([], "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_a_record_counts_only_for_its_step(far, tmp_path, record, told):
    left = leave(far, tmp_path / "spool", b"planted")
    Path(left + ".json").write_text(record if record == "{" else json.dumps(record))
    with pytest.warns(UserWarning, match=told), towline.Checkpointer(far, "run", spool=tmp_path / "spool") as later:
        assert later.steps() == []
    assert far.ls() == [] and os.path.exists(left), "nothing is saved, and nothing is lost"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act for another user")
def test_a_spool_that_another_user_made_is_not_used(far, tmp_path):
    left = leave(far, tmp_path / "spool", b"planted")
    os.chown(Path(left).parents[1], 4711, 4711)
    with pytest.warns(UserWarning, match="belongs to user 4711"):
        later = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    assert far.ls() == []
    with pytest.warns(UserWarning, match="the save continues without it"):
        later.save(2, {"a": 1}).wait()
    assert later.steps() == [2]
    later.close()


def test_what_is_local_survives_the_loss_of_the_cache(far, tmp_path):
    """The cache may be removed at any time; steps that wait are no cache."""
    with towline.Checkpointer(far, "run", close_retry=0) as checkpointer:
        far._engine.away = True
        checkpointer.save(1, a_state(1, mib=1)).wait("local")
        spooled = list((tmp_path / "state" / "towline" / "spool").rglob("0-step-1.*.json"))
        assert len(spooled) == 1 and spooled[0].parents[1].stat().st_mode & 0o077 == 0
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with pytest.raises(towline.SaveFailed, match="only on the disk of this node"):
            checkpointer.close()
    far._engine.away = False
    with towline.Checkpointer(far, "run") as later:
        assert later.steps() == [1]


def in_spool(spool: Path) -> list[Path]:
    # Steps that were set aside have other names.
    return list(spool.rglob("0-step-*"))


@pytest.mark.parametrize("away", [False, True])
def test_a_step_that_another_process_saved_is_refused_and_leaves_the_spool(far, tmp_path, monkeypatch, away):
    monkeypatch.setattr(_backlog, "_PAUSE", 0.05)
    late = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    with towline.Checkpointer(far.url, "run") as first:
        far._engine.away = away
        if away:
            # It is spooled before the other process saves the step, and uploaded after it.
            late.save(1, a_state(10)).wait("local")
        first.save(1, a_state(1)).wait()
        far._engine.away = False
    handle = late._handles[-1] if away else late.save(1, a_state(10))
    while not handle.done():
        time.sleep(0.01)
    with pytest.raises(towline.SaveConflict, match="saved by another process"):
        late.close()
    assert isinstance(handle.error, towline.Conflict) and in_spool(tmp_path / "spool") == []
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as after:
        check(after, 1)


def test_the_next_process_replaces_no_step_that_another_one_saved_before_it_was_spooled(far, tmp_path):
    late = towline.Checkpointer(far, "run", spool=tmp_path / "spool", close_retry=0)
    with towline.Checkpointer(far.url, "run") as first:
        first.save(1, a_state(1)).wait()
    far._engine.away = True
    late.save(1, a_state(10)).wait("local")
    with pytest.raises(towline.SaveFailed, match="only on the disk of this node"):
        late.close()
    assert in_spool(tmp_path / "spool") != []
    far._engine.away = False
    with (
        pytest.warns(UserWarning, match="run/step-1: only on .* dropped: another process has continued the run"),
        towline.Checkpointer(far, "run", spool=tmp_path / "spool") as after,
    ):
        check(after, 1)
    assert in_spool(tmp_path / "spool") == []
