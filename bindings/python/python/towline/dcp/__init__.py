"""torch.distributed.checkpoint on a repository: each rank saves what is its own, and the step is there in one commit once all
ranks' parts are.

    import torch.distributed.checkpoint as dcp
    from towline.dcp import Reader, Writer

    writer = Writer("s3://bucket/experiments")
    dcp.save(state, checkpoint_id="run-7/step-100", storage_writer=writer)
    dcp.load(state, storage_reader=Reader("s3://bucket/experiments", "run-7@latest"))

`dcp.async_save` takes the same Writer, which stages in memory that it uses again from save to save: keep one for the run. With
`Writer(..., stage="background")` it returns before the state is copied: `response.staging_completion.result()` comes before the
next step of the optimizer then.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as _dcp

from ..repository import Repository
from .reader import Reader
from .stager import Stager
from .writer import Writer

__all__ = ["Reader", "Stager", "Writer", "load", "save"]


def save(state_dict: dict[str, Any], repo: Repository | str | os.PathLike[str] | None, name: str, **said: Any) -> Any:
    """Saves `state_dict` as `name`; `said` is what `torch.distributed.checkpoint.save` takes. Returns torch's metadata."""
    return _dcp.save(state_dict, storage_writer=Writer(repo, name), **said)


def load(state_dict: dict[str, Any], repo: Repository | str | os.PathLike[str] | None, name: str, **said: Any) -> None:
    """Loads `name` (or `RUN@latest`, ...) into `state_dict`, in place, whatever the number of ranks was that saved it."""
    _dcp.load(state_dict, storage_reader=Reader(repo, name), **said)
