"""GPUs: copies to host memory, and pinned host memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def gpus(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """GPUs of the tensors."""
    return {tensor.device for tensor in tensors if tensor.device.type == "cuda"}


def pin(owner: Any, address: int, length: int, device: torch.device) -> weakref.finalize[..., Any]:
    """Pins memory until `owner` is garbage-collected or the result is called. The memory must be unpinned before it is freed."""
    import torch

    runtime = torch.cuda.cudart()
    # A new thread uses the first GPU by default; this avoids a CUDA context there.
    with torch.cuda.device(device):
        # 1 is cudaHostRegisterPortable: for all devices
        # (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html).
        torch.cuda.check_error(runtime.cudaHostRegister(address, length, 1))
    unpin = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    # At exit, CUDA may be shut down earlier.
    unpin.atexit = False
    return unpin


class Devices:
    """Copies from GPUs, on one separate stream of the lowest priority for each, ordered after the work in the caller's
    stream."""

    def __init__(self, devices: Iterable[torch.device]):
        self._streams: dict[Any, Any] = {}
        for device in devices:
            import torch

            stream = torch.cuda.Stream(device=device, priority=0)
            stream.wait_event(torch.cuda.current_stream(device).record_event())
            self._streams[device] = stream

    def __iter__(self) -> Iterator[torch.device]:
        return iter(self._streams)

    def stream(self, tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Stream for copies of `tensor`, as a context manager."""
        stream = self._streams.get(tensor.device)
        if stream is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """Waits for all copies."""
        for stream in self._streams.values():
            stream.synchronize()
