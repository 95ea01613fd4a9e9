"""FSDP2 with checkpoints by towline.dcp: sharded state saved in the background, resumed on any number of ranks.

    torchrun --nproc-per-node 2 -- examples/fsdp2_dcp.py --repo /data/towline --run demo --steps 20

Stop it at any time and start it again, on any number of ranks: it resumes from the last complete step. On the same number of
ranks the losses are bitwise equal to those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import towline
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from towline.dcp import StorageReader, StorageWriter

#: Global batch size; divisible by 1, 2, 3, 4 and 6 ranks.
BATCH = 12


class Training(Stateful):
    """State to save: the model, the optimizer and the step."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model, sharded over all ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 16)) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 16, generator=generator)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[own], inputs.sin().sum(dim=1, keepdim=True)[own]


def digest(model: torch.nn.Module) -> str:
    """A digest of all parameters, gathered from all ranks."""
    hashed = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        hashed.update(name.encode())
        hashed.update(whole.detach().numpy().tobytes())
    return hashed.hexdigest()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repo", required=True, help="the repository: a folder or s3://bucket/prefix")
    arguments.add_argument("--run", default="demo")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--every", type=int, default=2, help="steps between two checkpoints")
    args = arguments.parse_args()
    dist.init_process_group("gloo")
    # The background save needs a process group of its own.
    saving = dist.new_group(backend="gloo")

    repository = towline.open(args.repo)
    model, optimizer = build()
    training = Training(model, optimizer)
    writer, saved = StorageWriter(repository), None
    if any(run["run"] == args.run for run in repository.runs()):
        dcp.load({"training": training}, storage_reader=StorageReader(repository, f"{args.run}@latest"))
    dist.barrier()

    def log(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    log(f"from {training.step} {digest(model)}")
    for step in range(training.step + 1, args.steps + 1):
        inputs, targets = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.step = step
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        log(f"step {step} {mean.item().hex()}")
        if step % args.every == 0:
            if saved is not None:
                saved.result()
            writer.metrics = {"loss": mean.item()}
            saved = dcp.async_save(
                {"training": training},
                checkpoint_id=f"{args.run}/step-{step}",
                storage_writer=writer,
                process_group=saving,
            )
    if saved is not None:
        saved.result()
    log(f"at {training.step} {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
