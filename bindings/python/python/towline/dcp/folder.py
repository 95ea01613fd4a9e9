"""Checkpoints of torch's FileSystemWriter, a pickled `.metadata` and `.distcp` files, that were saved to a repository as files.

The unpickler only creates the metadata classes of torch.
"""

from __future__ import annotations

import enum
import io
import pickle
import struct
from collections.abc import Container
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import Damaged, Unsupported
from .metadata import Stored

#: Path of the metadata in such a checkpoint.
METADATA = ".metadata"

#: Maximum bytes in a path (PATH_MAX of Linux).
_PATH_LEN_MAX = 4096


def _joined(*parts: object) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise pickle.UnpicklingError("a path is not made of texts")
    path = "/".join(map(str, parts))
    if len(path) > _PATH_LEN_MAX:
        raise pickle.UnpicklingError(f"a path is longer than {_PATH_LEN_MAX} bytes")
    return path


_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
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


class _Unpickler(_Base):
    """Unpickler that only creates torch's metadata classes."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(_Base.dispatch)

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
        if module == torch_metadata.__name__ and name in (*torch_metadata.__all__, "_MEM_FORMAT_ENCODING"):
            return getattr(torch_metadata, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _NAMES[module, name]
        except KeyError:
            raise Unsupported(
                f"the checkpoint's {METADATA} holds a {module}.{name}, which is not allowed in a pickle"
            ) from None


def read(held: bytes) -> torch.Tensor:
    """Tensor in a byte range of a `.distcp` file."""
    tensor: torch.Tensor = torch.load(io.BytesIO(held), map_location="cpu", weights_only=True)
    return tensor


def decode(document: bytes, tensors: Container[str]) -> Metadata:
    """Metadata of such a checkpoint, with a `Stored` for each item as its storage data. `tensors` are the names that the engine
    lists."""
    try:
        metadata = _Unpickler(io.BytesIO(document)).load()
    except Unsupported:
        raise
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError),
        *(struct.error, AssertionError, OverflowError, MemoryError, RuntimeError),
    ) as error:
        raise Damaged(f"the checkpoint's {METADATA} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Damaged(f"the checkpoint's {METADATA} is not the metadata of a distributed checkpoint")
    stored = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise Unsupported(
                f"{index.fqn} was written through {', '.join(info.transform_descriptors)}, which towline cannot read"
            )
        held = metadata.state_dict_metadata[index.fqn]
        if isinstance(held, TensorStorageMetadata):
            # The engine lists the tensors of such a folder by name, with their parts joined; only non-contiguous ones are
            # missing, and are read from the file.
            dtype, origin = str(held.properties.dtype).removeprefix("torch."), tuple(index.offset)
            known = index.fqn in tensors
            path, tensor = (".", index.fqn) if known else (info.relative_path, None)
            stored[index] = Stored(path, tensor, dtype, start=info.offset, length=info.length, origin=origin)
        else:
            stored[index] = Stored(info.relative_path, start=info.offset, length=info.length)
    metadata.storage_data = stored
    return metadata
