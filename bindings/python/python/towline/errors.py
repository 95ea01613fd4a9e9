"""What can go wrong, a class for each thing that a caller can do about it."""

from __future__ import annotations


class Error(Exception):
    """Anything that went wrong. `kind` is the word of the command line's JSON errors, `place` is where, `cure` what to do."""

    kind: str = "other"
    place: str | None = None
    cure: str | None = None


class UsageError(Error, ValueError):
    """The call makes no sense."""

    kind = "usage"


class NotFound(Error, FileNotFoundError):
    """A name, file, tensor or repository that does not exist."""

    kind = "not-found"


class TensorNotFound(NotFound, KeyError):
    """A tensor that a tree does not hold."""

    __str__ = NotFound.__str__


class Damaged(Error):
    """Stored bytes are not what was written."""

    kind = "damaged"


class Conflict(Error):
    """Somebody else got there first, or something is in the way."""

    kind = "conflict"


class Unreachable(Error, ConnectionError):
    """The store does not answer, or not now."""

    kind = "unreachable"


class Denied(Error, PermissionError):
    """The store or the file system says no."""

    kind = "denied"


class Exhausted(Error):
    """Not enough memory budget, disk or descriptors."""

    kind = "exhausted"


class Cancelled(Error):
    """It was stopped."""

    kind = "cancelled"


class Unsupported(Error, NotImplementedError):
    """This program is too old, or this store too weak, for what was asked."""

    kind = "unsupported"


class UnsupportedValue(UsageError, TypeError):
    """A state holds something that cannot be kept; `place` is its path in the state."""


class SaveFailed(Error):
    """A save that went on by itself failed: raised by the next call, with what made it fail as its cause."""


class Timeout(Error, TimeoutError):
    """It takes longer than was to be waited for. It goes on."""

    kind = "timeout"


_BY_KIND = {
    cls.kind: cls
    for cls in (
        UsageError, NotFound, Damaged, Conflict, Unreachable, Denied, Exhausted, Cancelled, Unsupported
    )
}  # fmt: skip


def make(kind: str, text: str, place: str | None = None, cure: str | None = None) -> Error:
    """The exception for an error of the engine."""
    error = _BY_KIND.get(kind, Error)(text if cure is None else f"{text} ({cure})")
    error.place, error.cure = place, cure
    return error
