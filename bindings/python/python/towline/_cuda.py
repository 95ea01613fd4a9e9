"""Copies to NVIDIA GPUs by the engine: verified bytes go through pinned memory, while the next ones are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from . import _towline
from .errors import Error

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger("towline")


class Gpu(NamedTuple):
    """A GPU, and the stream of torch for which tensors are allocated there. Copies wait for what was queued in it, as torch may
    give out memory that earlier work in the stream still uses."""

    number: int
    stream: torch.cuda.Stream

    @property
    def target(self) -> tuple[int, int, str]:
        """Number of the GPU, handle of the stream, and where chunks are decoded, for the engine."""
        return self.number, self.stream.cuda_stream, os.environ.get("TOWLINE_DECODE_ON", "cpu")

    def allocating(self) -> torch.cuda.StreamContext:
        """Block in which tensors are allocated for the stream, also in another thread than that of its user."""
        import torch

        return torch.cuda.stream(self.stream)


def gpu_of(device: str | int | torch.device | None) -> Gpu | None:
    """The GPU `device` with torch's current stream there; None for other devices, and where only torch can use the GPU."""
    if device is None:
        return None
    import torch

    chosen = torch.device(device)
    if chosen.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    number = torch.cuda.current_device() if chosen.index is None else chosen.index
    try:
        _towline.cuda_name(number)
    except Error as error:
        _logger.info("torch copies to cuda:%s: %s", number, error)
        return None
    return Gpu(number, torch.cuda.current_stream(number))


def copied(tensors: Iterable[torch.Tensor], gpu: Gpu) -> list[torch.Tensor]:
    """Copies of tensors in host memory, on the GPU."""
    import torch

    from . import _torch

    tensors = list(tensors)
    with gpu.allocating():
        made = [torch.empty_like(tensor, device=f"cuda:{gpu.number}") for tensor in tensors]
    pairs = zip(tensors, made, strict=True)
    ranges = [(one.data_ptr(), copy.data_ptr(), _torch.nbytes(one)) for one, copy in pairs]
    _towline.copy_to_cuda([one for one in ranges if one[2]], gpu.target)
    return made
