"""Retention: the steps of a run, and rules for those to keep."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from . import _arguments
from ._collecting import Collector
from .errors import Error, NotFound

if TYPE_CHECKING:
    from .repository import Repository

_logger = logging.getLogger("towline")


def steps(repository: Repository, run: str) -> list[int]:
    """All saved steps, in order."""
    try:
        runs = repository.runs(run)
    except NotFound:
        return []
    # The list also has runs whose names begin with this one.
    return [step.step for one in runs if one.run == run for step in one.steps if step.counts]


class Branch:
    """Steps that a training gives up, because it went back to an earlier one and saves others instead."""

    def __init__(self, run: str):
        self._run = run
        self._from: int | None = None
        self._later: set[int] = set()
        #: Steps given up that were not saved again.
        self.given_up: set[int] = set()

    def restored(self, step: int, later: set[int]) -> None:
        """Records that `step` was restored, although the run has the steps `later`."""
        self._from, self._later = step, later

    def saved(self, step: int | None, has_rules: bool) -> None:
        """Records a save. The first one after a restore gives up the later steps, and says so, if it is before the last of them:
        otherwise the training has passed them, and the restore was for something else, such as an evaluation."""
        later, self._later = self._later, set()
        if step is not None and later and step < max(later):
            self.given_up |= later
            steps = ", ".join(map(str, sorted(self.given_up)))
            if has_rules:
                what = "they no longer count for keep_last; `towline undelete` restores those that no other rule keeps for 7 days"
            else:
                what = f"{self._run}@latest is the last of them until the training has passed it; `towline rm` removes them"
            _logger.warning(
                "%s goes on from step %s, and gives up the later steps %s: %s", self._run, self._from, steps, what
            )
        if step is not None:
            self.given_up.discard(step)


class Retention:
    """Retention rules: they keep the last `keep_last` steps, every `keep_every`th, and those with the smallest (`keep_min`) or
    largest (`keep_max`) value of a metric. Without a rule all are kept. With `collect`, the data of removed steps is deleted in
    the background."""

    def __init__(
        self,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: str | Iterable[str] = (),
        keep_max: str | Iterable[str] = (),
        *,
        collect: bool = True,
    ):
        for rule, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            _arguments.check_positive(rule, number)
        self._collect = collect
        self._collector: Collector | None = None
        rules = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_min": _arguments.metric_names("keep_min", keep_min),
            "keep_max": _arguments.metric_names("keep_max", keep_max),
        }
        self._rules: dict[str, Any] = {key: rule for key, rule in rules.items() if rule}

    @property
    def has_rules(self) -> bool:
        """True if steps are removed."""
        return bool(self._rules)

    def expire(self, repository: Repository, run: str, given_up: Collection[int] = ()) -> None:
        """Removes the steps that no rule keeps. Those in `given_up` do not count as last ones, and `undelete` restores them for 7
        days. A failure is only a warning: the save itself succeeded, and the next one tries again."""
        if not self._rules:
            return
        try:
            plan = repository._expire(run, self._rules, given_up)
        except Error as error:
            warnings.warn(f"towline: steps of {run} were not expired: {error}", stacklevel=2)
            return
        if plan.removed:
            if self._collector is None:
                self._collector = Collector(repository, self._collect)
            self._collector.request()

    def close(self, timeout: float | None = None) -> None:
        """Waits a short time for pending deletes; a later collect deletes the rest."""
        if self._collector is not None:
            self._collector.close(timeout)
