"""States on this node's disk that are not in the repository yet: they survive the process, and are saved from here by the next.

SPOOL/<run, escaped>/<rank>-<step>.<random>/       the files of the step
SPOOL/<run, escaped>/<rank>-<step>.<random>.json   what it is; written last, so a folder without it is unfinished
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from . import _torch
from .errors import NotFound
from .reports import SaveReport

if TYPE_CHECKING:
    from .repository import Repository


def put(spool: str, name: str, options: dict[str, Any], files: list[tuple[str, list[Any]]]) -> str:
    """Writes files, pieces of bytes or `(address, length)` each, and returns once they are on the disk. Nothing is left of it
    if that fails."""
    folder = _place(spool, name, options)
    try:
        for path, pieces in files:
            whole = os.path.join(folder, path)
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            with open(whole, "wb", buffering=0) as file:
                for piece in pieces:
                    _write(
                        file,
                        memoryview(piece) if isinstance(piece, bytes) else memoryview(_torch.over(*piece).numpy().data),
                    )
                os.fsync(file.fileno())
            _sync(os.path.dirname(whole))
        _write_record(folder, name, options)
    except BaseException:
        remove(folder)
        raise
    return folder


def link(spool: str, name: str, options: dict[str, Any], source: str) -> str:
    """As `put`, of the folder `source` as it is now: its files are linked, so that it may go. Raises OSError where files cannot
    be linked."""
    folder = _place(spool, name, options)
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        shutil.copytree(source, folder, symlinks=True, copy_function=os.link)
        _write_record(folder, name, options)
    except BaseException:
        remove(folder)
        raise
    return folder


def left(spool: str, run: str, rank: int) -> list[str]:
    """The steps of a rank that are waiting, the oldest first. What is unfinished is removed."""
    folder = os.path.join(spool, quote(run, safe=""))
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and entry.name.startswith(f"{rank}-"):
                if os.path.exists(entry.path + ".json"):
                    found.append((entry.stat().st_mtime_ns, entry.path))
                else:
                    remove(entry.path)
    return [path for _, path in sorted(found)]


def outdated(repository: Repository, folder: str) -> bool:
    """Was the step that is waiting at `folder` saved since? By the process that left it, right before it was killed, or by one
    that went on elsewhere, whose step is not to be replaced by one of the past."""
    name = _read_record(folder)["name"]
    with contextlib.suppress(NotFound):
        saved = [one.saved for one in repository.ls(name) if one.name == name]
        left = int(os.stat(folder + ".json").st_mtime)
        return any(calendar.timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")) > left for at in saved)
    return False


def save(repository: Repository, folder: str) -> SaveReport:
    """Saves what is waiting at `folder`."""
    record = _read_record(folder)
    if "part" in record["options"]:
        record["options"]["part"] = tuple(record["options"]["part"])
    return SaveReport.read(json.loads(repository._engine.save(folder, record["name"], record["options"])))


def remove(folder: str) -> None:
    """Takes away what was saved: first what says that it is whole."""
    for file in (folder + ".json", folder + ".json.part"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(file)
    shutil.rmtree(folder, ignore_errors=True)


def _place(spool: str, name: str, options: dict[str, Any]) -> str:
    run, _, step = name.rpartition("/")
    rank = options.get("part", (0, ""))[0]
    return os.path.join(spool, quote(run, safe=""), f"{rank}-{step}.{uuid.uuid4().hex}")


def _read_record(folder: str) -> dict[str, Any]:
    with open(folder + ".json", encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
        return record


def _write_record(folder: str, name: str, options: dict[str, Any]) -> None:
    """Says what a folder is, which makes it whole."""
    part = folder + ".json.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump({"name": name, "options": options}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, folder + ".json")
    _sync(os.path.dirname(folder))


def _write(file: Any, view: memoryview) -> None:
    view = view.cast("B")
    while view:
        view = view[file.write(view) :]


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
