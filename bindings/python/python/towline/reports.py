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
    """A report of the engine. Its fields are attributes, and items too, as in the command line's JSON."""

    def __getitem__(self, key: str) -> Any:
        if key not in {one.name for one in dataclasses.fields(self)}:
            raise KeyError(key)
        return getattr(self, key)

    @classmethod
    def read(cls: type[Report], report: dict[str, Any]) -> Report:
        """From the engine's JSON; fields that this class does not have are left out."""
        hints = typing.get_type_hints(cls)
        return cls(**{key: _value(hints[key], value) for key, value in report.items() if key in hints})


def _value(hint: Any, value: Any) -> Any:
    """`value` as a field of the type `hint` has it: reports within reports are read, too."""
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

    #: Its manifest's id.
    manifest: str
    #: When it was saved.
    saved: str
    #: Bytes of its files.
    bytes: int


@dataclass(frozen=True)
class SaveReport(_Report):
    """Result of a save."""

    name: str
    #: The manifest's id.
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
    #: Files that were saved and may not be what they seem, with the reason.
    warnings: list[str] = field(default_factory=list)
    #: The previous value of the name, if it was replaced.
    replaced: Replaced | None = None
    #: Of a rank's part: whether it completed the step, and else a rank whose part is missing.
    complete: bool = True
    waits_for: int | None = None


@dataclass(frozen=True)
class Sources(_Report):
    """Stored bytes that were fetched, by where they came from."""

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
    """Result of a restore, or with `dry_run` of one that is yet to come."""

    name: str
    #: Bytes in all files that were asked for, holes included.
    bytes: int
    #: Stored bytes that were fetched.
    fetched_bytes: int
    sources: Sources
    #: Plain bytes that were there already.
    reused_bytes: int
    files: int
    seconds: float
    #: Files and links that were there, differed and were replaced.
    replaced_files: int = 0
    removed: Removed | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Saved(_Report):
    """A name, and the tree that it stands for."""

    name: str
    #: The manifest's id.
    manifest: str
    #: Bytes of all files.
    bytes: int
    files: int
    chunks: int
    #: When it was saved.
    saved: str
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None


@dataclass(frozen=True)
class Step(_Report):
    """A step of a run."""

    step: int
    name: str
    #: False if it was left behind when a run went back: choices such as `@latest` pass it over.
    counts: bool
    #: When it was saved.
    saved: str
    bytes: int
    files: int
    chunks: int
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    framework: str | None = None


@dataclass(frozen=True)
class Run(_Report):
    """A run, and its steps where it was asked for by name."""

    run: str
    #: Number of steps.
    count: int
    #: The smallest and the largest step.
    first: int
    last: int
    #: The name that `@latest` chooses.
    latest: str
    #: When the latest was saved.
    saved: str
    #: Bytes of the files of all steps.
    bytes: int
    #: Those of the latest.
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
    #: How the file was cut into chunks.
    cut: str | None = None
    #: A link's target.
    target: str | None = None
    #: Its tensors.
    tensors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Tree(_Report):
    """Content of a tree, and how it is stored."""

    name: str
    #: The manifest's id.
    manifest: str
    #: When it was saved.
    saved: str
    #: Bytes of all files.
    bytes: int
    #: Bytes of its chunks in the store, and of the chunks of other trees that these are stored as differences to.
    stored_bytes: int
    base_bytes: int
    #: Differences in a row that a chunk of it is at most made from.
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
    #: The rules that keep it.
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExpireReport(_Report):
    """Steps that expiry kept and removed, or with `dry_run` would."""

    run: str
    kept: list[PlannedStep] = field(default_factory=list)
    removed: list[PlannedStep] = field(default_factory=list)


@dataclass(frozen=True)
class CollectReport(_Report):
    """What a collect deleted and rewrote, or with `dry_run` would."""

    #: Bytes of the objects deleted.
    freed_bytes: int = 0
    #: Stored bytes of the chunks in use.
    live_bytes: int = 0
    #: Packs found unneeded: the next collect after the grace deletes them.
    condemned_packs: int = 0
    #: Packs that nothing may rely on from now on: they are deleted.
    purged_packs: int = 0
    #: Objects that nothing needs and that are kept until their grace is over, and their bytes.
    waiting_objects: int = 0
    waiting_bytes: int = 0
    #: Packs rewritten because most of their bytes were not needed.
    repacked_packs: int = 0
    #: Objects deleted: packs, and what interrupted saves left.
    deleted_objects: int = 0
    #: Index segments merged or rebuilt.
    merged_segments: int = 0
    #: Sessions ended because their writer did nothing for a day.
    fenced_sessions: int = 0
    #: Each thing that was done, in words.
    steps: list[str] = field(default_factory=list)
    #: How long it took.
    seconds: float = 0.0


@dataclass(frozen=True)
class Damage(_Report):
    """One thing that is not as it was written."""

    #: Which object, and which chunk of it.
    what: str
    #: What is wrong with it.
    error: str
    #: The names that cannot be restored, or not without it.
    names: list[str] = field(default_factory=list)
    #: What of them it hits, as far as that is known: `NAME:PATH`, with the tensor after a space.
    tensors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VerifyReport(_Report):
    """What a verification found."""

    #: Packs looked at, chunks in them, and bytes of those.
    packs: int = 0
    chunks: int = 0
    bytes: int = 0
    #: What is damaged, as it was before a repair.
    damaged: list[Damage] = field(default_factory=list)
    #: What a repair did, in words.
    repaired: list[str] = field(default_factory=list)
    #: How long it took.
    seconds: float = 0.0


@dataclass(frozen=True)
class SyncReport(_Report):
    """What a sync copied."""

    #: Names that the destination now has as the source has them.
    names: int = 0
    #: Stored bytes that the destination lacked, and that it had.
    moved_bytes: int = 0
    skipped_bytes: int = 0
    #: Chunks of these names, and how many of them the destination lacked.
    chunks: int = 0
    new_chunks: int = 0
    #: With `dry_run`, each name that would be copied: `name`, `bytes`, `moved_bytes`, and whether it `replaces` another tree.
    planned: list[dict[str, Any]] = field(default_factory=list)
    #: How long it took.
    seconds: float = 0.0
