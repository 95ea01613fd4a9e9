"""Steps that a killed process left in the spool although the repository has them, and disks that take no spool."""

from __future__ import annotations

import errno
import os
import re
import warnings
from pathlib import Path

import pytest
import towline
from towline import spool

from .spooling import a_state, check, in_spool, leave
from .spooling import far as far


def killed_after_the_commit(far, folder: Path, monkeypatch, world_size: int) -> None:
    """Leaves in the spool what processes leave that are killed before they remove it."""
    attempt = {} if world_size == 1 else {"attempt": "first"}
    with monkeypatch.context() as kill:
        kill.setattr(spool, "remove", lambda kept: None)
        ranks = [
            towline.Checkpointer(far, "run", rank, world_size, spool=folder, **attempt) for rank in range(world_size)
        ]
        for rank, one in enumerate(ranks):
            one.save(1, a_state(10 * world_size + rank, 1))
        for one in ranks:
            one.close()


@pytest.mark.parametrize("seconds", [-60, 60], ids=["before the commit", "after it"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_was_committed_before_the_kill_is_no_alarm(far, tmp_path, monkeypatch, world_size, seconds):
    """Whatever the clocks of the node and of the store say."""
    killed_after_the_commit(far, tmp_path / "spool", monkeypatch, world_size)
    records = list((tmp_path / "spool").rglob("*-step-1.*.json"))
    assert len(records) == world_size
    for record in records:
        os.utime(record, (record.stat().st_mtime + seconds,) * 2)
    before = [one.manifest for one in far.ls()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        attempt = {} if world_size == 1 else {"attempt": "second"}
        for rank in range(world_size):
            with towline.Checkpointer(far, "run", rank, world_size, spool=tmp_path / "spool", **attempt) as later:
                assert later.restore(1)["seed"] == 10 * world_size + rank
    assert list((tmp_path / "spool").rglob("*-step-*")) == [] and [one.manifest for one in far.ls()] == before


def test_steps_for_a_repository_that_was_replaced_are_told(far, tmp_path):
    folder = tmp_path / "spool"
    kept = Path(leave(far, folder, b"for the one before"))
    own = kept.parents[1].name
    before = folder / f"01ARZ3NDEKTSV4RRFFQ69G5FAV-{own.rpartition('-')[2]}"
    kept.parents[1].rename(before)
    (left,) = in_spool(before)[:1]
    told = f"another repository than the one for which 1 earlier saves of run wait .*: {re.escape(str(before))}/run/0-step-1"
    with pytest.warns(UserWarning, match=told):
        towline.Checkpointer(far, "run", spool=folder).close()
    assert left.exists() and far.ls() == []
    # Steps of other runs and places cause no warning.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        towline.Checkpointer(far, "another", spool=folder).close()
        before.rename(folder / "01ARZ3NDEKTSV4RRFFQ69G5FAV-0000000000000000")
        towline.Checkpointer(far, "run", spool=folder).close()


OTHERS = "01ARZ3NDEKTSV4RRFFQ69G5FAV-0000000000000000"


def left_for_another(far, folder: Path, *steps: int, rank: int = 0) -> Path:
    """Leaves steps in the spool for a repository at another place; returns the folder of their run."""
    run = folder / OTHERS / "run"
    for step in steps:
        options = {"part": (rank, "first")} if rank else {}
        spool.put(str(run.parent), f"run/step-{step}", options, [("state.json", [b"{}"])])
    return run


def told_of_others(caplog) -> list[str]:
    said = [
        one.getMessage() for one in caplog.records if "wait on this node for another repository" in one.getMessage()
    ]
    caplog.clear()
    return said


def test_newer_steps_for_another_repository_are_told_once(far, tmp_path, caplog):
    """As after a store that was away: the training goes on in another repository, which has the steps up to 3."""
    folder = tmp_path / "spool"
    with towline.Checkpointer(far, "run", spool=folder) as before:
        for step in (1, 2, 3):
            before.save(step, {"step": step}).wait()
    run = left_for_another(far, folder, 2, 10, 4)
    assert told_of_others(caplog) == []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        towline.Checkpointer(far, "run", spool=folder).close()
        (said,) = told_of_others(caplog)
        towline.Checkpointer(far, "run", spool=folder).close()
    assert told_of_others(caplog) == [], "it is told once"
    assert re.match(
        "2 earlier saves of a run named run wait .* up to step 10, and .*repository has none after step 3: ", said
    )
    assert f"{run}/0-step-10." in said and "create a Checkpointer of that repository" in said
    assert len(in_spool(folder)) == 6, "they stay there"


@pytest.mark.parametrize("case", ["older", "a day old", "of another rank", "of another run", "no steps", "store away"])
def test_steps_for_another_repository_that_are_no_concern_here(far, tmp_path, caplog, case):
    folder = tmp_path / "spool"
    with towline.Checkpointer(far, "run", spool=folder) as before:
        before.save(3, {"step": 3}).wait()
    run = left_for_another(far, folder, 3 if case == "older" else 4, rank=int(case == "of another rank"))
    for record in list(run.glob("*.json")):
        if case == "a day old":
            os.utime(record, (record.stat().st_mtime - 90_000,) * 2)
        elif case == "no steps":
            record.rename(record.with_name("0-notes.txt.json"))
    if case == "of another run":
        run.rename(run.with_name("another"))
    far._engine.away = case == "store away"
    caplog.clear()
    towline.Checkpointer(far, "run", spool=folder).close()
    assert told_of_others(caplog) == []
    # One that is newer is told.
    far._engine.away = False
    left_for_another(far, folder, 5)
    towline.Checkpointer(far, "run", spool=folder).close()
    assert len(told_of_others(caplog)) == 1


@pytest.mark.parametrize("seconds", [-60, 60], ids=["before the other", "after it"])
def test_a_step_of_other_content_is_told_in_words_that_fit(far, tmp_path, seconds):
    with towline.Checkpointer(far, "run", spool=tmp_path / "elsewhere") as other:
        other.save(1, a_state(1, 1)).wait()
    record = Path(leave(far, tmp_path / "spool", b"other content") + ".json")
    record.write_text(record.read_text().replace('"options": {', '"options": {"version": 0, '))
    os.utime(record, (record.stat().st_mtime + seconds,) * 2)
    with (
        pytest.warns(UserWarning, match="a step left at .*step-1.* is dropped: the repository has") as warned,
        towline.Checkpointer(far, "run", spool=tmp_path / "spool") as later,
    ):
        check(later, 1, 1)
    assert len(warned) == 1 and "use another name" not in str(warned[0].message)
    assert in_spool(tmp_path / "spool") == []


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space in"),
        (errno.EROFS, "mount the file system of .* writable"),
        (errno.EACCES, "see that this user owns"),
    ],
)
def test_a_spool_that_takes_nothing_is_told_once_for_each_cause(far, tmp_path, monkeypatch, number, remedy):
    write, fails = spool._write, [number]

    def refuse(*said):
        if fails[0]:
            raise OSError(fails[0], os.strerror(fails[0]))
        write(*said)

    monkeypatch.setattr(spool, "_write", refuse)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
            for step, fault in enumerate((number, number, number, errno.EIO, errno.EIO, None, number, number), 1):
                fails[0] = fault
                checkpointer.save(step, {"step": step}).wait()
    told = [str(one.message) for one in warned if "cannot be spooled" in str(one.message)]
    assert [text.split()[1] for text in told] == ["run/step-1", "run/step-4", "run/step-7"]
    assert os.strerror(number) in told[0] and os.strerror(errno.EIO) in told[1] and os.strerror(number) in told[2]
    assert re.search(f"{remedy}.*or pass another folder as spool=", told[0])
    assert ("free space" in told[0]) == (number == errno.ENOSPC)
    assert checkpointer.steps() == list(range(1, 9))
