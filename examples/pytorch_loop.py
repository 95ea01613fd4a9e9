"""A plain PyTorch loop that can be killed at any time: run it again to resume. Only three lines are Towline's.

python examples/pytorch_loop.py --repo s3://bucket/experiments
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import towline


def batch(step: int) -> torch.Tensor:
    """Batch of a step."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", help="folder or s3://bucket/prefix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, help="kill the process after this step (for tests)")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = {"model": model, "optimizer": optimizer, "step": 0}

    checkpointer = towline.Checkpointer(args.repo, "pytorch-loop")
    checkpointer.restore(into=training)
    for step in range(training["step"] + 1, args.steps + 1):
        loss = (model(batch(step)) - batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training["step"] = step
        checkpointer.save(step, training, metrics={"loss": loss.item()})
        print("step", step, loss.item().hex(), flush=True)
        if step == args.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
