"""Checkpointer for Hugging Face's Accelerate that saves states in the background, as steps of a run:

    checkpointer = AccelerateCheckpointer(accelerator, "s3://bucket/experiments", "run-7")
    step = checkpointer.restore() or 0
    ...
    checkpointer.save(step, metrics={"loss": loss})

A step is the folder that `accelerator.save_state` writes: models, optimizers, schedulers, samplers, scalers, random states and
objects given to `register_for_checkpointing`, of all ranks. Accelerate's own hooks are called as usual. Do not save from such a
hook: it is called before the folder is written.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from accelerate.utils import broadcast_object_list

from . import _arguments, _folders
from .errors import Error, NotFound
from .handle import Handle
from .retention import number

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .repository import Compression, Repository

__all__ = ["AccelerateCheckpointer"]


class AccelerateCheckpointer:
    """Saves the state of `accelerator` as steps of `run` in `repo`, a Repository or its URL, and restores them. All ranks create
    one, and call its methods together.

    States are written to `folder` before they are saved, and restored to it before they are loaded; by default
    `towline-states/RUN` in the accelerator's `project_dir`; for the run `a/b` that is `towline-states/a%2Fb`. With several nodes
    it must be a shared folder. Other processes may restore from it, but not save to it, while this one does. `keep_last`,
    `keep_every`, `keep_min` and `keep_max` select the steps to keep (by default all). They, `collect` (whether the data of the
    others is deleted), `compression`, `create` (whether a missing repository is created) and `close_retry` (seconds that `close`
    retries for if the store takes no bytes) are as for `towline.Checkpointer`.
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
        keep_min: str | Iterable[str] = (),
        keep_max: str | Iterable[str] = (),
        compression: Compression = "auto",
        collect: bool = True,
        create: bool | None = None,
        close_retry: float = 60.0,
    ):
        self.accelerator, self.run = accelerator, run
        states = os.path.abspath(os.path.join(accelerator.project_dir or ".", "towline-states"))
        self.folder = os.path.abspath(folder or os.path.join(states, quote(run, safe="")))
        self._is_claimed = False
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
            create=create,
            close_retry=close_retry,
        )
        self.repository = self._saver.repository
        if accelerator.is_main_process:
            if not folder and os.path.isdir(os.path.join(states, _folders.OWN, quote(run, safe=""))):
                # Left by an earlier version, whose runs shared the folder.
                self._save_pending(states)
            self._save_pending(self.folder)

    def __enter__(self) -> AccelerateCheckpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except Error as error:
            if kind is None:
                raise
            warnings.warn(f"towline: {error}", stacklevel=2)

    def save(self, step: int, metrics: Mapping[str, float] | None = None, **options: Any) -> Handle | None:
        """Saves the state as this step. Returns once it is written to `folder`: a Handle on the main process, None on others.
        `options` are keyword arguments of `accelerator.save_state`.

        Raises UsageError for a step that is no integer or a metric that is not finite. Raises SaveFailed if an earlier save
        failed, SaveConflict if the run had the step already when this training began, and nothing was restored from it, and
        UsageError if another process saves its states to `folder`; this step is then not saved.
        """
        step, metrics = _arguments.step_number(step), _arguments.finite_metrics(metrics)
        self._claim()
        written = os.fspath(self.accelerator.save_state(os.path.join(self.folder, f"step-{step}"), **options))
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return None
        handle = self._saver.save(written, step, metrics, self.folder)
        if os.path.dirname(written) == self.folder:
            _folders.remove(written)
        return handle

    def restore(self, step: int | str = "latest", **options: Any) -> int | None:
        """Loads the state at `step`: a number, `"latest"`, `"upto=N"`, `"min=METRIC"` or `"max=METRIC"`. Returns the number of
        the step; None if `"latest"` is asked for and nothing is saved. `options` are keyword arguments of
        `accelerator.load_state`.

        If a step before the last of the later ones is saved next, the training gives those up: they are removed right before that
        save, so that no restart resumes them, and `Repository.undelete` restores them for 7 days."""
        told = [self._told(step) if self.accelerator.is_main_process else (None, "")]
        broadcast_object_list(told)
        found, entry = told[0]
        if isinstance(found, Exception):
            raise found
        if found is None:
            return None
        folder = os.path.join(self.folder, entry or found.name.rpartition("/")[2])
        _folders.restore(self.repository, found.name, folder)
        self.accelerator.load_state(folder, **options)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            _folders.remove(folder)
        if self.accelerator.is_main_process:
            self._saver.restored(found)
        return number(found.name)

    def steps(self) -> list[int]:
        """All saved steps, in order."""
        return self._saver.steps()

    def wait(self) -> None:
        """Waits until every save is durable, except if the store does not answer; raises SaveFailed if one failed."""
        self._saver.wait()

    def close(self) -> None:
        """Waits until every save is durable, and ends the background thread; raises SaveFailed if one failed. If the store takes
        no bytes, it retries for `close_retry` seconds. Then it raises SaveFailed, too: the states stay in `folder`, and the next
        AccelerateCheckpointer of this run saves them."""
        self._is_claimed = False
        self._saver.close()

    def _save_pending(self, folder: str) -> None:
        with _folders.alone(folder):
            self._saver.save_pending(folder)

    def _claim(self) -> None:
        """Makes `folder` the one of this training until `close`. Raises UsageError on all ranks if it is another process's."""
        if self._is_claimed:
            return
        told: list[Exception | None] = [None]
        if self.accelerator.is_main_process:
            try:
                self._saver.claim(self.folder)
            except (Error, OSError) as error:
                told = [error]
        broadcast_object_list(told)
        if told[0] is not None:
            raise told[0]
        self._is_claimed = True

    def _told(self, step: int | str) -> tuple[_folders.Found | Exception | None, str]:
        """Step to restore, as `_find`, and name of the folder. Returns errors, so that all ranks raise them."""
        try:
            return self._find(step), self._name_for_restore()
        except (Error, OSError) as error:
            return error, ""

    def _name_for_restore(self) -> str:
        """Name of the folder to restore to, beside the states that another process writes; else empty: that of the step."""
        return f"restored-{uuid.uuid4().hex}" if self._saver.is_claimed(self.folder) else ""

    def _find(self, step: int | str) -> _folders.Found | None:
        """Step to restore; None if nothing is saved."""
        self._saver.wait()
        steps = self.steps()
        if step == "latest" and not steps:
            return None
        if not _arguments.is_step(step):
            return self._saver.found(self.repository._engine.resolve(f"{self.run}@{step}"), step == "latest")
        step = _arguments.step_number(step)
        if step not in steps:
            raise NotFound(f"{self.run} has no step {step} (saved are {steps or 'none'})")
        return self._saver.found(f"{self.run}/step-{step}", False)
