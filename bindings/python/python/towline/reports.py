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
    """The previous value of a name."""

    #: Id of its manifest.
    manifest: str
    #: Time of the save.
    saved: str
    #: Bytes of its files.
    bytes: int
    #: Whether `undelete` takes it back for a while: not, if the new value is the same tree.
    kept: bool = False


@dataclass(frozen=True)
class SaveReport(_Report):
    """Result of a save."""

    name: str
    #: Id of the manifest.
    manifest: str
    #: Bytes in all files, holes included.
    logical_bytes: int
    #: Plain bytes of newly stored chunks.
    new_bytes: int
    #: Bytes written to the store.
    stored_bytes: int
    #: Distinct chunks of the tree.
    chunks: int
    #: Chunks that were not in the repository.
    new_chunks: int
    files: int
    seconds: float
    #: Files that were found and not saved, with the reason.
    skipped: list[str] = field(default_factory=list)
    #: Files that were saved but may be incomplete or inconsistent, with the reason.
    warnings: list[str] = field(default_factory=list)
    #: The previous value of the name, if it was replaced.
    replaced: Replaced | None = None
    #: For a rank's part: True if it completed the step; else `waits_for` is a rank whose part is missing.
    complete: bool = True
    waits_for: int | None = None


@dataclass(frozen=True)
class Sources(_Report):
    """Stored bytes that were fetched, by source."""

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


@dataclass(frozen=True)
class RestoreReport(_Report):
    """Result of a restore; with `dry_run`, the expected result."""

    name: str
    #: Bytes in all requested files, holes included.
    bytes: int
    #: Stored bytes that were fetched.
    fetched_bytes: int
    sources: Sources
    #: Plain bytes that were already in the destination.
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
    """A value that a name has or had."""

    #: The log entry that set it.
    version: int
    #: The manifest's id.
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
class RemovalEvent(_Report):
    """Removal or replacement of a value."""

    #: The log entry.
    entry: int
    #: Its time, by its writer's clock.
    at: str
    #: "removed" or "replaced"; None, if the log no longer has it.
    by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Kept(Value):
    """A value that `undelete` can restore."""

    #: Its removal or replacement.
    taken: RemovalEvent
    #: Until when it is kept at least, if collects keep what is removed for 7 days.
    until: str | None = None


@dataclass(frozen=True)
class History(_Report):
    """Values of a name."""

    name: str
    #: Its value now, if it is there.
    present: Value | None
    #: Values that it had, the latest first.
    kept: list[Kept] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Undeleted(Value):
    """The result of `undelete`."""

    #: The name that has it now.
    name: str
    #: The version that it had before it was removed.
    was: int
    #: What it replaced.
    replaced: Replaced | None = None


@dataclass(frozen=True)
class Step(_Report):
    """A step of a run."""

    step: int
    name: str
    #: False if the run later resumed from an earlier step: choices such as `@latest` ignore this step.
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
    #: Method that found its chunk boundaries: "tensor", "content" or "fixed".
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
    #: Stored bytes of its chunks, and of chunks in other trees that they are differences to.
    stored_bytes: int
    base_bytes: int
    #: Longest chain of differences to decode for one of its chunks.
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
class CollectReport(_Report):
    """Result of a collect; with `dry_run`, the expected result."""

    #: Bytes of the objects deleted.
    freed_bytes: int = 0
    #: Values of removed and replaced names that were forgotten: they were kept for as long as they were to be.
    forgotten_values: int = 0
    #: Values that `undelete` can restore, and stored bytes that are kept only for them.
    kept_values: int = 0
    kept_bytes: int = 0
    #: Stored bytes of the chunks in use, those included.
    live_bytes: int = 0
    #: Packs found unneeded: the next collect after the grace deletes them.
    condemned_packs: int = 0
    #: Packs that the second mark found unneeded, too: they are deleted now.
    purged_packs: int = 0
    #: Unneeded objects that are kept until their grace is over, and their bytes.
    waiting_objects: int = 0
    waiting_bytes: int = 0
    #: Packs rewritten because most of their bytes were unneeded.
    repacked_packs: int = 0
    #: Objects deleted: packs, and leftovers of interrupted saves.
    deleted_objects: int = 0
    #: Index segments merged or rebuilt.
    merged_segments: int = 0
    #: Sessions closed because their writer was idle for a day.
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
    #: Names that cannot be restored completely.
    names: list[str] = field(default_factory=list)
    #: Files and tensors affected, as far as known: `NAME:PATH`, then the tensor after a space.
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
    #: With `dry_run`, each name to copy: `name`, `bytes`, `moved_bytes`, and whether it `replaces` another tree.
    planned: list[dict[str, Any]] = field(default_factory=list)
    #: Duration.
    seconds: float = 0.0
