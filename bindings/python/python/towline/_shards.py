"""Check that a load of all tensors of a tree gets all: those that the index of a sharded checkpoint names, and those of each
safetensors file. A save stores what is there, with a warning: a shard may be truncated or missing, or not understood."""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import _header
from ._documents import ALWAYS_READ, memory_of
from .errors import Damaged, Error, Exhausted, NotFound

if TYPE_CHECKING:
    from ._towline import Repository as Engine
    from ._towline import Tree

#: Ends of the names of an index, and of safetensors files.
_INDEX, _FILE = ".safetensors.index.json", ".safetensors"
#: Maximum bytes of the indexes that are compared: that of one in a save.
_INDEX_MAX = 64 << 20
#: Remedies: of a checkpoint that is not whole, of a file that was saved without its tensors, and of a long header.
_SAVE_WHOLE = "save the whole folder again; `path` or `tensors` loads what is there"
_SAVE_TENSORS = "save it again with `--cut tensor` and more `--memory`; safetensors.load_file reads it as it is"
_MORE_MEMORY = "open the repository with a larger `memory`, if you trust whoever saved it"

_logger = logging.getLogger("towline")


def check_complete(engine: Engine, tree: Tree, path: str | None, found: Iterable[tuple[str, str]]) -> bool:
    """Raises Damaged or NotFound if `found`, the path and name of each tensor of `tree`, or of its file or folder `path`, lacks
    tensors that there are by the files there. Returns True if there is a safetensors file without tensors."""
    try:
        entries = {at: (kind, size) for at, kind, size, *_ in tree.entries() if _is_below(at, path)}
    except Exhausted as error:
        _logger.warning("%s is loaded without a search for missing tensors: %s", tree.name, error)
        return False
    found = list(found)
    listed = {at for at, _ in found}
    # A file whose name is no text cannot be read by its path, in which characters stand for others.
    files = {at: size for at, (kind, size) in entries.items() if kind == "file" and "\ufffd" not in at}
    left = _INDEX_MAX
    by_folder: _Names | None = None
    for at, size in files.items():
        if at.endswith(_INDEX):
            by_folder = by_folder or _Names(found, entries)
            left -= size
            placed = _weight_map(engine, tree, at, size) if left >= 0 else None
            if placed is None:
                _logger.warning(
                    "%s of %s is not compared with the tensors there: it takes too much memory", at, tree.name
                )
                continue
            lacking = by_folder.lacking(at, placed)
            if lacking:
                what = f"{at} of {tree.name} names {len(placed)} tensors, of which {len(lacking)} are not there: the first is "
                raise _incomplete(engine, tree, what, lacking[0], entries, listed)
    empty = {at: size for at, size in files.items() if at.endswith(_FILE) and at not in listed}
    for at, size in empty.items():
        _check_file(engine, tree, at, size, "")
    return bool(empty)


class _Names:
    """Names of the tensors that are listed, by their places."""

    def __init__(self, found: list[tuple[str, str]], entries: dict[str, tuple[str, int]]):
        self._entries, self._found = entries, set(found)
        self._anywhere = {name for _, name in found}
        self._within: dict[str, set[str]] = {}
        for path, name in found:
            # A tensor whose parts are in several files has the path of their folder.
            folder = posixpath.dirname(path) if self._kind(path) == "file" else ("" if path == "." else path)
            self._within.setdefault(folder, set()).add(name)

    def _kind(self, path: str) -> str:
        return self._entries.get(path, ("", 0))[0]

    def lacking(self, at: str, placed: dict[str, str]) -> list[tuple[str, str]]:
        """Name and file of the tensors of the index `at` that are not listed: neither in the file that it names, nor in another
        one beside the index, such as one that shards were merged to, nor, if that file is a link, anywhere."""
        folder = posixpath.dirname(at)
        beside, lacking = self._within.get(folder, set()), []
        for name, file in placed.items():
            path = posixpath.normpath(posixpath.join(folder, file))
            there = self._anywhere if self._kind(path) == "link" else beside
            if name not in there and (path, name) not in self._found:
                lacking.append((name, path))
        return lacking


def _is_below(at: str, path: str | None) -> bool:
    """True for the file or folder `path`, and all that is in it."""
    folder = "" if path is None else path.strip("/")
    return folder == "" or at == folder or at.startswith(f"{folder}/")


def _weight_map(engine: Engine, tree: Tree, at: str, size: int) -> dict[str, str] | None:
    """Files of the tensors that the index `at` names, none if it is no index; None if it takes too much memory."""
    most = max(engine.memory(), ALWAYS_READ)
    document = tree.read([(at, 0, size)])[0] if size <= most else None
    if document is None or memory_of(document) > most:
        return None
    try:
        placed = json.loads(document)["weight_map"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return {}
    return placed if isinstance(placed, dict) and all(isinstance(file, str) for file in placed.values()) else {}


def _incomplete(
    engine: Engine,
    tree: Tree,
    what: str,
    first: tuple[str, str],
    entries: dict[str, tuple[str, int]],
    listed: set[str],
) -> Error:
    """Error, which begins with `what`, for tensors that an index names: says what is wrong with the file of the first."""
    name, path = first
    kind, size = entries.get(path, ("", 0))
    if kind == "file" and path not in listed:
        _check_file(engine, tree, path, size, f"{what}{name!r} of {path}; ")
    why = "which has no such tensor" if kind == "file" else "which is no file of the tree"
    return _error(Damaged, tree, f"{what}{name!r} of {path}, {why}", _SAVE_WHOLE)


def _check_file(engine: Engine, tree: Tree, at: str, size: int, what: str) -> None:
    """Raises unless the safetensors file `at`, of which the tree lists no tensors, is valid and has none. `what` precedes the
    message."""
    try:
        _, places = _header.parsed(_header.read_header(engine, tree, at, size), size)
    except _header.Malformed as reason:
        raise _error(
            Damaged, tree, f"{what}{at} of {tree.name} is not a safetensors file: {reason}", _SAVE_WHOLE
        ) from None
    except _header.TooLarge as reason:
        raise _error(Exhausted, tree, f"{what}{reason}", _MORE_MEMORY) from None
    if places:
        why = "it was cut otherwise, or took too much memory, when it was saved"
        text = f"{what}{at} of {tree.name} has {len(places)} tensors, of which the tree lists none: {why}"
        raise _error(NotFound, tree, text, _SAVE_TENSORS)


def _error(cls: type[Error], tree: Tree, text: str, help: str) -> Error:
    error = cls(f"{text} ({help})")
    error.place, error.help = tree.name, help
    return error
