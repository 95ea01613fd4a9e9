"""Ranks that start again, or go back, and save a step once more: never mixed with what was saved of it before."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import towline
from towline._attempts import Attempts, from_launcher

from . import ranks


def a_state(rank: int, value: float) -> dict:
    return {"rank": rank, "shard": torch.full((1000,), value + rank)}


def check(checkpointer: towline.Checkpointer, step: int, rank: int, value: float) -> None:
    back = checkpointer.restore(step)
    assert back["rank"] == rank and torch.equal(back["shard"], a_state(rank, value)["shard"]), (step, rank, value)


def saved(checkpointer: towline.Checkpointer, step: int, rank: int, value: float) -> None:
    checkpointer.save(step, a_state(rank, value)).wait()
    dist.barrier()
    check(checkpointer, step, rank, value)
    dist.barrier()


def start(rank: int, world_size: int, url: str, value: float) -> None:
    with towline.Checkpointer(url, "run", rank, world_size) as checkpointer:
        saved(checkpointer, 1, rank, value)
        # Back to the step before, and on with other content.
        saved(checkpointer, 2, rank, value)
        saved(checkpointer, 1, rank, value + 10)
        saved(checkpointer, 2, rank, value + 20)
    # Another one of the same start, made where torch.distributed is there no more.
    before = Attempts().current()
    other = towline.Checkpointer(url, "other", rank, world_size)
    assert other._attempts.current() == before
    dist.barrier()
    dist.destroy_process_group()
    assert other._attempts.current() == before
    other.save(3, a_state(rank, value))
    other.close()
    dist.init_process_group("gloo", init_method=f"file://{url}-again-{value}", rank=rank, world_size=world_size)
    assert other._attempts.current() != before
    dist.barrier()
    assert other.steps() == [3]


def die(rank: int, world_size: int, url: str) -> None:
    """Only one rank saves its part before all are gone."""
    checkpointer = towline.Checkpointer(url, "run", rank, world_size)
    if rank == 1:
        checkpointer.save(2, a_state(rank, -1)).wait()
    dist.barrier()
    os._exit(7)


def test_ranks_that_start_again_save_their_steps_again(tmp_path):
    url = str(tmp_path / "repository")
    towline.open(url)
    assert ranks.run(2, tmp_path / "first", start, url, 1.0) == [0, 0]
    assert ranks.run(2, tmp_path / "die", die, url) == [7, 7]
    assert ranks.run(2, tmp_path / "second", start, url, 2.0) == [0, 0]
    for rank in range(2):
        with towline.Checkpointer(url, "run", rank, 2) as checkpointer:
            assert checkpointer.steps() == [1, 2]
            check(checkpointer, 1, rank, 12.0)
            check(checkpointer, 2, rank, 22.0)
    assert towline.open(url).verify(data=True)["damaged"] == []


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def test_without_anything_that_tells_starts_apart_nothing_is_saved(repository):
    checkpointer = towline.Checkpointer(repository, "run", 0, 2)
    with pytest.raises(
        towline.UsageError, match=r"pass attempt=, a text that all ranks share and that changes at every start"
    ):
        checkpointer.save(1, a_state(0, 1.0))
    assert checkpointer.restore() is None
    checkpointer.close()
    assert repository._engine.names("") == []


def test_other_content_in_one_attempt_is_refused(repository):
    def rank(at: int, value: float, attempt: str) -> None:
        with towline.Checkpointer(repository, "run", at, 2, attempt=attempt) as checkpointer:
            checkpointer.save(1, a_state(at, value))

    rank(0, 1.0, "first")
    rank(0, 1.0, "first")
    with pytest.raises(towline.SaveFailed, match="something else in this attempt"):
        rank(0, 2.0, "first")
    rank(0, 2.0, "again")
    rank(1, 2.0, "again")
    with towline.Checkpointer(repository, "run", 1, 2) as checkpointer:
        check(checkpointer, 1, 1, 2.0)


def test_an_attempt_that_is_used_again_mixes_no_parts_of_two_starts(repository):
    """Rank 1 is killed before its part of step 3; rank 0 has saved its parts of 3 and 4."""

    def begin() -> list[towline.Checkpointer]:
        return [towline.Checkpointer(repository, "run", rank, 2, attempt="job") for rank in (0, 1)]

    first = begin()
    for step in (1, 2):
        for at, rank in enumerate(first):
            rank.save(step, a_state(at, 1.0)).wait()
    for step in (3, 4):
        first[0].save(step, a_state(0, 1.0)).wait()
    for rank in first:
        rank.close()
    again = begin()
    for at, rank in enumerate(again):
        assert rank.restore()["rank"] == at and rank.step == 2
    for step in (3, 4):
        assert not again[1].save(step, a_state(1, 2.0)).result().complete
    assert again[0].steps() == [1, 2]
    for step in (3, 4):
        assert again[0].save(step, a_state(0, 2.0)).result().complete
    for at, rank in enumerate(again):
        check(rank, 4, at, 2.0)
        rank.close()


def test_restores_after_the_first_save_leave_the_attempt_as_it_is(repository):
    """One rank alone may look at a step."""
    ranks = [towline.Checkpointer(repository, "run", rank, 2, attempt="job") for rank in (0, 1)]
    for at, rank in enumerate(ranks):
        rank.save(1, a_state(at, 1.0)).wait()
    ranks[0].restore(1)
    for at, rank in enumerate(ranks):
        rank.save(2, a_state(at, 1.0)).wait()
    assert ranks[0].steps() == [1, 2]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(("saved", "restoring"), [(3, 2), (2, 3), (2, 1), (1, 2)])
def test_another_number_of_ranks_restores_nothing(repository, saved, restoring):
    for at in range(saved):
        with towline.Checkpointer(repository, "run", at, saved, attempt="first") as checkpointer:
            checkpointer.save(1, a_state(at, 1.0))
    for at in range(restoring):
        checkpointer = towline.Checkpointer(repository, "run", at, restoring, attempt="second")
        for step in (1, "latest"):
            into = a_state(at, 0.0)
            with pytest.raises(towline.Mismatch, match=f"world_size={saved} .*world_size={restoring}.*towline.dcp"):
                checkpointer.restore(step, into=into)
            assert into["shard"].eq(at).all()
        checkpointer.close()


def test_launchers(monkeypatch):
    assert from_launcher() is None and Attempts("mine").current() == "mine"
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-node-7-4711@1")
    by_mpirun = from_launcher()
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-node-7-4712@1")
    assert from_launcher() not in (by_mpirun, None)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    # A batch script and an interactive shell are no launch.
    for special in ("4294967291", "4294967290", ""):
        monkeypatch.setenv("SLURM_STEP_ID", special)
        assert not from_launcher().startswith("slurm")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert from_launcher() == "slurm-4711.2-0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert Attempts().current() == "slurm-4711.2-1"
    # The id that torchrun has by default is the same for all.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert from_launcher() == "slurm-4711.2-1"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    attempts = Attempts()
    assert attempts.current() == "job-4711-3"
    attempts.resumed(7, 42)
    assert attempts.current() == "job-4711-3.7-42"
    attempts.record("run/step-1")
    assert (
        attempts.for_save("run/step-1") == "job-4711-3.7-42.2" and attempts.for_save("run/step-2") == "job-4711-3.7-42"
    )
    attempts.resumed(8, 50)
    assert attempts.current() == "job-4711-3.7-42"
    for odd in ("a/b c", "x" * 60, ".."):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", odd)
        found = Attempts()
        assert found.current() == Attempts().current() and len(found.current()) < 50


def test_an_odd_job_name_is_no_obstacle(repository, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "cluster/job: 7")
    for at in range(2):
        with towline.Checkpointer(repository, "run", at, 2) as checkpointer:
            checkpointer.save(1, a_state(at, 1.0))
    assert towline.Checkpointer(repository, "run").steps() == [1]
