"""torch.distributed.checkpoint (DCP) with a repository as storage. Each rank saves its own shards; the step becomes visible in
one commit once the parts of all ranks are saved.

    import torch.distributed.checkpoint as dcp
    from towline.dcp import StorageReader, StorageWriter

    writer = StorageWriter("s3://bucket/experiments")
    writer.metrics = {"loss": loss}                       # optional, for `RUN@min=loss`
    dcp.save(state, checkpoint_id="run-7/step-100", storage_writer=writer)
    dcp.load(state, storage_reader=StorageReader("s3://bucket/experiments", "run-7@latest"))

`dcp.async_save` takes the same StorageWriter. Create one and keep it for the whole run: it reuses its staging memory. With
`StorageWriter(..., stage="background")`, `async_save` returns before the state is copied; call
`response.staging_completion.result()` before the next optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import state_dict_loader as _loader
from torch.distributed.checkpoint import state_dict_saver as _saver

from ..repository import Repository
from .reader import StorageReader
from .stager import Stager
from .writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter", "load", "save"]


def save(
    state_dict: dict[str, Any],
    repo: Repository | str | os.PathLike[str] | None,
    name: str,
    *,
    metrics: Mapping[str, float] | None = None,
    create: bool | None = None,
    **options: Any,
) -> Any:
    """Saves `state_dict` as `name`, with `metrics`; returns torch's metadata. `create` is as for `towline.open`. `options` are
    further keyword arguments of `torch.distributed.checkpoint.save`."""
    return _saver.save(state_dict, storage_writer=StorageWriter(repo, name, metrics=metrics, create=create), **options)


def load(
    state_dict: dict[str, Any], repo: Repository | str | os.PathLike[str] | None, name: str, **options: Any
) -> None:
    """Loads `name` (or `RUN@latest`, ...) into `state_dict`, in place. The number of ranks may differ from that of the save.
    `options` are further keyword arguments of `torch.distributed.checkpoint.load`."""
    _loader.load(state_dict, storage_reader=StorageReader(repo, name), **options)
