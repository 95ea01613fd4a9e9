"""Trainings that go back to an earlier step: the steps that they give up are never resumed, whenever the process is killed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import towline
from towline import spool
from towline.retention import GivenUp

from .spooling import Far, in_spool


def save(checkpointer: towline.Checkpointer, branch: str, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, {"branch": branch}, metrics={"loss": 1 / step}).wait("local")


def resumed(checkpointer: towline.Checkpointer) -> tuple[int | None, str]:
    """Step and branch that a restart goes on with."""
    state = checkpointer.restore()
    return checkpointer.step, state["branch"]


@pytest.fixture(params=["folder", "far"])
def either(request, repository) -> towline.Repository:
    """A repository in a folder of this node, and one whose steps go through the spool."""
    if request.param == "far":
        repository._engine = Far(repository._engine)
    return repository


RULES = [{}, {"keep_last": 2}, {"keep_every": 5}, {"keep_min": "loss"}, {"keep_last": 20}]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_restart_resumes_the_new_branch(either, tmp_path, caplog, rules):
    with towline.Checkpointer(either, "run", spool=tmp_path) as first:
        save(first, "old", *range(1, 11))
    with towline.Checkpointer(either, "run/inner", spool=tmp_path) as inner:
        save(inner, "inner", 7)
    with towline.Checkpointer(either, "run", spool=tmp_path, **rules) as back:
        back.restore(3)
        assert back.steps() == list(range(1, 11)), "reading alone gives up nothing"
        back.save(4, {"branch": "new"}, metrics={"loss": 1.0}).wait()
        # At once: the process may be killed now.
        assert max(back.steps()) == 4 and resumed(towline.Checkpointer(either, "run", spool=tmp_path)) == (4, "new")
        assert caplog.text.count("gives up the later steps 4, 5, 6, 7, 8, 9, 10: they are removed") == 1
        save(back, "new", 5, 6)
    with towline.Checkpointer(either, "run", spool=tmp_path, **rules) as restarted:
        assert resumed(restarted) == (6, "new")
        save(restarted, "new", 7)
        assert resumed(restarted) == (7, "new")
    # As the warning says.
    command = re.search("`towline (undelete run/step-10 .*)`", caplog.text)[1]
    words = [sys.executable, "-m", "towline", *shlex.split(command), "--as", "before/step-10"]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert resumed(towline.Checkpointer(either, "before", spool=tmp_path)) == (10, "old")
    assert towline.Checkpointer(either, "run/inner", spool=tmp_path).steps() == [7]
    assert in_spool(tmp_path) == []


def test_a_step_that_is_skipped_or_refused_gives_up_nothing(repository, monkeypatch):
    with towline.Checkpointer(repository, "run") as first:
        save(first, "old", *range(1, 6))
    with towline.Checkpointer(repository, "run", when_busy="skip") as back:
        back.restore(2)
        with pytest.raises(towline.UnsupportedValue):
            back.save(3, {"f": open})
        with monkeypatch.context() as busy:
            busy.setattr(back._staging, "take", lambda *_: None)
            assert back.save(3, {"branch": "new"}) is None
        assert back.steps() == [1, 2, 3, 4, 5]
        # The next one does.
        back.save(4, {"branch": "new"}).wait()
        assert back.steps() == [1, 2, 4]


def test_the_last_restore_counts(repository):
    with towline.Checkpointer(repository, "run") as first:
        save(first, "old", *range(1, 6))
    with towline.Checkpointer(repository, "run") as back:
        back.restore(2)
        back.restore()
        save(back, "old", 6)
        assert back.steps() == [1, 2, 3, 4, 5, 6]
        back.restore("upto=3")
        save(back, "new", 4)
        assert back.steps() == [1, 2, 3, 4]
        # Again in the same process.
        back.restore(1)
        save(back, "third", 2)
        back.wait()
        assert back.steps() == [1, 2] and resumed(back) == (2, "third")


def test_the_step_that_it_went_back_to_may_be_gone(repository):
    with towline.Checkpointer(repository, "run") as first:
        save(first, "old", 1, 2, 3)
    with towline.Checkpointer(repository, "run") as back:
        back.restore(1)
        repository.remove("run/step-1")
        back.save(2, {"branch": "new"}).wait()
        assert back.steps() == [2] and resumed(back) == (2, "new")


@pytest.mark.parametrize("saved", [5, 9])
def test_what_another_process_saves_meanwhile_stays(either, tmp_path, saved):
    with towline.Checkpointer(either, "run", spool=tmp_path / "a") as first:
        save(first, "old", *range(1, 6))
    back = towline.Checkpointer(either, "run", spool=tmp_path / "b")
    back.restore(2)
    with towline.Checkpointer(either, "run", spool=tmp_path / "a") as other:
        other.restore()
        save(other, "other", saved)
    with pytest.raises(towline.SaveConflict, match=f"run/step-{saved} was saved by another process since .* step 2"):
        back.save(3, {"branch": "new"}).wait()
    assert resumed(back) == (saved, "other") and back.restore(3)["branch"] == "old"
    back.close()


def test_all_ranks_go_back(repository, caplog):
    def ranks(attempt: str) -> list[towline.Checkpointer]:
        return [towline.Checkpointer(repository, "run", rank, 2, attempt=attempt) for rank in (1, 0)]

    for checkpointer in (first := ranks("a")):
        save(checkpointer, "old", 1, 2, 3, 4)
    for checkpointer in first:
        checkpointer.close()
    back = ranks("b")
    for checkpointer in back:
        assert checkpointer.restore(1)["branch"] == "old"
    one, zero = back
    # One rank may be a step ahead of the other.
    for step in (2, 3):
        one.save(step, {"branch": "new"}).wait()
    assert zero.steps() == [1], "rank 0 has not saved: the steps are not there yet"
    zero.save(2, {"branch": "new"}).wait()
    assert zero.steps() == [1, 2] and caplog.text.count("gives up") == 1
    for checkpointer in (*back, *ranks("c")):
        assert resumed(checkpointer) == (2, "new")
        checkpointer.close()


def run_script(text: str, *args: str) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(text), *args], env=environment, timeout=120).returncode


BACK = """
    import os, signal, sys
    import towline
    from towline import retention, spool
    from tests.python.test_going_back import save
    from tests.python.spooling import Far

    def kill(*said, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    url, folder, place, far = sys.argv[1:]
    repository = towline.open(url)
    if far == "True":
        repository._engine = Far(repository._engine)
    checkpointer = towline.Checkpointer(repository, "run", spool=folder)
    checkpointer.restore(3)
    if place == "before the removal":
        retention.give_up = kill
    elif place == "in the removal":
        type(repository)._remove_steps = kill
    elif place == "after the removal":
        checkpointer._own = kill
    elif place == "after the save":
        checkpointer._expire = spool.remove = kill
    checkpointer.save(4, {"branch": "new"}).wait()
"""

#: Steps and the branch of the last one after a kill: while nothing is removed the old branch is whole; from then on, the training
#: goes on from the step that it went back to.
KILLS = {
    "before the removal": (list(range(1, 11)), "old"),
    "in the removal": (list(range(1, 11)), "old"),
    "after the removal": ([1, 2, 3], "old"),
    "after the save": ([1, 2, 3, 4], "new"),
}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("place", KILLS)
def test_killed_while_it_gives_up_steps(repository, tmp_path, place, far):
    with towline.Checkpointer(repository, "run") as first:
        save(first, "old", *range(1, 11))
    assert run_script(BACK, repository.url, str(tmp_path / "spool"), place, str(far)) == -signal.SIGKILL
    steps, branch = KILLS[place]
    state = towline.Checkpointer(repository, "run").restore()
    assert towline.Checkpointer(repository, "run").steps() == steps and state["branch"] == branch
    if far:
        # The next process on the same node has the step in its spool, and finishes what was begun.
        repository._engine = Far(repository._engine)
        later = towline.Checkpointer(repository, "run", spool=tmp_path / "spool")
        assert later.steps() == [1, 2, 3, 4] and resumed(later) == (4, "new")
        assert in_spool(tmp_path / "spool") == []


@pytest.fixture
def far(repository) -> towline.Repository:
    repository._engine = Far(repository._engine)
    return repository


@pytest.mark.parametrize("killed", [False, True])
def test_the_store_is_away_while_it_goes_back(far, tmp_path, monkeypatch, killed):
    """Steps 4 and 5 were spooled before it went back, and are given up, too; the spool keeps their order."""
    from towline import _backlog

    monkeypatch.setattr(_backlog, "_PAUSE", 3600.0)
    back = towline.Checkpointer(far, "run", spool=tmp_path, close_retry=0)
    save(back, "old", 1, 2, 3)
    back.wait()
    far._engine.away = True
    save(back, "old", 4, 5)
    while back._handles[-1].error is None:
        pass
    far._engine.away = False
    back.restore(2)
    far._engine.away = True
    save(back, "new", 3, 4)
    assert towline.open(far.url).runs("run")[0].steps[-1].step == 3
    far._engine.away = False
    if killed:
        towline._shutdown.forget(back)
        back._owner.release()
    else:
        monkeypatch.setattr(back, "_close_retry", 60.0)
        back.close()
    with towline.Checkpointer(far, "run", spool=tmp_path) as later:
        assert later.steps() == [1, 2, 3, 4]
        assert [later.restore(step)["branch"] for step in (2, 3, 4)] == ["old", "new", "new"]
    assert in_spool(tmp_path) == []


def test_it_goes_back_to_the_latest_durable_step(far, tmp_path, monkeypatch):
    """Steps 4 and 5 are only in the spool: `restore()` does not return them, and they are given up."""
    from towline import _backlog

    monkeypatch.setattr(_backlog, "_PAUSE", 3600.0)
    with towline.Checkpointer(far, "run", spool=tmp_path) as back:
        save(back, "old", 1, 2, 3)
        back.wait()
        far._engine.away = True
        save(back, "old", 4, 5)
        while back._handles[-1].error is None:
            pass
        far._engine.away = False
        assert resumed(back) == (3, "old")
        save(back, "new", 4)
    assert back.steps() == [1, 2, 3, 4] and resumed(towline.Checkpointer(far, "run")) == (4, "new")


@pytest.mark.parametrize("later", [False, True])
def test_a_step_that_failed_for_good_is_given_up(far, tmp_path, later):
    """It stays in the spool, and the next process on the node would upload it as the latest step. That process may be the one
    that goes back."""
    engine = far._engine
    begin = engine.begin_save_files

    def refuse(*_):
        raise towline.Denied("not allowed")

    back = towline.Checkpointer(far, "run", spool=tmp_path)
    save(back, "old", 1, 2, 3)
    back.wait()
    engine.begin_save_files = refuse
    failed = back.save(4, {"branch": "old"})
    with pytest.raises(towline.SaveFailed, match="not allowed"):
        failed.wait()
    assert len(in_spool(tmp_path)) == 3, "the files, the record, and the mark that this process gave it up"
    engine.begin_save_files = begin
    if later:
        with pytest.raises(towline.SaveFailed, match="only on the disk"):
            back.close()
        engine.save = refuse
        with pytest.warns(UserWarning, match="not durable yet: not allowed"):
            back = towline.Checkpointer(far, "run", spool=tmp_path)
        del engine.save
    back.restore(2)
    save(back, "new", 3)
    back.close()
    assert in_spool(tmp_path) == []
    with towline.Checkpointer(far, "run", spool=tmp_path) as following:
        assert following.steps() == [1, 2, 3] and resumed(following) == (3, "new")


def test_a_spooled_step_gives_up_no_branch_that_went_on_elsewhere(far, tmp_path):
    with towline.Checkpointer(far, "run", spool=tmp_path / "here") as first:
        save(first, "old", 1, 2, 3)
    back = towline.Checkpointer(far, "run", spool=tmp_path / "here", close_retry=0)
    back.restore(1)
    far._engine.away = True
    save(back, "new", 2)
    with pytest.raises(towline.SaveFailed, match="only on the disk"):
        back.close()
    far._engine.away = False
    with towline.Checkpointer(towline.open(far.url), "run") as elsewhere:
        assert resumed(elsewhere) == (3, "old")
        save(elsewhere, "old", 4)
    with pytest.warns(UserWarning, match="run/step-2: .* dropped: .*run/step-4 was saved by another process"):
        later = towline.Checkpointer(far, "run", spool=tmp_path / "here")
    assert later.steps() == [1, 2, 3, 4] and later.restore(2)["branch"] == "old"


@pytest.mark.parametrize("versions", [{"models/base": 1}, {"run/inner/step-3": 1}, {"run/step-3": "1"}, [1]])
def test_a_record_gives_up_only_steps_of_its_run(far, tmp_path, versions):
    with towline.Checkpointer(far, "run", spool=tmp_path) as first:
        save(first, "old", 1, 2, 3)
    planted = GivenUp(1, {})
    planted.versions = versions
    folder = os.path.join(tmp_path, far._engine.spool_name())
    kept = spool.put(folder, "run/step-2", {"metrics": {}}, [("state.json", [b"{}"])], planted)
    with pytest.warns(UserWarning, match="give"):
        later = towline.Checkpointer(far, "run", spool=tmp_path)
    assert later.steps() == [1, 2, 3] and os.path.exists(str(kept))
