"""Files of saved trees as file objects: read by range through a cache of blocks, written by staging until they are closed."""

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

from ._trees import Home, Piece, Tree

#: What is read at least; chunks are about as long, and are decoded whole.
BLOCK = 1 << 20
#: What is read ahead at most.
_AHEAD_MAX = 32 << 20
#: Files up to this long are read whole.
_SMALL = 8 << 20
#: What a file keeps in memory at most, besides what was read last.
_KEPT = 64 << 20
#: What lines are looked for in.
_PEEK = 8 << 10
#: Files up to this long are staged in memory, longer ones on the local disk.
_MEMORY = 16 << 20


class Reader(io.BufferedIOBase):
    """A file of a tree as it was when the file was opened, whatever becomes of its name. Small reads share blocks, sequential
    ones read ahead, and large ones go straight to where they are wanted."""

    mode = "rb"

    def __init__(self, fs: Any, path: str, home: Home, where: tuple[Tree, str], size: int, block: int):
        super().__init__()
        self.fs, self.path, self.size, self.blocksize = fs, path, size, block
        self._home, (self._tree, self._inner) = home, where
        self._lock = threading.RLock()
        self._at = 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._next, self._ahead = 0, block
        #: What to read through instead, where one is put here, as fsspec's `blockcache::` does.
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
        """What the file system says of it."""
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
                (whole,) = self._home.read(self._tree, [(self._inner, self._at, self._at + size)])
                self._at += size
                return whole
            out = bytearray(size)
            self._fill(memoryview(out))
            return bytes(out)

    def read1(self, size: int = -1) -> bytes:
        return self.read(self.blocksize if size is None or size < 0 else size)

    def peek(self, size: int = 0) -> bytes:
        """Some of what comes next, which stays to be read: what lines are found in."""
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
                self._home.read_into(self._tree, self._inner, self._at, view)
                self._at += len(view)
            else:
                self._fill(view)
            return len(view)

    readinto1 = readinto

    def _fetch_range(self, start: int, end: int) -> bytes:
        """What lies at `start..end`, as caches of fsspec ask for it."""
        (read,) = self._home.read(self._tree, [(self._inner, start, min(end, self.size))])
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
        # fsspec's `blockcache::` sets it once it has closed a file.
        if closed:
            self.close()

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    @property
    def _direct(self) -> int:
        """Reads of this length and more do not go through the cache."""
        return 8 * self.blocksize

    def _fill(self, out: memoryview) -> None:
        """Fills `out` with what comes next, from blocks; the lacking ones are read in one go."""
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
        """Reads the blocks from `first` up to `end`, and more where reading goes on and on."""
        blocks = -(-self.size // self.blocksize)
        self._ahead = min(2 * self._ahead, _AHEAD_MAX) if first == self._next else self.blocksize
        if self.size <= _SMALL:
            first, end = 0, blocks
        end = min(max(end, first + self._ahead // self.blocksize), blocks)
        start, stop = first * self.blocksize, min(end * self.blocksize, self.size)
        (read,) = self._home.read(self._tree, [(self._inner, start, stop)])
        view, self._next = memoryview(read), end
        for block in range(first, end):
            self._blocks[block] = view[(block - first) * self.blocksize :][: self.blocksize]
            self._blocks.move_to_end(block)
        while len(self._blocks) > max(_KEPT // self.blocksize, end - first):
            self._blocks.popitem(last=False)


class Writer(io.BufferedIOBase):
    """A new file: staged in memory, or if it gets long on the local disk, and visible once it is closed, whole or not at all.
    One that is left by an exception, or never closed, is discarded; so is one that `fsspec.open` opened and closes for that."""

    mode = "wb"

    def __init__(self, fs: Any, path: str, publish: Callable[[Writer], None], begin: bytes = b""):
        super().__init__()
        self.fs, self.path = fs, path
        self._publish = publish
        #: What writes to it, and has something to write at its end.
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
        """Puts the file into its tree. If that fails it is discarded, and this raises."""
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
        """Closes it, if it was not."""
        self.close()

    def discard(self) -> None:
        """Forgets it: nothing of it becomes visible."""
        if self._staged is not None:
            self._end_compressor()
            self._staged.close()
            self._staged = None
        super().close()

    def _end_compressor(self) -> None:
        # What it writes at its end goes nowhere, but it is not to try that later.
        if self.compressor is not None:
            with contextlib.suppress(Exception):
                self.compressor.close()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_staged", None) is not None:
            self.discard()

    @contextlib.contextmanager
    def pieces(self) -> Any:
        """What was written, as the engine takes it, as long as the block lasts; gone after it."""
        staged = self._open()
        if isinstance(staged, io.BytesIO):
            yield [staged.getvalue()]
        else:
            staged.flush()
            with mmap.mmap(staged.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
                # Private pages: ctypes asks for memory that could be written.
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
    """A new file that is written through a compressor: it ends as the file does that holds it."""

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
        """Puts the file into its tree. If that fails it is discarded, and this raises."""
        try:
            self._writer.close()
        finally:
            self._end()

    def discard(self) -> None:
        """Forgets it: nothing of it becomes visible."""
        self._writer.discard()
        self._end()

    def _end(self) -> None:
        # There is nothing left to flush.
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
    """A file of text, discarded if it is left by an exception or never closed."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None:
            self._discard()
        self.close()

    def __del__(self) -> None:
        # One whose making failed, as for an unknown encoding, is nothing yet.
        with contextlib.suppress(ValueError, AttributeError):
            if not self.closed:
                self._discard()

    def _discard(self) -> None:
        if isinstance(self.buffer, (Compressed, Writer)):
            self.buffer.discard()


def _is_left_by_exception() -> bool:
    """Is a file being closed because the block of `with fsspec.open(...)` was left by an exception? OpenFile closes its files
    and does not tell them why (https://github.com/fsspec/filesystem_spec/blob/master/fsspec/core.py): so they look."""
    frame: types.FrameType | None = sys._getframe(1)
    # Writer.close, OpenFile.close, and it.
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code is OpenFile.__exit__.__code__:
            return frame.f_locals["args"][0] is not None
        frame = frame.f_back
    return False
