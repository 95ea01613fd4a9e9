"""Ranks that start again, or go back, and save a step once more: never mixed with what was saved of it before."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import towline
from towline._attempts import Attempts

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


def test_without_anything_that_tells_starts_apart_other_content_is_refused(repository):
    def rank(at: int, value: float, attempt: str | None = None) -> None:
        with towline.Checkpointer(repository, "run", at, 2, attempt=attempt) as checkpointer:
            checkpointer.save(1, a_state(at, value))

    rank(0, 1.0)
    rank(0, 1.0)
    with pytest.raises(towline.SaveFailed, match="something else in this attempt"):
        rank(0, 2.0)
    rank(0, 2.0, "again")
    rank(1, 2.0, "again")
    with towline.Checkpointer(repository, "run", 1, 2) as checkpointer:
        check(checkpointer, 1, 1, 2.0)


def test_what_torchrun_says(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert Attempts().current() == "none-0" and Attempts("mine").current() == "mine"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert Attempts().current() == "job-4711-3"
    for odd in ("a/b c", "x" * 60, "..", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", odd)
        attempts = Attempts()
        assert attempts.current() == Attempts().current() and len(attempts.current()) < 50
    attempts.record("run/step-1")
    assert (
        attempts.for_save("run/step-1") == f"{attempts.current()}.2"
        and attempts.for_save("run/step-2") == attempts.current()
    )


def test_an_odd_job_name_is_no_obstacle(repository, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "cluster/job: 7")
    for at in range(2):
        with towline.Checkpointer(repository, "run", at, 2) as checkpointer:
            checkpointer.save(1, a_state(at, 1.0))
    assert towline.Checkpointer(repository, "run").steps() == [1]
