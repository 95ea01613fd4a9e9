"""Hugging Face's Trainer with checkpoints in a repository. Run it again to resume, also on another machine.

python examples/hf_trainer.py --repo s3://bucket/experiments
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from towline.transformers import TowlineCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Report(TrainerCallback):
    """Prints the loss of each step; kills the process at step `die_at`."""

    def __init__(self, die_at: int | None):
        self.die_at = die_at

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            print("step", state.global_step, logs["loss"].hex(), flush=True)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", help="folder or s3://bucket/prefix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, help="kill the process after this step (for tests)")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    tokens = torch.randint(128, (64, 32))
    training = TrainingArguments(
        output_dir="hf-checkpoints",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=2,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = TowlineCallback(args.repo, "hf-trainer")
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback, Report(args.die_at)],
    )
    latest = callback.restore_latest(training.output_dir)
    # Trainer would train one more step when it resumes from the last one.
    if latest and int(str(latest).rpartition("-")[2]) >= args.steps:
        print("all", args.steps, "steps are done")
        return
    trainer.train(resume_from_checkpoint=latest)


if __name__ == "__main__":
    main()
