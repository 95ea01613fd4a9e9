"""What callers say about a save, checked where they say it: what is wrong raises at once, and nothing is saved of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from . import _towline
from .errors import UsageError

#: Steps are 64-bit numbers in the engine.
_STEP_MAX = (1 << 64) - 1


def step_number(step: Any) -> int:
    """A step as a plain integer. Integers of numpy and torch are steps too; truth values and floats are not."""
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise UsageError(f"a step is a whole number, such as 1000, not {step!r} (convert it with int)") from None
    if not 0 <= number <= _STEP_MAX:
        raise UsageError(f"a step is a whole number from 0 to {_STEP_MAX}, not {number}")
    return number


def is_step(step: Any) -> bool:
    """Does it say a step by its number, and not by a choice such as "latest"?"""
    return not isinstance(step, str)


def finite_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats. What is no finite number would choose no step, and is refused."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics are a dict, such as {{'loss': 0.25}}, not {metrics!r}")
    found = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise UsageError(f"the name of a metric is text, not {name!r}")
        found[name] = _finite(name, value)
    return found


def check_save(name: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for a name or options (of `repository.save_options`) that no save takes."""
    _towline.check_save(name, dict(options))


def check_run(run: Any) -> None:
    """Raises UsageError for what cannot be the name of a run."""
    if not isinstance(run, str):
        raise UsageError(f"the name of a run is text, such as 'run-7', not {run!r}")
    _towline.check_save(f"{run}/step-0", {"metrics": {}})


def _finite(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"the metric {name!r} is a finite number, not {value!r}") from None
    if not math.isfinite(number):
        raise UsageError(
            f"the metric {name!r} is a finite number, not {number} (leave it out: a step without it is not compared by it)"
        )
    return number
