"""Owners: who puts steps into a spool holds a lock in it, so that other processes leave the steps of a running one alone. The
kernel releases the lock when the process ends, however it does.

RUN/owner-<id>    locked file of an owner; the random part of the names of its steps begins with the id
RUN/<step>.left   mark of a step that its owner gave up: it belongs to whoever takes it
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import uuid
import weakref
from typing import TYPE_CHECKING

from . import _private

if TYPE_CHECKING:
    from ._private import Folder

_logger = logging.getLogger("towline")

_PREFIX = "owner-"
#: End of the names of marks.
LEFT = ".left"
#: Hexadecimal digits of an id.
_DIGITS = 16
#: Seconds for which a claim is tried again: others only look at it for a moment.
_GRACE, _PAUSE = 2.0, 0.05

#: Finalizers of the locks of this process, by their descriptors.
_finalizers: dict[int, weakref.finalize[[int], Lock]] = {}
#: Ids of the owners in this process that hold locks.
_ids: set[str] = set()
#: Folders in which this process was told that locks are refused.
_told: set[str] = set()


class Lock:
    """A locked file: until it is released, nothing refers to it, or the process ends."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.release = _finalizers[descriptor] = weakref.finalize(self, _close, descriptor)
        # At exit, `_shutdown` may finish saves after finalizers ran.
        self.release.atexit = False


#: Lock of each folder that this process saves to, by its device and inode.
_claims: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()


class Owner:
    """A Checkpointer or FolderSaver, as the owner of steps in a spool."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex[:_DIGITS]
        #: Locks, and the folders that they are in, by the devices and inodes of these.
        self._locks: dict[tuple[int, int], tuple[Folder, Lock]] = {}

    def new_name(self, folder: Folder) -> str:
        """Random part of the name of a new step in `folder`, which others leave alone until `release`."""
        _, lock = self._locks.get(_key(folder.descriptor), (None, None))
        if lock is None or not self._is_there(folder, lock):
            self._hold(folder)
        return self._id + uuid.uuid4().hex[_DIGITS:]

    def release(self) -> None:
        """Releases the locks: steps that are still there are left to the next process."""
        for folder, lock in self._locks.values():
            if self._is_there(folder, lock):
                with contextlib.suppress(OSError):
                    os.unlink(_PREFIX + self._id, dir_fd=folder.descriptor)
            lock.release()
        self._locks = {}
        _ids.discard(self._id)
        self._id = uuid.uuid4().hex[:_DIGITS]

    def _hold(self, folder: Folder) -> None:
        # The file gets its name once it is locked: one of that name without a lock is of a process that ended.
        part = f"{_PREFIX}{self._id}.{uuid.uuid4().hex}.part"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = Lock(os.open(part, flags, 0o600, dir_fd=folder.descriptor))
        try:
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.unlink(part, dir_fd=folder.descriptor)
            lock.release()
            _tell(folder.shown, error)
            return
        os.rename(part, _PREFIX + self._id, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
        _ids.add(self._id)
        self._locks[_key(folder.descriptor)] = (folder, lock)

    def _is_there(self, folder: Folder, lock: Lock) -> bool:
        """False if the locked file was removed, with the folder, or this is a forked child, which has no locks."""
        with contextlib.suppress(OSError):
            found = os.stat(_PREFIX + self._id, dir_fd=folder.descriptor, follow_symlinks=False)
            return lock.release.alive and (found.st_dev, found.st_ino) == _key(lock.descriptor)
        return False


def leave(folder: int, step: str) -> None:
    """Gives up the step folder `step`, in the folder with this descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(step + LEFT, flags, 0o600, dir_fd=folder))


def is_mine(folder: int, step: str) -> bool:
    """True if an owner in this process has the step folder `step`, in the folder with this descriptor."""
    return _id_of(step) in _ids and not _is_left(folder, step)


def is_live(folder: int, step: str) -> bool:
    """True if the owner of the step folder `step`, in the folder with this descriptor, still runs, and did not give it up."""
    return not _is_left(folder, step) and _is_locked(folder, _PREFIX + _id_of(step))


def sweep(folder: int) -> None:
    """Removes the files of owners that ended, in the folder with this descriptor."""
    for name in os.listdir(folder):
        if name.startswith(_PREFIX) and not name.endswith(".part"):
            _is_locked(folder, name)


def _is_locked(folder: int, name: str) -> bool:
    """True if the owner with the file `name` still runs; removes the file of one that ended."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return False
    except OSError:
        # Nothing is known of the owner, for example with no descriptor left: its steps are left alone.
        return True
    try:
        # Shared: others may look at the same time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def claim(folder: Folder, grace: float = _GRACE) -> Lock | None:
    """Lock of a folder that one process at a time saves to; None if another process has it for longer than `grace` seconds."""
    descriptor = _private.lock(folder, "training")
    key, until = _key(descriptor), time.monotonic() + grace
    found = _claims.get(key)
    if found is not None:
        os.close(descriptor)
        return found
    lock = Lock(descriptor)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                lock.release()
                return None
            time.sleep(_PAUSE)
        except OSError as error:
            _tell(folder.shown, error)
            break
        else:
            break
    _claims[key] = lock
    return lock


def _is_left(folder: int, step: str) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(step + LEFT, dir_fd=folder, follow_symlinks=False).st_uid == os.geteuid()
    return False


def _id_of(step: str) -> str:
    return step.rpartition(".")[2][:_DIGITS]


def _key(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _tell(folder: str, error: OSError) -> None:
    """Logs, once for each folder, that files cannot be locked there."""
    if folder not in _told:
        _told.add(folder)
        _logger.warning(
            "files in %s cannot be locked: %s: another process that restores from this run here may take this one's steps for "
            "those of a process that ended (choose a folder on a file system with locks)",
            folder, error,
        )  # fmt: skip


def _close(descriptor: int) -> None:
    del _finalizers[descriptor]
    os.close(descriptor)


def _forked() -> None:
    """Closes the locks in a forked child: it would hold them after the end of its parent. Their finalizers do not run again, when
    new files of the child have these descriptors."""
    for finalizer in list(_finalizers.values()):
        finalizer()
    _ids.clear()
    _claims.clear()


os.register_at_fork(after_in_child=_forked)
