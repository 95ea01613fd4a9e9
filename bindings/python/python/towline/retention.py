"""Which steps of a run there are, and which of them outlive later ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ._collecting import Collector
from .errors import Error, NotFound

if TYPE_CHECKING:
    from .repository import Repository


def steps(repository: Repository, run: str) -> list[int]:
    """The steps that are saved, in order."""
    try:
        runs = repository.runs(run)
    except NotFound:
        return []
    # Runs whose names begin with this one's come too.
    return [step.step for one in runs if one.run == run for step in one.steps if step.counts]


class Retention:
    """Which steps outlive later ones: the last `keep_last`, every `keep_every`th, and those whose metrics are the smallest
    (`keep_min`) or the largest (`keep_max`). Without a rule all do. With `collect` what expired steps leave behind is deleted,
    in the background."""

    def __init__(
        self,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: Iterable[str] = (),
        keep_max: Iterable[str] = (),
        *,
        collect: bool = True,
    ):
        self._collect = collect
        self._collector: Collector | None = None
        rules = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_min": list(keep_min),
            "keep_max": list(keep_max),
        }
        self._rules: dict[str, Any] = {key: rule for key, rule in rules.items() if rule}

    def expire(self, repository: Repository, run: str) -> None:
        """Takes away the steps that no rule keeps. What makes that fail is a warning: the save is done, and the next one tries
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
        """Waits for what is being deleted, but not for long: what is left is deleted by a later collect."""
        if self._collector is not None:
            self._collector.close(timeout)
