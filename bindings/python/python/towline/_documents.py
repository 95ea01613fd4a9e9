"""JSON documents of a tree, such as `state.json`, which are read into memory within limits: a few stored bytes may stand for a
long document, and a document for many objects."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ._versions import read_range
from .errors import Damaged, Exhausted

if TYPE_CHECKING:
    from ._towline import Tree
    from .repository import Repository

Key = TypeVar("Key", bound=Hashable)

#: Maximum bytes of a document.
DOCUMENT_MAX = 256 << 20
#: Maximum bytes of memory for each delimiter of a JSON document, in CPython 3.10 to 3.14: an empty list and its place, a dict of
#: up to five keys, a number or short string and its place.
JSON = {b"[": 88, b"{": 240, b",": 80, b":": 80}
#: Bytes of memory that any document may take.
ALWAYS_READ = 1 << 20
#: Maximum keys of one hash. All multiples of 2**61 - 1 have the same one, and to look up n of them takes n * n steps.
SAME_HASH_MAX = 256


def read_document(repository: Repository, name: str, path: str, marks: Mapping[bytes, int] = JSON) -> bytes:
    """Reads the document `path` in the tree `name`, as `read_documents` does."""
    return next(read_documents(repository, name, [path], marks))


def document_in(repository: Repository, tree: Tree, path: str) -> bytes:
    """Reads the document `path` in an open tree, as `read_documents` does."""
    return next(_within(repository, tree.name, [path], JSON, lambda at, end: bytes(read_range(tree, at, 0, end))))


def read_documents(
    repository: Repository, name: str, paths: Iterable[str], marks: Mapping[bytes, int] = JSON
) -> Iterator[bytes]:
    """Reads the documents `paths` in the tree `name`, one after the other. Raises Exhausted if one is longer than the maximum, or
    the objects of all so far could take more memory than the limit of `repository`, by the delimiters in them: `marks` has the
    bytes for each."""
    yield from _within(
        repository, name, paths, marks, lambda path, end: bytes(repository._engine.cat(name, path, 0, end))
    )


def _within(
    repository: Repository,
    name: str,
    paths: Iterable[str],
    marks: Mapping[bytes, int],
    read: Callable[[str, int], bytes],
) -> Iterator[bytes]:
    """Yields documents within the limits; `read` returns the bytes of a path up to an end."""
    most = max(repository._engine.memory(), ALWAYS_READ)
    longest = min(most, DOCUMENT_MAX)
    needed = 0
    for count, path in enumerate(paths):
        document = read(path, longest + 1)
        if len(document) > longest:
            raise Exhausted(
                f"{path} of {name} is longer than {longest >> 20} MiB (open the repository with a larger `memory`, if you trust "
                "whoever saved it)"
            )
        needed += memory_of(document, marks)
        if needed > most:
            before = ", with the documents before it," if count else ""
            raise Exhausted(
                f"{path} of {name}{before} needs up to {needed >> 20} MiB of memory, and the limit is {most >> 20} MiB "
                "(open the repository with a larger `memory`, if you trust whoever saved it)"
            )
        yield document


def memory_of(document: bytes, marks: Mapping[bytes, int] = JSON) -> int:
    """Bytes of memory that the objects of a document take, at most: `marks` has the bytes for each delimiter, and as `b""` those
    for any byte."""
    # One character beyond ASCII makes all of its string wide.
    wide = not document.isascii() or b"\\u" in document
    each = max(4 if wide else 1, marks.get(b"", 0))
    return each * len(document) + sum(size * document.count(mark) for mark, size in marks.items() if mark)


def parsed(document: bytes, what: str) -> Any:
    """Parses a JSON document. Raises Damaged, as not being `what`."""
    try:
        return json.loads(document)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"this is not {what}") from error


def distinct(keys: Iterable[Key], where: str) -> list[Key]:
    """Lists `keys` of a dict or set. Raises Damaged if so many have the same hash that it would take very long to build."""
    listed = list(keys)
    most = max(collections.Counter(map(hash, listed)).values(), default=0)
    if most > SAME_HASH_MAX:
        raise Damaged(f"{most} keys of {where} have the same hash: no such document was saved by towline")
    return listed
