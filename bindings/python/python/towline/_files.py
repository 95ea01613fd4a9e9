"""File objects for files of saved trees. Reads go through a cache of blocks; writes are staged until the file is closed."""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import sys
import tempfile
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from fsspec.core import OpenFile

from ._trees import Piece, SharedRepository, Tree

#: Default block size, the minimum of a read: about the length of a chunk, which is always decoded whole.
BLOCK = 1 << 20
#: Maximum read-ahead.
_AHEAD_MAX = 32 << 20
#: Files up to this length are read whole.
_SMALL = 8 << 20
#: Maximum bytes of blocks that an open file keeps, except for its last read.
_KEPT = 64 << 20
#: Bytes that `peek` returns, in which readline looks for line ends.
_PEEK = 8 << 10
#: Files up to this length are staged in memory, longer ones on the local disk.
_MEMORY = 16 << 20


class Reader(io.BufferedIOBase):
    """Reader of a file of a tree. Its content stays that of the time of opening, even if the name changes. Small reads are served
    from blocks, sequential reads read ahead, and large reads bypass the cache."""

    mode = "rb"

    def __init__(self, fs: Any, path: str, shared: SharedRepository, where: tuple[Tree, str], size: int, block: int):
        super().__init__()
        self.fs, self.path, self.size, self.blocksize = fs, path, size, block
        self._shared, (self._tree, self._inner) = shared, where
        self._lock = threading.RLock()
        self._at = 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._next, self._ahead = 0, block
        #: A cache of fsspec to read through instead, set by fsspec's `blockcache::`.
        self.cache: Any = None

    @property
    def name(self) -> str:
        return self.path

    @property
    def full_name(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.full_name}>"

    def info(self) -> dict[str, Any]:
        """Info of the file, as from the file system."""
        info: dict[str, Any] = self.fs.info(self.path)
        return info

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError("seek to before the start of the file")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        self._check()
        with self._lock:
            left = max(self.size - self._at, 0)
            size = left if size is None or size < 0 else min(size, left)
            if self.cache is not None:
                return self._read_cached(size)
            if size >= self._direct:
                (whole,) = self._shared.read(self._tree, [(self._inner, self._at, self._at + size)])
                self._at += size
                return whole
            out = bytearray(size)
            self._fill(memoryview(out))
            return bytes(out)

    def read1(self, size: int = -1) -> bytes:
        return self.read(self.blocksize if size is None or size < 0 else size)

    def peek(self, size: int = 0) -> bytes:
        """Returns the next bytes without moving the position; readline uses it."""
        at = self._at
        try:
            return self.read(_PEEK)
        finally:
            self._at = at

    def readinto(self, buffer: Any) -> int:
        self._check()
        with self._lock:
            view = memoryview(buffer).cast("B")
            view = view[: min(len(view), max(self.size - self._at, 0))]
            if self.cache is not None:
                view[:] = self._read_cached(len(view))
            elif len(view) >= self._direct:
                self._shared.read_into(self._tree, self._inner, self._at, view)
                self._at += len(view)
            else:
                self._fill(view)
            return len(view)

    readinto1 = readinto

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Reads `start..end`, for caches of fsspec."""
        (read,) = self._shared.read(self._tree, [(self._inner, start, min(end, self.size))])
        return read

    def _read_cached(self, size: int) -> bytes:
        found = bytes(self.cache._fetch(self._at, self._at + size))
        self._at += len(found)
        return found

    def close(self) -> None:
        if not self.closed:
            self._blocks.clear()
        super().close()

    @property
    def closed(self) -> bool:
        return super().closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        # fsspec's `blockcache::` sets this when it closes a file.
        if closed:
            self.close()

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    @property
    def _direct(self) -> int:
        """Minimum length of reads that bypass the cache."""
        return 8 * self.blocksize

    def _fill(self, out: memoryview) -> None:
        """Fills `out` from blocks, from the current position on; missing blocks are read at once."""
        if not out:
            return
        end = self._at + len(out)
        first, last = self._at // self.blocksize, (end - 1) // self.blocksize
        lacking = [block for block in range(first, last + 1) if block not in self._blocks]
        if lacking:
            self._load(lacking[0], lacking[-1] + 1)
        while out:
            block = self._at // self.blocksize
            if block not in self._blocks:
                self._load(block, block + 1)
            self._blocks.move_to_end(block)
            start = self._at - block * self.blocksize
            part = self._blocks[block][start : start + len(out)]
            out[: len(part)] = part
            out = out[len(part) :]
            self._at += len(part)

    def _load(self, first: int, end: int) -> None:
        """Reads the blocks from `first` up to `end`, and more ahead if reads are sequential."""
        blocks = -(-self.size // self.blocksize)
        self._ahead = min(2 * self._ahead, _AHEAD_MAX) if first == self._next else self.blocksize
        if self.size <= _SMALL:
            first, end = 0, blocks
        end = min(max(end, first + self._ahead // self.blocksize), blocks)
        start, stop = first * self.blocksize, min(end * self.blocksize, self.size)
        (read,) = self._shared.read(self._tree, [(self._inner, start, stop)])
        view, self._next = memoryview(read), end
        for block in range(first, end):
            self._blocks[block] = view[(block - first) * self.blocksize :][: self.blocksize]
            self._blocks.move_to_end(block)
        while len(self._blocks) > max(_KEPT // self.blocksize, end - first):
            self._blocks.popitem(last=False)


class Writer(io.BufferedIOBase):
    """Writer of a file. It is staged in memory, or on the local disk if it is long, and becomes visible when it is closed. It is
    discarded if it is never closed, or if an exception leaves its `with` block, also that of `fsspec.open`."""

    mode = "wb"

    def __init__(self, fs: Any, path: str, publish: Callable[[Writer], None], begin: bytes = b""):
        super().__init__()
        self.fs, self.path = fs, path
        self._publish = publish
        #: Compressor that writes to this file, and has to be closed before it.
        self.compressor: Any = None
        self._staged: Any = io.BytesIO()
        self.write(begin)

    @property
    def name(self) -> str:
        return self.path

    @property
    def full_name(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.full_name}>"

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._open().tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._open().seek(offset, whence))

    def truncate(self, size: int | None = None) -> int:
        return int(self._open().truncate(size))

    def write(self, data: Any) -> int:
        staged, view = self._open(), memoryview(data).cast("B")
        if isinstance(staged, io.BytesIO) and staged.tell() + len(view) > _MEMORY:
            disk = tempfile.TemporaryFile(prefix="towline-")  # noqa: SIM115 - it lives until the file is closed
            disk.write(staged.getbuffer())
            disk.seek(staged.tell())
            self._staged = staged = disk
        return int(staged.write(view))

    def close(self) -> None:
        """Commits the file to its tree. If this fails, the file is discarded."""
        if not self.closed and _is_left_by_exception():
            self.discard()
        elif not self.closed:
            try:
                if self.compressor is not None:
                    self.compressor.close()
                self._publish(self)
            except BaseException:
                self.discard()
                raise
            super().close()

    def commit(self) -> None:
        """Closes the file, if it is still open."""
        self.close()

    def discard(self) -> None:
        """Discards the file: nothing of it becomes visible."""
        if self._staged is not None:
            self._end_compressor()
            self._staged.close()
            self._staged = None
        super().close()

    def _end_compressor(self) -> None:
        # Its last output is dropped; closing it now keeps it from writing later. No `contextlib`: see `__del__`.
        if self.compressor is not None:
            try:  # noqa: SIM105
                self.compressor.close()
            except Exception:
                pass

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # At the end of the process, names of modules may be None already: what this calls uses none of them.
        if getattr(self, "_staged", None) is not None:
            self.discard()

    @contextlib.contextmanager
    def pieces(self) -> Any:
        """Content of the file, as the engine takes it, valid within the block; the staged data is freed after it."""
        staged = self._open()
        if isinstance(staged, io.BytesIO):
            yield [staged.getvalue()]
        else:
            staged.flush()
            with mmap.mmap(staged.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
                # A private mapping, because ctypes requires writable memory.
                first = ctypes.c_char.from_buffer(pages)
                try:
                    pieces: list[Piece] = [(ctypes.addressof(first), len(pages))]
                    yield pieces
                finally:
                    del first
        self._staged = None
        staged.close()

    def _open(self) -> Any:
        if self._staged is None:
            raise ValueError("I/O operation on closed file.")
        return self._staged


class Compressed(io.BufferedIOBase):
    """Writer that compresses; it is committed or discarded together with the file that it writes to."""

    mode = "wb"

    def __init__(self, writer: Writer, compressor: Any):
        super().__init__()
        self._writer = writer
        writer.compressor = compressor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        return int(self._writer.compressor.write(data))

    def flush(self) -> None:
        if self._writer.compressor is not None:
            self._writer.compressor.flush()

    def close(self) -> None:
        """Commits the file to its tree. If this fails, the file is discarded."""
        try:
            self._writer.close()
        finally:
            self._end()

    def discard(self) -> None:
        """Discards the file: nothing of it becomes visible."""
        self._writer.discard()
        self._end()

    def _end(self) -> None:
        # Nothing is left to flush.
        self._writer.compressor = None
        super().close()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            self.discard()


class Text(io.TextIOWrapper):
    """Text file; discarded if an exception leaves its `with` block, or if it is never closed."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None:
            self._discard()
        self.close()

    def __del__(self) -> None:
        # If the constructor failed, for example because of an unknown encoding, there is nothing to discard. Names of modules are
        # not used, as in that of `Writer`.
        try:
            if not self.closed:
                self._discard()
        except (ValueError, AttributeError):
            pass

    def _discard(self) -> None:
        # A Reader has nothing to discard.
        discard = getattr(self.buffer, "discard", None)
        if discard is not None:
            discard()


def _is_left_by_exception() -> bool:
    """True if a file is being closed because an exception left the block of `with fsspec.open(...)`. OpenFile does not tell its
    files (https://github.com/fsspec/filesystem_spec/blob/master/fsspec/core.py), so this looks at the stack."""
    frame: types.FrameType | None = sys._getframe(1)
    # The frames of Writer.close, OpenFile.close and OpenFile.__exit__.
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code is OpenFile.__exit__.__code__:
            return frame.f_locals["args"][0] is not None
        frame = frame.f_back
    return False
