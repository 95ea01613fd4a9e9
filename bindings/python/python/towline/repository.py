"""Repositories: where saved trees live."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from . import _given, _progress, _towline
from .errors import UsageError
from .reports import (
    CollectReport,
    ExpireReport,
    History,
    RestoreReport,
    Run,
    Saved,
    SaveReport,
    SyncReport,
    Tree,
    Undeleted,
    VerifyReport,
)
from .tensors import Tensors

#: Compression of a save: as small as possible (None or True), raw while that is faster ("if-faster"), or always raw (False).
Compression = Literal["if-faster"] | bool | None


def open(
    url: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    *,
    create: bool = True,
    cache: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    region: str | None = None,
    allow_http: bool = False,
) -> Repository:
    """Opens the repository at `url`: a folder, or `s3://bucket/prefix`; by default `$TOWLINE_REPO`, else the default folder of
    the command line. With `create` it is created if there is none.

    `memory` limits the engine's buffers, in bytes or as text such as "512M" or "1.5G"; by default a quarter of the memory of the
    cgroup or the machine, at most 2 GiB. The other arguments are the options of the same name of the command line.
    """
    return Repository(
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


def default_url() -> str:
    """`$TOWLINE_REPO`, else the user's own repository."""
    url = os.environ.get("TOWLINE_REPO")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return url or str(Path(data) / "towline" / "repository")


def _bytes(memory: int | str | None) -> int | None:
    return _towline.size(memory, "memory") if isinstance(memory, str) else memory


def _span(span: str | float | timedelta, argument: str) -> timedelta:
    if isinstance(span, str):
        return _towline.span(span, argument)
    duration = span if isinstance(span, timedelta) else timedelta(seconds=span)
    if duration < timedelta(0):
        raise UsageError(f"{argument} is a time such as '24h' or a number of seconds, not {span!r}")
    return duration


def save_options(
    metrics: Mapping[str, float] | None = None,
    *,
    world_size: int | None = None,
    framework: str | None = None,
    labels: Mapping[str, str] | None = None,
    exclude: Iterable[str] = (),
    compression: Compression = None,
    key_every: int | None = None,
    base: str | None = None,
    part: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """Options of a save, as the engine takes them. `part` is a rank and the attempt that it saves in."""
    options = {
        "world_size": world_size,
        "framework": framework,
        "compression": _compression_word(compression),
        "key_every": key_every,
        "base": base,
        "part": part,
    }
    return {
        "metrics": _given.finite_metrics(metrics),
        "labels": dict(labels or {}),
        "exclude": list(exclude),
        **{key: value for key, value in options.items() if value is not None},
    }


def _compression_word(compression: Compression) -> str | None:
    """The engine's word for `compression`; None for the default."""
    if compression is None or compression is True:
        return None
    if compression is False:
        return "off"
    if compression != "if-faster":
        raise UsageError(f"compression is None, 'if-faster' or False, not {compression!r}")
    return compression


class Repository:
    """A repository, opened by `towline.open`. It is thread-safe; a forked or spawned process opens its own connection to it."""

    def __init__(self, url: str, opening: dict[str, Any] | None = None):
        if opening is None:
            raise TypeError(f"towline.Repository is not called directly: use towline.open({url!r})")
        self._url, self._opening = url, opening
        self._engine = _towline.Repository(url, {key: value for key, value in opening.items() if value is not None})

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
        compression: Compression = None,
        key_every: int | None = None,
        base: str | None = None,
        progress: _progress.Progress = None,
    ) -> SaveReport:
        """Saves the file or folder at `path` as `name`; returns once it is durable. `metrics`, `world_size` and `framework` are
        recorded if `name` is a step of a run (`RUN/step-N`), `labels` for any name. Paths that match a pattern in `exclude` are
        skipped.

        Data is stored as small as possible; `compression="if-faster"` stores it raw while writing is faster than compressing,
        False always. Every `key_every`th step of a run is stored without differences to other steps. `base` is a name to store
        differences to, instead of the step before. `progress` is called as `progress(phase, done, total, moved)`, in bytes,
        several times a second; True draws a progress bar, if there is a terminal or a notebook."""
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
        """Describes the tree `name`: its files, and how they are stored."""
        return Tree.read(json.loads(self._engine.show(name)))

    def remove(self, name: str, *, now: bool = False) -> None:
        """Takes a name away. For a while `undelete` takes it back; after that, or with `now` from now on, what only it needed is
        deleted by `collect`."""
        self._engine.remove(name, now)

    def undelete(
        self, name: str, *, version: int | None = None, to: str | None = None, replace: bool = False
    ) -> Undeleted:
        """Takes back what `name` stood for before it was removed or replaced: the last value that is kept, or `version` of
        `history`, under the name `to` if one is given. What is there stays, and Conflict is raised, unless `replace`."""
        return Undeleted.read(json.loads(self._engine.undelete(name, version, to, replace)))

    def history(self, name: str) -> History:
        """The current value of `name`, and the earlier values that `undelete` can restore, the latest first."""
        return History.read(json.loads(self._engine.history(name)))

    def copy(self, source: str, name: str) -> None:
        """Gives a saved tree an additional name; no data is copied."""
        self._engine.copy(source, name)

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
        """Takes away the steps of a run that no rule keeps. A step that is kept is never harmed. What only the others needed is
        deleted by `collect`; with `keep_removed` `undelete` takes them back for a while before."""
        for rule, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            _given.check_positive(rule, number)
        least, greatest = _given.metric_names("keep_min", keep_min), _given.metric_names("keep_max", keep_max)
        report = self._engine.expire(run, keep_last, keep_every, least, greatest, dry_run, keep_removed)
        return ExpireReport.read(json.loads(report))

    def collect(
        self,
        *,
        grace: str | float | timedelta = "24h",
        keep_removed: str | float | timedelta = "7d",
        dry_run: bool = False,
    ) -> CollectReport:
        """Deletes what no name needs any more. It is set aside first, and deleted by the first collect after `grace`: `"24h"`, a
        number of seconds or a timedelta; with 0 at once. Nothing's safety depends on it: a reader whose name goes away meanwhile
        has that much time to end. What names stood for that were removed or replaced is kept for `keep_removed` before, by the
        store's clock. With `dry_run` it only says what it would do. Needs rights to delete: raises Denied without."""
        spans = _span(grace, "grace"), _span(keep_removed, "keep_removed")
        return CollectReport.read(json.loads(self._engine.collect(dry_run, *spans)))

    def verify(self, name: str | None = None, *, data: bool = False, repair: bool = False) -> VerifyReport:
        """Checks one tree, or all, for damage: the structure, or with `data` every byte. The report lists the damage. `repair`
        repairs what it can."""
        return VerifyReport.read(json.loads(self._engine.verify(name, data, repair)))

    def sync(
        self,
        to: Repository | str | os.PathLike[str],
        names: Iterable[str] = (),
        *,
        create: bool = False,
        dry_run: bool = False,
    ) -> SyncReport:
        """Copies `names` (names, prefixes of names, or selectors such as `RUN@latest`; by default all) to the repository `to`, a
        Repository or its URL. Only chunks that `to` lacks are sent. Names that exist there are replaced. With `create` the
        repository is created if there is none. With `dry_run` nothing is copied: the report's `planned` says what would be."""
        names = [names] if isinstance(names, str) else list(names)
        there = to if isinstance(to, Repository) else open(to, create=create)
        return SyncReport.read(json.loads(self._engine.sync(there._engine, names, dry_run)))

    def tensors(self, name: str) -> Tensors:
        """Returns the tensors of the tree `name` as a lazy mapping: only tensors, or slices, that you convert are read."""
        return Tensors(self, self._engine.resolve(name))

    def read(self, name: str, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns the bytes `start..end` of the file `path` in the tree `name`, verified."""
        return self._engine.cat(name, path, start, end)
