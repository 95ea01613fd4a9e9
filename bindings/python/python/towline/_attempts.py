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

#: Key of the agreed id in the store of torch.distributed.
_KEY = "towline/attempt"

#: Valid name of an attempt, with room for a number after it.
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._+=-]{1,40}")


class Attempts:
    """Attempts of one rank at the steps of a run. They are equal on all ranks, without a collective, and change when all ranks
    restart. Sources, in order: the given id; the id that ranks agree on in torch.distributed; the id and restart count of
    torchrun."""

    def __init__(self, attempt: str | None = None):
        self._given = attempt
        self._store: weakref.ref[Any] | None = None
        self._agreed = ""
        self._times: collections.Counter[str] = collections.Counter()
        # Agrees now: later the rank that hosts the store may have ended.
        self.current()

    def current(self) -> str:
        """Id of the current start of all ranks."""
        return self._given or self._agree() or _from_torchrun()

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


def _from_torchrun() -> str:
    """Id of the job and number of its restarts
    (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if not _NAME.fullmatch(job):
        job = hashlib.sha256(job.encode()).hexdigest()[:32]
    return f"{job}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
