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
    RestoreReport,
    Run,
    Saved,
    SaveReport,
    SyncReport,
    Tree,
    VerifyReport,
)
from .tensors import Tensors

#: How small to store: the smallest (None, or True), raw while that is faster, or never smaller.
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
    """Opens the repository at `url`: a folder, or `s3://bucket/prefix`; by default `$TOWLINE_REPO`, else the folder that the
    command line uses too. With `create` it is made if there is none.

    `memory` bounds the engine's buffers, in bytes or as text such as "512M" or "1.5G", as `--memory` takes it; by default a
    quarter of what the cgroup or the machine has, at most 2 GiB. The other arguments are those of the command line's options of
    the same name.
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
    """Options of a save, as the engine takes them. `part` is a rank and the attempt that it takes part in."""
    options = {
        "world_size": world_size,
        "framework": framework,
        "compression": _manner(compression),
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


def _manner(compression: Compression) -> str | None:
    """The engine's word for it, where it is not the usual manner."""
    if compression is None or compression is True:
        return None
    if compression is False:
        return "off"
    if compression != "if-faster":
        raise UsageError(f"compression is None, 'if-faster' or False, not {compression!r}")
    return compression


class Repository:
    """A repository, opened by `towline.open`. Any thread may use it; a forked or spawned process opens it anew by itself."""

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
        """Its address."""
        return self._engine.location

    @property
    def id(self) -> str:
        """Its name for ever, whatever its address."""
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
        """Saves the file or folder at `path` as `name`; returns once that is durable. Of a step of a run, `RUN/step-N`,
        `metrics`, `world_size` and `framework` are kept; `labels` of any name. Paths that match a pattern of `exclude` are
        left out.

        With `compression="if-faster"` chunks are stored raw while the store takes bytes faster than they are compressed, with
        False always. Every `key_every`th step of a run is stored without differences to others; `base` is a name to store
        differences to, in the place of the step before. `progress` is called with `(phase, done, total, moved)`, in bytes, some
        times a second; True draws a bar, where there is a terminal or a notebook."""
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
        """Restores the tree `name` (or `RUN@latest`, `RUN@min=METRIC`, ...), or what lies at `path` of it, to `dest`, bit for
        bit. What is there and the same stays; what differs is in the way unless `overwrite`; `delete` removes the
        rest, and says how much in the report's `removed`. A tree without any file empties no folder unless `may_empty`.
        With `dry_run` nothing is written: the report says what would be. `progress` is as for `save`."""
        with _progress.counting(progress, name) as counters:
            report = self._engine.restore(name, os.fspath(dest), path, overwrite, delete, may_empty, dry_run, counters)
            return RestoreReport.read(json.loads(report))

    def ls(self, prefix: str | None = None) -> list[Saved]:
        """Names under `prefix`, or all."""
        return [Saved.read(name) for name in json.loads(self._engine.ls(prefix))]

    def runs(self, prefix: str | None = None) -> list[Run]:
        """Runs under `prefix`, or all; the run that is `prefix` itself comes with its steps."""
        return [Run.read(run) for run in json.loads(self._engine.runs(prefix))]

    def show(self, name: str) -> Tree:
        """Content of the tree `name`, and how it is stored."""
        return Tree.read(json.loads(self._engine.show(name)))

    def remove(self, name: str) -> None:
        """Takes a name away. What only it needed is deleted by `collect`."""
        self._engine.remove(name)

    def copy(self, source: str, name: str) -> None:
        """Gives a saved tree another name as well; nothing is copied."""
        self._engine.copy(source, name)

    def expire(
        self,
        run: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: Iterable[str] = (),
        keep_max: Iterable[str] = (),
        dry_run: bool = False,
    ) -> ExpireReport:
        """Takes away the steps of a run that no rule keeps. A step that is kept is never harmed. What only the others needed is
        deleted by `collect`."""
        report = self._engine.expire(run, keep_last, keep_every, list(keep_min), list(keep_max), dry_run)
        return ExpireReport.read(json.loads(report))

    def collect(self, *, grace: str | float | timedelta = "24h", dry_run: bool = False) -> CollectReport:
        """Deletes what no name needs any more. It is set aside first, and deleted by the first collect after `grace`: `"24h"`, a
        number of seconds or a timedelta; with 0 at once. Nothing's safety depends on it: a reader whose name goes away meanwhile
        has that much time to end. With `dry_run` it only says what it would do. Needs rights to delete: raises Denied without."""
        return CollectReport.read(json.loads(self._engine.collect(dry_run, _span(grace, "grace"))))

    def verify(self, name: str | None = None, *, data: bool = False, repair: bool = False) -> VerifyReport:
        """Looks for damage in structure, or with `data` in every byte; of one tree, or of all. What is damaged is in the report.
        With `repair` what can be mended is."""
        return VerifyReport.read(json.loads(self._engine.verify(name, data, repair)))

    def sync(
        self,
        to: Repository | str | os.PathLike[str],
        names: Iterable[str] = (),
        *,
        create: bool = False,
        dry_run: bool = False,
    ) -> SyncReport:
        """Copies `names` (names, `RUN@latest` and the like, or prefixes of names; by default all) to the repository `to`, opened
        or its address. Only chunks that it lacks move. A name that it has already is replaced. With `create` it is made if there
        is none. With `dry_run` nothing is copied: the report's `planned` says what would be."""
        names = [names] if isinstance(names, str) else list(names)
        there = to if isinstance(to, Repository) else open(to, create=create)
        return SyncReport.read(json.loads(self._engine.sync(there._engine, names, dry_run)))

    def tensors(self, name: str) -> Tensors:
        """The tensors of the tree `name`, by name, lazily: each is read when it is asked for, and only what is asked for."""
        return Tensors(self, self._engine.resolve(name))

    def read(self, name: str, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes `start..end` of the file at `path` in the tree `name`, every one checked."""
        return self._engine.cat(name, path, start, end)
