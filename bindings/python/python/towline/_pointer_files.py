"""Pointer files: small files at paths where a framework looks for a checkpoint. Each refers to a checkpoint in a repository.

A pointer file is a file for torch.load that contains one call of `towline.lightning.load_pointer_file`, so that torch.load
returns the checkpoint. The reference is also stored as JSON in the same file, so that it can be read here without running code.
"""

from __future__ import annotations

import calendar
import io
import json
import os
import time
import uuid
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from . import _private

#: Maximum bytes of a pointer file.
_LENGTH_MAX = 16 << 10
#: Path of the JSON record in the file, which is a zip archive.
_ENTRY = "archive/towline.json"
#: Keys of the record.
_KEYS = ("repository", "name", "file", "folder", "url")


class _Call:
    """Object that unpickles to a call. Its tensor is mapped by torch.load's map_location, and so shows the device."""

    def __init__(self, load: Callable[[str, torch.Tensor], Any], text: str):
        self._load, self._text = load, text

    def __reduce__(self) -> tuple[Any, ...]:
        return self._load, (self._text, torch.zeros(1, dtype=torch.uint8))


def write(
    path: str, record: dict[str, str], load: Callable[[str, torch.Tensor], Any], saved: str | None = None
) -> None:
    """Writes a pointer file to `path`, atomically. `load` is the function that it calls, `saved` its modification time."""
    text = json.dumps(record)
    made = io.BytesIO()
    torch.save(_Call(load, text), made)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr(_ENTRY, text)
    # A name that nobody can guess, of any length of the file's, and no link is followed: others may write to the folder.
    part = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o666), "wb") as file:
        try:
            file.write(made.getbuffer())
            file.flush()
            if saved is not None:
                seconds = calendar.timegm(time.strptime(saved, "%Y-%m-%dT%H:%M:%SZ"))
                os.utime(file.fileno(), (seconds, seconds))
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise


def read(path: str) -> dict[str, str] | None:
    """Reads the record of the pointer file at `path`; None if there is no pointer file."""
    text = _private.read(path, _LENGTH_MAX, follow=True)
    if text is None:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(text)) as archive:
            entry = archive.getinfo(_ENTRY)
            # `write` stores it: what is compressed may stand for any number of bytes.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _LENGTH_MAX:
                return None
            return parsed(archive.read(entry).decode())
    except (zipfile.BadZipFile, KeyError, ValueError):
        return None


def parsed(text: str) -> dict[str, str]:
    """Parses the record of a pointer file. Raises ValueError if it is invalid."""
    record = json.loads(text)
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in _KEYS):
        raise ValueError("this is not the record of a pointer file")
    return record
