"""Retention: the steps of a run, and rules for those to keep."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _arguments
from ._collecting import Collector
from .errors import Error, NotFound

if TYPE_CHECKING:
    from .repository import Repository


def steps(repository: Repository, run: str) -> list[int]:
    """All saved steps, in order."""
    try:
        runs = repository.runs(run)
    except NotFound:
        return []
    # The list also has runs whose names begin with this one.
    return [step.step for one in runs if one.run == run for step in one.steps if step.counts]


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

    def expire(self, repository: Repository, run: str) -> None:
        """Removes the steps that no rule keeps. A failure is only a warning: the save itself succeeded, and the next one tries
        again."""
        if not self._rules:
            return
        try:
            plan = repository.expire(run, **self._rules)
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
