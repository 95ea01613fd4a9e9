"""Hints: where a job should run, given its data. Answered by this node's agent, which has a sites file (docs/placement.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

from ._arguments import duration
from ._towline import agent_request
from .errors import Denied, Error, Timeout

__all__ = ["Candidate", "Commitment", "Hint", "hint"]

# Seconds that the agent may read the chunks of names that are new to it.
_READ = 60
# Seconds from one look at a commitment to the next.
_LOOK = 0.5


def _seconds(value: str | float | timedelta, argument: str) -> float:
    return duration(value, argument).total_seconds()


class _Answer:
    """JSON of an agent; its fields are attributes."""

    def __init__(self, answer: dict[str, Any]) -> None:
        #: The answer as it came.
        self.raw = answer

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["raw"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} has no field {name!r}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.raw!r})"


class Candidate(_Answer):
    """One site: `site`, `rank`, `score`, `verdict`, `deny`, `bytes`, `eta_s`, `usd_micro`, `capacity`, `sources`, `reasons`."""

    @property
    def is_allowed(self) -> bool:
        """True if the policy lets the data go there."""
        return bool(self.verdict == "allow")


class Hint(_Answer):
    """Sites for a job, the best first: `candidates`. Other fields: `hint_id`, `generated_at`, `complete`, `inputs`, `notes`."""

    def __init__(self, answer: dict[str, Any], gpus: int = 0) -> None:
        super().__init__(answer)
        self._gpus = gpus
        self.candidates = [Candidate(one) for one in answer["candidates"]]

    @property
    def best(self) -> Candidate | None:
        """The best site where the data may go; None if there is none."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.is_allowed else None

    def commit(self, site: str | None = None, *, lease: str | float | timedelta = "1h") -> Commitment:
        """Has an agent of `site`, or of the best one, hold the inputs for `lease` and fetch them now.

        A repetition renews the lease. Raises `Denied` if the data may go to no site, `Exhausted` if it does not fit there.
        """
        if site is None:
            best = self.best
            if best is None:
                raise Denied("the data may go to none of the sites")
            site = best.site
        body = {"site": site, "inputs": self.inputs, "lease": _seconds(lease, "lease")}
        if self._gpus:
            body["gpus"] = self._gpus
        answer, at = agent_request("POST", f"/v1/hints/{self.hint_id}/commit", json.dumps(body), site)
        return Commitment(json.loads(answer), at or site)


class Commitment:
    """Inputs that an agent holds. As a context manager, it releases them at its end."""

    def __init__(self, answer: dict[str, Any], at: str) -> None:
        self._answer = answer
        #: The agent that holds them.
        self.at = at

    @property
    def _path(self) -> str:
        return f"/v1/hints/{self._answer['hint_id']}"

    @property
    def bytes(self) -> int:
        """Stored bytes that are held."""
        return int(self._answer["bytes"])

    def missing_bytes(self) -> int:
        """Stored bytes that are not there yet."""
        answer, _ = agent_request("GET", self._path, None, self.at)
        self._answer = json.loads(answer)
        return int(self._answer["missing_bytes"])

    def wait(self, timeout: str | float | timedelta | None = None) -> None:
        """Returns once everything is there; raises `Timeout` after `timeout`, or an `Error` if it cannot be fetched.

        The GPUs of the hint are taken to start then: what they did not idle is in `towline usage`.
        """
        end = None if timeout is None else time.monotonic() + _seconds(timeout, "timeout")
        while missing := self.missing_bytes():
            self._check_fetch()
            if end is not None and time.monotonic() >= end:
                raise Timeout(f"{missing} bytes are still missing at {self.at}")
            time.sleep(_LOOK)
        if self._answer.get("gpus"):
            agent_request("POST", f"{self._path}/outcome", json.dumps({"started": True}), self.at)

    def _check_fetch(self) -> None:
        task = self._answer["task"]
        if task is None:
            return
        answer, _ = agent_request("GET", f"/v1/tasks/{task}", None, self.at)
        fetch = json.loads(answer)
        if fetch["state"] == "done" and (missing := self.missing_bytes()):
            raise Error(
                f"{missing} bytes of the inputs could not be fetched at {self.at}: no source that answers has them, or they are "
                "damaged; the log of the agent says which (commit the hint again to go on)"
            )
        if fetch["state"] in ("failed", "cancelled"):
            reason = (fetch.get("error") or {}).get("message", "it was stopped")
            raise Error(f"the inputs are not fetched at {self.at}: {reason} (commit the hint again to go on)")

    def renew(self, lease: str | float | timedelta) -> None:
        """Holds them for `lease` from now on."""
        body = json.dumps({"lease": _seconds(lease, "lease")})
        answer, _ = agent_request("POST", f"{self._path}/outcome", body, self.at)
        self._answer = json.loads(answer)

    def release(self) -> None:
        """Releases them: they stay in the cache as long as there is space."""
        agent_request("POST", f"{self._path}/outcome", "{}", self.at)

    def __enter__(self) -> Commitment:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hint(
    *names: str,
    at: Iterable[str] = (),
    gpus: int = 0,
    gpu_usd_h: float | None = None,
    runtime: str | float | timedelta = 0,
    deadline: str | None = None,
    objective: Literal["time", "cost", "weighted"] = "time",
    usd_per_hour: float = 0.0,
    quantile: float = 0.5,
    max_usd: float | None = None,
    max_time: str | float | timedelta | None = None,
) -> Hint:
    """Compares sites for a job that reads `names`, such as `run-7@latest`; moves nothing.

    `at` are the sites to compare (default: all of the sites file); the other arguments are those of `towline hint`.
    """
    request = {
        "apiVersion": "towline.dev/v1",
        "workload": {
            "gpus": gpus,
            "gpu_usd_h": gpu_usd_h,
            "runtime_s": int(_seconds(runtime, "runtime")),
            "deadline": deadline,
        },
        "inputs": [{"ref": name} for name in names],
        "candidates": [{"site": site} for site in at],
        "objective": {
            "mode": objective,
            "usd_per_hour": usd_per_hour,
            "quantile": quantile,
            "max_usd": max_usd,
            "max_seconds": None if max_time is None else _seconds(max_time, "max_time"),
        },
    }
    answer, _ = agent_request("POST", f"/v1/hints?wait={_READ}s", json.dumps(request))
    return Hint(json.loads(answer), gpus)
