"""Retention: the steps of a run, and rules for those to keep."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import _arguments
from ._collecting import Collector
from .errors import Busy, Conflict, Error, NotFound

if TYPE_CHECKING:
    from .repository import Repository

_logger = logging.getLogger("towline")

_STEP = re.compile(r"step-([0-9]+)")

#: Tries to remove steps of a run that changes meanwhile.
_TRIES = 5
#: Numbers of steps that a message lists.
_LISTED_MAX = 20


def steps(repository: Repository, run: str) -> list[int]:
    """All saved steps, in order."""
    try:
        runs = repository.runs(run)
    except NotFound:
        return []
    # The list also has runs whose names begin with this one.
    return [step.step for one in runs if one.run == run for step in one.steps if step.counts]


@dataclass
class GivenUp:
    """Steps that a training gives up: it went back to step `start` and saves others in their place."""

    start: int
    #: Version of each name, above those of other saves. None: it waits on this node's disk, and its version is not known yet.
    versions: dict[str, int | None]
    #: True once they are removed.
    removed: bool = False

    def __post_init__(self) -> None:
        self.last = max(map(number, self.versions), default=-1)


class Branch:
    """Decides which steps a training gives up."""

    def __init__(self) -> None:
        self._later: GivenUp | None = None
        self._given_up: GivenUp | None = None

    def restored(self, step: int, later: Mapping[str, int | None]) -> None:
        """Records that `step` was restored, although the run has the steps `later`."""
        self._later, self._given_up = GivenUp(step, dict(later)) if later else None, None

    def saved(self, name: str, step: int | None) -> GivenUp | None:
        """Records a save as `name`; returns the steps to remove before it becomes durable. The first save after a restore gives
        up the later steps if it is before the last of them: otherwise the training has passed them, and the restore was for
        something else, such as an evaluation."""
        later, self._later = self._later, None
        if step is not None and later is not None and step < later.last:
            self._given_up = later
        given_up = self._given_up
        if given_up is None or given_up.removed:
            self._given_up = None
            return None
        if given_up.versions.get(name, 0) is None:
            # Later saves must not remove this one, which they could not tell from the one that waits.
            others = {other: version for other, version in given_up.versions.items() if other != name}
            self._given_up = GivenUp(given_up.start, others) if others else None
        return given_up


def later(
    repository: Repository, run: str, step: int, waiting: Iterable[str], is_latest: bool, left: Iterable[str] = ()
) -> dict[str, int | None]:
    """Steps that a training which goes on from `step` gives up, with their versions; also those of `waiting`, which are on this
    node's disk, and of `left`, which stay there for the next process. After the latest durable step there are only those:
    another process saves what the repository has beyond it."""
    found: dict[str, int | None] = {} if is_latest else {**versions(repository, run)}
    found |= dict.fromkeys(waiting)
    for name in left:
        found.setdefault(name, None)
    return {name: version for name, version in found.items() if number(name) > step}


def give_up(repository: Repository, run: str, given_up: GivenUp | None, limit: timedelta | None = None) -> None:
    """Removes the steps that a training gives up, before the first step in their place becomes durable: if the process is killed
    in between, the next one resumes the step that the training went back to. They are removed in one commit, and `undelete`
    restores them for 7 days. Raises Unreachable if the store does not answer within `limit`; raises Conflict, and removes
    nothing, if another process has gone on with them, and Busy if the run changes all the time."""
    if given_up is None or given_up.removed:
        return
    _remove(repository, run, given_up, limit)
    given_up.removed = True


def _remove(repository: Repository, run: str, given_up: GivenUp, limit: timedelta | None) -> None:
    for left in reversed(range(_TRIES)):
        there = versions(repository, run, limit)
        names = [
            name for name, version in given_up.versions.items() if name in there and version in (None, there[name])
        ]
        if not names:
            return
        _check_unchanged(run, given_up, there)
        try:
            kept = repository._remove_steps(run, {number(name) for name in names}, limit)
            # The step that the training went back to may have been removed: a run keeps its last step.
            for name in kept.intersection(names):
                repository._engine.remove(name, limit=limit)
        except (Conflict, NotFound) as error:
            # A step was saved or removed since they were listed, such as by another rank.
            if not left:
                raise Busy(f"steps of {run} change while the later ones are given up: {error}") from error
            continue
        _logger.warning(
            "%s goes on from step %s, and gives up the later steps %s: they are removed, so that restore() does not resume them. "
            "`towline undelete %s --repo %s` restores the last of them for 7 days; with --as NAME under another name, which the "
            "training does not replace",
            run, given_up.start, _listed(names), max(names, key=number), repository.url,
        )  # fmt: skip
        return


def _check_unchanged(run: str, given_up: GivenUp, there: Mapping[str, int]) -> None:
    """Raises Conflict if another process has saved a step to give up, or one beyond them."""
    for name, version in there.items():
        known = given_up.versions.get(name, version)
        if known not in (None, version) or (name not in given_up.versions and number(name) > given_up.last):
            error = Conflict(
                f"{name} was saved by another process since this training went back to step {given_up.start} of {run}: the steps "
                f"after it are not given up (give each process its own run; to replace them, restore step {given_up.start} again)"
            )
            error.place, error.help = name, "give each process its own run"
            raise error


def versions(repository: Repository, run: str, limit: timedelta | None = None) -> dict[str, int]:
    """Version of each step, by its name. Raises Unreachable if the store does not answer within `limit`."""
    named = repository._engine.names(run, limit)
    # The list also has runs whose names begin with this one.
    return {name: version for name, version in named if name.rpartition("/")[0] == run and number(name) >= 0}


def number(name: str) -> int:
    """Number of the step with this name; -1 if it is none."""
    found = _STEP.fullmatch(name.rpartition("/")[2])
    value = -1 if found is None else int(found[1])
    return value if value < 1 << 64 else -1


def _listed(names: Iterable[str]) -> str:
    """Numbers of steps for a message."""
    numbers = sorted(set(map(number, names)))
    if len(numbers) <= _LISTED_MAX:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)} steps)"


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

    def has_rules(self) -> bool:
        """True if steps are removed."""
        return bool(self._rules)

    def close(self, timeout: float | None = None) -> None:
        """Waits a short time for pending deletes; a later collect deletes the rest."""
        if self._collector is not None:
            self._collector.close(timeout)
