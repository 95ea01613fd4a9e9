"""GPUs: copies from them, and memory of the host that they copy to by themselves."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def gpus(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The GPUs that tensors are on."""
    return {tensor.device for tensor in tensors if tensor.device.type == "cuda"}


def pin(owner: Any, address: int, length: int, device: torch.device) -> weakref.finalize[..., Any]:
    """Pins memory until `owner` goes, or what this returns is called. Must be over before the memory is."""
    import torch

    runtime = torch.cuda.cudart()
    # A thread begins on the first GPU, whose memory is not to be touched for this.
    with torch.cuda.device(device):
        # 1 is cudaHostRegisterPortable: for all devices
        # (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html).
        torch.cuda.check_error(runtime.cudaHostRegister(address, length, 1))
    unpin = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    # At exit CUDA may be gone before.
    unpin.atexit = False
    return unpin


class Devices:
    """Copies from GPUs: from each on a stream of its own of the lowest priority, after what the caller's stream was given
    before."""

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
        """Where copies of `tensor` are put in line."""
        stream = self._streams.get(tensor.device)
        if stream is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """Waits for all copies."""
        for stream in self._streams.values():
            stream.synchronize()
