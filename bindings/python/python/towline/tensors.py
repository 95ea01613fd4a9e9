"""Lazy tensors of a saved tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._versions import snapshot
from .errors import Conflict, TensorNotFound, UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ._towline import Tree
    from .repository import Repository


#: Dtypes of which several elements share a byte.
PACKED = ("F4", "F6_E2M3", "F6_E3M2")


class Tensors(Mapping[str, "Tensor"]):
    """Mapping of all tensors of one tree. If a name is in several files, the keys are `FILE:NAME`. Reading a key that two tensors
    have raises UsageError, which names both. All are of the version that the name had when they were listed."""

    def __init__(self, repository: Repository, name: str):
        self.repository, self.name = repository, name
        engine = repository._engine
        self._tree: Tree | None
        self._tree, text = snapshot(engine, name, lambda tree: engine.tensors(tree.name))
        self._version = self._tree.version
        listed = json.loads(text)
        seen: dict[str, int] = {}
        for tensor in listed:
            seen[tensor["name"]] = seen.get(tensor["name"], 0) + 1
        self._tensors: dict[str, Tensor] = {}
        #: Tensors whose keys others before them have.
        self._same: dict[str, list[Tensor]] = {}
        for info in listed:
            key = info["name"] if seen[info["name"]] == 1 else f"{info['path']}:{info['name']}"
            tensor = Tensor(self, info["name"], info["path"], info["dtype"], tuple(info["shape"]))
            if key in self._tensors:
                self._same.setdefault(key, []).append(tensor)
            else:
                self._tensors[key] = tensor

    def __getstate__(self) -> dict[str, Any]:
        # An open tree is of one process.
        return {**self.__dict__, "_tree": None}

    @property
    def _snapshot(self) -> Tree:
        """The open tree. In another process, raises Conflict if the name has another version there."""
        if self._tree is None:
            tree = self.repository._engine.open_tree(self.name)
            if tree.version != self._version:
                raise Conflict(f"{self.name} was saved anew since its tensors were listed (list them again)")
            self._tree = tree
        return self._tree

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor = self._tensors[name]
        except KeyError:
            raise TensorNotFound(f"no such tensor in {self.name}: {name}") from None
        if name in self._same:
            both = (tensor, self._same[name][0])
            named = " and ".join(f"{one.name!r} of {one.path}" for one in both)
            raise UsageError(
                f"two tensors of {self.name} have the key {name!r}: {named} (`of_file` has those of one file)"
            )
        return tensor

    def of_file(self, path: str) -> dict[str, Tensor]:
        """Returns the tensors of the file `path` by their names in it; none, if it has no tensors or does not exist."""
        others = (tensor for same in self._same.values() for tensor in same)
        return {tensor.name: tensor for tensor in (*self._tensors.values(), *others) if tensor.path == path}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self.name}>"


@dataclass(frozen=True, eq=False)
class Tensor:
    """A lazy tensor: `torch()` or `numpy()` reads it. `tensor[0:128, :]` is a lazy slice; only the chunks of it are fetched."""

    tensors: Tensors
    name: str
    path: str
    #: Name of the dtype in safetensors, such as "BF16".
    dtype: str
    shape: tuple[int, ...]
    #: Start of the slice along each dimension; None for the whole tensor.
    offsets: tuple[int, ...] | None = None
    #: Dimensions that an integer index removes.
    _dropped: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<tensor {self.name} {self.dtype} {list(self.shape)}>"

    def __getitem__(self, index: Any) -> Tensor:
        if self.offsets is not None:
            raise UsageError("a slice of a slice is not supported: index the whole tensor once")
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = index[:at] + (slice(None),) * (len(self.shape) - len(index) + 1) + index[at + 1 :]
        if len(index) > len(self.shape):
            raise IndexError(f"{self.name} has {len(self.shape)} dimensions, not {len(index)}")
        offsets, shape, dropped = [], [], []
        for dimension, length in enumerate(self.shape):
            one = index[dimension] if dimension < len(index) else slice(None)
            if isinstance(one, slice):
                start, stop, step = one.indices(length)
                if step != 1:
                    raise UsageError("a slice with a step is not supported: use steps of 1")
                offsets.append(start)
                shape.append(max(0, stop - start))
            else:
                at = one.__index__()
                if not -length <= at < length:
                    raise IndexError(
                        f"index {at} is out of bounds for dimension {dimension} of {self.name}, of length {length}"
                    )
                offsets.append(at % length)
                shape.append(1)
                dropped.append(dimension)
        return Tensor(self.tensors, self.name, self.path, self.dtype, tuple(shape), tuple(offsets), tuple(dropped))

    def torch(self, device: str | torch.device | None = None) -> torch.Tensor:
        """Reads the tensor as a torch tensor, on `device` (default: CPU)."""
        from . import _torch

        _torch.check_shape(self.name, self.dtype, self.shape)
        if self.dtype in PACKED:
            raise UsageError(no_type(self.name, self.dtype))
        read = _torch.empty(self.dtype, self.shape)
        self._read(read.data_ptr(), read.numel() * read.element_size())
        for dimension in reversed(self._dropped):
            read = read.squeeze(dimension)
        return read if device is None else read.to(device)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Reads the tensor as a numpy array. Dtypes that numpy lacks (bf16, fp8) become unsigned integers of the same width."""
        import numpy

        words = {"BOOL": "?", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "C128": "<c16", "BF16": "<u2"}
        letters = {"I": "i", "U": "u"}
        kind = words.get(self.dtype)
        if kind is None and self.dtype[0] in letters and self.dtype[1:] in ("8", "16", "32", "64"):
            kind = f"<{letters[self.dtype[0]]}{int(self.dtype[1:]) // 8}"
        if kind is None and (self.dtype.startswith("F8_") or self.dtype in ("QI8", "QU8")):
            kind = "u1"
        if kind is None:
            raise UsageError(no_type(self.name, self.dtype, "numpy"))
        read = numpy.empty(self.shape, numpy.dtype(kind))
        self._read(read.ctypes.data, read.nbytes)
        return read.squeeze(self._dropped) if self._dropped else read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        read = self.numpy()
        return read if dtype is None else read.astype(dtype)

    def __dlpack__(self, **wanted: Any) -> Any:
        return self.torch().__dlpack__(**wanted)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU, https://dmlc.github.io/dlpack/latest/c_api.html

    def read_request(self, address: int, length: int) -> tuple[Any, ...]:
        """Read of this tensor into memory, as the engine takes it."""
        return read_request(
            self.name, self.path, None if self.offsets is None else (self.offsets, self.shape), address, length
        )

    def _read(self, address: int, length: int) -> None:
        if length:
            self.tensors._snapshot.read_tensors([self.read_request(address, length)])


def no_type(name: str, dtype: str, package: str = "torch") -> str:
    """Text about a tensor of a dtype that `package` has no type for."""
    if dtype in PACKED:
        pairs = ", of which torch has pairs as float4_e2m1fn_x2," if dtype == "F4" else ""
        return (
            f"{name} is {dtype}, numbers of less than a byte{pairs} for which there is no type here: restore its file, and read "
            "that with the safetensors package"
        )
    return f"{name} is {dtype}, for which {package} has no type: restore its file instead"


def read_request(
    name: str,
    path: str,
    window: tuple[Sequence[int], Sequence[int]] | None,
    address: int,
    length: int,
) -> tuple[Any, ...]:
    """Read of a tensor, or of a `window` (offsets, shape) of it, into memory, as the engine takes it."""
    box = None if window is None else (list(window[0]), list(window[1]))
    return (name, path, box, address, length)
