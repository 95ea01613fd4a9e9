"""Callback for Hugging Face's Trainer that saves its checkpoints in the background, as steps of a run:

    callback = TowlineCallback("s3://bucket/experiments", "run-7")
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.restore_latest(args.output_dir))

Trainer writes `checkpoint-N` to its output folder as usual, on all ranks; that folder is saved as `RUN/step-N`. With several
nodes the output folder must be shared: only the files that the first node sees are saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from . import _folders, _private
from .errors import Error, NotFound, SaveConflict
from .repository import Compression, Repository

__all__ = ["TowlineCallback"]

_logger = logging.getLogger("towline")

#: The file that Trainer writes last.
_LAST_FILE = "trainer_state.json"
#: Maximum bytes of that file.
_LAST_FILE_MAX = 16 << 20


class TowlineCallback(TrainerCallback):
    """Saves each checkpoint of Trainer as a step of `run` in `repo`, a Repository or its URL. The metrics of the step are the
    numbers that were logged at it, such as `loss` and `eval_loss`.

    The save runs in the background, and completes even if `save_total_limit` removes the folder meanwhile. If it fails, the
    callback raises SaveFailed after the next checkpoint, or at the end of the training, which waits for all saves. If the store
    takes no bytes then, it retries for `close_retry` seconds, and raises SaveFailed, too: the checkpoints stay in the output
    folder. A restarted process first finishes the saves that the one before left.

    A training that begins anew, in a folder without checkpoints of the run and without `restore_latest`, replaces no step that
    another one saved in the run, also one in the same process: SaveConflict. If it saves others, one warning says so. A step
    that another process saves while this training runs is not replaced either: the callback raises SaveConflict after the next
    checkpoint, or at the end.

    With `remove_local`, a checkpoint is removed from the output folder once its step is durable; the newest and the best stay.
    `keep_last`, `keep_every`, `keep_min` and `keep_max` select the steps to keep in the repository (by default all). They,
    `collect` (whether the data of the others is deleted), `compression` and `create` (whether a missing repository is created)
    are as for `towline.Checkpointer`.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        *,
        remove_local: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: str | Iterable[str] = (),
        keep_max: str | Iterable[str] = (),
        compression: Compression = "auto",
        collect: bool = True,
        create: bool | None = None,
        close_retry: float = 60.0,
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
            create=create,
            close_retry=close_retry,
        )
        self.repository, self.run, self.remove_local = self._saver.repository, run, remove_local
        self._saved: dict[str, Any] = {}

    def restore_latest(self, output_dir: str | os.PathLike[str]) -> str | None:
        """Returns the folder of the newest checkpoint, to resume from, or None if there is none. It is restored to `output_dir`,
        unless a newer complete one is there already. A newer folder that is incomplete, because Trainer was killed while writing
        it, is renamed, which the log `towline` says, so that `resume_from_checkpoint=True` finds the right checkpoint, too."""
        output_dir = os.fspath(output_dir)
        os.makedirs(output_dir, exist_ok=True)
        self._save_pending(output_dir)
        steps = self._saver.steps()
        while (local := _last_checkpoint(output_dir)) is not None and (not steps or _step(local) > steps[-1]):
            if os.path.exists(os.path.join(local, _LAST_FILE)):
                self._saver.resumed()
                return local
            # Another process may have renamed it already.
            aside = os.path.join(output_dir, f"incomplete-{os.path.basename(local)}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(local, aside)
                _logger.warning("%s lacks its %s, and so is incomplete: it is called %s now", local, _LAST_FILE, aside)
        if not steps:
            return None
        folder = self._restore(output_dir, steps[-1])
        last = _private.read(os.path.join(folder, _LAST_FILE), _LAST_FILE_MAX)
        if last is None:
            raise Error(
                f"{folder} has no {_LAST_FILE} of at most {_LAST_FILE_MAX} bytes: it is no checkpoint of Trainer"
            )
        best = json.loads(last).get("best_global_step")
        # Trainer forgets the best checkpoint if its folder does not exist.
        if best in steps and best != steps[-1]:
            self._restore(output_dir, best)
        self._saver.resumed()
        return folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finishes the saves that a killed process left, and notes which checkpoints this training goes on from."""
        if state.is_world_process_zero:
            output_dir = _output_dir(args)
            self._save_pending(output_dir)
            self._saver.has([*_complete(output_dir), *([state.global_step] if state.global_step else [])], output_dir)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts to save the checkpoint that was just written."""
        if args.distributed_state is not None:
            # All ranks must have written their random states; Trainer does not wait for them.
            args.distributed_state.wait_for_everyone()
        if not state.is_world_process_zero or state.is_hyper_param_search:
            return
        folder = os.path.join(_output_dir(args), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if not os.path.isdir(folder):
            raise NotFound(f"no checkpoint at {folder}, where Trainer should have written it")
        metrics = {}
        for logged in state.log_history:
            if logged.get("step") == state.global_step:
                metrics.update({key: value for key, value in logged.items() if key not in ("step", "epoch")})
        aside = os.path.join(_output_dir(args), f"dropped-{os.path.basename(folder)}")
        try:
            self._saver.check(state.global_step, f", and its files are in {aside}")
        except SaveConflict:
            # The next start would take it for a checkpoint of the run.
            _folders.remove(aside)
            os.rename(folder, aside)
            raise
        self._saved[folder] = self._saver.save(folder, state.global_step, metrics, _output_dir(args))
        self._remove_local(folder, state.best_model_checkpoint)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Waits until every step is durable; raises SaveFailed if one is not."""
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

    def _save_pending(self, output_dir: str) -> None:
        self._saver.begin(output_dir)
        with _folders.alone(output_dir):
            for step in self._saver.save_pending(output_dir):
                # Trainer resumes the highest checkpoint in the folder.
                name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(os.path.join(output_dir, name), os.path.join(output_dir, f"dropped-{name}"))


def _last_checkpoint(output_dir: str) -> str | None:
    folder: str | None = get_last_checkpoint(output_dir)
    return folder


def _complete(output_dir: str) -> list[int]:
    """Steps of the complete checkpoints in the folder."""
    found = [(entry, re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", entry)) for entry in os.listdir(output_dir)]
    return [
        int(step[1]) for entry, step in found if step and os.path.exists(os.path.join(output_dir, entry, _LAST_FILE))
    ]


def _output_dir(args: TrainingArguments) -> str:
    # None only before TrainingArguments is set up.
    assert args.output_dir is not None
    return args.output_dir


def _step(folder: str) -> int:
    return int(folder.rpartition("-")[2])
