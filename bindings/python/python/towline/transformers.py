"""Checkpoints of Hugging Face's Trainer, saved as steps of a run while it trains:

    callback = TowlineCallback("s3://bucket/experiments", "run-7")
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.restore_latest(args.output_dir))

Trainer writes `checkpoint-N` to its output folder as ever, on all ranks; `RUN/step-N` is that folder. Ranks on several nodes
share the output folder, or else only what the first node wrote is saved.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from . import _folders
from .errors import NotFound
from .repository import Compression, Repository

__all__ = ["TowlineCallback"]

#: The file that Trainer writes last.
_LAST_FILE = "trainer_state.json"


class TowlineCallback(TrainerCallback):
    """Saves each checkpoint that Trainer writes as a step of `run` in `repo`, a repository or its address, with the numbers
    that were logged at this step, such as `loss` and `eval_loss`.

    The training waits neither for the save, nor does `save_total_limit` harm it. What makes it fail is raised after the next
    checkpoint, or at the end of the training, which waits for all saves. A process that starts again saves first what the
    one before was killed over.

    With `remove_local` a checkpoint is taken away from the output folder once its step is durable, but for the newest and the
    best. `keep_last`, `keep_every`, `keep_min` and `keep_max` say which steps outlive later ones in the repository, by default
    all, `collect` whether what the others leave behind is deleted, and `compression` how small steps are stored, as for
    `towline.Checkpointer`.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        *,
        remove_local: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: Iterable[str] = (),
        keep_max: Iterable[str] = (),
        compression: Compression = None,
        collect: bool = True,
    ):
        self._saver = _folders.FolderSaver(
            repo,
            run,
            "transformers",
            keep_last=keep_last,
            keep_every=keep_every,
            keep_min=keep_min,
            keep_max=keep_max,
            compression=compression,
            collect=collect,
        )
        self.repository, self.run, self.remove_local = self._saver.repository, run, remove_local
        self._saved: dict[str, Any] = {}

    def restore_latest(self, output_dir: str | os.PathLike[str]) -> str | None:
        """The newest checkpoint, to resume from: restored to `output_dir`, unless a newer one lies there. None, if there is
        none at all. `resume_from_checkpoint=True` finds it too: a newer folder there that is not complete, because Trainer was
        killed as it wrote it, is moved aside."""
        output_dir = os.fspath(output_dir)
        os.makedirs(output_dir, exist_ok=True)
        self._save_left_over(output_dir)
        steps = self._saver.steps()
        while (local := _last_checkpoint(output_dir)) is not None and (not steps or _step(local) > steps[-1]):
            if os.path.exists(os.path.join(local, _LAST_FILE)):
                return local
            # Another process may have been faster.
            with contextlib.suppress(FileNotFoundError):
                os.rename(local, os.path.join(output_dir, f"incomplete-{os.path.basename(local)}"))
        if not steps:
            return None
        folder = self._restore(output_dir, steps[-1])
        with open(os.path.join(folder, _LAST_FILE), encoding="utf-8") as file:
            best = json.load(file).get("best_global_step")
        # Trainer forgets the best one where it is not there.
        if best in steps and best != steps[-1]:
            self._restore(output_dir, best)
        return folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves what a process that was killed had not saved yet."""
        if state.is_world_process_zero:
            self._save_left_over(_output_dir(args))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins to save the checkpoint that was just written."""
        if args.distributed_state is not None:
            # Other ranks write their random states without waiting for each other.
            args.distributed_state.wait_for_everyone()
        if not state.is_world_process_zero or state.is_hyper_param_search:
            return
        folder = os.path.join(_output_dir(args), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if not os.path.isdir(folder):
            raise NotFound(f"no checkpoint at {folder}, where Trainer was to write it")
        metrics = {}
        for logged in state.log_history:
            if logged.get("step") == state.global_step:
                metrics.update({key: value for key, value in logged.items() if key not in ("step", "epoch")})
        self._saved[folder] = self._saver.save(folder, state.global_step, metrics, _output_dir(args))
        self._remove_local(folder, state.best_model_checkpoint)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Waits until every step is durable."""
        if state.is_world_process_zero:
            self._saver.close()
            self._remove_local(next(reversed(self._saved), None), state.best_model_checkpoint)

    def _restore(self, output_dir: str, step: int) -> str:
        folder = os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        _folders.restore(self.repository, f"{self.run}/step-{step}", folder)
        return folder

    def _remove_local(self, newest: str | None, best: str | None) -> None:
        stay = {os.path.abspath(folder) for folder in (newest, best) if folder is not None}
        for folder, handle in list(self._saved.items()):
            if handle.done() and os.path.abspath(folder) not in stay:
                del self._saved[folder]
                if self.remove_local and handle.error is None:
                    _folders.remove(folder)

    def _save_left_over(self, output_dir: str) -> None:
        with _folders.alone(output_dir):
            self._saver.save_left_over(output_dir)


def _last_checkpoint(output_dir: str) -> str | None:
    folder: str | None = get_last_checkpoint(output_dir)
    return folder


def _output_dir(args: TrainingArguments) -> str:
    # None only before TrainingArguments is set up.
    assert args.output_dir is not None
    return args.output_dir


def _step(folder: str) -> int:
    return int(folder.rpartition("-")[2])
