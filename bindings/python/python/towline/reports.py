"""What the repository's housekeeping did: `collect`, `verify` and `sync`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

Report = TypeVar("Report", bound="_Report")


@dataclass(frozen=True)
class _Report:
    """Numbers by attribute; by key too, as in the dicts that other calls return."""

    def __getitem__(self, key: str) -> Any:
        if key not in {one.name for one in dataclasses.fields(self)}:
            raise KeyError(key)
        return getattr(self, key)

    @classmethod
    def read(cls: type[Report], told: dict[str, Any]) -> Report:
        """What the engine told; of numbers that this class has no field for, nothing."""
        known = {one.name for one in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in told.items() if key in known})


@dataclass(frozen=True)
class CollectReport(_Report):
    """What a collect deleted and rewrote, or with `dry_run` would."""

    #: Bytes of the objects deleted.
    freed_bytes: int = 0
    #: Stored bytes of the chunks in use.
    live_bytes: int = 0
    #: Packs set aside: nothing in them is needed, and the next collect after the grace deletes them.
    condemned_packs: int = 0
    #: Packs deleted.
    purged_packs: int = 0
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
    #: What of them it hits, as far as that can be told: `NAME:PATH`, with the tensor after a space.
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

    @classmethod
    def read(cls, told: dict[str, Any]) -> VerifyReport:
        damaged = [Damage.read(one) for one in told.get("damaged", ())]
        return super().read({**told, "damaged": damaged})


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
