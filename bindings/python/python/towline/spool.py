"""Spool: states on this node's disk that are not in the repository yet. If the process dies, the next one uploads them.

SPOOL/<run, escaped>/<rank>-<step>.<random>/       the files of the step
SPOOL/<run, escaped>/<rank>-<step>.<random>.json   its record: name, options, steps that it replaces ("given_up"), and what its
                                                   process knew of the run ("origin"). Written last: without it the folder is
                                                   incomplete
SPOOL/<run, escaped>/<rank>-<step>.<random>.left   mark of a step that failed for good: the next process takes it
SPOOL/<run, escaped>/dropped-<rank>-<step>.<random>/
                                                   files of a step that another process has superseded, for the user
SPOOL/<run, escaped>/<rank>-known                  version of the last step that was saved from folders of links
SPOOL/<run, escaped>/owner-<id>                    lock of a running process: see `_owners`

All goes through open folders: others may be able to rename the spool and to put a link in its place.
"""

from __future__ import annotations

import calendar
import contextlib
import errno
import json
import logging
import os
import stat
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from . import _owners, _private, _torch, _towline
from ._origins import Origin
from ._owners import Owner
from .errors import Conflict, Damaged, Error, NotFound
from .reports import SaveReport
from .retention import GivenUp, number

if TYPE_CHECKING:
    from datetime import timedelta

    from .repository import Repository

T = TypeVar("T")

_logger = logging.getLogger("towline")

#: Beginning of the names of folders with superseded steps.
_ASIDE = "dropped-"
#: Maximum bytes of a record.
_RECORD_MAX = 16 << 20
#: Seconds for which steps in the spool for another repository are recent.
_RECENT = 86400
#: Seconds that a new owner waits for the steps of others in its process.
_PATIENCE = 20.0


class SpooledStep:
    """A step in a spool: the folder `name` in the open folder of its run."""

    def __init__(self, run: _private.Folder, name: str):
        self.run, self.name = run, name
        self.record = name + ".json"
        #: Mark of a step that its process gave up.
        self.mark = name + _owners.LEFT

    @property
    def step(self) -> str:
        """Name of the step in the repository."""
        step = self.name.partition("-")[2].rpartition(".")[0]
        return f"{unquote(os.path.basename(self.run.shown))}/{step}"

    def __str__(self) -> str:
        return os.path.join(self.run.shown, self.name)


class Unusable:
    """Warns of a spool that takes no steps: once for each cause, until it takes one."""

    def __init__(self) -> None:
        self._told: tuple[int | None, str] | None = None

    def tell(self, spool: str, name: str, error: OSError) -> None:
        """Warns that the step `name` cannot be put into the spool, unless the last one could not either for the same cause."""
        cause = (error.errno, type(error).__name__)
        if cause == self._told:
            return
        self._told = cause
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"free space in {spool}"
        elif error.errno == errno.EROFS:
            remedy = f"mount the file system of {spool} writable"
        else:
            remedy = f"see that this user owns {spool}, and can write to it"
        warnings.warn(
            f"towline: {name} cannot be spooled to this node's disk: {error} (the save continues without it; so do later ones, "
            f"without another warning; {remedy}, or pass another folder as spool=)",
            stacklevel=3,
        )

    def ended(self) -> None:
        """Records that the spool took a step."""
        self._told = None


def opened(spool: str) -> _private.Folder:
    """Opens the spool of a repository, a folder that only this user can use, created if there is none. Raises Denied if another
    user made it, or a link in its place: the folder that it lies in is the user's choice, its name is not."""
    above, name = os.path.split(spool)
    with _private.given(above) as folder:
        return folder.inside(name, own=True)


def put(
    spool: str,
    name: str,
    options: dict[str, Any],
    files: list[tuple[str, list[Any]]],
    given_up: GivenUp | None = None,
    origin: Origin | None = None,
    owner: Owner | None = None,
) -> SpooledStep:
    """Writes files and returns their place once they are on disk. Each file is a list of pieces: bytes, or `(address, length)`.
    `given_up` are the steps to remove before this one is saved. Other processes leave the step alone while its `owner` runs. If
    this fails, nothing is left behind. Raises Denied as `opened` does."""
    # Only this user may read states, and write what a later process saves.
    kept = _place(opened(spool), name, options, owner)
    try:
        os.mkdir(kept.name, 0o700, dir_fd=kept.run.descriptor)
        for path, pieces in files:
            whole = os.path.join(kept.run.at(kept.name), path)
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            with open(whole, "wb", buffering=0) as file:
                for piece in pieces:
                    _write(
                        file,
                        memoryview(piece) if isinstance(piece, bytes) else memoryview(_torch.over(*piece).numpy().data),
                    )
                os.fsync(file.fileno())
            _sync(os.path.dirname(whole))
        _write_record(kept, name, options, given_up, origin)
    except BaseException:
        remove(kept)
        raise
    return kept


def link(
    spool: _private.Folder,
    name: str,
    options: dict[str, Any],
    source: int,
    given_up: GivenUp | None = None,
    origin: Origin | None = None,
    owner: Owner | None = None,
) -> SpooledStep:
    """As `put`, for the folder with the descriptor `source`: its files are hard-linked, so that they may be removed there. Raises
    OSError if files cannot be linked."""
    kept = _place(spool, name, options, owner)
    try:
        with kept.run.inside(kept.name) as folder:
            _private.link_tree(source, folder.descriptor)
        _write_record(kept, name, options, given_up, origin)
    except BaseException:
        remove(kept)
        raise
    return kept


def pending(spool: _private.Folder, run: str, rank: int) -> list[SpooledStep]:
    """Steps of a rank that processes left in the spool, the oldest first. Removes incomplete ones. Leaves those of running
    processes alone; first waits some time for those of others in this process."""
    try:
        folder = spool.inside(quote(run, safe=""), create=False)
    except FileNotFoundError:
        return []
    _wait_for_own(folder, rank)
    _owners.sweep(folder.descriptor)
    found, others = [], []
    for name in os.listdir(folder.descriptor):
        if not name.startswith(f"{rank}-") or not folder.holds(name, stat.S_IFDIR):
            continue
        kept = SpooledStep(folder, name)
        if _owners.is_live(folder.descriptor, name):
            others.append(kept.step)
        elif folder.holds(kept.record, stat.S_IFREG):
            made = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False).st_mtime_ns
            found.append((made, name, kept))
        else:
            remove(kept)
    if others:
        _logger.warning(
            "%s in %s: left to the running process that saves them", ", ".join(sorted(others)), folder.shown
        )
    return [kept for _, _, kept in sorted(found, key=lambda one: one[:2])]


def _wait_for_own(folder: _private.Folder, rank: int) -> None:
    until = time.monotonic() + _PATIENCE
    for name in os.listdir(folder.descriptor):
        while (
            name.startswith(f"{rank}-")
            and _owners.is_mine(folder.descriptor, name)
            and folder.holds(name, stat.S_IFDIR)
            and time.monotonic() < until
        ):
            time.sleep(0.01)


def of_replaced(spool: str, run: str, rank: int) -> list[str]:
    """Paths of a rank's steps that were left for a repository that was at this place before; `spool` is the folder of the one
    that is there now."""
    return [path for is_replaced, path, _ in _of_others(spool, run, rank) if is_replaced]


def of_others(spool: str, run: str, rank: int) -> list[tuple[int, str]]:
    """Numbers and paths of a rank's steps that this user put into the spool in the last day, for repositories at other places
    that have a run of this name, in their order; `spool` is the folder of this repository."""
    found = []
    for is_replaced, path, written in _of_others(spool, run, rank):
        step = number(os.path.basename(path).partition("-")[2].rpartition(".")[0])
        if not is_replaced and step >= 0 and time.time() - written < _RECENT:
            found.append((step, path))
    return sorted(found)


def _of_others(spool: str, run: str, rank: int) -> Iterator[tuple[bool, str, float]]:
    """A rank's steps that processes of this user left in the spool for other repositories than that of the folder `spool`:
    whether it was at the same place, the path, and the time of the record."""
    folder, own = os.path.split(spool)
    place = own.rpartition("-")[2]
    with contextlib.suppress(OSError):
        for other in sorted(os.listdir(folder)):
            steps = os.path.join(folder, other, quote(run, safe=""))
            with contextlib.suppress(OSError):
                names = sorted(os.listdir(steps)) if other != own else []
                records = [name for name in names if name.startswith(f"{rank}-") and name.endswith(".json")]
                for name in records:
                    record = os.stat(os.path.join(steps, name), follow_symlinks=False)
                    path = os.path.join(steps, name.removesuffix(".json"))
                    # Others may have planted names that look like records.
                    if stat.S_ISREG(record.st_mode) and record.st_uid == os.geteuid() and not _is_live(path):
                        yield other.rpartition("-")[2] == place, path, record.st_mtime


def _is_live(path: str) -> bool:
    """True if the owner of the step at `path` still runs."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _owners.is_live(descriptor, name)
    finally:
        os.close(descriptor)


def outdated(repository: Repository, kept: SpooledStep) -> bool:
    """True if the repository has a later save of the step `kept`: by the process that left it, right before it was killed, or by
    one that continued elsewhere, whose step must not be replaced by an older one."""
    name = _read_record(kept)["name"]
    with contextlib.suppress(NotFound):
        saved = [one.saved for one in repository.ls(name) if one.name == name]
        left = int(os.stat(kept.record, dir_fd=kept.run.descriptor, follow_symlinks=False).st_mtime)
        return any(calendar.timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")) > left for at in saved)
    return False


def given_up(kept: SpooledStep) -> GivenUp | None:
    """Steps to remove before the step `kept` is saved. Raises Damaged if its record has others than steps of its run."""
    found = _read_record(kept).get("given_up")
    if found is None:
        return None
    run = kept.step.rpartition("/")[0]
    try:
        read = GivenUp(int(found["start"]), dict(found["versions"]))
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"record of {kept} has steps to give up that cannot be read: {error!r}") from error
    for name, version in read.versions.items():
        of_run = name.rpartition("/")[0] == run and number(name) >= 0
        if not of_run or not (version is None or isinstance(version, int)):
            raise Damaged(f"record of {kept} gives up {name!r} in version {version!r}, expected a step of {run!r}")
    return read


def origin(kept: SpooledStep) -> Origin | None:
    """Knowledge of the run that the process of the step `kept` had; None if it did not record any. Raises Damaged if it cannot be
    read."""
    found = _read_record(kept).get("origin")
    try:
        return None if found is None else Origin.read(found)
    except (ValueError, AttributeError) as error:
        raise Damaged(f"record of {kept} has an origin that cannot be read: {error}") from error


def is_same(repository: Repository, kept: SpooledStep, limit: timedelta) -> bool:
    """True if the step `kept` has the same content in the repository; a rank's part is one folder of the step. Raises Unreachable
    if the store does not answer within `limit`."""
    part = _read_record(kept)["options"].get("part")
    path = "" if part is None else f"rank-{int(part[0]):05}"
    place = os.path.join(kept.run.at(kept.name), path)
    try:
        repository._engine.find(kept.step, limit)
        report = repository.restore(kept.step, place, path=path or None, overwrite=True, delete=True, dry_run=True)
    except (NotFound, Conflict):
        return False
    return (
        report.reused_bytes == report.bytes
        and not report.replaced_files
        and not (report.removed and report.removed.files)
    )


def set_known(kept: SpooledStep, version: int) -> None:
    """Records the version that the step `kept` got, before it is removed: steps after it are known to be of the same training."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(_known(kept) + ".part", dir_fd=kept.run.descriptor)
    _write_json(kept.run, _known(kept), {"version": version})


def known(kept: SpooledStep) -> int:
    """Version that `set_known` recorded last; 0 if there is none."""
    try:
        return int(json.loads(_private.read(_known(kept), _RECORD_MAX, inside=kept.run) or b"{}").get("version", 0))
    except (ValueError, TypeError, AttributeError):
        return 0


def _known(kept: SpooledStep) -> str:
    return kept.name.partition("-")[0] + "-known"


def save(repository: Repository, kept: SpooledStep, options: Mapping[str, Any] | None = None) -> SaveReport:
    """Saves the step `kept` to the repository; `options` go before those of its record. Raises Conflict if another process saved
    the step since it was spooled, and Damaged if its record is not one that `put` or `link` wrote."""
    return SaveReport.read(json.loads(_call(repository._engine.save, kept, options)))


def begin_save(repository: Repository, kept: SpooledStep, options: Mapping[str, Any]) -> _towline.Task:
    """As `save`, in the background."""
    return _call(repository._engine.begin_save, kept, options)


def _call(save: Callable[[str, str, dict[str, Any]], T], kept: SpooledStep, options: Mapping[str, Any] | None) -> T:
    """Calls `save` with the place, name and options of a step."""
    record = _read_record(kept)
    record["options"] |= options or {}
    place = kept.run.at(kept.name)
    try:
        if "part" in record["options"]:
            record["options"]["part"] = tuple(record["options"]["part"])
        return save(place, record["name"], record["options"])
    except (TypeError, ValueError) as error:
        if isinstance(error, Error):
            raise
        raise Damaged(f"record of {kept} has options of another version: {error}") from error


def leave(kept: SpooledStep) -> None:
    """Leaves a step that failed for good to whoever looks for steps next, although this process still runs."""
    try:
        _owners.leave(kept.run.descriptor, kept.name)
    except OSError as error:
        _logger.warning("%s stays at %s until this process ends: %s", kept.step, kept, error)


def remove(kept: SpooledStep) -> None:
    """Removes a step from the spool: first the record that marks it as complete."""
    for file in (kept.record, kept.record + ".part", kept.mark):
        with contextlib.suppress(FileNotFoundError):
            os.remove(file, dir_fd=kept.run.descriptor)
    kept.run.remove(kept.name)


def set_aside(kept: SpooledStep) -> str:
    """Takes a step out of the spool, but leaves its files there, in a folder of another name; returns its path."""
    run = kept.run.descriptor
    # First the folder: without its record it would be removed as incomplete.
    os.rename(kept.name, _ASIDE + kept.name, src_dir_fd=run, dst_dir_fd=run)
    for file in (kept.record, kept.mark):
        with contextlib.suppress(FileNotFoundError):
            os.remove(file, dir_fd=run)
    os.fsync(run)
    return os.path.join(kept.run.shown, _ASIDE + kept.name)


def _place(spool: _private.Folder, name: str, options: dict[str, Any], owner: Owner | None) -> SpooledStep:
    run, _, step = name.rpartition("/")
    rank = options.get("part", (0, ""))[0]
    folder = spool.inside(quote(run, safe=""))
    random = uuid.uuid4().hex if owner is None else owner.new_name(folder)
    return SpooledStep(folder, f"{rank}-{step}.{random}")


def _read_record(kept: SpooledStep) -> dict[str, Any]:
    text = _private.read(kept.record, _RECORD_MAX, inside=kept.run)
    if text is None:
        raise NotFound(f"{kept} has no record of at most {_RECORD_MAX} bytes")
    try:
        record: dict[str, Any] = json.loads(text)
        name, _ = record["name"], record["options"].keys()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"record of {kept} cannot be read: {error!r}") from error
    if name != kept.step:
        raise Damaged(f"record of {kept} is of {name!r}, expected {kept.step!r}")
    return record


def _write_record(
    kept: SpooledStep,
    name: str,
    options: dict[str, Any],
    given_up: GivenUp | None = None,
    origin: Origin | None = None,
) -> None:
    """Writes the record of a step, which marks it as complete."""
    record: dict[str, Any] = {"name": name, "options": options}
    if given_up is not None:
        record["given_up"] = {"start": given_up.start, "versions": given_up.versions}
    if origin is not None:
        record["origin"] = {"known": origin.known, "starts": origin.starts}
    _write_json(kept.run, kept.record, record)


def _write_json(folder: _private.Folder, name: str, content: dict[str, Any]) -> None:
    part, run = name + ".part", folder.descriptor
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o600, dir_fd=run), "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, name, src_dir_fd=run, dst_dir_fd=run)
    os.fsync(run)


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
