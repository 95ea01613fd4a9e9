"""Towline: save training state once, move only what the other side lacks.

import towline

checkpointer = towline.Checkpointer("s3://bucket/experiments", "run-7")
checkpointer.restore(into=state)          # loads the latest step in place; None if nothing is saved yet
...
checkpointer.save(step, state, metrics={"loss": loss})
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ._classes import allow_classes
from ._towline import __version__
from .errors import (
    Busy,
    Cancelled,
    Conflict,
    Damaged,
    Denied,
    DiskFull,
    Error,
    Exhausted,
    Mismatch,
    NotFound,
    SaveConflict,
    SaveFailed,
    TensorNotFound,
    Timeout,
    Unreachable,
    Unsupported,
    UnsupportedValue,
    UsageError,
)
from .hints import hint
from .repository import Repository, load, open
from .tensors import Tensor, Tensors

__all__ = [
    "Busy",
    "Cancelled",
    "Checkpointer",
    "Conflict",
    "Damaged",
    "Denied",
    "DiskFull",
    "Error",
    "Exhausted",
    "Mismatch",
    "NotFound",
    "Repository",
    "SaveConflict",
    "SaveFailed",
    "Tensor",
    "TensorNotFound",
    "Tensors",
    "Timeout",
    "Unreachable",
    "Unsupported",
    "UnsupportedValue",
    "UsageError",
    "__version__",
    "allow_classes",
    "hint",
    "load",
    "open",
]


# Submodules, most of which need additional packages: imported at first use.
_MODULES = {"accelerate", "dcp", "fsspec", "hints", "lightning", "reports", "safetensors", "transformers", "vllm"}


def __getattr__(name: str) -> Any:
    # Checkpointer imports torch, which is slow: programs that only move files do without.
    if name == "Checkpointer":
        from .checkpointer import Checkpointer

        return Checkpointer
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
