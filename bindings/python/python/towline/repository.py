"""Repositories: the storage of saved trees. A tree is a file, or a folder with all files in it, saved under a name."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import _arguments, _progress, _towline
from .errors import NotFound, UsageError
from .reports import (
    CollectReport,
    ExpireReport,
    History,
    RestoreReport,
    Run,
    Saved,
    SaveReport,
    SettleReport,
    SyncReport,
    Tree,
    Undeleted,
    VerifyReport,
)
from .tensors import Tensors

if TYPE_CHECKING:
    import torch

#: Compression of a save, by the words of the command line: "auto" stores data as small as possible; "if-faster" stores it
#: uncompressed while the store takes bytes faster than they can be compressed; "predict" also predicts weights from the step
#: before, for runs that save each step; "off" never compresses.
Compression = Literal["auto", "if-faster", "predict", "off"]
_COMPRESSIONS = typing.get_args(Compression)

#: A call that creates a repository, in messages (`errors.make`).
_OPEN_CREATE = re.compile(r"towline\.open\((?:'[^']*'|\"[^\"]*\"), create=True\)")

_logger = logging.getLogger("towline")


def open(
    url: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    *,
    create: bool | None = None,
    cache: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    region: str | None = None,
    allow_http: bool = False,
) -> Repository:
    """Opens the repository at `url`: a folder, or `s3://bucket/prefix`; by default `$TOWLINE_REPO`, else the default folder of
    the command line. If there is no repository, it is created, with a warning in the log `towline`. The folder or bucket is
    created, too, if it is missing. `create=False` raises NotFound instead, so that a mistyped URL is found. Without `create`,
    NotFound is also raised if this user had a repository in the folder: its disk may not be mounted. `create=True` creates a new
    one then.

    `memory` limits the engine's buffers, in bytes or as text such as "512M" or "1.5G"; by default a quarter of the memory of the
    cgroup or the machine, at most 2 GiB. The other arguments are the options of the same name of the command line.
    """
    opened = Repository(
        default_url() if url is None else os.fspath(url),
        {
            "memory": _bytes(memory),
            "create": create,
            "cache": None if cache is None else os.fspath(cache),
            "endpoint": endpoint,
            "region": region,
            "allow_http": allow_http,
        },
    )
    if opened._engine.created:
        _logger.warning("created the repository %s: there was none", opened.url)
    return opened


def opened(
    repo: Repository | str | os.PathLike[str] | None, *, create: bool | None, caller: str | None = None
) -> Repository:
    """Returns `repo` itself, or opens the repository at this URL. `caller` is the class or function that was called, if it takes
    `create` itself: errors then name that one."""
    if isinstance(repo, Repository):
        return repo
    try:
        return open(repo, create=create)
    except NotFound as error:
        if caller is not None:
            error.args = tuple(_of_caller(text, caller) for text in error.args)
            error.help = None if error.help is None else _of_caller(error.help, caller)
        raise


def _of_caller(text: str, caller: str) -> str:
    """Names `caller` where a message names `towline.open` with `create=True`."""
    return _OPEN_CREATE.sub(lambda _: f"{caller}(..., create=True)", text)


def load(
    name: str,
    *,
    repo: Repository | str | os.PathLike[str] | None = None,
    device: str | int | torch.device | None = None,
    tensors: str | Iterable[str] = (),
    path: str | None = None,
    progress: _progress.Progress = None,
) -> dict[str, torch.Tensor]:
    """Loads the tensors of a saved tree, as `Repository.load`. `repo` is a Repository or its URL, by default as for
    `towline.open`."""
    there = opened(repo, create=False)
    return there.load(name, device=device, tensors=tensors, path=path, progress=progress)


def default_url() -> str:
    """`$TOWLINE_REPO`, else the user's own repository."""
    url = os.environ.get("TOWLINE_REPO")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return url or str(Path(data) / "towline" / "repository")


def _bytes(memory: int | str | None) -> int | None:
    return _towline.size(memory, "memory") if isinstance(memory, str) else memory


def save_options(
    metrics: Mapping[str, float] | None = None,
    *,
    world_size: int | None = None,
    framework: str | None = None,
    labels: Mapping[str, str] | None = None,
    exclude: Iterable[str] = (),
    compression: Compression = "auto",
    key_every: int | None = None,
    base: str | None = None,
    part: tuple[int, str] | None = None,
    parts: int | None = None,
) -> dict[str, Any]:
    """Options of a save, as the engine takes them. `part` is the number of a part and the id of the attempt that it is of.
    `parts` is their number, if it is not `world_size`."""
    options = {
        "world_size": world_size,
        "framework": framework,
        "compression": check_compression(compression),
        "key_every": key_every,
        "base": base,
        "part": part,
        "parts": parts,
    }
    return {
        "metrics": _arguments.finite_metrics(metrics),
        "labels": dict(labels or {}),
        "exclude": list(exclude),
        **{key: value for key, value in options.items() if value is not None},
    }


def check_compression(compression: Compression) -> Compression:
    """Raises UsageError unless `compression` is a valid choice."""
    if not isinstance(compression, str) or compression not in _COMPRESSIONS:
        raise UsageError(f"compression is 'auto', 'if-faster', 'predict' or 'off', not {compression!r}")
    return compression


class Repository:
    """A repository, opened by `towline.open`. It may be used by several threads, pickled for other processes, and used in a
    forked child: each process has its own connections.

    The policy of the repository and the audit log see the user of this process as the caller."""

    def __init__(self, url: str, opening: dict[str, Any] | None = None):
        if opening is None:
            raise TypeError(f"towline.Repository is not called directly: use towline.open({url!r})")
        self._url, self._opening = url, opening
        self._engine = _towline.Repository(url, opening)

    def __reduce__(self) -> tuple[Any, ...]:
        return Repository, (self._url, {**self._opening, "create": False})

    def __repr__(self) -> str:
        return f"towline.open({self.url!r})"

    @property
    def url(self) -> str:
        """URL of the repository."""
        return self._engine.location

    @property
    def id(self) -> str:
        """Permanent id of the repository, independent of its URL."""
        return self._engine.id()

    def save(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        metrics: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        exclude: Iterable[str] = (),
        world_size: int | None = None,
        framework: str | None = None,
        compression: Compression = "auto",
        key_every: int | None = None,
        base: str | None = None,
        progress: _progress.Progress = None,
    ) -> SaveReport:
        """Saves the file or folder at `path` as `name`; returns once it is durable. `metrics`, `world_size` and `framework` are
        recorded if `name` is a step of a run (`RUN/step-N`), `labels` for any name. Paths that match a pattern in `exclude` are
        skipped.

        `compression` is `"auto"` (as small as possible), `"if-faster"` (uncompressed while the store takes bytes faster than
        they can be compressed), `"predict"` (for runs that save each step: weights and second moments are predicted from the
        step before, so that reading a step reads those back to its key step; the optimizer's state must be in the same save) or
        `"off"`. A step is stored as its differences to the step before, or to the tree named `base`; every `key_every`th step
        (by default every 8th) is stored whole. `progress` is called as `progress(phase, done, total, moved)`, in bytes, several
        times a second; True draws a progress bar, if there is a terminal or a notebook."""
        options = save_options(
            metrics,
            world_size=world_size,
            framework=framework,
            labels=labels,
            exclude=exclude,
            compression=compression,
            key_every=key_every,
            base=base,
        )
        with _progress.counting(progress, name) as counters:
            if counters is not None:
                options["progress"] = counters
            return SaveReport.read(json.loads(self._engine.save(os.fspath(path), name, options)))

    def restore(
        self,
        name: str,
        dest: str | os.PathLike[str],
        path: str | None = None,
        *,
        overwrite: bool = False,
        delete: bool = False,
        may_empty: bool = False,
        dry_run: bool = False,
        progress: _progress.Progress = None,
    ) -> RestoreReport:
        """Restores the tree `name` (or `RUN@latest`, `RUN@min=METRIC`, ...), or the file or folder `path` in it, to `dest`, bit
        for bit. Files in `dest` that are equal stay. Files that differ raise Conflict, unless `overwrite` replaces them. `delete`
        removes files that the tree lacks; the report's `removed` lists them. A tree without files does not empty a folder unless
        `may_empty`. With `dry_run` nothing is written: the report says what would be. `progress` is as for `save`."""
        with _progress.counting(progress, name) as counters:
            report = self._engine.restore(name, os.fspath(dest), path, overwrite, delete, may_empty, dry_run, counters)
            return RestoreReport.read(json.loads(report))

    def ls(self, prefix: str | None = None) -> list[Saved]:
        """Lists saved names under `prefix`, or all."""
        return [Saved.read(name) for name in json.loads(self._engine.ls(prefix))]

    def runs(self, prefix: str | None = None) -> list[Run]:
        """Lists runs under `prefix`, or all. If `prefix` is itself a run, its entry lists the steps, too."""
        return [Run.read(run) for run in json.loads(self._engine.runs(prefix))]

    def show(self, name: str) -> Tree:
        """Describes the tree `name`: its files, and how they are stored. A list longer than a quarter of the `memory` of the
        repository is refused."""
        return Tree.read(json.loads(self._engine.show(name)))

    def remove(self, name: str, *, now: bool = False) -> None:
        """Removes a name. `undelete` restores it for 7 days (`keep_removed` of `collect`), but not with `now`. `collect` then
        deletes the data that only this name needed."""
        self._engine.remove(name, now)

    def undelete(
        self, name: str, *, version: int | None = None, to: str | None = None, replace: bool = False
    ) -> Undeleted:
        """Restores the tree that `name` had last before it was removed or replaced, or that of `version` in
        `history`; under the name `to`, if given. Raises Conflict if the name exists, unless `replace`."""
        return Undeleted.read(json.loads(self._engine.undelete(name, version, to, replace)))

    def history(self, name: str) -> History:
        """Lists the tree that `name` has now, and earlier ones that `undelete` can restore, the latest first."""
        return History.read(json.loads(self._engine.history(name)))

    def copy(self, source: str, name: str) -> None:
        """Gives a saved tree a second name; no data is copied."""
        self._engine.copy(source, name)

    def inherit_labels(self, source: str, name: str) -> None:
        """Gives `name` the labels that bind `source`, and records that it was made from that. For a program that copies content
        between them by itself; `copy` and `sync` do it already."""
        self._engine.inherit_labels(source, name)

    def expire(
        self,
        run: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: str | Iterable[str] = (),
        keep_max: str | Iterable[str] = (),
        dry_run: bool = False,
        keep_removed: bool = False,
    ) -> ExpireReport:
        """Removes the steps of a run that no rule keeps. Rules are those of `towline.Checkpointer`. `collect` then deletes their
        data; steps that are kept lose nothing. With `keep_removed`, `undelete` can restore the removed steps for 7 days."""
        for rule, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            _arguments.check_positive(rule, number)
        least, greatest = _arguments.metric_names("keep_min", keep_min), _arguments.metric_names("keep_max", keep_max)
        report = self._engine.expire(run, keep_last, keep_every, least, greatest, dry_run, keep_removed)
        return ExpireReport.read(json.loads(report))

    def _remove_steps(self, run: str, steps: Collection[int], limit: timedelta | None = None) -> set[str]:
        """Removes steps of a run in one commit, so that `undelete` can restore them; returns the names of the other steps, and of
        the last one if it would have removed all. Raises Unreachable if the store does not answer within `limit`; they may be
        removed then."""
        report = self._engine.expire(run, keep_last=sys.maxsize, keep_removed=True, given_up=set(steps), limit=limit)
        return {step.name for step in ExpireReport.read(json.loads(report)).kept}

    def collect(
        self,
        *,
        grace: str | float | timedelta = "24h",
        keep_removed: str | float | timedelta = "7d",
        dry_run: bool = False,
    ) -> CollectReport:
        """Garbage collection: deletes the data that no name needs. Data is deleted by the first collect after a `grace` period
        that begins when a collect finds it unneeded: `"24h"`, a number of seconds or a timedelta; 0 deletes it at once. The
        period only gives readers of a removed name time to finish; no saved name depends on it. Trees of removed and replaced
        names are kept for `keep_removed`, by the store's clock, before. With `dry_run` nothing is deleted: the report says what
        would be. Raises Denied without the right to delete objects."""
        periods = _arguments.duration(grace, "grace"), _arguments.duration(keep_removed, "keep_removed")
        return CollectReport.read(json.loads(self._engine.collect(dry_run, *periods)))

    def verify(self, name: str | None = None, *, data: bool = False, repair: bool = False) -> VerifyReport:
        """Checks one tree, or all, for damage: the structure, or with `data` every byte. The report lists the damage. `repair`
        repairs what it can, and sets damaged data aside: save the same content, under any name, and repair again, which restores
        the trees that used it."""
        return VerifyReport.read(json.loads(self._engine.verify(name, data, repair)))

    def settle(self, name: str, *, progress: _progress.Progress = None) -> SettleReport:
        """Stores the tree `name`, such as `"RUN@latest"`, without the steps that it is stored as differences to: a restore then
        reads nothing else. For a step that will be read from a bucket at a site without an agent. `progress` is as for `restore`.
        Raises Conflict if the name changes meanwhile."""
        with _progress.counting(progress, name) as counters:
            return SettleReport.read(json.loads(self._engine.settle(name, counters)))

    def sync(
        self,
        to: Repository | str | os.PathLike[str],
        names: Iterable[str] = (),
        *,
        create: bool = False,
        if_absent: bool = False,
        force: bool = False,
        forget: bool = False,
        dry_run: bool = False,
    ) -> SyncReport:
        """Copies `names` (names, prefixes of names, or selectors such as `RUN@latest`; by default all) to the repository `to`, a
        Repository or its URL. Only chunks that `to` lacks are sent. Names that exist there with another value are
        replaced, but not if that value is newer: then it stays, which the report's `kept` says, unless `force` is set. A name
        for which `to` would forget an old value that `undelete` restores is not replaced, unless `forget` is set. With
        `if_absent` no existing name is replaced. With `create` the repository is created if there is none. With `dry_run` nothing
        is copied: the report's `planned` says what would be. Names that cannot be copied, such as damaged ones, do
        not stop the others: the error at the end names them."""
        if if_absent and force:
            raise UsageError("if_absent and force exclude each other")
        names = [names] if isinstance(names, str) else list(names)
        there = opened(to, create=create, caller="Repository.sync")
        existing = "keep" if if_absent else "replace" if force else ""
        return SyncReport.read(json.loads(self._engine.sync(there._engine, names, dry_run, (existing, forget))))

    def load(
        self,
        name: str,
        *,
        device: str | int | torch.device | None = None,
        tensors: str | Iterable[str] = (),
        path: str | None = None,
        progress: _progress.Progress = None,
    ) -> dict[str, torch.Tensor]:
        """Loads the tensors of the tree `name` (or `RUN@latest`, ...), by name; a name that several files have becomes
        `FILE:NAME`. `tensors` selects some: names or patterns such as `"layers.*"`, whose `*` takes slashes, too, each perhaps
        with a box, `"embed[0:128, :]"`; `path` a file or folder. They are moved to `device`, if given: to an NVIDIA GPU through
        pinned memory, while others are read. Without `tensors`, Damaged is raised if an index of shards
        (`*.safetensors.index.json`) names tensors that are not there, or a safetensors file is not valid, and NotFound if the
        tree does not list the tensors of one, or has no file of tensors. Valid safetensors files without tensors are an empty
        dict.

        If this node's agent keeps tensors in memory (`[staging]` in its settings), they are verified once, when the agent reads
        them, and every process maps that memory without a copy. Writes are private to the process: a page is copied when it is
        first written. Otherwise they are read and verified here."""
        from . import _loading

        selectors = [tensors] if isinstance(tensors, str) else list(tensors)
        return _loading.load(self._engine, name, path, selectors, device, progress)

    def stream(
        self,
        name: str,
        *,
        device: str | int | torch.device | None = None,
        tensors: str | Iterable[str] = (),
        path: str | None = None,
        ahead: int | str = "256M",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `load`, but yields pairs of a name and a tensor while the next tensors are read. At most twice `ahead` bytes of
        tensors are in memory beside those that the caller keeps, or the two longest tensors."""
        from . import _loading

        selectors = [tensors] if isinstance(tensors, str) else list(tensors)
        length = _towline.size(ahead, "ahead") if isinstance(ahead, str) else ahead
        _arguments.check_positive("ahead", length)
        return _loading.stream(self._engine, name, path, selectors, device, length)

    def tensors(self, name: str) -> Tensors:
        """Returns the tensors of the tree `name` as a lazy mapping: a tensor, or slice of one, is read when it is converted with
        `torch()` or `numpy()`."""
        return Tensors(self, self._engine.resolve(name))

    def read(self, name: str, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns the bytes from `start` to `end` (exclusive) of the file `path` in the tree `name`, verified."""
        return self._engine.cat(name, path, start, end)
