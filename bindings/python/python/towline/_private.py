"""Folders that only this user may use, in places where others may write."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from .errors import Denied


def make(path: str) -> str:
    """Makes the folder `path`, or takes it over with mode 0700 if it is this user's; returns it. Raises Denied for a link, and
    for a folder of somebody else: what lies there may be planted."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    with opened(path) as descriptor:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise Denied(f"folder {path} belongs to user {found.st_uid}: remove it, or write checkpoints elsewhere")
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
    return path


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """The folder `path` itself, open: not through a link, which raises Denied."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise Denied(f"{path} is a link or a file, expected a folder: it may be planted; remove it") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
