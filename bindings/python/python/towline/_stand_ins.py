"""Stand-ins: small files that lie where a framework looks for a checkpoint, and stand for one in a repository.

A stand-in is a file of torch's, which holds one call of `towline.lightning.load_stand_in`: what reads it with torch.load gets
the checkpoint. What it stands for is written beside the call as JSON, which is read here without running anything.
"""

from __future__ import annotations

import calendar
import io
import json
import os
import time
import zipfile
from collections.abc import Callable
from typing import Any

import torch

#: Larger files are no stand-ins.
_LENGTH_MAX = 16 << 10
#: Where in the file it says what it stands for.
_ENTRY = "archive/towline.json"
#: What it says.
_KEYS = ("repository", "name", "file", "folder", "url")


class _Call:
    """What is unpickled as a call. The tensor goes where torch.load's map_location puts tensors, and so shows the device."""

    def __init__(self, load: Callable[[str, torch.Tensor], Any], text: str):
        self._load, self._text = load, text

    def __reduce__(self) -> tuple[Any, ...]:
        return self._load, (self._text, torch.zeros(1, dtype=torch.uint8))


def write(
    path: str, record: dict[str, str], load: Callable[[str, torch.Tensor], Any], saved: str | None = None
) -> None:
    """Puts a stand-in at `path`, whole or not at all. `load` is what it calls, `saved` the time that the file gets."""
    text = json.dumps(record)
    made = io.BytesIO()
    torch.save(_Call(load, text), made)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr(_ENTRY, text)
    part = f"{path}.{os.getpid()}.part"
    with open(part, "wb") as file:
        file.write(made.getbuffer())
    if saved is not None:
        seconds = calendar.timegm(time.strptime(saved, "%Y-%m-%dT%H:%M:%SZ"))
        os.utime(part, (seconds, seconds))
    os.replace(part, path)


def read(path: str) -> dict[str, str] | None:
    """What the stand-in at `path` says; None, if there is none."""
    if not os.path.isfile(path) or os.path.getsize(path) > _LENGTH_MAX:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return parsed(archive.read(_ENTRY).decode())
    except (zipfile.BadZipFile, KeyError, ValueError):
        return None


def parsed(text: str) -> dict[str, str]:
    """What a stand-in says. Raises ValueError, if it says something else."""
    record = json.loads(text)
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in _KEYS):
        raise ValueError("this is not what a stand-in says")
    return record
