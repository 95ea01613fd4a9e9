"""Steps of a run that a training neither saved nor resumed: it must not replace or remove them. Such a training began anew, as in
an empty folder on another machine, or forgot to restore.

A training is a Checkpointer, a callback with its folder, or a fit of Lightning: what others in the process resumed, such as an
evaluation, does not count."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from . import _backlog, _origins, _pointer_files
from ._reading import DOCUMENT
from .errors import Error, SaveConflict
from .retention import number

if TYPE_CHECKING:
    from .repository import Repository

_logger = logging.getLogger("towline")

#: Number of steps that the warning lists.
_LISTED_MAX = 5


class EarlierSteps:
    """Steps of one run that others saved before this training began."""

    #: Word for steps.
    _word = "steps"

    def __init__(self, repository: Repository, run: str):
        self._repository, self._run = repository, run
        self._is_told = False
        self._found: set[str] = set()
        #: Names of the steps that this training saved.
        self._saved: set[str] = set()
        self._is_resumed = False

    def _begin(self, seen: Mapping[str, int] | None) -> None:
        """Records the names of the run when this training begins; None if the store did not answer."""
        self._found = {name for name in seen or () if self._is_of_run(name) and name not in self._saved}

    def saved(self, name: str) -> None:
        """Records that this training saved a step, once it is durable."""
        self._saved.add(name)

    def anew(self) -> None:
        """Records that another training begins, which has saved and resumed nothing."""
        self._saved, self._is_resumed, self._is_told = set(), False, False

    def _check(self, name: str, help: str, more: str = "") -> None:
        """Raises SaveConflict if a save as `name` would replace a step that this training did not resume; warns, once, if the run
        has any. `help` says what to do, and `more` what else becomes of it."""
        if name in self._found and not self._is_there(name):
            self._found.discard(name)
        if name in self._found and not self._is_own(name):
            error = SaveConflict(
                f"{name} was saved by another training, and this one did not resume the run {self._run}: it is not "
                f"replaced{more} ({help})"
            )
            error.place, error.help = name, help
            raise error
        if self._is_told:
            return
        self._is_told = True
        others = [other for other in sorted(self._found, key=lambda one: (number(one), one)) if not self._is_own(other)]
        if others:
            rest = f" and {len(others) - _LISTED_MAX} more" if len(others) > _LISTED_MAX else ""
            text = (
                f"the run {self._run} in {self._repository.url} has {self._word} that this training did not resume: "
                f"{', '.join(others[:_LISTED_MAX])}{rest}. None of them is replaced or removed, but @latest may be of either "
                f"training ({help})"
            )
            _logger.warning("%s", text)
            warnings.warn(f"towline: {text}", stacklevel=5)

    def _is_own(self, name: str) -> bool:
        """True if an earlier process of this training saved the step."""
        return False

    def _is_there(self, name: str) -> bool:
        """False if a step was removed since. If the store does not answer, it counts as there."""
        try:
            found = self._repository._engine.find(name, _backlog.SILENCE)
        except Error:
            return True
        return found is not None and found[0] == name

    def _is_of_run(self, name: str) -> bool:
        return name.rpartition("/")[0] == self._run


class UnresumedSteps(EarlierSteps):
    """Steps of one run that a training did not resume."""

    def __init__(self, repository: Repository, run: str, cure: str, is_own: Callable[[str], bool] = lambda _: False):
        """`cure` says how to resume; `is_own` whether an earlier process of this training saved a step."""
        super().__init__(repository, run)
        self._cure, self._is_left = cure, is_own

    def begin(self, seen: Mapping[str, int] | None) -> None:
        """Records the names of the run when this training begins; None if the store did not answer."""
        self._begin(seen)

    def resumed(self) -> None:
        """Records that this training goes on from the run."""
        self._is_resumed = True

    def _is_own(self, name: str) -> bool:
        return self._is_left(name)

    def has(self, steps: Iterable[int], links: str) -> None:
        """Records that the training has checkpoints of its own of `steps`: if the run has one of them, or if earlier processes
        saved steps of the run from the folder of links `links`, the training goes on from it."""
        numbers = list(steps)
        saved_here = bool(numbers) and os.path.isdir(os.path.join(links, quote(self._run, safe="")))
        if saved_here or any(f"{self._run}/step-{number}" in self._found for number in numbers):
            self.resumed()

    def check(self, name: str, more: str = "") -> None:
        """Raises SaveConflict if a save as `name` would replace a step that this training did not resume; warns, once, if the run
        has any. `more` says what else becomes of the step."""
        if self._found and not self._is_resumed:
            self._check(
                name,
                f"to go on from the run, {self._cure}; else give this training another run name, or remove the steps of the "
                f"other: `towline rm --recursive {self._run}`",
                more,
            )


class UnresumedCheckpoints(EarlierSteps):
    """Checkpoints of one run that a Lightning training did not resume."""

    _word = "checkpoints"

    def __init__(self, repository: Repository, run: str):
        super().__init__(repository, run)
        #: Whether each folder had a checkpoint file of the run before the first save into it.
        self._folders: dict[str, bool] = {}
        self._starts: list[str] = []

    def begin(self, seen: Mapping[str, int] | None, starts: Iterable[str]) -> None:
        """Records the names of the run when a fit begins; None if the store did not answer. `starts` are the ids of this start
        and of those whose steps this node's spool held."""
        self.anew()
        self._begin(seen)
        self._folders, self._starts = {}, list(starts)

    def loaded(self, name: str) -> None:
        """Records that a checkpoint was loaded: if it is of the run, the training goes on from it."""
        self._is_resumed = self._is_resumed or self._is_of_run(name)

    def check(self, name: str, path: str, folder: str) -> None:
        """Raises SaveConflict if a save as `name` would replace a checkpoint that this training did not resume; warns, once, if
        the run has any. `path` is the file in `folder` that Lightning saves."""
        if self._found and not self.goes_on(folder):
            self._check(
                name,
                f"to go on from the run, call checkout({folder!r}) of the TowlineCheckpointIO before "
                "Trainer.fit(..., ckpt_path='last'); else give this training another run name",
                f", and {path} not saved",
            )

    def goes_on(self, folder: str) -> bool:
        """True if the training goes on from the run: it loaded a checkpoint, or `folder` had one before the first save."""
        return self._is_resumed or self._has_files(folder)

    def may_remove(self, name: str) -> bool:
        """True if the training saved the checkpoint, or goes on from the run. Checkpoints that were checked out have files."""
        return self._is_resumed or not self._is_of_run(name) or name in self._saved

    def _is_own(self, name: str) -> bool:
        """True if an earlier process left the checkpoint in this node's spool, and was killed before it wrote its file."""
        return len(self._starts) > 1 and _origins.start_of(self._repository, name, DOCUMENT) in self._starts

    def _has_files(self, folder: str) -> bool:
        if folder not in self._folders:
            self._folders[folder] = any(
                record["repository"] == self._repository.id and self._is_of_run(record["name"])
                for record in _records(folder)
            )
        return self._folders[folder]


def _records(folder: str) -> Iterator[dict[str, str]]:
    """Records of the pointer files in a folder."""
    for entry in sorted(os.listdir(folder)):
        path = os.path.join(folder, entry)
        record = _pointer_files.read(path) if os.path.isfile(path) else None
        if record is not None:
            yield record
