"""Staging memory of a Checkpointer: reusable host memory that states are copied to, so that the training can continue."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _devices, _torch, _towline
from . import state as states
from ._progress import Progress
from .handle import Handle
from .retention import GivenUp

if TYPE_CHECKING:
    import torch

#: Bytes of memory that are prepared at once; a save waits for at most one such piece.
_PIECE = 64 << 20


class Staging:
    """Memory for staging one state at a time. It can be prepared before it is needed: the kernel allocates pages at the first
    write, which takes longer than the copy."""

    def __init__(self) -> None:
        self._stager = _towline.Stager()
        #: Bytes that were taken last.
        self.length = 0
        #: Function that unpins the memory, if it is pinned.
        self._pinned: weakref.finalize[..., Any] | None = None
        self._preparing: threading.Thread | None = None
        self._enough = threading.Event()

    def take(self, length: int, timeout: float | None = None) -> _towline.StagingBuffer | None:
        """Takes memory for `length` bytes, once the state before is saved; None after `timeout` seconds."""
        self._end_preparing()
        if self.length not in (0, length):
            # Another length may need other memory: the current memory must be unpinned before it is freed.
            before = self._stager.take(self.length, timeout)
            if before is None:
                return None
            self._unpin()
            before.release()
        stage = self._stager.take(length, timeout)
        if stage is not None:
            self.length = length
        return stage

    def pin(self, stage: _towline.StagingBuffer, length: int, devices: Iterable[torch.device]) -> None:
        """Pins the memory, if GPUs copy to it."""
        device = next(iter(devices), None)
        if device is None or not length or self._pinned is not None:
            return
        self._pinned = _devices.pin(self, stage.address, length, device)

    def prepare(self, length: int, devices: Iterable[torch.device] = ()) -> None:
        """Allocates and pins `length` bytes in the background, unless the memory is in use."""
        stage = self.take(length, timeout=0)
        if stage is None:
            return
        self._enough.clear()
        arguments = (stage, length, list(devices))
        self._preparing = threading.Thread(target=self._prepare, args=arguments, name="towline-memory", daemon=True)
        self._preparing.start()

    def _prepare(self, stage: _towline.StagingBuffer, length: int, devices: list[torch.device]) -> None:
        try:
            for start in range(0, length, _PIECE):
                if self._enough.is_set():
                    return
                ctypes.memset(stage.address + start, 0, min(_PIECE, length - start))
            # If pinning fails, the save reports it.
            with contextlib.suppress(Exception):
                self.pin(stage, length, devices)
        finally:
            stage.release()

    def close(self) -> None:
        """Stops preparing, and unpins the memory; call it when no state is staged."""
        self._end_preparing()
        self._unpin()

    def _end_preparing(self) -> None:
        if self._preparing is not None:
            self._enough.set()
            self._preparing.join()
            self._preparing = None

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned()
            self._pinned = None


class Job:
    """A state to be saved: staged, then written by the saver thread."""

    def __init__(
        self,
        handle: Handle,
        described: states.Described,
        options: dict[str, Any],
        progress: Progress = None,
        given_up: GivenUp | None = None,
    ):
        leaves = [(leaf.name, leaf.word, leaf.shape, leaf.length) for leaf in described.leaves]
        self.header, self.starts, length = _towline.lay_out(leaves)
        self.handle, self.described, self.options, self.progress = handle, described, options, progress
        #: Steps to remove before this one is saved.
        self.given_up = given_up
        #: The document of the state, once it is signed.
        self.document = described.document
        handle._pickled, handle._classes = described.pickled, described.classes
        #: Bytes of the tensors, which are staged.
        self.length = length - len(self.header)
        self.stage: _towline.StagingBuffer | None = None
        self.staged = False
        #: Set once the state is durable, is left to the backlog, or could not be saved.
        self.settled = threading.Event()
        self.devices = _devices.Devices(_devices.gpus(leaf.tensor for leaf in described.leaves))

    def taken(self) -> _towline.StagingBuffer:
        """Stage of this job; it must have been taken."""
        assert self.stage is not None
        return self.stage

    def fill(self, staging: Staging) -> None:
        """Copies the tensors to the stage."""
        base, stage = len(self.header), self.taken()
        copies, others = [], []
        for leaf, start in zip(self.described.leaves, self.starts, strict=True):
            if _torch.is_plain(leaf.tensor):
                copies.append((start - base, leaf.tensor.data_ptr(), leaf.length))
            elif leaf.length:
                others.append((start - base, leaf))
        try:
            staging.pin(stage, self.length, self.devices)
            for offset, leaf in others:
                there = _torch.over(stage.address + offset, leaf.length).view(leaf.tensor.dtype)
                with self.devices.stream(leaf.tensor):
                    there.view(leaf.tensor.shape).copy_(leaf.tensor, non_blocking=True)
            stage.fill([copy for copy in copies if copy[2]])
        finally:
            self.devices.synchronize()
            # The copies replace the references to the caller's tensors.
            self.described.leaves.clear()
        self.staged = True
        self.handle._reach("staged")
