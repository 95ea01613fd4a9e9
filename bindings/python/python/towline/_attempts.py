"""Attempts: ids of a start of all ranks. Parts of a step from different starts are never combined."""

from __future__ import annotations

import collections
import hashlib
import os
import re
import uuid
import weakref
from typing import Any

import torch.distributed as dist

from .errors import UsageError

#: Key of the agreed id in the store of torch.distributed.
_KEY = "towline/attempt"

#: Valid id of an attempt.
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._+=-]+")
#: Bytes for a number after an id.
_NUMBER = 20
#: Steps of Slurm from this number on are no launches of srun, but the batch script, an interactive shell and the like
#: (https://slurm.schedmd.com/sacct.html#SECTION_Job-Steps).
_SLURM_SPECIAL = 0xFFFFFFF0
#: Bytes of an id, at most.
_LENGTH_MAX = 64


class Attempts:
    """Attempts of one rank at the steps of a run. They are equal on all ranks, without a collective, and change when all ranks
    restart. Sources, in order: the given id; the id that ranks agree on in torch.distributed; the launch of torchrun, srun or
    mpirun. For the given one and those of launchers the step that the ranks resumed from is added: an id that is used for two
    starts then tells them apart, unless both resumed from the same step."""

    def __init__(self, attempt: str | None = None):
        self._given = attempt
        self._store: weakref.ref[Any] | None = None
        self._agreed = ""
        self._times: collections.Counter[str] = collections.Counter()
        self._resumed = ""
        # Agrees now: later the rank that hosts the store may have ended.
        self._agree()

    def current(self) -> str:
        """Id of the current start of all ranks. Raises UsageError if there is none."""
        if self._given is None and (agreed := self._agree()):
            return agreed
        found = self._given or from_launcher()
        if found is None:
            raise UsageError(
                "nothing tells this start of the ranks from another one, whose parts of a step must not be mixed with theirs: "
                "pass attempt=, a text that all ranks share and that changes at every start, or initialize torch.distributed "
                "before"
            )
        return _short(found + self._resumed)

    def resumed(self, step: int, version: int) -> None:
        """Records that the ranks resume from a step, of this version of its name; counts only before the first save."""
        if not self._times:
            self._resumed = f".{step}-{version}"

    def for_save(self, step: str) -> str:
        """Attempt for the next save of a step. If all ranks go back and save a step again, the attempt is a new one."""
        before = self._times[step]
        return f"{self.current()}.{before + 1}" if before else self.current()

    def record(self, step: str) -> None:
        """Records that the step is being saved."""
        self._times[step] += 1

    def _agree(self) -> str | None:
        """Id that the first rank to ask has proposed. A new start of torch.distributed has a new store."""
        if not (dist.is_available() and dist.is_initialized()):
            # After torch.distributed is destroyed, the last saves still use the agreed id.
            return self._agreed or None
        store = dist.distributed_c10d._get_default_store()
        if self._store is None or self._store() is not store:
            # https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.Store.compare_set
            self._agreed = bytes(store.compare_set(_KEY, "", uuid.uuid4().hex)).decode()
            self._store = weakref.ref(store)
        return self._agreed


def from_launcher() -> str | None:
    """Id of the launch of all ranks, from the environment that a launcher gives them; None without one.

    - torchrun: id of the job, unless it is the default for all, and number of restarts
      (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)
    - srun: ids of the job and of the launch in it, and number of requeues
      (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES)
    - mpirun, and others with PMIx: the namespace, which is unique for each launch
      (https://github.com/openpmix/openpmix/wiki/3May2017, https://github.com/open-mpi/ompi/pull/2091)
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job not in ("", "none"):
        return f"{_short(job, 32)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    job, launch = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
    if job and launch.isdecimal() and int(launch) < _SLURM_SPECIAL:
        return _short(f"slurm-{job}.{launch}-{os.environ.get('SLURM_RESTART_COUNT', '0')}")
    namespace = os.environ.get("PMIX_NAMESPACE")
    return _short(f"pmix-{namespace}") if namespace else None


def _short(text: str, length_max: int = _LENGTH_MAX - _NUMBER) -> str:
    """The text itself, or a hash of it if it is too long or has other characters than an id."""
    return text if len(text) <= length_max and _NAME.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:32]
