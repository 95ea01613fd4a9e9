"""Steps that an earlier process left in the spool: the next Checkpointer of the run uploads them when it begins."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import _backlog, _origins, retention, spool
from ._backlog import Backlog, dropped_text
from ._origins import Superseded
from .errors import Busy, Conflict, Error
from .spool import SpooledStep, set_aside

if TYPE_CHECKING:
    from .repository import Repository

_logger = logging.getLogger("towline")

#: Ids of repositories, and runs, of which this process has told that steps wait for another repository.
_told: set[tuple[str, str]] = set()


class LeftSteps:
    """Steps of one rank in `folder` of the spool when its Checkpointer begins."""

    def __init__(self, repository: Repository, run: str, rank: int, folder: str, backlog: Backlog):
        self._repository, self._run, self._backlog = repository, run, backlog
        self._steps: list[SpooledStep] = []
        if lost := spool.of_replaced(folder, run, rank):
            more = ", ..." if len(lost) > 1 else ""
            warnings.warn(
                f"towline: {repository.url} is another repository than the one for which {len(lost)} earlier saves of {run} wait "
                f"on this node, which are not uploaded: {lost[0]}{more} (`towline save FOLDER NAME` saves one; remove those that "
                "are not needed)",
                stacklevel=4,
            )
        if os.path.isdir(folder):
            try:
                self._steps = spool.pending(spool.opened(folder), run, rank)
            except OSError as error:
                warnings.warn(f"towline: steps left in {folder} are not looked at: {error}", stacklevel=4)
        if others := spool.of_others(folder, run, rank):
            self._tell_of_others(others)

    def starts(self) -> list[str]:
        """Ids of the starts that left them."""
        found: list[str] = []
        for kept in self._steps:
            # If the record cannot be read, `upload` tells.
            with contextlib.suppress(Error):
                origin = spool.origin(kept)
                found += origin.starts if origin else []
        return found

    def upload(self, is_own: Callable[[str, int], bool]) -> None:
        """Uploads them, the oldest first. `is_own` says whether this training saved a step."""
        uploaded: set[str] = set()
        for at, kept in enumerate(self._steps):
            try:
                _origins.check(self._repository, self._run, spool.origin(kept), is_own)
                if spool.outdated(self._repository, kept):
                    self._tell_dropped(kept, "the repository has a later save of this step")
                else:
                    self._save(kept, kept.step in uploaded)
                    uploaded.add(kept.step)
            except Busy as error:
                self._stays(kept, error)
                continue
            except Superseded as error:
                stay = [_take_out(dropped, set_aside) for dropped in self._steps[at:]]
                warnings.warn(f"towline: {dropped_text(self._steps[at:], error, stay)}", stacklevel=4)
                return
            except Conflict as error:
                # The remedies of a command for a name that exists are none here.
                why = str(error).removesuffix(f" ({error.help})")
                self._tell_dropped(kept, f"the repository has another save of it, or later ones: {why}")
            except Error as error:
                self._stays(kept, error)
                continue
            _take_out(kept, spool.remove)

    def _save(self, kept: SpooledStep, is_uploaded: bool) -> None:
        """Uploads a step. One that was saved twice replaces itself."""
        given_up = spool.given_up(kept)
        retention.give_up(self._repository, self._run, given_up)
        if given_up is not None:
            self._backlog.drop_left(given_up)
        expected = {}
        if is_uploaded:
            found = self._repository._engine.find(kept.step)
            expected["version"] = found[1] if found is not None and found[0] == kept.step else 0
        spool.save(self._repository, kept, expected)

    def _tell_of_others(self, others: list[tuple[int, str]]) -> None:
        """Logs, once in a process, that steps of a run of this name wait for other repositories, if they are newer than those
        that this one has: the training that goes on here may have saved them. It may also be another one of the same name."""
        key = (self._repository.id, self._run)
        if key in _told:
            return
        try:
            here = [
                *retention.versions(self._repository, self._run, _backlog.SILENCE),
                *(one.step for one in self._steps),
            ]
        except Error:
            # No answer: the steps of the run in this repository are unknown.
            return
        last = max(map(retention.number, here), default=-1)
        newer = [(step, path) for step, path in others if step > last]
        if newer:
            _told.add(key)
            has = f"has none after step {last}" if here else "has none"
            _logger.warning(
                "%s earlier saves of a run named %s wait on this node for another repository, up to step %s, and %s %s: if they "
                "are of this training, create a Checkpointer of that repository, which uploads them there, or save them here, "
                "before it goes on (`towline save FOLDER NAME`): %r%s",
                len(newer), self._run, newer[-1][0], self._repository.url, has, newer[-1][1], ", ..." if len(newer) > 1 else "",
            )  # fmt: skip

    def _tell_dropped(self, kept: SpooledStep, why: str) -> None:
        """Warns that a step is dropped, unless the repository has what was left: that process was killed right after the
        commit."""
        with contextlib.suppress(Error):
            if spool.is_same(self._repository, kept, _backlog.SILENCE):
                return
        warnings.warn(f"towline: a step left at {kept} is dropped: {why}", stacklevel=5)

    def _stays(self, kept: SpooledStep, error: Error) -> None:
        """Warns that a step stays in the spool."""
        self._backlog.left.append((kept, None))
        warnings.warn(f"towline: a step left at {kept} is not durable yet: {error}", stacklevel=5)


def _take_out(kept: SpooledStep, how: Callable[[SpooledStep], str | None]) -> str | None:
    """Takes a step out of the spool by `how`; returns what that returns."""
    try:
        return how(kept)
    except OSError as error:
        warnings.warn(
            f"towline: a step that was saved from {kept}, or dropped, cannot be removed there: {error}", stacklevel=5
        )
        return None
