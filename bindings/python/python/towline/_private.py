"""Folders for this user alone, in places where others may write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
import weakref
from collections.abc import Iterator

from .errors import Denied

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """An open folder. Others may rename it and put a link in its place: all is done in the folder that was opened. It is closed
    at the end of a `with`, or once nothing refers to it.

    `own` is true if it was this user's alone when it was opened; then the folders opened in it are, too."""

    def __init__(self, descriptor: int, shown: str, own: bool):
        self.descriptor, self.shown, self.own = descriptor, shown, own
        self._closed = weakref.finalize(self, os.close, descriptor)
        # At exit, `_shutdown` may finish saves that use the folder after finalizers ran.
        self._closed.atexit = False

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed()

    @property
    def path(self) -> str:
        """Path that leads to the open folder, wherever it is now. Only valid in this process, while the folder is open."""
        return f"/proc/self/fd/{self.descriptor}"

    def at(self, name: str) -> str:
        """Path of an entry, as `path`."""
        return f"{self.path}/{name}"

    def inside(self, name: str, *, own: bool | None = None, create: bool = True) -> Folder:
        """Opens the folder `name` in this one, created with mode 0700 if `create`. Raises Denied for a link.

        With `own`, which is by default as here, raises Denied for another user's, as its content may be planted, and takes the
        rights of others to this user's away."""
        own = self.own if own is None else own
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        shown = os.path.join(self.shown, name)
        try:
            descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
        except NotADirectoryError as error:
            raise _planted(shown) from error
        found = Folder(descriptor, shown, own)
        if own:
            _claim(found)
        return found

    def fresh(self, name: str) -> Folder:
        """As `inside` with `own`; whatever has the name is removed first, unless it is a folder that only this user can have
        written to."""
        with contextlib.suppress(FileNotFoundError):
            raw = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            if not stat.S_ISDIR(raw.st_mode) or raw.st_uid != os.geteuid() or raw.st_mode & 0o077:
                self.remove(name)
        return self.inside(name, own=True)

    def remove(self, name: str) -> None:
        """Removes the entry `name`, with all that is in it; a link itself. Leaves what cannot be removed."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            pass
        except OSError:
            with contextlib.suppress(OSError):
                descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
                try:
                    _empty(descriptor)
                finally:
                    os.close(descriptor)
                os.rmdir(name, dir_fd=self.descriptor)

    def holds(self, name: str, kind: int) -> bool:
        """True if there is an entry `name` of this kind, such as `stat.S_IFDIR`; in an `own` folder, one of this user."""
        try:
            raw = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_IFMT(raw.st_mode) == kind and (not self.own or raw.st_uid == os.geteuid())


def given(path: str) -> Folder:
    """Opens the folder `path`, created if there is none. A link to one is followed: the path is the user's choice."""
    path = path or "."
    os.makedirs(path, exist_ok=True)
    return Folder(os.open(path, _FOLDER), path, False)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Opens the folder `path`; yields its descriptor. Raises Denied for a link."""
    try:
        descriptor = os.open(path, _FOLDER | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise _planted(path) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock(folder: Folder, name: str) -> int:
    """Opens the file `name`, to be locked; creates it if there is none, and changes none. Raises Denied for a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(name, flags, 0o600, dir_fd=folder.descriptor)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Denied(f"{os.path.join(folder.shown, name)} is a link: it may be planted; remove it") from error


def _empty(root: int) -> None:
    """Removes all that is in the folder with the descriptor `root`, links themselves. Leaves what cannot be removed.

    Folders are moved to `root` and removed there one by one, so that only two are open at a time and none is reached by a path,
    however deep they are (`shutil.rmtree` ends at some depth)."""
    prefix, count = uuid.uuid4().hex, 0
    folders: list[str] = []

    def clear(inside: int) -> None:
        nonlocal count
        for name in os.listdir(inside):
            try:
                os.unlink(name, dir_fd=inside)
            except FileNotFoundError:
                continue
            except OSError:
                count += 1
                moved = f"{prefix}-{count}"
                with contextlib.suppress(OSError):
                    os.rename(name, moved, src_dir_fd=inside, dst_dir_fd=root)
                    folders.append(moved)

    clear(root)
    while folders:
        name = folders.pop()
        with contextlib.suppress(OSError):
            descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=root)
            try:
                clear(descriptor)
            finally:
                os.close(descriptor)
            os.rmdir(name, dir_fd=root)


def _claim(folder: Folder) -> None:
    found = os.fstat(folder.descriptor)
    if found.st_uid != os.geteuid():
        raise Denied(f"folder {folder.shown} belongs to user {found.st_uid}: remove it, or write checkpoints elsewhere")
    if found.st_mode & 0o077:
        os.fchmod(folder.descriptor, 0o700)


def _planted(path: str) -> Denied:
    return Denied(f"{path} is a link or a file, expected a folder: it may be planted; remove it")


def read(path: str, length_max: int, *, follow: bool = False, inside: Folder | None = None) -> bytes | None:
    """Reads the file at `path`, of the folder `inside` if given; None if there is none, it is no regular file, or it is longer
    than `length_max` bytes. Does not wait for a pipe; follows a link only if told to."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, dir_fd=None if inside is None else inside.descriptor)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        found = file.read(length_max + 1)
    return found if len(found) <= length_max else None


def link_tree(source: int, target: int) -> None:
    """Makes hard links of all files in the folder with the descriptor `source` in the empty one with the descriptor `target`.
    Links are linked themselves, wherever they lead."""
    pending = [""]
    while pending:
        inside = pending.pop()
        descriptor = os.open(inside or ".", _FOLDER | os.O_NOFOLLOW, dir_fd=source)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    path = os.path.join(inside, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        os.mkdir(path, 0o700, dir_fd=target)
                        pending.append(path)
                    else:
                        os.link(entry.name, path, src_dir_fd=descriptor, dst_dir_fd=target, follow_symlinks=False)
        finally:
            os.close(descriptor)
