"""Checkpoints of torch's FileSystemWriter, a pickled `.metadata` and `.distcp` files, that were saved to a repository as files.

The unpickler only creates the metadata classes of torch. It executes only the opcodes that a metadata needs, and hashes only keys
that are quick to hash: a pickle of a few hundred bytes can hold a tuple whose hash takes forever, or overflows the stack.
"""

from __future__ import annotations

import collections
import enum
import io
import pickle
import struct
from collections.abc import Container, Iterable
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .. import _torch
from .._documents import SAME_HASH_MAX
from ..errors import Damaged, Unsupported
from . import _pickles
from .metadata import StorageInfo

#: Path of the metadata in such a checkpoint.
METADATA = ".metadata"

#: Maximum bytes in a path (PATH_MAX of Linux).
_PATH_LEN_MAX = 4096
#: Maximum number of dimensions of a tensor.
_DIMENSIONS_MAX = 256
#: Maximum nesting of the planner's data. That of torch's planner is a dict of tuples.
_DEPTH_MAX = 32


def _joined(*parts: object) -> str:
    length = 0
    for part in parts:
        if not isinstance(part, str):
            raise pickle.UnpicklingError("a path is not made of strings")
        # Checked before they are joined: one long part may be there many times.
        length += len(part) + 1
        if length > _PATH_LEN_MAX + 1:
            raise pickle.UnpicklingError(f"a path is longer than {_PATH_LEN_MAX} bytes")
    return "/".join(map(str, parts))


def _layout(name: object) -> torch.layout:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("a layout is not named by a string")
    layout: torch.layout = torch.serialization._get_layout(name)
    return layout


def _memory_format(value: object) -> Any:
    # An enumeration hashes the value to look it up.
    if type(value) is not int:
        raise pickle.UnpicklingError("a memory format is not named by a number")
    return torch_metadata._MEM_FORMAT_ENCODING(value)


def _ordered_dict() -> dict[Any, Any]:
    # An OrderedDict is pickled as an empty one, and its items after it.
    return {}


_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _memory_format,
    ("collections", "OrderedDict"): _ordered_dict,
    ("pathlib", "Path"): _joined,
    ("pathlib", "PosixPath"): _joined,
}


#: Classes whose instances may get state from a pickle. Enumerations are left out: their members are shared by the process.
_STATEFUL = {
    _StorageInfo,
    *(
        kind
        for kind in map(torch_metadata.__dict__.get, torch_metadata.__all__)
        if isinstance(kind, type) and kind.__module__ == torch_metadata.__name__ and not issubclass(kind, enum.Enum)
    ),
}


#: The pure-Python unpickler: only it lets an opcode be overridden.
_Base: Any = pickle._Unpickler

#: Opcodes of a metadata that is pickled with protocol 2 or later, as torch does: no sets, no extensions, and none of the text
#: opcodes of protocol 0 but GLOBAL.
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "LONG4", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE",
)  # fmt: skip


#: Bytes of memory that opcodes stand for, at most: lists, dicts, tuples, texts, instances, and places in the memo; and any byte.
MARKS = {
    b"]": 64, b"}": 64, b"t": 64, b"\x85": 64, b"\x86": 64, b"\x87": 64, b"\x8c": 64, b"\x81": 256, b"R": 256, b"\x94": 128,
    b"q": 128, b"r": 128, b"": 12,
}  # fmt: skip


class _Unpickler(_Base):
    """Unpickler that only creates torch's metadata classes."""

    stack: list[Any]
    #: Keys of each hash.
    hashes: collections.Counter[int]
    dispatch: ClassVar[dict[int, Any]] = {
        code: _Base.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES)
    }

    def load(self) -> Any:
        self.hashes = collections.Counter()
        try:
            return super().load()
        except KeyError as error:
            # The error of an opcode that is not in the table, and of a memo that is not set, is only its key.
            raise pickle.UnpicklingError(f"it has an opcode or a reference that is not allowed: {error}") from error

    def load_setitem(self) -> None:
        if len(self.stack) >= 2:
            self._check_key(self.stack[-2])
        super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            self._check_key(key)
        super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def _check_key(self, key: object) -> None:
        _check_key(key)
        self.hashes[hash(key)] += 1
        # Strings differ in their hashes; the same ones are keys of several dicts.
        if type(key) is MetadataIndex and self.hashes[hash(key)] > SAME_HASH_MAX:
            raise pickle.UnpicklingError("too many keys have the same hash")

    def load_build(self) -> None:
        if len(self.stack) < 2:
            raise pickle.UnpicklingError("state without an object")
        target = self.stack[-2]
        # The base class would also set attributes of classes that the pickle names, for the whole process.
        if type(target) not in _STATEFUL:
            what = getattr(target, "__qualname__", type(target).__qualname__)
            raise Unsupported(
                f"the checkpoint's {METADATA} sets attributes of {what}, which is not allowed in a pickle"
            )
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module == torch_metadata.__name__ and name in torch_metadata.__all__:
            return getattr(torch_metadata, name)
        if module == "torch" and (dtype := _torch.dtype_named(name)) is not None:
            return dtype
        try:
            return _NAMES[module, name]
        except KeyError:
            raise Unsupported(
                f"the checkpoint's {METADATA} holds a {module}.{name}, which is not allowed in a pickle"
            ) from None


def _check_key(key: object) -> None:
    """Raises UnpicklingError unless `key` is one of a metadata, which is quick to hash and to compare."""
    if type(key) is str:
        return
    if type(key) is not MetadataIndex:
        raise pickle.UnpicklingError(f"a key is a {type(key).__name__}, not a string or a MetadataIndex")
    offset = key.offset
    if type(key.fqn) is not str or not (offset is None or type(offset) is torch.Size):
        raise pickle.UnpicklingError("a MetadataIndex is not one of a name and an offset")
    if offset is not None and len(offset) > _DIMENSIONS_MAX:
        raise pickle.UnpicklingError(f"an offset has more than {_DIMENSIONS_MAX} dimensions")


def _check_planner_data(data: Any, count_max: int) -> None:
    """Raises UnpicklingError unless the planner's data is plain, and has at most `count_max` values, those that it shares counted
    each time: a planner walks all of it, and hashes what is in tuples."""
    left, pending = count_max, [(data, 0)]
    while pending:
        value, depth = pending.pop()
        left -= 1
        if left < 0 or depth > _DEPTH_MAX:
            raise pickle.UnpicklingError("the planner's data is nested too deeply, or shares too many values")
        if isinstance(value, dict):
            children: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple)):
            children = value
        elif value is None or isinstance(value, (bool, int, float, str, bytes)):
            continue
        else:
            raise pickle.UnpicklingError(f"the planner's data has a {type(value).__name__}")
        if len(value) > left:
            raise pickle.UnpicklingError("the planner's data shares too many values")
        pending += [(child, depth + 1) for child in children]


def read(held: bytes) -> torch.Tensor:
    """Tensor in a byte range of a `.distcp` file."""
    tensor: torch.Tensor = torch.load(_pickles.checked(held), map_location="cpu", weights_only=True)
    return tensor


def decode(document: bytes, tensors: Container[str]) -> Metadata:
    """Metadata of such a checkpoint, with a `StorageInfo` for each item as its storage data. `tensors` are the names that the
    engine lists."""
    try:
        return _located(_unpickled(document), tensors)
    except Unsupported:
        raise
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError),
        *(struct.error, AssertionError, OverflowError, MemoryError, RuntimeError),
    ) as error:
        raise Damaged(f"the checkpoint's {METADATA} cannot be read: {error}") from error


def _unpickled(document: bytes) -> Metadata:
    metadata = _Unpickler(io.BytesIO(document)).load()
    if (
        not isinstance(metadata, Metadata)
        or not isinstance(metadata.storage_data, dict)
        or not isinstance(metadata.state_dict_metadata, dict)
    ):
        raise pickle.UnpicklingError("it is not the metadata of a distributed checkpoint")
    for key in metadata.storage_data:
        # A pickle may change a key after it was checked.
        _check_key(key)
    # A value takes at least an opcode of one byte, and a path of the planner shares few.
    _check_planner_data(metadata.planner_data, 4 * len(document))
    return metadata


def _located(metadata: Metadata, tensors: Container[str]) -> Metadata:
    stored = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise Unsupported(f"{index.fqn} was written through transforms, which towline cannot read")
        held = metadata.state_dict_metadata[index.fqn]
        # A text of a planted object could be of any length.
        if type(info.relative_path) is not str or type(info.offset) is not int or type(info.length) is not int:
            raise pickle.UnpicklingError("a place in it is malformed")
        if isinstance(held, TensorStorageMetadata):
            # The engine lists the tensors of such a folder by name, with their parts joined; only non-contiguous ones are
            # missing, and are read from the file.
            if type(held.properties.dtype) is not torch.dtype:
                raise pickle.UnpicklingError("the type of a tensor in it is malformed")
            dtype, origin = str(held.properties.dtype).removeprefix("torch."), tuple(index.offset)
            known = index.fqn in tensors
            path, tensor = (".", index.fqn) if known else (info.relative_path, None)
            stored[index] = StorageInfo(path, tensor, dtype, start=info.offset, length=info.length, origin=origin)
        else:
            stored[index] = StorageInfo(info.relative_path, start=info.offset, length=info.length)
    metadata.storage_data = stored
    return metadata
