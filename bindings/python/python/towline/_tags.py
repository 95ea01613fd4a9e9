"""Tags of values in a state's JSON document, shared by serializing and restoring, and conversion of values that are text."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import types
import zoneinfo
from collections.abc import Sequence
from typing import Any

import torch

from .errors import Damaged, Unsupported

#: Version of the document's layout, stored in it.
VERSION = 1
#: Maximum nesting depth, well below the limit of Python's stack.
DEPTH_MAX = 128

DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
NAMESPACES: dict[str, type] = {"Namespace": argparse.Namespace, "SimpleNamespace": types.SimpleNamespace}
SPARSE = {
    torch.sparse_coo: ("coo", ("_indices", "_values")),
    torch.sparse_csr: ("csr", ("crow_indices", "col_indices", "values")),
    torch.sparse_csc: ("csc", ("ccol_indices", "row_indices", "values")),
    torch.sparse_bsr: ("bsr", ("crow_indices", "col_indices", "values")),
    torch.sparse_bsc: ("bsc", ("ccol_indices", "row_indices", "values")),
}
#: Factories of a defaultdict that are restored by name.
FACTORIES = {
    cls.__name__: cls
    for cls in (
        list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes, bytearray,
        collections.deque, collections.OrderedDict, collections.Counter,
    )
}  # fmt: skip

_PATHS = {
    type(pathlib.Path()): "Path",
    pathlib.PurePosixPath: "PurePosixPath",
    pathlib.PureWindowsPath: "PureWindowsPath",
}
#: Maximum characters of a path, as in Linux (limits.h, PATH_MAX). A path keeps an object for each of its folders.
_PATH_LEN_MAX = 4096
#: Maximum characters of an unknown time zone in an error; known ones have at most 32.
_ZONE_SHOWN_MAX = 64
_TIMES = {cls.__name__: cls for cls in (datetime.datetime, datetime.date, datetime.time)}

#: Tags of values that contain a list of values.
LISTS = ("tuple", "set", "frozenset", "torch.Size", "deque")
#: Tags of values that contain pairs of a key, or a name, and a value.
PAIRS = tuple(cls.__name__ for cls in DICTS)
NAMED = ("dataclass", "namedtuple", *NAMESPACES)
#: Tags of values that are stored as text.
PLAIN = ("Path", "PurePosixPath", "PureWindowsPath", "datetime", "date", "time", "timedelta")


class Attribute(str):
    """Attribute in a path in a state, in contrast to a key."""


def shown(path: tuple[Any, ...]) -> str:
    """Path in a state, in Python syntax; a long one is shortened in the middle."""
    parts = [f".{key}" if type(key) is Attribute else f"[{key!r}]" for key in path]
    if len(parts) > 16:
        parts[8:-4] = [" ... "]
    return "state" + "".join(parts)


def listed(node: dict[str, Any], *, pairs: bool = False) -> list[Any]:
    """Values of a node that contains a list, or pairs."""
    values = node.get("v")
    if not isinstance(values, list) or (
        pairs and not all(isinstance(pair, list) and len(pair) == 2 for pair in values)
    ):
        raise Damaged(
            f"the document of a state has a {node.get('!')} without its list of {'pairs' if pairs else 'values'}"
        )
    return values


def is_stateful(value: Any) -> bool:
    """True for objects with state_dict and load_state_dict, such as modules, optimizers and schedulers."""
    return (
        not isinstance(value, (type, enum.Enum))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def as_text(value: Any) -> dict[str, Any] | None:
    """Converts a path or time to a node; None for other values, and for times in an unnamed zone."""
    kind = type(value)
    if kind in _PATHS:
        return {"!": _PATHS[kind], "v": str(value)} if len(str(value)) <= _PATH_LEN_MAX else None
    if kind is datetime.timedelta:
        return {"!": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.date:
        return {"!": "date", "v": value.isoformat()}
    if kind not in (datetime.datetime, datetime.time):
        return None
    node: dict[str, Any] = {"!": kind.__name__, "v": value.replace(tzinfo=None, fold=0).isoformat()}
    if value.fold:
        node["fold"] = value.fold
    if value.tzinfo is not None:
        zone = _zone(value.tzinfo)
        if zone is None:
            return None
        node["zone"] = zone
    return node


def from_text(node: dict[str, Any]) -> Any:
    """Converts a node of `as_text` back."""
    word, text = node["!"], node["v"]
    if word == "timedelta":
        return datetime.timedelta(*text)
    if word not in _TIMES:
        if len(text) > _PATH_LEN_MAX:
            raise Damaged(
                f"the document of a state has a path of {len(text)} characters; at most {_PATH_LEN_MAX} are saved"
            )
        return getattr(pathlib, word)(text)
    value: Any = _TIMES[word].fromisoformat(text)
    if "fold" in node:
        value = value.replace(fold=node["fold"])
    return value.replace(tzinfo=_read_zone(node["zone"])) if "zone" in node else value


def _zone(zone: datetime.tzinfo) -> str | list[int] | None:
    """Name of a time zone, or its offset from UTC."""
    if type(zone) is zoneinfo.ZoneInfo:
        return zone.key
    if type(zone) is not datetime.timezone:
        return None
    offset = zone.utcoffset(None)
    return [offset.days, offset.seconds, offset.microseconds]


def _read_zone(zone: str | list[int]) -> datetime.tzinfo:
    if isinstance(zone, list):
        return datetime.timezone(datetime.timedelta(*zone))
    try:
        return zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, OSError, ValueError) as error:
        # A zone is the path of a file: "America" is a folder, and a long one is no path.
        name = zone if len(zone) <= _ZONE_SHOWN_MAX else zone[:_ZONE_SHOWN_MAX] + "..."
        raise Unsupported(f"this machine knows no time zone {name!r} (install the package tzdata)") from error


def hides_method(cls: type, name: Any) -> bool:
    """True if an attribute of this name cannot be one of an object of `cls`, or would hide a method."""
    return not isinstance(name, str) or hasattr(cls, name)


def is_gapless(stride: Sequence[int], shape: Sequence[int]) -> bool:
    """True if elements with these strides have no gaps, in any order of the dimensions."""
    if len(stride) != len(shape):
        return False
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True
