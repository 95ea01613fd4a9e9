"""Checkpoints of a run that a Lightning training neither saved nor resumed: it must not replace or remove them. Such a training
began anew, as in an empty folder on another machine."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from . import _origins, _pointer_files
from ._reading import DOCUMENT
from .errors import SaveConflict

if TYPE_CHECKING:
    from .repository import Repository

_logger = logging.getLogger("towline")

#: Checkpoints that this process saved: ids of repositories, and names.
_saved: set[tuple[str, str]] = set()
#: Number of checkpoints that the warning lists.
_LISTED_MAX = 5


class Unresumed:
    """Checkpoints of one run that others saved before this process did."""

    def __init__(self, repository: Repository, run: str):
        self._repository, self._run = repository, run
        self._is_resumed = self._is_told = False
        self._begin(None)

    def _begin(self, seen: Mapping[str, int] | None) -> None:
        #: Checkpoints that the run had when this process began to save.
        self._found = {name for name in seen or () if self._is_of_run(name) and not self._is_saved(name)}
        #: Whether each folder had a checkpoint file of the run before the first save into it.
        self._folders: dict[str, bool] = {}
        self._starts: list[str] = []

    def begin(self, seen: Mapping[str, int] | None, starts: Iterable[str]) -> None:
        """Records the names of the run when this process begins to save; None if the store did not answer. `starts` are the ids
        of this start and of those whose steps this node's spool held."""
        self._begin(seen)
        self._starts = list(starts)

    def loaded(self, name: str) -> None:
        """Records that a checkpoint was loaded: if it is of the run, the training goes on from it."""
        self._is_resumed = self._is_resumed or self._is_of_run(name)

    def saved(self, name: str) -> None:
        """Records that this process saved a checkpoint, once it is durable."""
        _saved.add((self._repository.id, name))

    def check(self, name: str, path: str, folder: str) -> None:
        """Raises SaveConflict if a save as `name` would replace a checkpoint that this training did not resume; warns, once, if
        the run has any. `path` is the file in `folder` that Lightning saves."""
        if not self._found or self._is_resumed or self._has_files(folder):
            return
        help = (
            f"to go on from the run, call checkout({folder!r}) of the TowlineCheckpointIO before "
            "Trainer.fit(..., ckpt_path='last'); else give this training another run name"
        )
        if name in self._found and not self._is_spooled(name):
            error = SaveConflict(
                f"{name} was saved by another process, and this training did not resume the run {self._run}: it is not replaced, "
                f"and {path} not saved ({help})"
            )
            error.place, error.help = name, help
            raise error
        if self._is_told:
            return
        self._is_told = True
        others = [other for other in sorted(self._found) if not self._is_spooled(other)]
        if others:
            more = f" and {len(others) - _LISTED_MAX} more" if len(others) > _LISTED_MAX else ""
            text = (
                f"the run {self._run} in {self._repository.url} has checkpoints that this training did not resume: "
                f"{', '.join(others[:_LISTED_MAX])}{more}. None of them is replaced or removed, but @latest may be of either "
                f"training ({help})"
            )
            _logger.warning("%s", text)
            warnings.warn(f"towline: {text}", stacklevel=4)

    def may_remove(self, name: str) -> bool:
        """True if the training saved the checkpoint, or goes on from the run. Checkpoints that were checked out have files."""
        return self._is_resumed or not self._is_of_run(name) or self._is_saved(name)

    def _is_of_run(self, name: str) -> bool:
        return name.rpartition("/")[0] == self._run

    def _is_saved(self, name: str) -> bool:
        return (self._repository.id, name) in _saved

    def _is_spooled(self, name: str) -> bool:
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
