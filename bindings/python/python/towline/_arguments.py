"""Early checks of arguments: an invalid one raises before anything is done."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from . import _towline
from .errors import UsageError

#: Steps are 64-bit numbers in the engine.
_STEP_MAX = (1 << 64) - 1


def step_number(step: Any) -> int:
    """Converts a step to a plain integer. Integers of numpy and torch are valid; booleans and floats are not."""
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise UsageError(f"a step is an integer, such as 1000, not {step!r} (convert it with int)") from None
    if not 0 <= number <= _STEP_MAX:
        raise UsageError(f"a step is an integer from 0 to {_STEP_MAX}, not {number}")
    return number


def check_close_retry(seconds: float) -> None:
    """Raises UsageError unless `close_retry` is a time."""
    if not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise UsageError(f"close_retry is a number of seconds from 0 on, not {seconds!r}")


def is_step(step: Any) -> bool:
    """True for the number of a step, False for a choice such as "latest"."""
    return not isinstance(step, str)


def finite_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Converts metrics to floats. Values that are not finite are refused: steps cannot be compared by them."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics are a dict, such as {{'loss': 0.25}}, not {metrics!r}")
    found = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise UsageError(f"the name of a metric is a str, not {name!r}")
        found[name] = _finite(name, value)
    return found


def check_save(name: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for an invalid name or invalid options (of `repository.save_options`) of a save."""
    _towline.check_save(name, dict(options))


def check_positive(argument: str, number: Any) -> None:
    """Raises UsageError unless `number` is None or an integer of at least 1."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(f"{argument} is an integer of at least 1, not {number!r}")


def metric_names(argument: str, names: str | Iterable[str]) -> list[str]:
    """Converts the argument `keep_min` or `keep_max` to a list; a string is one name."""
    found = [names] if isinstance(names, str) else list(names)
    if not all(isinstance(name, str) for name in found):
        raise UsageError(f"{argument} names metrics, such as ['loss'], not {names!r}")
    return found


def check_run(run: Any) -> None:
    """Raises UsageError for an invalid name of a run."""
    if not isinstance(run, str):
        raise UsageError(f"the name of a run is a str, such as 'run-7', not {run!r}")
    _towline.check_save(f"{run}/step-0", {"metrics": {}})
    _towline.check_run(run)


def duration(value: str | float | timedelta, argument: str) -> timedelta:
    """Converts a length of time: a number of seconds, a `timedelta`, or a text such as "2h"."""
    if isinstance(value, str):
        return _towline.span(value, argument)
    found = value if isinstance(value, timedelta) else timedelta(seconds=value)
    if found < timedelta(0):
        raise UsageError(f"{argument} is a duration such as '24h' or a number of seconds, not {value!r}")
    return found


def _finite(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        # torch warns if a tensor that requires grad is converted.
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"the metric {name!r} is a finite number, not {value!r}") from None
    if not math.isfinite(number):
        raise UsageError(
            f"the metric {name!r} is a finite number, not {number} (leave it out: a step without it is not compared by it)"
        )
    return number
