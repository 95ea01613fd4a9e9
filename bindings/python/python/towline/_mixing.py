"""Two trainings in one run: `latest` is then a step of whichever saved last. A node that slept or was cut off, and goes on when
another one has taken its place, saves such steps."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from . import retention

if TYPE_CHECKING:
    from .repository import Repository

_logger = logging.getLogger("towline")

#: Number of steps that the warning lists.
_LISTED_MAX = 5


class Mixing:
    """Warns, once, if another process saves steps of a run beside this one."""

    def __init__(self, repository: Repository, run: str, is_own: Callable[[str], bool] = lambda _: False):
        self._repository, self._run, self._is_own = repository, run, is_own
        #: Steps that the run had when this training began or resumed, and those that are its own. None: not known.
        self._known: set[str] | None = None
        self._saved: set[str] = set()
        self._is_told = False

    def begin(self, seen: Iterable[str] | None) -> None:
        """Records the names of the run when this training begins or resumes; None if the store did not answer."""
        self._known, self._is_told = None if seen is None else set(seen), False

    def saved(self, name: str) -> None:
        """Records that this training saves a step."""
        self._saved.add(name)

    def look(self) -> None:
        """Looks for steps of others; call it after a save. It reads the log once, and fails without a word: the save is
        durable."""
        if self._is_told:
            return
        with contextlib.suppress(Exception):
            there = retention.versions(self._repository, self._run)
            if self._known is None:
                self._known = set(there)
            new = [name for name in there if name not in self._known and name not in self._saved]
            own = {name for name in new if self._is_own(name)}
            self._saved |= own
            others = sorted((name for name in new if name not in own), key=retention.number)
            if others:
                self._tell(others)

    def _tell(self, others: list[str]) -> None:
        self._is_told = True
        times = {one.name: one.saved for one in self._repository.ls(self._run)}
        listed = [f"{name} ({times.get(name, 'removed since')})" for name in others[:_LISTED_MAX]]
        more = f" and {len(others) - _LISTED_MAX} more" if len(others) > _LISTED_MAX else ""
        text = (
            f"another process saved steps of the run {self._run} in {self._repository.url} since this training began or resumed: "
            f"{', '.join(listed)}{more}. {self._run}@latest may now be of either training (start one of them again with another "
            "run name; `towline rm NAME` removes steps that are not wanted, `towline undelete NAME` brings removed ones back)"
        )
        _logger.warning("%s", text)
        warnings.warn(f"towline: {text}", stacklevel=3)
