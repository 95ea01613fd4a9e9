"""Helpers for torch tensors: dtypes by their safetensors names, and access to their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _towline

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

#: Safetensors names of dtypes.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def empty(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Uninitialized tensor of the dtype `name`; bytes with one more dimension if torch has no such dtype."""
    dtype = DTYPES.get(name)
    if dtype is not None:
        made = torch.empty(tuple(shape), dtype=dtype)
        if nbytes(made) >= LARGE:
            _towline.huge_pages(made.data_ptr(), nbytes(made))
        return made
    width = {"C32": 4, "C128": 16, "QI32": 4}.get(name, 1)
    return torch.empty((*shape, width), dtype=torch.uint8)


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


def over(address: int, length: int) -> torch.Tensor:
    """Tensor of bytes over existing memory, which it does not own."""
    import ctypes

    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * length).from_address(address), dtype=torch.uint8)
