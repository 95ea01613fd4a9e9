"""Reports: the results of `Repository`'s methods, as dataclasses. Sizes are in bytes, times in UTC (RFC 3339)."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

Report = TypeVar("Report", bound="_Report")


@dataclass(frozen=True)
class _Report:
    """Base class of reports. Fields can be read as attributes or as items; names are those of the command line's JSON."""

    def __getitem__(self, key: str) -> Any:
        if key not in {one.name for one in dataclasses.fields(self)}:
            raise KeyError(key)
        return getattr(self, key)

    @classmethod
    def read(cls: type[Report], report: dict[str, Any]) -> Report:
        """Creates a report from the engine's JSON; unknown fields are ignored."""
        hints = typing.get_type_hints(cls)
        return cls(**{key: _value(hints[key], value) for key, value in report.items() if key in hints})


def _value(hint: Any, value: Any) -> Any:
    """Converts JSON to the type `hint` of a field, including nested reports."""
    if typing.get_origin(hint) is list:
        (element,) = typing.get_args(hint)
        return [_value(element, one) for one in value]
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    if value is not None and isinstance(hint, type) and issubclass(hint, _Report):
        return hint.read(value)
    return value


@dataclass(frozen=True)
class Replaced(_Report):
    """The tree that a name had before."""

    #: Id of its manifest.
    manifest: str
    #: Time of the save.
    saved: str
    #: Bytes of its files.
    bytes: int
    #: True if `undelete` can restore it for a while; False if the new tree is the same.
    kept: bool = False


@dataclass(frozen=True)
class SaveReport(_Report):
    """Result of a save."""

    name: str
    #: Id of the manifest.
    manifest: str
    #: Bytes of all files, holes of sparse files included.
    logical_bytes: int
    #: Bytes that were not in the repository, before compression.
    new_bytes: int
    #: Bytes written to the store, after compression.
    stored_bytes: int
    #: Distinct chunks of the tree: pieces of files of up to a few MiB, which are stored once.
    chunks: int
    #: Chunks that were not in the repository.
    new_chunks: int
    files: int
    seconds: float
    #: Files that were found and not saved, with the reason.
    skipped: list[str] = field(default_factory=list)
    #: Files that were saved but may be incomplete or inconsistent, with the reason.
    warnings: list[str] = field(default_factory=list)
    #: The tree that the name had before, if there was one.
    replaced: Replaced | None = None
    #: For a rank's part: True if it completed the step; else `waits_for` is a rank whose part is missing.
    complete: bool = True
    waits_for: int | None = None


@dataclass(frozen=True)
class Sources(_Report):
    """Bytes that were fetched, compressed, by source."""

    #: The agent of this node.
    agent: int = 0
    #: The cache of this node.
    cache: int = 0
    #: Agents of this site.
    site: int = 0
    #: Agents of other sites.
    remote: int = 0
    repository: int = 0


@dataclass(frozen=True)
class Removed(_Report):
    """Files that a restore with `delete` removed, or with `dry_run` would."""

    files: int
    bytes: int
    #: Some of their paths.
    paths: list[str] = field(default_factory=list)
    #: Other files and folders that stay, because `.towlineignore` leaves them out of a save.
    ignored: int = 0


@dataclass(frozen=True)
class RestoreReport(_Report):
    """Result of a restore; with `dry_run`, the expected result."""

    name: str
    #: Bytes of all requested files, holes of sparse files included.
    bytes: int
    #: Bytes that were fetched, compressed.
    fetched_bytes: int
    sources: Sources
    #: Bytes that were already in the destination.
    reused_bytes: int
    files: int
    seconds: float
    #: Files and links in the destination that differed and were replaced.
    replaced_files: int = 0
    removed: Removed | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Saved(_Report):
    """A saved name, and its tree."""

    name: str
    #: Id of the manifest.
    manifest: str
    #: Bytes of all files.
    bytes: int
    files: int
    chunks: int
    #: Time of the save.
    saved: str
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None


@dataclass(frozen=True)
class Value(_Report):
    """A tree that a name has or had."""

    #: Version of the name: the number of the log entry that set it.
    version: int
    #: Id of the manifest.
    manifest: str
    #: Bytes of all files.
    bytes: int
    files: int
    #: When it was saved.
    saved: str
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None


@dataclass(frozen=True)
class Removal(_Report):
    """The end of a tree's time under a name."""

    #: Number of the log entry.
    entry: int
    #: Time of it, by its writer's clock.
    at: str
    #: "removed" or "replaced"; None if the log was truncated since.
    by: str | None = None


@dataclass(frozen=True, kw_only=True)
class KeptValue(Value):
    """A tree that `undelete` can restore."""

    #: When and how the name lost it.
    taken: Removal
    #: Earliest time at which a collect with the default `keep_removed` (7 days) drops it.
    until: str | None = None


@dataclass(frozen=True)
class History(_Report):
    """Trees of a name."""

    name: str
    #: The tree that it has now; None if the name does not exist.
    present: Value | None
    #: Earlier ones that can be restored, the latest first.
    kept: list[KeptValue] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Undeleted(Value):
    """Result of an undelete."""

    #: Name that has the tree now.
    name: str
    #: Version of the name before it was removed or replaced.
    was: int
    #: Tree that it replaced.
    replaced: Replaced | None = None


@dataclass(frozen=True)
class Step(_Report):
    """A step of a run."""

    step: int
    name: str
    #: False if the run later resumed from an earlier step: selectors such as `@latest` ignore this step.
    counts: bool
    #: Time of the save.
    saved: str
    bytes: int
    files: int
    chunks: int
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None


@dataclass(frozen=True)
class Run(_Report):
    """A run; with its steps if it was requested by name."""

    run: str
    #: Number of steps.
    count: int
    #: Smallest and largest step.
    first: int
    last: int
    #: Name that `@latest` selects.
    latest: str
    #: Time of the latest save.
    saved: str
    #: Bytes of the files of all steps.
    bytes: int
    #: Metrics of the latest step.
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Entry(_Report):
    """A file, folder or link of a tree."""

    path: str
    #: "file", "folder" or "link".
    kind: str
    #: Permissions, such as "0644".
    mode: str
    mtime: str
    bytes: int
    chunks: int
    stored_bytes: int
    #: Chunking method: "tensor" (at tensors), "content" (content-defined chunking) or "fixed" (pieces of one length).
    cut: str | None = None
    #: A link's target.
    target: str | None = None
    #: Tensors in the file.
    tensors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Tree(_Report):
    """Content of a tree, and how it is stored."""

    name: str
    #: Id of the manifest.
    manifest: str
    #: Time of the save.
    saved: str
    #: Bytes of all files.
    bytes: int
    #: Stored bytes of its chunks, and of the chunks of other trees that they are decoded from.
    stored_bytes: int
    base_bytes: int
    #: Saves since the key step that it is decoded from; 0 if it is a key step.
    behind: int
    files: int
    chunks: int
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedStep(_Report):
    """A step that expiry keeps or removes."""

    step: int
    name: str
    bytes: int
    #: Rules that keep it.
    reasons: list[str] = field(default_factory=list)
    #: Metrics of these rules that the step lacks.
    lacks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExpireReport(_Report):
    """Steps that expiry kept and removed, or with `dry_run` would."""

    run: str
    kept: list[PlannedStep] = field(default_factory=list)
    removed: list[PlannedStep] = field(default_factory=list)


@dataclass(frozen=True)
class SettleReport(_Report):
    """Result of `Repository.settle`."""

    #: Name of the tree.
    name: str = ""
    #: Chunks that were stored again, and the bytes that they take.
    chunks: int = 0
    stored_bytes: int = 0
    #: Stored bytes that a restore of all of it reads: before, and now.
    read_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CollectReport(_Report):
    """Result of a collect; with `dry_run`, the expected result."""

    #: Bytes of the objects deleted.
    freed_bytes: int = 0
    #: Trees of removed and replaced names that can no longer be restored: `keep_removed` is over.
    forgotten_values: int = 0
    #: Those that `undelete` can still restore, and the stored bytes that are kept only for them.
    kept_values: int = 0
    kept_bytes: int = 0
    #: Stored bytes of all chunks in use, including those.
    live_bytes: int = 0
    #: Stored bytes of unused chunks that stay, because most of their pack is in use.
    unused_bytes: int = 0
    #: Packs (objects with many chunks) that this collect found unneeded: the first collect after `grace` deletes them.
    condemned_packs: int = 0
    #: Packs that an earlier collect found unneeded, and that were still unneeded: they were deleted.
    purged_packs: int = 0
    #: Unneeded objects whose `grace` is not over, and their bytes.
    waiting_objects: int = 0
    waiting_bytes: int = 0
    #: Packs rewritten because most of their bytes were unneeded.
    repacked_packs: int = 0
    #: Objects deleted: packs, and what interrupted saves left.
    deleted_objects: int = 0
    #: Index segments merged or rebuilt.
    merged_segments: int = 0
    #: Unfinished saves of other processes that were ended because they made no progress for a day.
    fenced_sessions: int = 0
    #: Descriptions of the actions taken.
    steps: list[str] = field(default_factory=list)
    #: Duration.
    seconds: float = 0.0


@dataclass(frozen=True)
class Damage(_Report):
    """One damaged object."""

    #: The object, and the chunk in it.
    what: str
    #: Description of the damage.
    error: str
    #: Names that cannot be restored completely; of very many the first ones.
    names: list[str] = field(default_factory=list)
    #: Number of further such names.
    more_names: int = 0
    #: Files and tensors of `names` affected, as far as known: `NAME:PATH`, then the tensor after a space. `NAME:...` stands
    #: for more.
    tensors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VerifyReport(_Report):
    """Result of a verification."""

    #: Packs checked, chunks in them, and bytes of these chunks.
    packs: int = 0
    chunks: int = 0
    bytes: int = 0
    #: Damage found, before any repair.
    damaged: list[Damage] = field(default_factory=list)
    #: Descriptions of the repairs.
    repaired: list[str] = field(default_factory=list)
    #: Damage that a second look found after the repairs.
    left: list[Damage] = field(default_factory=list)
    #: Log entries whose changes the repair of the log gave up.
    lost: list[str] = field(default_factory=list)
    #: Duration.
    seconds: float = 0.0


@dataclass(frozen=True)
class SyncReport(_Report):
    """Result of a sync."""

    #: Names that are now equal in both repositories.
    names: int = 0
    #: Stored bytes that were sent, and that the destination had already.
    moved_bytes: int = 0
    skipped_bytes: int = 0
    #: Chunks of these names, and how many of them the destination lacked.
    chunks: int = 0
    new_chunks: int = 0
    #: Names that had another tree in the destination (with `dry_run`, that have one).
    replaced: list[str] = field(default_factory=list)
    #: Kept values of the destination that were forgotten for these (only with `forget=True`).
    forgotten: int = 0
    #: Names whose other value in the destination was kept: `name`, `reason` (`"newer"` or `"exists"`), and when each was `saved`
    #: and `saved_there`.
    kept: list[dict[str, Any]] = field(default_factory=list)
    #: With `dry_run`, each name to copy: `name`, `bytes`, `moved_bytes`, and whether it `replaces` another tree.
    planned: list[dict[str, Any]] = field(default_factory=list)
    #: Duration.
    seconds: float = 0.0
