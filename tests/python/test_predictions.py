"""Runs of torch's own optimizers that save each step: `compression="predict"`."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import towline
from towline.dcp import StorageReader, StorageWriter

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
    "AdamW, not by tensor": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
}


class Training:
    """A small model that learns cumulative sums."""

    def __init__(self, optimizer):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        for _ in range(3):
            self.step()

    def step(self):
        x = torch.randn(32, 256)
        loss = (self.model(x) - x.cumsum(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_an_optimizer_are_predicted(repository, optimizer):
    training, kept, stored = Training(optimizer), {}, {}
    with towline.Checkpointer(repository, "run", compression="predict") as checkpointer:
        for step in range(1, 4):
            training.step()
            kept[step] = {
                key: {**value} for key, value in torch.utils._pytree.tree_map(copied, training.state()).items()
            }
            stored[step] = checkpointer.save(step, training.state()).wait().report.stored_bytes
    # A third of Adam's state, and half of SGD's, is moments that nothing predicts.
    bound = 0.5 if "Adam" in optimizer else 0.65
    assert max(stored[2], stored[3]) < bound * stored[1], stored
    for step, state in kept.items():
        with towline.Checkpointer(repository, "run") as checkpointer:
            assert same(checkpointer.restore(step=step)["model"], state["model"])
            assert same(checkpointer.restore(step=step)["optimizer"]["state"], state["optimizer"]["state"])


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_steps_of_a_distributed_checkpoint_are_predicted(repository):
    training, stored = Training("AdamW"), []
    for step in range(1, 4):
        training.step()
        writer = StorageWriter(repository, f"run/step-{step}", compression="predict")
        dcp.save(training.state(), storage_writer=writer)
        stored.append(writer.report.stored_bytes)
    assert max(stored[1:]) < 0.5 * stored[0], stored
    wanted, state = training.state(), torch.utils._pytree.tree_map(copied, training.state())
    torch.utils._pytree.tree_map(lambda value: value.zero_() if isinstance(value, torch.Tensor) else value, state)
    dcp.load(state, storage_reader=StorageReader(repository, "run/step-3"))
    assert same(state["model"], wanted["model"])
    assert same(state["optimizer"]["state"], wanted["optimizer"]["state"])


def test_a_save_says_if_nothing_is_predicted(repository, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.randn(1 << 20)}, path)
    [warning] = repository.save(path, "run/step-1", compression="predict").warnings
    assert warning.startswith("nothing is predicted: no file above 1 MiB has 32-bit weights and, in the same save, "), (
        warning
    )
