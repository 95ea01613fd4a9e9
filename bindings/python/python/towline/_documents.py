"""Documents of a tree that are read whole, such as `state.json`: of bounded length, whatever their manifest says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Exhausted

if TYPE_CHECKING:
    from .repository import Repository

#: Bytes of a document, at most.
DOCUMENT_MAX = 256 << 20


def read_document(repository: Repository, name: str, path: str) -> bytes:
    """The bytes of the document at `path` in the tree `name`. Raises Exhausted for one that is longer than documents are."""
    document = bytes(repository._engine.cat(name, path, 0, DOCUMENT_MAX + 1))
    if len(document) > DOCUMENT_MAX:
        raise Exhausted(
            f"{path} of {name} is longer than {DOCUMENT_MAX >> 20} MiB: no such document was saved by towline"
        )
    return document
