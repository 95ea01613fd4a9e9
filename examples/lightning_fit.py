"""Lightning's Trainer with checkpoints in a repository. Run it again to resume, also on another machine.

python examples/lightning_fit.py --repo s3://bucket/experiments
"""

from __future__ import annotations

import argparse
import os
import signal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from towline.lightning import TowlineCheckpointIO

CHECKPOINTS = "lightning-checkpoints"


class Model(L.LightningModule):
    """A small autoencoder."""

    def __init__(self, die_at: int | None = None):
        super().__init__()
        self.die_at = die_at
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))

    def training_step(self, rows: torch.Tensor, _: int) -> torch.Tensor:
        if self.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.layers(rows) - rows).square().mean()
        self.log("loss", loss)
        print("step", self.global_step + 1, loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches:
    """Batches of all steps. The position is part of the checkpoint, so that Lightning resumes at the right batch."""

    def __init__(self, steps: int):
        self.steps, self.step = steps, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        for step in range(self.step + 1, self.steps + 1):
            self.step = step
            yield torch.randn(32, 64, generator=torch.Generator().manual_seed(step))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", help="folder or s3://bucket/prefix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, help="kill the process after this step (for tests)")
    args = parser.parse_args()

    checkpoint_io = TowlineCheckpointIO(args.repo, "lightning-fit")
    checkpoint_io.checkout(CHECKPOINTS)
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=args.steps,
        plugins=[checkpoint_io],
        callbacks=[ModelCheckpoint(CHECKPOINTS, every_n_train_steps=2, save_top_k=2, monitor="loss", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(args.die_at), Batches(args.steps), ckpt_path="last")


if __name__ == "__main__":
    main()
