"""What is said about a save is checked where it is said, and a failure is raised once."""

from __future__ import annotations

import fractions
import math
import time

import numpy
import pytest
import torch
import towline
from towline.handle import raise_failed

STATE = {"a": torch.ones(4)}


@pytest.fixture
def checkpointer(repository):
    with towline.Checkpointer(repository, "run") as made:
        yield made


@pytest.mark.parametrize(
    "step", [-1, 1.0, 2.5, True, "7", None, numpy.float64(1), numpy.bool_(True), torch.tensor(True), 1 << 64]
)
def test_what_is_no_step_is_refused_at_once(checkpointer, step):
    with pytest.raises(towline.UsageError, match="a step is an integer"):
        checkpointer.save(step, STATE)
    checkpointer.save(1, STATE).wait()
    assert checkpointer.steps() == [1] and [one.name for one in checkpointer.repository.ls()] == ["run/step-1"]


@pytest.mark.parametrize("step", [0, numpy.int32(3), numpy.uint8(3), torch.tensor(3), (1 << 64) - 1])
def test_whole_numbers_of_any_kind_are_steps(checkpointer, step):
    handle = checkpointer.save(step, STATE)
    handle.wait()
    assert type(handle.step) is int and checkpointer.steps() == [int(step)]
    assert torch.equal(checkpointer.restore(step)["a"], STATE["a"]) and checkpointer.step == int(step)


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ({"loss": math.nan}, "'loss' is a finite number, not nan"),
        ({"loss": 1.0, "accuracy": math.inf}, "'accuracy' is a finite number, not inf"),
        ({"loss": torch.tensor(math.nan)}, "'loss'"),
        ({"loss": torch.ones(2)}, "'loss'"),
        ({"loss": "0.5"}, "'loss' is a finite number, not '0.5'"),
        ({"loss": None}, "'loss'"),
        ({"val/loss": 0.5}, "invalid name of a metric"),
        ({5: 0.5}, "the name of a metric is a str"),
        ([("loss", 0.5)], "metrics are a dict"),
    ],
)
def test_a_bad_metric_loses_no_step(checkpointer, repository, tmp_path, metrics, what):
    with pytest.raises(towline.UsageError, match=what):
        checkpointer.save(1, STATE, metrics=metrics)
    # The next one is not skipped for it.
    checkpointer.save(2, STATE, metrics={"loss": 0.5}).wait()
    assert checkpointer.steps() == [2]
    (tmp_path / "file").write_text("x")
    with pytest.raises(towline.UsageError, match=what):
        repository.save(tmp_path / "file", "name", metrics=metrics)
    assert [one.name for one in repository.ls()] == ["run/step-2"]


def test_numbers_of_any_kind_are_metrics(checkpointer):
    metrics = {"a": 1, "b": numpy.float32(0.5), "c": torch.tensor(0.25), "d": fractions.Fraction(1, 8)}
    checkpointer.save(1, STATE, metrics=metrics).wait()
    assert checkpointer.repository.show("run/step-1").metrics == {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125}


@pytest.mark.parametrize("run", ["", "a b", "run/", "/run", "run@latest", "run/step-1", "r\u00e9sum\u00e9", None, 7])
def test_what_is_no_name_of_a_run_is_refused_when_it_is_given(repository, run):
    with pytest.raises(towline.UsageError):
        towline.Checkpointer(repository, run)


def failed(checkpointer: towline.Checkpointer, tmp_path, step: int):
    """A save that failed, of a repository that was away for it."""
    checkpointer.wait()
    (tmp_path / "repository").rename(tmp_path / "gone")
    (tmp_path / "repository").write_text("a file where the repository was")
    handle = checkpointer.save(step, STATE)
    while not handle.done():
        time.sleep(0.01)
    (tmp_path / "repository").unlink()
    (tmp_path / "gone").rename(tmp_path / "repository")
    return handle


def test_a_failure_that_a_wait_raised_costs_no_further_step(checkpointer, tmp_path):
    checkpointer.save(1, STATE).wait()
    for wait in (lambda handle: handle.wait(), lambda _: checkpointer.wait()):
        handle = failed(checkpointer, tmp_path, 2)
        with pytest.raises(towline.SaveFailed, match="run/step-2"):
            wait(handle)
        checkpointer.save(3, {"a": torch.zeros(4)}).wait()
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
        checkpointer.repository.remove("run/step-3")
    checkpointer.close()


def test_a_failure_that_nobody_heard_of_is_raised_by_the_next_save_and_once(checkpointer, tmp_path):
    handle = failed(checkpointer, tmp_path, 2)
    checkpointer.wait("staged")
    with pytest.raises(towline.SaveFailed, match="run/step-2"):
        checkpointer.save(3, STATE)
    checkpointer.save(4, STATE).wait()
    assert checkpointer.steps() == [4]
    # Who asks again is told again.
    with pytest.raises(towline.SaveFailed, match="run/step-2"):
        handle.wait()


def test_all_that_failed_is_named_and_once(checkpointer, tmp_path):
    first = failed(checkpointer, tmp_path, 5)
    # Else the next save raises it, and is not made.
    first._raised = True
    second = failed(checkpointer, tmp_path, 6)
    first._raised = False
    with pytest.raises(towline.SaveFailed, match=r"run/step-5 was not saved: .* \(and neither were run/step-6\)"):
        raise_failed([first, second])
    checkpointer.save(7, STATE).wait()
    assert checkpointer.steps() == [7]
