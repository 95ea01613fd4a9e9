"""Staging: a copy of the state in host memory, so that training continues while the copy is saved.

The memory is reused from save to save, so there is never more than one staged copy: staging waits until the state before is
saved. With background staging `async_save` does not wait: it returns futures of the staging and the upload
(https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/state_dict_saver.py, `AsyncSaveResponse`).
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager

from .. import _torch, _towline
from .._devices import Devices, gpus, pin
from ..errors import Exhausted, Unsupported, UsageError

#: Alignment of tensors, in bytes.
_ALIGNED = 64
#: Seconds after which a staged state that no save has claimed no longer blocks the next one.
_UNCLAIMED = 30.0


class Stager(AsyncStager):
    """Stages states for `dcp.async_save(..., async_stager=stager)`, one at a time, in host memory. The memory is reused once a
    `towline.dcp.StorageWriter` has saved the state. Every StorageWriter has a stager of its own.

    `stage` is `"blocking"` (the state is copied when `async_save` returns) or `"background"`: `async_save` returns at once with
    an `AsyncSaveResponse` (torch 2.9 and newer), and tensors must not change before its `staging_completion` is done. Values that
    are no tensors are always copied at once.
    """

    # `stage` returns a complete copy, or a future of one.
    _synchronize_after_execute = False

    def __init__(self, stage: str = "blocking"):
        if stage not in ("blocking", "background"):
            raise UsageError(f"stage is 'blocking' or 'background', not {stage!r}")
        if stage == "background" and not hasattr(state_dict_saver, "AsyncSaveResponse"):
            raise Unsupported(
                f"this torch ({torch.__version__}) stages only before async_save returns (use 2.9 or newer)"
            )
        self._background = stage == "background"
        self._lock = threading.Lock()
        self._set_up_anew()
        _stagers.add(self)

    def _set_up_anew(self) -> None:
        self._region = Region()
        self._lease: Lease | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[dict[str, Any]] | None = None

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copies `state_dict` to host memory, once the state before is saved; returns the copy, or a future of it."""
        return self.stage_with(state_dict, {})

    def stage_with(
        self, state_dict: Mapping[str, Any], metrics: dict[str, float]
    ) -> dict[str, Any] | Future[dict[str, Any]]:
        """As `stage`; `claim` returns `metrics` to the thread that saves the state."""
        devices: set[torch.device] = set()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
            return tensor

        state = _walk(state_dict, note, _own)
        arguments = state, Devices(devices), threading.current_thread(), metrics
        if not self._background:
            return self._stage(*arguments)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="towline-stager")
        self._last = self._worker.submit(self._stage, *arguments)
        return self._last

    def _stage(
        self, state: dict[str, Any], devices: Devices, by: threading.Thread, metrics: dict[str, float]
    ) -> dict[str, Any]:
        with self._lock:
            while self._lease is not None and self._lease.in_use():
                self._lease.over.wait(0.02)
            if self._lease is not None and not self._lease.over.is_set():
                # Nobody released it: it may be in use.
                self._region = Region(shared=self._region.shared)
            leaves = _Leaves()
            _walk(state, lambda tensor: _tensor(tensor, leaves.note))
            replaced = leaves.replaced_by(self._region.fill(leaves.tensors, devices))
            staged = Staged(_walk(state, lambda tensor: _tensor(tensor, replaced)))
            staged.lease = self._lease = Lease(staged, self._region, by, metrics)
            return staged

    def synchronize_staging(self) -> None:
        """Waits until the last state is staged; raises if that failed."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Waits until all states are staged, and frees the memory. The stager can be used again."""
        if self._worker is not None:
            self._worker.shutdown()
        self._set_up_anew()

    def claim(self) -> dict[str, float] | None:
        """Marks the staged state as being saved by this thread, if another thread staged it. Returns the metrics of the state;
        None if this thread saves another one."""
        lease = self._lease
        if lease is None or lease.over.is_set():
            return None
        lease.claim()
        return lease.metrics if lease.saved_by(threading.current_thread()) else None


#: All stagers: a StorageWriter may save a state that another stager staged.
_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()


def _leases(tensors: list[torch.Tensor]) -> list[Lease]:
    leases = [lease for stager in list(_stagers) if (lease := stager._lease) is not None]
    return [lease for lease in leases if any(lease.region.holds(tensor) for tensor in tensors)]


def claim(tensors: list[torch.Tensor]) -> None:
    """Marks `tensors` as being saved by this thread, if they are staged."""
    for lease in _leases(tensors):
        lease.claim()


def release(tensors: list[torch.Tensor]) -> None:
    """Marks `tensors` as saved: if they are staged, their memory is free."""
    for lease in _leases(tensors):
        lease.over.set()


class Staged(dict[str, Any]):
    """A staged state. It is sent to another process as a single block of shared memory, however many tensors it has."""

    __slots__ = ("__weakref__", "lease")

    lease: Lease

    def __reduce__(self) -> tuple[Any, ...]:
        self.lease.claim()
        view = self.lease.region.share()
        return dict, (_walk(dict(self), lambda tensor: _tensor(tensor, view)),)


class Lease:
    """Use of the staging memory by one save. It ends when the writer releases it, when the state is garbage-collected, or when
    the thread that saves it has ended."""

    def __init__(self, staged: Staged, region: Region, by: threading.Thread, metrics: dict[str, float]):
        self.region, self.metrics = region, metrics
        self.over = threading.Event()
        self._staged = weakref.ref(staged)
        self._by = by
        self._saver: threading.Thread | None = None
        self._since = time.monotonic()

    def claim(self) -> None:
        """Records that this thread saves the state. The thread that staged it does not count: it saves another state."""
        thread = threading.current_thread()
        if self._saver is None and thread is not self._by:
            self._saver = thread

    def saved_by(self, thread: threading.Thread) -> bool:
        return self._saver is thread

    def in_use(self) -> bool:
        if self.over.is_set() or self._staged() is None:
            return False
        if self._saver is None:
            return time.monotonic() - self._since < _UNCLAIMED
        return self._saver.is_alive()


class Region:
    """Reusable host memory that tensors are copied to: as large as the largest state so far, and at most four times as large as
    the last one. It is pinned at the first GPU tensor, and moved to shared memory once another process reads it."""

    def __init__(self, shared: bool = False):
        self.shared = shared
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., Any] | None = None
        self._pinned_for: torch.device | None = None
        #: Address of the memory when it was filled.
        self._begin = 0

    def fill(self, tensors: list[torch.Tensor], devices: Devices | None = None) -> list[torch.Tensor]:
        """Copies dense tensors to this memory; each copy is contiguous and has its own storage. `devices` are the devices that
        they are on."""
        starts, length = [], 0
        for tensor in tensors:
            starts.append(length)
            length += -(-_torch.nbytes(tensor) // _ALIGNED) * _ALIGNED
        devices = Devices(gpus(tensors)) if devices is None else devices
        self._reserve(length, next(iter(devices), None))
        copies, plain = [], []
        # A storage for each: pickling one tensor must not pickle the whole memory.
        held = self._memory.numpy()
        self._begin = self._memory.data_ptr()
        for tensor, start in zip(tensors, starts, strict=True):
            size = _torch.nbytes(tensor)
            there = torch.empty(0, dtype=torch.uint8)
            if size:
                there = torch.frombuffer(held, dtype=torch.uint8, count=size, offset=start)
            there = there.view(tensor.dtype).view(tensor.shape)
            if _torch.is_plain(tensor):
                plain.append((there.data_ptr(), tensor.data_ptr(), size))
            elif size:
                with devices.stream(tensor):
                    there.copy_(tensor, non_blocking=tensor.device.type == "cuda")
            copies.append(there)
        _towline.copy([one for one in plain if one[2]])
        devices.synchronize()
        return copies

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is in this memory."""
        return tensor.numel() > 0 and self._begin <= tensor.data_ptr() < self._begin + self._memory.numel()

    def share(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Moves the memory to shared memory; returns a function that turns a copy into a view of it."""
        private = self._memory
        if not private.is_shared():
            self.shared = True
            self._reserve(private.numel(), self._pinned_for)
            _towline.copy([(self._memory.data_ptr(), private.data_ptr(), private.numel())])
        memory, begin = self._memory, self._begin

        def view(copied: torch.Tensor) -> torch.Tensor:
            start, length = copied.data_ptr() - begin, _torch.nbytes(copied)
            return memory[start : start + length].view(copied.dtype).view(copied.shape) if length else copied

        return view

    def _reserve(self, length: int, device: torch.device | None) -> None:
        """Resizes the memory to at least `length` bytes, and pins it if `device` copies to it."""
        there = self._memory.numel()
        if there < length or there > max(4 * length, 1 << 20) or (self.shared and not self._memory.is_shared()):
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            self._memory = _shared(length) if self.shared else torch.empty(length, dtype=torch.uint8)
        if device is not None and self._unpin is None and length:
            self._unpin, self._pinned_for = (
                pin(self._memory, self._memory.data_ptr(), self._memory.numel(), device),
                device,
            )


class _Leaves:
    """Distinct tensors of a state."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[Any, int] = {}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._key(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        return tensor

    def replaced_by(self, copies: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: copies[self._numbers[self._key(tensor)]]

    @staticmethod
    def _key(tensor: torch.Tensor) -> Any:
        # Each call of state_dict() creates new tensor objects for the same memory.
        return (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )


def _walk(
    value: Any,
    tensor: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Copy of a state with `tensor` applied to its tensors and `other` to all other values."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, Mapping):
        return {key: _walk(one, tensor, other) for key, one in value.items()}
    if type(value) is list:
        return [_walk(one, tensor, other) for one in value]
    return other(value)


def _tensor(tensor: torch.Tensor, leaf: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies `leaf` to a dense tensor, or to the dense tensors that a wrapper holds."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return _wrapped(tensor, leaf)
    if tensor.device.type == "meta":
        return tensor
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.detach().cpu().clone()
    made = leaf(tensor.detach())
    if vars(tensor):
        # For example, marks of a shard.
        made = made.view(made.shape)
        vars(made).update(vars(tensor))
    return made


def _wrapped(tensor: torch.Tensor, leaf: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies `leaf` within a DTensor, or another tensor subclass that wraps plain tensors."""
    wrapper: Any = tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return _tensor(wrapper.wait(), leaf)
    if not hasattr(tensor, "__tensor_flatten__"):
        # ShardedTensor, for one.
        return copy.deepcopy(tensor) if tensor.device.type == "cpu" else tensor.to("cpu")
    names, context = wrapper.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    parts = {name: _tensor(one, leaf) for name, one in inner.items() if isinstance(one, torch.Tensor)}
    # A wrapper of a view takes over its storage offset, which torch then uses as the address when it pickles the wrapper. So
    # views are set afterwards.
    views = {name: part for name, part in parts.items() if part.storage_offset()}
    whole = {name: parts.get(name, one) if name not in views else one for name, one in inner.items()}
    made: torch.Tensor = type(wrapper).__tensor_unflatten__(whole, context, tensor.size(), tensor.stride())
    for name, view in views.items():
        setattr(made, name, view)
    return made


def _own(value: Any) -> Any:
    """Copy of a value that is saved by pickling. Its tensors get their own memory, or the whole region would be pickled."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if type(value) is tuple:
        return tuple(_own(one) for one in value)
    return copy.deepcopy(value)


def _shared(length: int) -> torch.Tensor:
    """Allocates shared memory."""
    folder = "/dev/shm"
    free = os.statvfs(folder) if os.path.isdir(folder) else None
    if free is not None and free.f_bavail * free.f_frsize < length:
        raise Exhausted(
            f"staging for another process takes {length} bytes of shared memory, and {folder} has "
            f"{free.f_bavail * free.f_frsize} (give the container more, as with --shm-size, or save in a thread)"
        )
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(length))
