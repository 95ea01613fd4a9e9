"""Helpers for torch tensors: dtypes by their safetensors names, and access to their memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import _towline
from .errors import UsageError

#: Minimum bytes of a tensor that is allocated in huge pages, which are faster to fill.
LARGE = 4 << 20

#: Dtypes by their safetensors names. Dtypes that this torch lacks are left out.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, torch_name)
}

#: Bytes of an element of the dtypes that torch may lack, unless it is one.
_WIDTHS = {"C32": 4, "C128": 16, "QI32": 4}

#: Safetensors names of dtypes.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_named(name: str) -> torch.dtype | None:
    """Dtype by its name in torch; None if it has none. `getattr` would import a submodule, such as `_inductor`, of that name."""
    dtype = vars(torch).get(name)
    return dtype if isinstance(dtype, torch.dtype) else None


def empty(name: str, shape: Sequence[int], device: str | None = None) -> torch.Tensor:
    """Uninitialized tensor of the dtype `name`, in host memory unless `device` says otherwise; bytes with one more dimension if
    torch has no such dtype."""
    dtype, place = DTYPES.get(name), device or "cpu"
    if dtype is not None:
        made = torch.empty(tuple(shape), dtype=dtype, device=place)
        if device is None and nbytes(made) >= LARGE:
            _towline.huge_pages(made.data_ptr(), nbytes(made))
        return made
    return torch.empty((*shape, _WIDTHS.get(name, 1)), dtype=torch.uint8, device=place)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of all elements."""
    return tensor.numel() * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor is dense, contiguous and in host memory, so that its bytes can be copied directly."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def over(address: int, length: int, owner: Any = None) -> torch.Tensor:
    """Tensor of bytes over existing memory. It does not own the memory, but keeps `owner` alive."""
    import ctypes

    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_ubyte * length).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def view(bytes_: torch.Tensor, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Tensor of the dtype `name` over a tensor of all its bytes; bytes with one more dimension if torch has no such dtype."""
    dtype = DTYPES.get(name)
    if bytes_.numel() == 0:
        return empty(name, shape)
    shape = tuple(shape)
    return bytes_.view((*shape, _WIDTHS.get(name, 1))) if dtype is None else bytes_.view(dtype).view(shape)


def is_shape(name: str, shape: Sequence[int]) -> bool:
    """True if `empty` can make a tensor of this shape, if there is memory. torch computes strides as 64-bit integers, also those
    of a tensor without elements, as if a dimension of 0 were one of 1."""
    width = 1 if name in DTYPES else _WIDTHS.get(name, 1)
    return math.prod(max(1, size) for size in shape) * width < 1 << 63


def check_shape(tensor: str, name: str, shape: Sequence[int]) -> None:
    """Raises UsageError if `empty` cannot make a tensor of this shape, however much memory there is."""
    if not is_shape(name, shape):
        raise UsageError(f"{tensor} has the shape {list(shape)}, too large for torch: restore its file instead")


def length(name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor that `empty` makes."""
    dtype = DTYPES.get(name)
    return math.prod(shape) * (_WIDTHS.get(name, 1) if dtype is None else dtype.itemsize)
