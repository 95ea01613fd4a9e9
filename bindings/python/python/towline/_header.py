"""The header of a safetensors file in a tree, checked as the safetensors package does, and reads of tensors by its offsets: of a
file whose tensors the tree does not list, as it was cut otherwise, or too little memory was there, when it was saved."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._documents import ALWAYS_READ, memory_of

if TYPE_CHECKING:
    from ._towline import Repository as Engine
    from ._towline import Tree

#: Bytes of the length before the header, and maximum length: https://github.com/huggingface/safetensors, "Format".
_PREFIX, HEADER_MAX = 8, 100_000_000
#: Bits of an element, by the name of its type.
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
#: Maximum bytes of a read for several tensors, and of a tensor that is read with others.
_TOGETHER, _SHORT = 16 << 20, 1 << 20
#: Maximum dimensions of a tensor.
_RANK_MAX = 1024


class Malformed(ValueError):
    """Reason why a file is not a valid safetensors file."""


class TooLarge(ValueError):
    """Reason why a header is not read."""


class Place(NamedTuple):
    """A tensor of a file: its type and shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Run(NamedTuple):
    """Consecutive elements of a tensor that hold a box of it: the first one, their shape, and the index of the box in it, if it
    is not all of them."""

    first: int
    shape: tuple[int, ...]
    box: tuple[slice, ...] | None


class Range(NamedTuple):
    """Bytes of a file, and the memory that they are read to."""

    start: int
    end: int
    address: int


def read_header(engine: Engine, tree: Tree, path: str, length: int) -> bytes:
    """Reads the header of the file `path` of `length` bytes. Raises Malformed if it has none, TooLarge if it takes more memory
    than the limit."""
    most = max(engine.memory(), ALWAYS_READ)
    size = int.from_bytes(_read(tree, path, 0, min(_PREFIX, length)), "little")
    if length < _PREFIX:
        raise Malformed(f"it has {length} bytes, and the length of the header takes {_PREFIX}")
    if size > min(HEADER_MAX, length - _PREFIX):
        raise Malformed(
            f"its header has {size} bytes by its first {_PREFIX}, and at most {min(HEADER_MAX, length - _PREFIX)} were "
            "expected: it was cut short, or has another format"
        )
    header = b"" if size > most else _read(tree, path, _PREFIX, _PREFIX + size)
    if size > most or memory_of(header) > most:
        raise TooLarge(
            f"the header of {path} of {tree.name} has {size} bytes and takes more memory than the limit of {most >> 20} MiB"
        )
    return header


def length_of(tree: Tree, path: str) -> int:
    """Bytes of the file `path`; 0 if there is none."""
    return next((size for at, kind, size, *_ in tree.entries() if kind == "file" and at == path), 0)


def _read(tree: Tree, path: str, start: int, end: int) -> bytes:
    # The engine raises for a path that is no file.
    return tree.read([(path, start, end)])[0]


def parsed(header: bytes, length: int) -> tuple[dict[str, Any], dict[str, Place]]:
    """Parses the header of a file of `length` bytes: the JSON object, and the tensors by name. Raises Malformed."""
    root = _object(header)
    metadata = root.get("__metadata__")
    if metadata is not None and not _are_texts(metadata):
        raise Malformed("its __metadata__ is not an object of texts")
    base = _PREFIX + len(header)
    places = {name: _place(name, entry, base) for name, entry in root.items() if name != "__metadata__"}
    end, before = base, None
    for name, place in sorted(places.items(), key=lambda one: (one[1].start, one[1].end)):
        if place.start != end:
            what = "its data begins" if before is None else f"that of {before!r} ends"
            raise Malformed(f"tensor {name!r} begins at byte {place.start - base}, and {what} at byte {end - base}")
        end, before = place.end, name
    if end != length:
        short = ": it was cut short" if end > length else ""
        raise Malformed(f"its tensors take {end - base} bytes, and {length - base} follow the header{short}")
    return root, places


def _object(header: bytes) -> dict[str, Any]:
    try:
        # Not `json.loads(header)`, which also takes UTF-16.
        root = json.loads(header.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
        if isinstance(root, dict):
            "".join(root).encode()
            return root
    except Malformed:
        raise
    except (ValueError, RecursionError):
        pass
    raise Malformed("its header is not a JSON object")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = next(one for one, other in itertools.pairwise(keys) if one == other)
        raise Malformed(f"its header has the key {twice!r} twice")
    return made


def _no_constant(word: str) -> Any:
    raise Malformed(f"its header has the number {word}, which is not JSON")


def _are_texts(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _place(name: str, entry: Any, base: int) -> Place:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise Malformed(f"tensor {name!r} lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise Malformed(f"tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape):
        raise Malformed(f"tensor {name!r} has a shape that is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Malformed(f"tensor {name!r} has data_offsets that are not a start and an end after it")
    if len(shape) > _RANK_MAX:
        raise Malformed(f"tensor {name!r} has {len(shape)} dimensions, and at most {_RANK_MAX} are read")
    bits, got = _BITS[dtype], offsets[1] - offsets[0]
    for size in shape:
        bits *= size
        if bits >> 64:
            raise Malformed(f"tensor {name!r} has a shape of more than 2**64 bits")
    if bits != 8 * got:
        raise Malformed(f"tensor {name!r} of {dtype} {shape} takes {bits / 8:g} bytes, and its data_offsets span {got}")
    return Place(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(one) is int and 0 <= one < 1 << 64 for one in numbers)


def run_of(shape: Sequence[int], window: tuple[Sequence[int], Sequence[int]] | None) -> Run:
    """The shortest run of elements that holds the box `window` (offsets, shape) of a tensor, or all of it."""
    if window is None:
        return Run(0, tuple(shape), None)
    offsets, lengths = window
    # Before this dimension the box has one element of each, behind it the run has all.
    at = next((at for at, length in enumerate(lengths) if length != 1), len(shape) - 1)
    rest = tuple(shape[at + 1 :])
    first = 0
    for size, offset in zip(shape[: at + 1], offsets[: at + 1], strict=True):
        first = first * size + offset
    box = tuple(slice(start, start + size) for start, size in zip(offsets[at + 1 :], lengths[at + 1 :], strict=True))
    index = None if rest == tuple(lengths[at + 1 :]) else (slice(None),) * (at + 1) + box
    return Run(first * math.prod(rest), tuple(lengths[: at + 1]) + rest, index)


def bytes_of(place: Place, run: Run) -> tuple[int, int]:
    """Bytes of a run in the file. The elements fill whole bytes."""
    width = _BITS[place.dtype] // 8
    start = place.start + run.first * width
    return start, start + math.prod(run.shape) * width


def read_ranges(tree: Tree, path: str, ranges: Iterable[Range]) -> None:
    """Reads ranges of the file `path` into memory. Short ones beside each other are one read: each read decodes chunks anew."""
    together: list[Range] = []
    for one in sorted(ranges):
        if together and not _join(together, one):
            _read_together(tree, path, together)
            together = []
        if one.end - one.start > _SHORT:
            tree.read_into(path, *one)
        else:
            together.append(one)
    if together:
        _read_together(tree, path, together)


def _join(together: list[Range], one: Range) -> bool:
    """True if `one` is read with those before it."""
    return one.start <= together[-1].end + _SHORT and one.end <= together[0].start + _TOGETHER


def _read_together(tree: Tree, path: str, ranges: list[Range]) -> None:
    first = ranges[0].start
    held = _read(tree, path, first, max(one.end for one in ranges))
    for start, end, address in ranges:
        ctypes.memmove(address, held[start - first : end - first], end - start)
