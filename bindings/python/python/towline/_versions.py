"""Reads of one version of a name: others may save it again meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .errors import Busy

if TYPE_CHECKING:
    from ._towline import Repository as Engine
    from ._towline import Tree

Seen = TypeVar("Seen")

#: Tries to see one version of a name that others save again and again.
_TRIES = 8


def snapshot(engine: Engine, name: str, look: Callable[[Tree], Seen]) -> tuple[Tree, Seen]:
    """Opens the tree `name`; also returns what `look`, which may use its name, returns for it. Both are of one version: the tree
    stays as it is, whatever the name gets. Calls `look` again if the name was saved anew meanwhile."""
    for _ in range(_TRIES):
        tree = engine.open_tree(name)
        seen = look(tree)
        if is_current(engine, tree):
            return tree, seen
    help = "try again, and let no two processes save it at a time"
    error = Busy(f"{name} was saved anew each of {_TRIES} times that it was opened ({help})")
    error.place, error.help = name, help
    raise error


def is_current(engine: Engine, tree: Tree) -> bool:
    """True if the name of `tree` has its version: what was read by name since it was opened is of it, too."""
    return engine.find(tree.name) == (tree.name, tree.version)


def read_range(tree: Tree, path: str, start: int, end: int) -> bytes:
    """Bytes from `start` to `end` of the file `path`; fewer, if it is shorter."""
    length = next((size for at, kind, size, *_ in tree.entries() if kind == "file" and at == path), 0)
    start = min(start, length)
    # The engine raises for a path that is no file.
    return tree.read([(path, start, max(start, min(end, length)))])[0]
