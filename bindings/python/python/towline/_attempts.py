"""What tells one start of all ranks from others: parts of a step that different starts saved are never put together."""

from __future__ import annotations

import collections
import hashlib
import os
import re
import uuid
import weakref
from typing import Any

import torch.distributed as dist

#: What the ranks agree on lies here in the store of torch.distributed.
_KEY = "towline/attempt"

#: What can be the name of an attempt, with room for a number behind it.
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._+=-]{1,40}")


class Attempts:
    """The attempts of one rank at the steps of a run: the same on all ranks, without any collective, and others whenever all
    start again. The given one; or what the ranks agree on, where torch.distributed is initialised; or torchrun's."""

    def __init__(self, attempt: str | None = None):
        self._given = attempt
        self._store: weakref.ref[Any] | None = None
        self._agreed = ""
        self._times: collections.Counter[str] = collections.Counter()
        # Later the rank that holds the store may be gone.
        self.present()

    def present(self) -> str:
        """The present start of all ranks."""
        return self._given or self._agree() or _from_torchrun()

    def at(self, step: str) -> str:
        """The attempt to save a step now. All ranks that went back and save it again do so in another one."""
        before = self._times[step]
        return f"{self.present()}.{before + 1}" if before else self.present()

    def made(self, step: str) -> None:
        """Says that the step is being saved."""
        self._times[step] += 1

    def _agree(self) -> str | None:
        """What the first rank that asks proposes. A new start of torch.distributed has a new store."""
        if not (dist.is_available() and dist.is_initialized()):
            # What was agreed on holds for what is still saved.
            return self._agreed or None
        store = dist.distributed_c10d._get_default_store()
        if self._store is None or self._store() is not store:
            # https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.Store.compare_set
            self._agreed = bytes(store.compare_set(_KEY, "", uuid.uuid4().hex)).decode()
            self._store = weakref.ref(store)
        return self._agreed


def _from_torchrun() -> str:
    """The name of the job, and how often it was restarted
    (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if not _NAME.fullmatch(job):
        job = hashlib.sha256(job.encode()).hexdigest()[:32]
    return f"{job}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
