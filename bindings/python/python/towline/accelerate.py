"""States of Hugging Face's Accelerate, saved as steps of a run while the training goes on:

    checkpointer = Checkpointer(accelerator, "s3://bucket/experiments", "run-7")
    step = checkpointer.restore() or 0
    ...
    checkpointer.save(step, metrics={"loss": loss})

A step is the folder that `accelerator.save_state` writes: models, optimizers, schedulers, samplers, scalers, random states and
what was registered by `register_for_checkpointing`, of all ranks. Accelerate's own hooks are called as ever; they are no place to
save from, because they are called before the folder is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from . import _folders, _given
from .errors import Error, NotFound
from .handle import Handle

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .repository import Compression, Repository

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves the state of `accelerator` as steps of `run` in `repo`, a repository or its address, and restores them. All ranks
    make one and call it together.

    `folder` is where states are written before they are saved, and restored before they are loaded; by default
    `towline-states` in the accelerator's `project_dir`. Ranks on several nodes share it. `keep_last`, `keep_every`, `keep_min`
    and `keep_max` say which steps outlive later ones, by default all, `collect` whether what the others leave behind is deleted,
    and `compression` how small steps are stored, as for `towline.Checkpointer`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        *,
        folder: str | os.PathLike[str] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: Iterable[str] = (),
        keep_max: Iterable[str] = (),
        compression: Compression = None,
        collect: bool = True,
    ):
        self.accelerator, self.run = accelerator, run
        self.folder = os.path.abspath(folder or os.path.join(accelerator.project_dir or ".", "towline-states"))
        self._saver = _folders.FolderSaver(
            repo,
            run,
            "accelerate",
            keep_last=keep_last,
            keep_every=keep_every,
            keep_min=keep_min,
            keep_max=keep_max,
            compression=compression,
            collect=collect,
        )
        self.repository = self._saver.repository
        if accelerator.is_main_process:
            with _folders.alone(self.folder):
                self._saver.save_left_over(self.folder)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except Error:
            if kind is None:
                raise

    def save(self, step: int, metrics: Mapping[str, float] | None = None, **options: Any) -> Handle | None:
        """Saves the state as this step; returns when it is written to this node's disk, on the main rank with a handle.
        `options` are keyword arguments of `accelerator.save_state`.

        Raises UsageError for a step that is no whole number or a metric that is not finite, and SaveFailed if an earlier save
        failed meanwhile: then this step is not saved.
        """
        step, metrics = _given.step_number(step), _given.finite_metrics(metrics)
        written = os.fspath(self.accelerator.save_state(os.path.join(self.folder, f"step-{step}"), **options))
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return None
        handle = self._saver.save(written, step, metrics, self.folder)
        if os.path.dirname(written) == self.folder:
            _folders.remove(written)
        return handle

    def restore(self, step: int | str = "latest", **options: Any) -> int | None:
        """Loads the state as it was at `step`: a number, `"latest"`, `"upto=N"`, `"min=METRIC"` or `"max=METRIC"`; the number
        of the step. None, if the latest is asked for and there is none. `options` are keyword
        arguments of `accelerator.load_state`."""
        if self.accelerator.is_main_process:
            self._saver.wait()
        found = [self._find(step) if self.accelerator.is_main_process else None]
        broadcast_object_list(found)
        if isinstance(found[0], Error):
            raise found[0]
        if found[0] is None:
            return None
        folder = os.path.join(self.folder, found[0].rpartition("/")[2])
        _folders.restore(self.repository, found[0], folder)
        self.accelerator.load_state(folder, **options)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            _folders.remove(folder)
        return int(found[0].rpartition("step-")[2])

    def steps(self) -> list[int]:
        """The steps that are saved, in order."""
        return self._saver.steps()

    def wait(self) -> None:
        """Waits until every save is durable, and raises what failed; but not for a store that does not answer."""
        self._saver.wait()

    def close(self) -> None:
        """As `wait`, and ends. What a store that does not answer lacks stays in `folder`, and the next Checkpointer of this
        run makes it durable."""
        self._saver.close()

    def _find(self, step: int | str) -> str | Error | None:
        steps = self.steps()
        if step == "latest" and not steps:
            return None
        if _given.is_step(step):
            step = _given.step_number(step)
            message = f"{self.run} has no step {step} (saved are {steps or 'none'})"
            return f"{self.run}/step-{step}" if step in steps else NotFound(message)
        try:
            return self.repository._engine.resolve(f"{self.run}@{step}")
        except Error as error:
            return error
