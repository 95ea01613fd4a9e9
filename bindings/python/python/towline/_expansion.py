"""Limit of the memory for tensors, by the bytes of their files. A file may name the same bytes as many tensors, such as tied
weights, and each of them is read into memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import Exhausted

if TYPE_CHECKING:
    from ._towline import Tree

#: Maximum bytes by which expanded tensors of a state (`Tensor.expand`, with stride 0), or tensors over the same bytes of a file,
#: may exceed what is stored of them.
EXPANSION_MAX = 1 << 30


@dataclass(frozen=True)
class TensorLength:
    """Bytes of a tensor, or of a box of it, and its place: `path` is a file, or the folder of the files with its parts."""

    name: str
    path: str
    bytes: int


@dataclass(frozen=True)
class TreeTensors:
    """Tensors to be read of the tree `name`; `open` opens it."""

    name: str
    tensors: Iterable[TensorLength]
    open: Callable[[], Tree]


def check_expansion(wanted: TreeTensors, help: str) -> None:
    """Raises Exhausted, with `help`, if the tensors are longer than twice the files that hold them by more than EXPANSION_MAX.
    Twice, so that a tensor, such as an embedding, may have a second name. Boxes of one tensor count as the longest of them."""
    longest: dict[tuple[str, str], int] = {}
    for one in wanted.tensors:
        place = one.path, one.name
        longest[place] = max(one.bytes, longest.get(place, 0))
    taken = sum(longest.values())
    if taken <= EXPANSION_MAX:
        return
    paths = {path for path, _ in longest}
    held = _bytes_of_files(paths, wanted.open().entries())
    if taken <= 2 * held + EXPANSION_MAX:
        return
    where = next(iter(paths)) if len(paths) == 1 else f"{len(paths)} paths"
    error = Exhausted(
        f"the tensors of {where} of {wanted.name} name the same bytes again and again: they take {taken} bytes of memory, and "
        f"at most {2 * held + EXPANSION_MAX} are read from files of {held} bytes ({help})"
    )
    error.place, error.help = wanted.name, help
    raise error


def _bytes_of_files(paths: set[str], entries: Iterable[tuple[Any, ...]]) -> int:
    """Bytes of the files at `paths` or below them; `.` is the root. `entries` are those of a tree."""
    files = ((path, size) for path, kind, size, *_ in entries if kind == "file")
    return sum(size for path, size in files if not paths.isdisjoint(_with_folders(path)))


def _with_folders(path: str) -> list[str]:
    """A path, and those of all folders above it."""
    found = ["."]
    while path:
        found.append(path)
        path = path.rpartition("/")[0]
    return found
