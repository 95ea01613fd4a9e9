"""Nodes that return with steps on their disk, after another process has continued the run: the old branch never counts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import towline
from towline import _backlog, _folders, spool

from .spooling import Far, in_spool


def save(checkpointer: towline.Checkpointer, branch: str, *steps: int, level: str = "local") -> None:
    for step in steps:
        checkpointer.save(step, {"branch": branch, "step": step}).wait(level)


def resumed(checkpointer: towline.Checkpointer) -> tuple[int | None, str]:
    state = checkpointer.restore()
    return checkpointer.step, state["branch"]


#: A node that saves steps 0 to 4, and then 5 to 9 while the store is away, and is killed.
NODE = """
    import os, signal, sys
    import towline
    from tests.python.test_returning import save
    from tests.python.spooling import Far

    repository = towline.open(sys.argv[1])
    repository._engine = Far(repository._engine)
    rank, world_size = int(sys.argv[3]), int(sys.argv[4])
    attempt = {} if world_size == 1 else {"attempt": "first"}
    checkpointer = towline.Checkpointer(repository, "run", rank, world_size, spool=sys.argv[2], **attempt)
    save(checkpointer, "old", *range(5), level="durable")
    repository._engine.away = True
    save(checkpointer, "old", *range(5, 10))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def node(repository, folder: Path, rank: int = 0, world_size: int = 1) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", textwrap.dedent(NODE), repository.url, str(folder), str(rank), str(world_size)]
    ended = subprocess.run(command, env=environment, timeout=120)
    assert ended.returncode == -signal.SIGKILL


def far(repository) -> towline.Repository:
    """The same repository, as from a node of its own."""
    opened = towline.open(repository.url)
    opened._engine = Far(opened._engine)
    return opened


@pytest.mark.parametrize("is_running", [False, True])
def test_a_killed_node_returns_after_another_one_went_on(repository, tmp_path, is_running):
    node(repository, tmp_path / "spool")
    assert len(in_spool(tmp_path / "spool")) == 10
    second = towline.Checkpointer(far(repository), "run", spool=tmp_path / "second")
    assert resumed(second) == (4, "old")
    save(second, "new", 5, 6, level="durable")
    if not is_running:
        second.close()
    with pytest.warns(UserWarning, match="dropped: another process has continued the run") as warned:
        first = towline.Checkpointer(far(repository), "run", spool=tmp_path / "spool")
    (told,) = (str(one.message) for one in warned if "dropped" in str(one.message))
    assert "run/step-5, run/step-6, run/step-7, run/step-8, run/step-9: " in told
    assert str(tmp_path / "spool") in told and "run/step-6 was saved by another process" in told
    # Nothing is lost: the files are there, for whoever wants the old branch.
    aside = sorted((tmp_path / "spool").rglob("dropped-0-step-*"))
    assert [path.name.split(".")[0] for path in aside] == [f"dropped-0-step-{step}" for step in range(5, 10)]
    assert all(str(path) in told for path in aside)
    repository.save(aside[-1], "old/step-9")
    assert resumed(towline.Checkpointer(repository, "old")) == (9, "old")
    assert first.steps() == list(range(7)) and resumed(first) == (6, "new") and in_spool(tmp_path / "spool") == []
    first.close()
    if is_running:
        save(second, "new", 7, 8, level="durable")
        second.close()
    assert resumed(towline.Checkpointer(repository, "run")) == (8 if is_running else 6, "new")


def test_another_node_whose_steps_are_expired_counts_too(repository, tmp_path):
    """Of the steps that it saved only the last is there, which no step of the spool replaces."""
    node(repository, tmp_path / "spool")
    with towline.Checkpointer(far(repository), "run", spool=tmp_path / "second", keep_last=1) as second:
        second.restore()
        save(second, "new", *range(5, 12), level="durable")
    with pytest.warns(UserWarning, match="dropped: another process has continued the run"):
        first = towline.Checkpointer(far(repository), "run", spool=tmp_path / "spool")
    assert first.steps() == [11]


@pytest.mark.parametrize("kill", [5, 7])
def test_a_node_that_is_killed_while_it_uploads_its_spool_goes_on(repository, tmp_path, kill):
    """Its own steps are no other process's: those that it removed from the spool, and one that it had no time to remove."""
    node(repository, tmp_path / "spool")
    script = """
        import os, signal, sys
        import towline
        from towline import spool
        from tests.python.spooling import Far

        remove = spool.remove
        def kill(kept):
            if kept.step == f"run/step-{sys.argv[3]}":
                os.kill(os.getpid(), signal.SIGKILL)
            remove(kept)

        repository = towline.open(sys.argv[1])
        repository._engine = Far(repository._engine)
        spool.remove = kill
        towline.Checkpointer(repository, "run", spool=sys.argv[2])
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", textwrap.dedent(script), repository.url, str(tmp_path / "spool"), str(kill)]
    assert subprocess.run(command, env=environment, timeout=120).returncode == -signal.SIGKILL
    assert towline.Checkpointer(repository, "run").steps() == list(range(kill + 1))
    first = towline.Checkpointer(far(repository), "run", spool=tmp_path / "spool")
    assert first.steps() == list(range(10)) and resumed(first) == (9, "old") and in_spool(tmp_path / "spool") == []


def test_a_running_process_drops_what_waits(repository, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_backlog, "_PAUSE", 0.05)
    first = towline.Checkpointer(far(repository), "run", spool=tmp_path / "spool")
    save(first, "old", 3, 4, level="durable")
    first.repository._engine.away = True
    save(first, "old", 5, 6, 7)
    handles = list(first._handles)
    with towline.Checkpointer(far(repository), "run", spool=tmp_path / "second") as second:
        second.restore()
        save(second, "new", 5, level="durable")
    first.repository._engine.away = False
    with pytest.raises(towline.SaveConflict, match="run/step-5 was saved by another process"):
        first.close()
    assert [type(handle.error) for handle in handles] == [handles[0].error.__class__] * 3
    assert caplog.text.count("run/step-5, run/step-6, run/step-7: only on this node's disk") == 1
    assert first.steps() == [3, 4, 5] and in_spool(tmp_path / "spool") == []
    assert resumed(towline.Checkpointer(repository, "run")) == (5, "new")


def test_a_running_process_uploads_all_if_nobody_went_on(repository, tmp_path, monkeypatch):
    """A save of which it knows no answer, and other steps of its own, are no reason to drop any."""
    monkeypatch.setattr(_backlog, "_PAUSE", 0.05)
    with towline.Checkpointer(far(repository), "run", spool=tmp_path / "spool") as first:
        save(first, "old", 1, level="durable")
        engine, begin = first.repository._engine, first.repository._engine.begin_save_files

        def answers_nothing(*said):
            assert begin(*said).wait(60)
            engine.away = True
            raise towline.Unreachable("no answer")

        engine.begin_save_files = answers_nothing
        save(first, "old", 2, 3, 4)
        engine.begin_save_files = begin
        engine.away = False
    assert first.steps() == [1, 2, 3, 4] and in_spool(tmp_path / "spool") == []


def test_ranks_that_return_drop_their_parts(repository, tmp_path, monkeypatch):
    """Each rank has a spool of its own; parts of a dropped step never complete it."""
    for rank in (0, 1):
        node(repository, tmp_path / f"spool-{rank}", rank, 2)
    ranks = [
        towline.Checkpointer(far(repository), "run", rank, 2, attempt="second", spool=tmp_path / f"other-{rank}")
        for rank in (0, 1)
    ]
    for rank in ranks:
        assert resumed(rank) == (4, "old")
    for step in (5, 6):
        for rank in ranks:
            rank.save(step, {"branch": "new", "step": step}).wait()
    for rank in ranks:
        rank.close()
    for rank in (0, 1):
        with pytest.warns(UserWarning, match="step-9: only on this node's disk, .* dropped"):
            back = towline.Checkpointer(
                far(repository), "run", rank, 2, attempt="third", spool=tmp_path / f"spool-{rank}"
            )
        assert back.steps() == list(range(7)) and resumed(back) == (6, "new")
        back.close()


def test_ranks_that_return_finish_their_steps_if_nobody_went_on(repository, tmp_path):
    """A step that the other rank completed meanwhile is of the same start."""
    for rank in (0, 1):
        node(repository, tmp_path / f"spool-{rank}", rank, 2)
    for rank in (1, 0):
        # Killed after two parts; then the rest.
        kept = spool.save
        done = []

        def few(repository, step, options, kept=kept, done=done):
            if len(done) == 2:
                raise towline.Unreachable("no answer")
            done.append(step.step)
            return kept(repository, step, options)

        spool.save = few
        try:
            with pytest.warns(UserWarning, match="not durable yet: no answer"):
                towline.Checkpointer(
                    far(repository), "run", rank, 2, attempt="second", spool=tmp_path / f"spool-{rank}"
                )
        finally:
            spool.save = kept
        assert done == ["run/step-5", "run/step-6"]
    assert towline.Checkpointer(repository, "run").steps() == list(range(7))
    for rank in (1, 0):
        towline.Checkpointer(far(repository), "run", rank, 2, attempt="third", spool=tmp_path / f"spool-{rank}")
    assert towline.Checkpointer(repository, "run").steps() == list(range(10))


def folders(parent: Path, branch: str, *steps: int) -> list[Path]:
    made = []
    for step in steps:
        folder = parent / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_bytes(f"{branch} {step}".encode() * 1000)
        made.append(folder)
    return made


def left_in_folder(repository, parent: Path) -> None:
    """Steps 5 to 9 of a training that was killed wait as links in its output folder."""
    saver = _folders.FolderSaver(far(repository), "run", "test", close_retry=0)
    saver.save_pending(str(parent))
    for step, folder in zip(range(10), folders(parent, "old", *range(10)), strict=True):
        if step == 5:
            saver.wait()
            saver.repository._engine.away = True
        saver.save(str(folder), step, None, str(parent))
    with pytest.raises(towline.SaveFailed, match="only on the disk"):
        saver.close()


def content(repository, folder: Path) -> bytes:
    repository.restore("run@latest", folder)
    return (folder / "weights").read_bytes()


def test_folders_of_a_branch_that_was_abandoned_are_dropped(repository, tmp_path):
    left_in_folder(repository, tmp_path / "out")
    second = _folders.FolderSaver(repository, "run", "test")
    assert second.save_pending(str(tmp_path / "second")) == []
    for step, folder in zip((5, 6), folders(tmp_path / "second", "new", 5, 6), strict=True):
        second.save(str(folder), step, None, str(tmp_path / "second"))
    second.close()
    first = _folders.FolderSaver(repository, "run", "test")
    with pytest.warns(
        UserWarning, match="run/step-5, .*run/step-9: only on .* dropped: .*run/step-6 was saved by another"
    ):
        assert first.save_pending(str(tmp_path / "out")) == [5, 6, 7, 8, 9]
    assert first.steps() == list(range(7)) and content(repository, tmp_path / "back").startswith(b"new 6")
    assert not list((tmp_path / "out" / "_towline").rglob("*.json"))


@pytest.mark.parametrize("at", ["_made", "remove"])
def test_folders_are_saved_on_by_the_next_process_if_nobody_went_on(repository, tmp_path, monkeypatch, at):
    """Killed right after a step became durable, before or after this was recorded."""
    left_in_folder(repository, tmp_path / "out")

    class Killed(BaseException):
        pass

    def kill(*said):
        if any("step-6" in str(one) for one in said):
            raise Killed
        return whole(*said)

    place = _folders.FolderSaver if at == "_made" else spool
    whole = getattr(place, at)
    with monkeypatch.context() as killing, pytest.raises(Killed):
        killing.setattr(place, at, kill)
        _folders.FolderSaver(repository, "run", "test").save_pending(str(tmp_path / "out"))
    assert towline.Checkpointer(repository, "run").steps() == list(range(7))
    first = _folders.FolderSaver(repository, "run", "test")
    assert first.save_pending(str(tmp_path / "out")) == []
    assert first.steps() == list(range(10)) and content(repository, tmp_path / "back").startswith(b"old 9")


def test_a_running_process_drops_its_folders(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(_backlog, "_PAUSE", 0.05)
    first = _folders.FolderSaver(far(repository), "run", "test")
    first.save_pending(str(tmp_path / "out"))
    for step, folder in zip((1, 2, 3), folders(tmp_path / "out", "old", 1, 2, 3), strict=True):
        if step == 2:
            first.wait()
            first.repository._engine.away = True
        first.save(str(folder), step, None, str(tmp_path / "out"))
    first.wait()
    with towline.Checkpointer(repository, "run") as second:
        save(second, "new", 2, level="durable")
    first.repository._engine.away = False
    with pytest.raises(towline.SaveConflict, match="run/step-2 was saved by another process"):
        first.close()
    assert first.steps() == [1, 2] and not list((tmp_path / "out" / "_towline").rglob("*.json"))


@pytest.mark.parametrize("links", [True, False])
def test_a_step_whose_version_could_not_be_read_is_replaced_by_its_own_training(
    repository, tmp_path, monkeypatch, links
):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    repository._engine = Forgetful(repository._engine)
    saver = _folders.FolderSaver(repository, "run", "test")
    saver.save_pending(str(tmp_path))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for text in ("first", "second"):
        (folder / "weights").write_text(text)
        saver.save(str(folder), 10, None, str(tmp_path))
        saver.wait()
        assert repository.read("run/step-10", "weights") == text.encode()
    # Another process's step is not taken for it.
    (folder / "weights").write_text("of another")
    repository.save(folder, "run/step-10")
    (folder / "weights").write_text("third")
    with pytest.raises(towline.SaveConflict, match="by another process"):
        saver.save(str(folder), 10, None, str(tmp_path))
        saver.wait()
    assert repository.read("run/step-10", "weights") == b"of another"


class Forgetful:
    """An engine whose store does not answer right after a save."""

    def __init__(self, engine):
        self._engine = engine

    def find(self, name, limit=None):
        if limit == _backlog.VERSION:
            raise towline.Unreachable("no answer")
        return self._engine.find(name, limit)

    def __getattr__(self, name):
        return getattr(self._engine, name)
