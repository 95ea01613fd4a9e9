"""Two trainings in one run: each is told of the steps of the other."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import towline
from towline import _folders, retention

from .spooling import Far


class Loop:
    """A training that saves with a Checkpointer."""

    def __init__(self, repository, folder: Path, rank: int = 0, world_size: int = 1, attempt: str | None = None):
        opened = towline.open(repository.url)
        opened._engine = Far(opened._engine)
        self.checkpointer = towline.Checkpointer(opened, "run", rank, world_size, spool=folder, attempt=attempt)

    def resume(self) -> None:
        self.checkpointer.restore()

    def save(self, step: int) -> None:
        self.checkpointer.save(step, {"step": step}).wait()

    def close(self) -> None:
        self.checkpointer.close()


class Folders:
    """A training that saves folders, as those of Accelerate and Trainer."""

    def __init__(self, repository, folder: Path):
        self.saver, self.folder = _folders.FolderSaver(towline.open(repository.url), "run", "test"), folder
        folder.mkdir()
        self.resume()

    def resume(self) -> None:
        self.saver.save_pending(str(self.folder))

    def save(self, step: int) -> None:
        made = self.folder / f"checkpoint-{step}"
        made.mkdir()
        (made / "weights").write_text(f"{self.folder} {step}")
        self.saver.save(str(made), step, None, str(self.folder))
        self.saver.wait()

    def close(self) -> None:
        self.saver.close()


def told(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if "another process saved steps" in one.getMessage()]


@pytest.mark.parametrize("kind", [Loop, Folders])
def test_a_training_that_slept_is_told_and_so_is_the_other(repository, tmp_path, caplog, kind):
    slept = kind(repository, tmp_path / "slept")
    slept.save(10)
    other = kind(repository, tmp_path / "other")
    other.resume()
    with pytest.warns(UserWarning) as warned:
        other.save(11)
        assert told(caplog) == []
        slept.save(15)
        slept.save(20)
        slept.close()
        (first,) = told(caplog)
        assert first.startswith("another process saved steps of the run run in ") and "run/step-11 (20" in first
        assert "run@latest may now be of either" in first and "another run name" in first and "`towline rm" in first
        other.save(22)
        other.save(33)
        other.close()
    _, second = told(caplog)
    assert "run/step-15 (20" in second and "run/step-20 (20" in second and "step-10" not in second
    assert [str(one.message) for one in warned if "another process" in str(one.message)] == [
        f"towline: {first}",
        f"towline: {second}",
    ]
    assert retention.steps(repository, "run") == [10, 11, 15, 20, 22, 33]


@pytest.mark.parametrize("kind", [Loop, Folders])
def test_a_training_that_resumes_is_not_told(repository, tmp_path, caplog, kind):
    first = kind(repository, tmp_path / "first")
    first.save(1)
    second = kind(repository, tmp_path / "second")
    second.save(2)
    first.resume()
    # Steps that it found may get a new version, as from `settle` or `undelete`.
    repository.remove("run/step-1")
    repository.undelete("run/step-1")
    for step in (3, 4):
        first.save(step)
    first.close()
    second.close()
    assert told(caplog) == []


def test_ranks_of_one_start_are_not_told_of_each_other(repository, tmp_path, caplog):
    def ranks(attempt: str) -> list[Loop]:
        return [Loop(repository, tmp_path / attempt, rank, 2, attempt) for rank in (0, 1)]

    def save(ranks: list[Loop], step: int) -> None:
        handles = [rank.checkpointer.save(step, {"step": step}) for rank in ranks]
        for handle in handles:
            handle.wait()

    first = ranks("first")
    for step in (1, 2):
        save(first, step)
    second = ranks("second")
    for rank in second:
        rank.resume()
    save(second, 3)
    assert told(caplog) == []
    with pytest.warns(UserWarning, match=r"run/step-3 \(20"):
        for step in (4, 5):
            save(first, step)
        for rank in first:
            rank.close()
    assert len(told(caplog)) == 1
    # A rank whose part of a step it does not know, as after a lost answer, knows the start.
    second[0].checkpointer._mixing._saved.clear()
    second[0].checkpointer._mixing._known -= {"run/step-3"}
    assert second[0].checkpointer._is_of_start("run/step-3")
    assert not second[0].checkpointer._is_of_start("run/step-4")


@pytest.mark.parametrize("kind", [Loop, Folders])
def test_a_look_that_fails_fails_no_save(repository, tmp_path, caplog, monkeypatch, kind):
    training = kind(repository, tmp_path / "own")

    def away(*_):
        raise towline.Unreachable("no answer")

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        patched.setattr(retention, "versions", away)
        training.save(1)
    other = kind(repository, tmp_path / "other")
    other.save(2)
    # Warnings are errors: the save is durable all the same.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.save(3)
        training.close()
    assert len(told(caplog)) == 1 and retention.steps(repository, "run") == [1, 2, 3]
    other.close()
