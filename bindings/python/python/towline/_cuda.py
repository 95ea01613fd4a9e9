"""Copies to NVIDIA GPUs by the engine: verified bytes go through pinned memory, while the next ones are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import _towline
from .errors import Error

if TYPE_CHECKING:
    import torch

#: Number of a GPU, and its stream.
Target = tuple[int, int]


def target(device: str | int | torch.device | None) -> Target | None:
    """The GPU `device` and torch's current stream there; None for other devices, and where only torch can use the GPU."""
    if device is None:
        return None
    import torch

    chosen = torch.device(device)
    if chosen.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    number = torch.cuda.current_device() if chosen.index is None else chosen.index
    try:
        _towline.cuda_name(number)
    except Error:
        # Without the driver's library, or with an old one, torch copies, or says why it cannot.
        return None
    return number, torch.cuda.current_stream(number).cuda_stream


def copied(tensors: Iterable[torch.Tensor], gpu: Target) -> list[torch.Tensor]:
    """Copies of tensors in host memory, on the GPU."""
    import torch

    tensors = list(tensors)
    made = [torch.empty_like(tensor, device=f"cuda:{gpu[0]}") for tensor in tensors]
    pairs = zip(tensors, made, strict=True)
    ranges = [(one.data_ptr(), copy.data_ptr(), one.numel() * one.element_size()) for one, copy in pairs]
    _towline.copy_to_cuda([one for one in ranges if one[2]], gpu)
    return made
