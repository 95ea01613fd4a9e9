"""States of Hugging Face's Accelerate in a repository."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import towline  # noqa: E402
from accelerate import Accelerator, DataLoaderConfiguration  # noqa: E402
from towline import _backlog  # noqa: E402
from towline.accelerate import AccelerateCheckpointer  # noqa: E402

from .spooling import Far  # noqa: E402
from .test_going_back import run_script  # noqa: E402


class Counter:
    """Something else that has a state."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Training:
    """A small training, whose state is Accelerate's."""

    def __init__(self, repository, folder: Path, **said):
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.checkpointer = AccelerateCheckpointer(self.accelerator, repository, "run-7", folder=folder, **said)
        self.losses: dict[int, str] = {}

    def run(self, first: int, last: int, save_every: int = 2) -> None:
        for step in range(first, last + 1):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = self.model(rows).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.seen += 4
            self.losses[step] = loss.item().hex()
            if step % save_every == 0:
                self.checkpointer.save(step, metrics={"loss": loss.item()})


def test_a_restored_state_goes_on_as_if_uninterrupted(repository, tmp_path):
    whole = Training(tmp_path / "other", tmp_path / "whole")
    assert whole.checkpointer.restore() is None
    whole.run(1, 7)
    first = Training(repository, tmp_path / "first")
    first.run(1, 5)
    first.checkpointer.close()
    assert first.checkpointer.steps() == [2, 4]
    assert not list((tmp_path / "first").glob("step-*"))
    with Training(repository, tmp_path / "second").checkpointer as checkpointer:
        assert checkpointer.steps() == [2, 4]
    second = Training(repository, tmp_path / "second")
    assert second.checkpointer.restore() == 4 and second.counter.seen == 16
    second.run(5, 7)
    assert {**first.losses, **second.losses} == whole.losses
    assert not list((tmp_path / "second").glob("step-*"))
    whole.checkpointer.close()
    second.checkpointer.close()


def test_steps_are_chosen(repository, tmp_path):
    training = Training(repository, tmp_path / "states", keep_last=3)
    training.run(1, 4, save_every=1)
    training.checkpointer.wait()
    assert training.checkpointer.steps() == [2, 3, 4]
    losses = {step: float.fromhex(loss) for step, loss in training.losses.items() if step > 1}
    assert training.checkpointer.restore("min=loss") == min(losses, key=losses.get)
    assert training.checkpointer.restore(3) == 3
    with pytest.raises(towline.NotFound, match=r"no step 1 \(saved are \[2, 3, 4\]\)"):
        training.checkpointer.restore(1)
    with pytest.raises(towline.NotFound):
        training.checkpointer.restore("min=nothing")


RULES = [{}, {"keep_last": 2}, {"keep_every": 5}, {"keep_min": "loss"}, {"keep_last": 20}]


def save(training: Training, branch: int, *steps: int) -> None:
    """Saves steps whose branch is the counter's state."""
    training.counter.seen = branch
    for step in steps:
        training.checkpointer.save(step, metrics={"loss": 1 / step})


def resumed(repository, folder: Path) -> tuple[int | None, int]:
    """Step and branch that a restart goes on with."""
    training = Training(repository, folder)
    step = training.checkpointer.restore()
    training.checkpointer.close()
    return step, training.counter.seen


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_restart_resumes_the_branch_that_went_back(repository, tmp_path, caplog, rules):
    first = Training(repository, tmp_path / "states")
    save(first, 1, *range(1, 11))
    first.checkpointer.close()
    back = Training(repository, tmp_path / "states", **rules)
    assert back.checkpointer.restore(3) == 3
    assert back.checkpointer.steps() == list(range(1, 11)), "reading alone gives up nothing"
    save(back, 2, 4)
    back.checkpointer.wait()
    # At once: the process may be killed now.
    assert max(back.checkpointer.steps()) == 4 and resumed(repository, tmp_path / "other") == (4, 2)
    assert caplog.text.count("gives up the later steps 4, 5, 6, 7, 8, 9, 10: they are removed") == 1
    save(back, 2, 5, 6)
    back.checkpointer.close()
    assert resumed(repository, tmp_path / "other") == (6, 2)


def test_a_restore_that_the_training_has_passed_gives_up_nothing(repository, tmp_path):
    with (training := Training(repository, tmp_path / "states")).checkpointer as checkpointer:
        save(training, 1, *range(1, 6))
        assert checkpointer.restore("upto=2") == 2
        save(training, 1, 6)
        checkpointer.restore(2)
        checkpointer.restore()
        save(training, 1, 5)
    assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def without_links(monkeypatch):
    """A file system without hard links."""

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


def test_where_files_cannot_be_linked_it_goes_back_too(repository, tmp_path, without_links):
    training = Training(repository, tmp_path / "states")
    save(training, 1, 1, 2, 3, 4)
    training.checkpointer.restore(2)
    save(training, 2, 3)
    assert training.checkpointer.steps() == [1, 2, 3] and resumed(repository, tmp_path / "states") == (3, 2)


@pytest.mark.parametrize("saved", [3, 9])
def test_where_files_cannot_be_linked_steps_of_another_process_stay(repository, tmp_path, without_links, saved):
    first = Training(repository, tmp_path / "a")
    save(first, 1, 1, 2)
    back = Training(repository, tmp_path / "b")
    back.checkpointer.restore()
    save(first, 3, saved)
    with pytest.raises(towline.SaveConflict, match=f"run-7/step-{saved} was saved by another process since"):
        save(back, 2, 3)
    assert resumed(repository, tmp_path / "b") == (saved, 3)


@pytest.mark.parametrize("saved", [5, 9])
def test_steps_that_another_process_saves_meanwhile_stay(repository, tmp_path, saved):
    first = Training(repository, tmp_path / "a")
    save(first, 1, *range(1, 6))
    first.checkpointer.wait()
    back = Training(repository, tmp_path / "b")
    back.checkpointer.restore(2)
    save(first, 3, saved)
    first.checkpointer.close()
    save(back, 2, 3)
    with pytest.raises(towline.SaveConflict, match=f"run-7/step-{saved} was saved by another process since .* step 2"):
        back.checkpointer.close()
    assert resumed(repository, tmp_path / "b") == (saved, 3)


BACK = """
    import os, signal, sys
    from pathlib import Path
    import towline
    from towline import _folders, retention, spool
    from tests.python.test_accelerate import Training, save

    def kill(*said, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    training = Training(towline.open(sys.argv[1]), Path(sys.argv[2]))
    training.checkpointer.restore(3)
    place = sys.argv[3]
    if place == "before the removal":
        retention.give_up = kill
    elif place == "in the removal":
        towline.Repository._remove_steps = kill
    elif place == "after the removal":
        _folders._save_linked = kill
    elif place == "after the save":
        spool.remove = kill
    save(training, 2, 4)
    training.checkpointer.close()
"""

#: Steps and the branch of the last one after a kill.
KILLS = {
    "before the removal": (list(range(1, 11)), 1),
    "in the removal": (list(range(1, 11)), 1),
    "after the removal": ([1, 2, 3], 1),
    "after the save": ([1, 2, 3, 4], 2),
}


@pytest.mark.parametrize("place", KILLS)
def test_killed_while_it_gives_up_steps(repository, tmp_path, place):
    first = Training(repository, tmp_path / "states")
    save(first, 1, *range(1, 11))
    first.checkpointer.close()
    assert run_script(BACK, repository.url, str(tmp_path / "states"), place) == -signal.SIGKILL
    steps, branch = KILLS[place]
    # Elsewhere, without the folder of the killed process.
    assert resumed(repository, tmp_path / "elsewhere") == (steps[-1], branch)
    assert [step.step for step in repository.runs("run-7")[0].steps] == steps
    # The next process with this folder finishes what was begun.
    assert resumed(repository, tmp_path / "states") == (4, 2)
    assert [step.step for step in repository.runs("run-7")[0].steps] == [1, 2, 3, 4]
    assert not list((tmp_path / "states").rglob("*.json"))


def test_it_goes_back_to_the_latest_durable_step(repository, tmp_path, monkeypatch):
    """Steps 4 and 5 wait in the folder: `restore()` does not return them, and they are given up."""
    monkeypatch.setattr(_backlog, "_PAUSE", 3600.0)
    repository._engine = Far(repository._engine)
    with (training := Training(repository, tmp_path / "states")).checkpointer as checkpointer:
        save(training, 1, 1, 2, 3)
        checkpointer.wait()
        repository._engine.away = True
        save(training, 1, 4, 5)
        checkpointer.wait()
        repository._engine.away = False
        assert checkpointer.restore() == 3
        save(training, 2, 4)
    assert checkpointer.steps() == [1, 2, 3, 4] and resumed(repository, tmp_path / "other") == (4, 2)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_store_is_away_while_it_goes_back(repository, tmp_path, monkeypatch, restarted):
    """Steps 4 and 5 wait in the folder when it goes back, and are given up, too."""
    monkeypatch.setattr(_backlog, "_PAUSE", 3600.0)
    repository._engine = Far(repository._engine)
    training = Training(repository, tmp_path / "states", close_retry=0 if restarted else 60)
    save(training, 1, 1, 2, 3)
    training.checkpointer.wait()
    repository._engine.away = True
    save(training, 1, 4, 5)
    training.checkpointer.wait()
    repository._engine.away = False
    training.checkpointer.restore(2)
    repository._engine.away = True
    save(training, 2, 3, 4)
    training.checkpointer.wait()
    if restarted:
        with pytest.raises(
            towline.SaveFailed, match="step-4, run-7/step-5, run-7/step-3, run-7/step-4: not durable yet"
        ):
            training.checkpointer.close()
        repository._engine.away = False
    else:
        repository._engine.away = False
        training.checkpointer.close()
    assert resumed(repository, tmp_path / "states") == (4, 2)
    assert [step.step for step in repository.runs("run-7")[0].steps] == [1, 2, 3, 4]
    assert not list((tmp_path / "states").rglob("*.json"))


def test_a_state_that_waits_gives_up_no_branch_that_went_on_elsewhere(repository, tmp_path):
    far = towline.open(repository.url)
    far._engine = Far(far._engine)
    first = Training(far, tmp_path / "here", close_retry=0)
    save(first, 1, 1, 2, 3)
    first.checkpointer.restore(1)
    far._engine.away = True
    save(first, 2, 2)
    with pytest.raises(towline.SaveFailed, match="run-7/step-2: not durable yet"):
        first.checkpointer.close()
    elsewhere = Training(repository, tmp_path / "elsewhere")
    assert elsewhere.checkpointer.restore() == 3
    save(elsewhere, 1, 4)
    elsewhere.checkpointer.close()
    with pytest.warns(UserWarning, match="run-7/step-2: .* dropped: .*run-7/step-4 was saved by another process"):
        assert resumed(repository, tmp_path / "here") == (4, 1)
    assert not list((tmp_path / "here").rglob("*.json"))


def test_automatic_names_of_accelerate(repository, tmp_path):
    from accelerate.utils import ProjectConfiguration

    names = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=names)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with AccelerateCheckpointer(accelerator, repository, "run-7") as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step)
    # Accelerate's own folders stay its own, and its limit counts them.
    assert sorted(os.listdir(tmp_path / "project" / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    assert checkpointer.steps() == [10, 20, 30]
    kept = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert checkpointer.restore() == 30 and torch.equal(model.weight, kept)


RANKS = """
import os, sys, torch
from accelerate import Accelerator
from towline.accelerate import AccelerateCheckpointer

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)
model = accelerator.prepare(torch.nn.Linear(2, 2))
checkpointer = AccelerateCheckpointer(accelerator, sys.argv[1], "run-7", folder=sys.argv[2])
before = torch.get_rng_state()
checkpointer.save(1)
torch.rand(3)
assert checkpointer.restore() == 1
assert torch.equal(torch.get_rng_state(), before), "the random state of each rank is restored"
checkpointer.save(2)
checkpointer.save(3)
assert checkpointer.restore(1) == 1
checkpointer.save(2)
checkpointer.close()
accelerator.wait_for_everyone()
assert checkpointer.steps() == [1, 2]
accelerator.end_training()
"""


def test_ranks(repository, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    command += [tmp_path / "ranks.py", repository.url, tmp_path / "states"]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    paths = {entry["path"] for entry in repository.show("run-7/step-1").entries}
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= paths


REFUSED = """
import sys, torch
from accelerate import Accelerator
from towline.accelerate import AccelerateCheckpointer

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
checkpointer = AccelerateCheckpointer(accelerator, sys.argv[1], "run-7", folder=sys.argv[2])
checkpointer.save(1)
checkpointer.close()

def refuse(*_):
    raise PermissionError("the folder belongs to another user")

checkpointer._saver.claim = checkpointer._saver.is_claimed = refuse
for call in (checkpointer.restore, lambda: checkpointer.save(2)):
    try:
        call()
    except PermissionError:
        # In one write: unbuffered, the processes may write between a text and its end of line.
        print(f"refused {accelerator.process_index}\\n", end="", flush=True)
accelerator.end_training()
"""


def test_a_folder_that_the_main_process_cannot_lock_is_an_error_on_all_ranks(repository, tmp_path):
    (tmp_path / "ranks.py").write_text(REFUSED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    command += [tmp_path / "ranks.py", repository.url, tmp_path / "states"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # In a group of its own: if a rank hangs, all are killed.
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert sorted(out.split()) == sorted(["refused", "0", "refused", "1"] * 2) and process.returncode == 0


def accelerated(folder: Path, monkeypatch) -> Accelerator:
    monkeypatch.chdir(folder)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator


def test_runs_in_one_working_folder_are_kept_apart(repository, tmp_path, monkeypatch):
    accelerator = accelerated(tmp_path, monkeypatch)
    for run in ("a", "b/c"):
        with AccelerateCheckpointer(accelerator, repository, run) as checkpointer:
            checkpointer.save(1)
            assert checkpointer.restore() == 1
    assert sorted(os.listdir(tmp_path / "towline-states")) == ["a", "b%2Fc"]


def test_states_that_an_earlier_version_left_are_saved(repository, tmp_path, monkeypatch):
    """All runs of a working folder shared it."""
    state = tmp_path / "towline-states" / "_towline" / "a" / f"0-step-7.{'0' * 32}"
    state.mkdir(parents=True)
    (state / "weights").write_bytes(b"7" * 100)
    state.with_name(state.name + ".json").write_text('{"name": "a/step-7", "options": {"metrics": {}}}')
    accelerator = accelerated(tmp_path, monkeypatch)
    AccelerateCheckpointer(accelerator, repository, "b").close()
    assert repository.ls() == []
    assert AccelerateCheckpointer(accelerator, repository, "a").steps() == [7]
    assert not state.exists()


HOLDS = """
    import sys
    from accelerate import Accelerator
    import torch, towline
    from towline.accelerate import AccelerateCheckpointer

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with AccelerateCheckpointer(accelerator, sys.argv[1], "run-7", folder=sys.argv[2]) as checkpointer:
        checkpointer.save(1).wait()
        print("saved", flush=True)
        sys.stdin.readline()
        checkpointer.save(2)
"""


def test_another_process_restores_from_the_folder_of_a_training_and_cannot_save_there(
    repository, tmp_path, monkeypatch
):
    command = [sys.executable, "-c", textwrap.dedent(HOLDS), repository.url, str(tmp_path / "states")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as training:
        assert training.stdout.readline() == "saved\n"
        # A state that the training is writing.
        (tmp_path / "states" / "step-1").mkdir()
        (tmp_path / "states" / "step-1" / "half").write_bytes(b"half")
        accelerator = accelerated(tmp_path, monkeypatch)
        other = AccelerateCheckpointer(accelerator, repository, "run-7", folder=tmp_path / "states")
        assert other.restore() == 1
        assert sorted(os.listdir(tmp_path / "states")) == ["_towline", "step-1"]
        assert os.listdir(tmp_path / "states" / "step-1") == ["half"]
        with pytest.raises(towline.UsageError, match=r"another process writes the states of its training to .*states"):
            other.save(5)
        assert not (tmp_path / "states" / "step-5").exists()
        training.communicate("\n", timeout=60)
    assert training.returncode == 0 and other.steps() == [1, 2]
    other.restore()
    other.save(5)
    other.close()
    assert other.steps() == [1, 2, 5]
