"""What can go wrong, a class for each thing that a caller can do about it."""

from __future__ import annotations

import errno as numbers
import re
from collections.abc import Sequence


class Error(Exception):
    """Anything that went wrong. `kind` is the word of the command line's JSON errors, `place` is where, `help` what to do."""

    kind: str = "other"
    place: str | None = None
    help: str | None = None


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


class DiskFull(Exhausted, OSError):
    """No space is left on a disk, of this node's or under the repository; `errno` says which limit it was."""


class Cancelled(Error):
    """It was stopped."""

    kind = "cancelled"


class Unsupported(Error, NotImplementedError):
    """This program is too old, or this store too weak, for what was asked."""

    kind = "unsupported"


class UnsupportedValue(UsageError, TypeError):
    """A state holds something that cannot be kept; `place` is its path in the state."""


class Mismatch(UsageError, RuntimeError):
    """A saved state does not fit what it is to be restored into; `place` is the path in the state. As torch has them:
    `missing_keys` are the paths that the saved state lacks, `unexpected_keys` those that `into` lacks."""

    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()


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


#: What the number of an error is that came without one.
_NUMBERS = {NotFound: numbers.ENOENT, Denied: numbers.EACCES, DiskFull: numbers.ENOSPC}
#: Numbers of a disk that is full, for this user or for so long a file.
_FULL = (numbers.ENOSPC, numbers.EDQUOT, numbers.EFBIG)

#: Words of the command line in the engine's texts: commands that have no method stay as they are, with what follows.
_COMMANDS = re.compile(
    r"`?towline (?P<verb>[a-z]+)(?P<rest>(?: --[a-z-]+(?: [A-Z][A-Z=]*)?)*)`?(?P<more>[^;,)`]*)"
    r"|`?(?<![\w./-])--(?P<flag>[a-z][a-z-]*)(?: (?P<number>\d+))?`?"
)
_METHODS = ("collect", "expire", "restore", "save", "show", "verify")
_SWITCHES = ("allow-http", "data", "delete", "dry-run", "overwrite", "repair")


def make(kind: str, text: str, place: str | None = None, help: str | None = None, errno: int | None = None) -> Error:
    """The exception for an error of the engine; `errno` is the system's number for what caused it."""
    text, help = _in_python(text), None if help is None else _in_python(help)
    cls = _BY_KIND.get(kind, Error)
    if cls is Exhausted and errno in _FULL:
        cls = DiskFull
    error = cls(text if help is None else f"{text} ({help})")
    if isinstance(error, OSError):
        error.errno = errno or _NUMBERS.get(cls)
    error.place, error.help = place, help
    return error


def _in_python(text: str) -> str:
    """What the engine says, with Python's words for the command line's."""
    return _COMMANDS.sub(_translated, text).replace("run the same command again", "do the same again")


def _translated(found: re.Match[str]) -> str:
    flag, verb = found["flag"], found["verb"]
    if flag is not None:
        return _argument(flag, found["number"])
    if verb not in _METHODS:
        return found[0]
    arguments = re.findall(r"--([a-z-]+)", found["rest"])
    if arguments == ["metric"]:
        return f"metrics={{NAME: VALUE}} of a save{found['more']}"
    return f"Repository.{verb}({', '.join(_argument(one) for one in arguments)}){found['more']}"


def _argument(flag: str, number: str | None = None) -> str:
    if flag == "memory":
        return "the memory of towline.open"
    if flag == "yes":
        return "may_empty=True"
    value = number or ("True" if flag in _SWITCHES else None)
    return flag.replace("-", "_") + ("" if value is None else f"={value}")
