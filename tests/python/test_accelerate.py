"""States of Hugging Face's Accelerate in a repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import towline  # noqa: E402
from accelerate import Accelerator, DataLoaderConfiguration  # noqa: E402
from towline.accelerate import AccelerateCheckpointer  # noqa: E402


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
checkpointer.close()
accelerator.end_training()
"""


def test_ranks(repository, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    command += [tmp_path / "ranks.py", repository.url, tmp_path / "states"]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    paths = {entry["path"] for entry in repository.show("run-7/step-1").entries}
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= paths
