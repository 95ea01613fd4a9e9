"""Origins: which start of a training saved a step. A step that waits on a node's disk must not become durable once another
process has continued its run: it would count as the latest step, although its branch was abandoned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from . import retention
from ._tags import VERSION
from .errors import Conflict, NotFound

if TYPE_CHECKING:
    from .repository import Repository

#: Beginning of the document of a state, and where the id of the start stands in it.
_BEGINNING = b'{"towline":%d,' % VERSION
_START = re.compile(rb'%s"start":("[^"\\]*"),' % re.escape(_BEGINNING))
#: Bytes of a document that hold them.
_READ = 512


class Superseded(Conflict):
    """Another process has continued the run of a step that waits on this node's disk."""


@dataclass(frozen=True)
class Origin:
    """Recorded with a step on this node's disk."""

    #: Version of the last save in the run that its process knew. Versions of a repository's names are numbers of log entries:
    #: each save has a greater one than those before it.
    known: int
    #: Ids of the starts whose steps were in the same spool.
    starts: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, record: Mapping[str, object]) -> Origin:
        """Reads an origin from a record. Raises ValueError for anything else."""
        known, starts = record.get("known"), record.get("starts")
        if isinstance(known, int) and isinstance(starts, list) and all(isinstance(start, str) for start in starts):
            return cls(known, starts)
        raise ValueError(f"known {known!r}, starts {starts!r}")


def known(seen: Mapping[str, int] | None, starts: list[str]) -> Origin | None:
    """Origin of a step that is saved when the run has the names `seen`, with their versions; None if they are not known."""
    return None if seen is None else Origin(max(seen.values(), default=0), list(starts))


def signed(document: bytes, start: str) -> bytes:
    """Adds the id of the start that saves it to the document of a state; readers ignore it."""
    if not document.startswith(_BEGINNING):
        raise ValueError(f"the document of a state begins with {document[:32]!r}, expected {_BEGINNING!r}")
    return _BEGINNING + b'"start":%s,' % json.dumps(start).encode() + document.removeprefix(_BEGINNING)


def start_of(repository: Repository, name: str, path: str, limit: timedelta | None = None) -> str | None:
    """Id of the start that saved the step `name` with the document `path`; None if it has none. Raises Unreachable if the store
    does not answer within `limit`."""
    try:
        found = _START.match(repository._engine.cat(name, path, 0, _READ, limit))
    except NotFound:
        return None
    return None if found is None else str(json.loads(found[1]))


def check(
    repository: Repository,
    run: str,
    origin: Origin | None,
    is_own: Callable[[str, int], bool],
    limit: timedelta | None = None,
) -> None:
    """Raises Superseded if another process made the last save in `run`, after those that the process with this origin knew.
    `is_own` says whether this training saved a step. Raises Unreachable if the store does not answer within `limit`."""
    if origin is None:
        return
    there = retention.versions(repository, run, limit)
    version, name = max(((version, name) for name, version in there.items()), default=(0, ""))
    if version <= origin.known or is_own(name, version):
        return
    help = "give each process its own run, or its rank and world_size"
    error = Superseded(f"{name} was saved by another process since ({help})")
    error.place, error.help = name, help
    raise error
