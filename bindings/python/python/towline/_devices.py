"""The GPUs that a state's tensors are on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Devices:
    """Copies from the GPUs of a state: each on a stream of its own of the lowest priority, after what the caller's stream was
    given before, into pinned memory."""

    #: What is pinned of this process: where, and how much.
    _pinned: tuple[int, int] | None = None

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._streams: dict[Any, Any] = {}
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            import torch

            stream = torch.cuda.Stream(device=device, priority=0)
            stream.wait_event(torch.cuda.current_stream(device).record_event())
            self._streams[device] = stream

    def pin(self, address: int, length: int) -> None:
        """Pins the stage, which stays where it is from save to save."""
        if not self._streams or Devices._pinned == (address, length):
            return
        import torch

        runtime = torch.cuda.cudart()
        if Devices._pinned is not None:
            runtime.cudaHostUnregister(Devices._pinned[0])
            Devices._pinned = None
        # 1 is cudaHostRegisterPortable: for all devices
        # (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html).
        torch.cuda.check_error(runtime.cudaHostRegister(address, length, 1))
        Devices._pinned = (address, length)

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
