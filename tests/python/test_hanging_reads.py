"""A store that stops answering right after a step became durable: reads that follow the commit hold up no save and no end."""

from __future__ import annotations

import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import towline
from towline import _backlog, _folders

from . import servers
from .spooling import Far, Silent, a_state, linked
from .waiting import until

#: Calls that hang, until the limit that some have.
_READS = ("names", "expire", "ls", "cat", "runs")


class Hanging(Far):
    """As Far; while `hangs` is set, reads do not end, and uploads take nothing."""

    def __init__(self, engine):
        super().__init__(engine)
        self.hangs, self.goes_on, self.reads = threading.Event(), threading.Event(), []
        #: Whether reads with a limit fail, too: they do not if the store stops answering right after them.
        self.finds_hang = True

    def __getattr__(self, name):
        plain = super().__getattr__(name)
        if name in _READS:
            return lambda *said, **more: self._read(name, plain, *said, **more)
        if self.hangs.is_set() and not self.goes_on.is_set():
            if name == "find" and self.finds_hang:
                return self._find
            if name in ("begin_save", "begin_save_files"):
                return lambda *_: Silent()
        return plain

    def _read(self, name, plain, *said, **more):
        if self.hangs.is_set():
            self.reads.append(name)
            limit = next((one for one in (*said, *more.values()) if isinstance(one, timedelta)), None)
            if not self.goes_on.wait(300 if limit is None else limit.total_seconds()):
                raise towline.Unreachable("store does not answer")
        return plain(*said, **more)

    def _find(self, path, limit=None):
        assert limit is not None, f"{path} is looked for without a limit"
        raise towline.Unreachable("store does not answer")


class Loop:
    def __init__(self, repository, folder: Path, **rules):
        self.saver = towline.Checkpointer(repository, "run", spool=folder, close_retry=0.1, **rules)

    def save(self, step: int) -> towline.Handle:
        return self.saver.save(step, a_state(step, 1))


class Folders:
    def __init__(self, repository, folder: Path, **rules):
        self.saver, self.folder = _folders.FolderSaver(repository, "run", "test", close_retry=0.1, **rules), folder
        folder.mkdir()
        self.saver.save_pending(str(folder))

    def save(self, step: int) -> towline.Handle:
        return linked(self.folder, self.saver, step)[0]


@pytest.fixture
def hanging(repository, monkeypatch):
    monkeypatch.setattr(_backlog, "SILENCE", timedelta(seconds=0.5))
    monkeypatch.setattr(_backlog, "SLOW", timedelta(seconds=0.5))
    monkeypatch.setattr(_folders, "_GRACE", 0.1)
    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    repository._engine = Hanging(repository._engine)
    yield repository
    # The threads of abandoned reads end.
    repository._engine.goes_on.set()


@pytest.fixture
def line(monkeypatch):
    """A line to a real store; `open` makes a repository there."""
    endpoint, url = servers.s3(monkeypatch)
    line = servers.Line(endpoint)
    line.open = lambda: towline.open(url, endpoint=line.endpoint, create=True)
    yield line
    line.mend()


def in_time(work) -> None:
    """Runs `work` in a thread of its own; fails if it has not ended after a minute."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for the store"
    if raised:
        raise raised[0]


@pytest.mark.parametrize("kind", [Loop, Folders])
@pytest.mark.parametrize("rules", [{}, {"keep_last": 2}])
def test_reads_after_a_commit_hold_up_no_save_and_no_end(hanging, tmp_path, caplog, kind, rules):
    engine = hanging._engine
    training = kind(hanging, tmp_path / "folder", **rules)
    training.save(1).wait()
    until("the reads after the first save", lambda: training.saver._afterwards.wait(1), 60)
    engine.hangs.set()
    training.saver._afterwards.request()
    until("a read that hangs", lambda: engine.reads, 60)
    handles = []
    in_time(lambda: handles.extend(training.save(step) for step in (2, 3, 4)))
    for handle in handles:
        handle.wait("local", timeout=60)
    until("the log", lambda: "does not take run/step-2" in caplog.text, 60)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(towline.SaveFailed, match="run/step-2, run/step-3, run/step-4: not durable yet"):
            in_time(training.saver.close)
    expired = [str(one.message) for one in warned if "were not expired" in str(one.message)]
    assert len(expired) == len(rules) and all("does not answer" in one for one in expired)
    engine.hangs.clear()
    engine.goes_on.set()
    later = kind(hanging, tmp_path / "folder", **rules) if kind is Loop else None
    saver = later.saver if later else training.saver
    if not later:
        saver.save_pending(str(tmp_path / "folder"))
    assert saver.steps()[-1] == 4
    saver.close()


@pytest.mark.parametrize("kind", [Loop, Folders])
def test_a_commit_whose_reads_hang_is_durable(hanging, tmp_path, monkeypatch, kind):
    """The store stops answering while the step is committed: its answer is the last one."""
    engine, limits = hanging._engine, []
    training = kind(hanging, tmp_path / "folder", keep_last=2)

    def find(path, limit=None):
        if engine.hangs.is_set():
            limits.append(limit)
            raise towline.Unreachable("store does not answer")
        return engine._engine.find(path, limit)

    with monkeypatch.context() as store:
        for name in ("begin_save", "begin_save_files"):
            begin = getattr(engine, name)

            def last(*said, begin=begin):
                begun = begin(*said)
                begun.wait()
                engine.hangs.set()
                return begun

            store.setattr(engine, name, last, raising=False)
        store.setattr(engine, "find", find, raising=False)
        training.save(1).wait(timeout=60)
        # Right after the commit for a short time, as the next state waits.
        assert limits[:1] == [_backlog.VERSION]
    engine.goes_on.set()
    training.saver.close()
    assert [one.name for one in hanging.ls()] == ["run/step-1"]


@pytest.mark.parametrize("kind", [Loop, Folders])
def test_an_end_waits_for_no_listing(hanging, tmp_path, kind):
    """The store answers a read with a limit, and then stops."""
    engine = hanging._engine
    training = kind(hanging, tmp_path / "folder")
    engine.away = True
    handle = training.save(1)
    until("a failure", lambda: handle.error is not None, 60)
    engine.hangs.set()
    engine.finds_hang, engine.away = False, False
    until("a listing that hangs", lambda: "names" in engine.reads, 60)
    with pytest.raises(towline.SaveFailed, match="run/step-1: not durable yet"):
        in_time(training.saver.close)


def test_calls_within_a_limit(line, tmp_path):
    repository = line.open()
    (tmp_path / "state.json").write_text("{}")
    repository.save(tmp_path / "state.json", "run/step-1")
    engine, limit = repository._engine, timedelta(seconds=1)
    line.hang()
    for call in (
        lambda: engine.find("run/step-1", limit),
        lambda: engine.names("run", limit),
        lambda: engine.show("run/step-1", limit),
        lambda: engine.cat("run/step-1", "state.json", limit=limit),
        lambda: engine.expire("run", 1, limit=limit),
        lambda: engine.remove("run/step-1", limit=limit),
    ):
        with pytest.raises(towline.Unreachable, match=r"store does not answer.*nothing for 1 s"):
            in_time(call)
    line.mend()
    assert [one.name for one in repository.ls()] == ["run/step-1"]


@pytest.mark.parametrize("outage", ["cut", "hang"])
def test_a_lightning_training_goes_on_without_its_store(line, tmp_path, monkeypatch, outage):
    pytest.importorskip("lightning")
    from towline.lightning import TowlineCheckpointIO

    monkeypatch.setattr(_backlog, "VERSION", timedelta(seconds=1))
    monkeypatch.setattr(_backlog, "SILENCE", timedelta(seconds=1))
    repository, folder = line.open(), tmp_path / "checkpoints"
    checkpoint_io = TowlineCheckpointIO(repository, "lt")

    def save(step: int) -> None:
        state = {"pytorch-lightning_version": "2.5", "global_step": step, "state_dict": a_state(step, 1)}
        checkpoint_io.save_checkpoint(state, folder / f"step={step}.ckpt")

    save(1)
    until("the first checkpoint", lambda: (folder / "step=1.ckpt").exists(), 60)
    getattr(line, outage)()
    in_time(lambda: [save(step) for step in (2, 3)])
    line.mend()
    checkpoint_io.teardown()
    assert [one.name for one in repository.ls()] == ["lt/step-1", "lt/step-2", "lt/step-3"]
    assert sorted(os.listdir(folder)) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
