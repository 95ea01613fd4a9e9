"""JSON documents of a tree, such as `state.json`, which are read into memory up to a maximum length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Exhausted

if TYPE_CHECKING:
    from .repository import Repository

#: Maximum bytes of a document.
DOCUMENT_MAX = 256 << 20


def read_document(repository: Repository, name: str, path: str) -> bytes:
    """Reads the document `path` in the tree `name`. Raises Exhausted if it is longer than the maximum."""
    document = bytes(repository._engine.cat(name, path, 0, DOCUMENT_MAX + 1))
    if len(document) > DOCUMENT_MAX:
        raise Exhausted(
            f"{path} of {name} is longer than {DOCUMENT_MAX >> 20} MiB: no such document was saved by towline"
        )
    return document
