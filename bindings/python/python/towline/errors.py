"""Exceptions, one class for each way to handle them."""

from __future__ import annotations

import errno as numbers
import re
from collections.abc import Sequence


class Error(Exception):
    """Base class. `kind` is the same word as in JSON errors of the command line, `place` is the location, `help` the remedy."""

    kind: str = "other"
    place: str | None = None
    help: str | None = None


class UsageError(Error, ValueError):
    """Invalid arguments."""

    kind = "usage"


class NotFound(Error, FileNotFoundError):
    """A name, file, tensor or repository that does not exist."""

    kind = "not-found"


class TensorNotFound(NotFound, KeyError):
    """A tensor that is not in a tree."""

    __str__ = NotFound.__str__


class Damaged(Error):
    """Stored bytes differ from those that were written."""

    kind = "damaged"


class Conflict(Error):
    """Another process was first, or an existing file or name is in the way."""

    kind = "conflict"


class Busy(Conflict):
    """Others change the same things too often: a later try may succeed."""

    kind = "busy"


class Unreachable(Error, ConnectionError):
    """The store does not answer; it may answer later."""

    kind = "unreachable"


class Denied(Error, PermissionError):
    """The store or the file system refuses access."""

    kind = "denied"


class Exhausted(Error):
    """Out of memory budget, disk space or file descriptors."""

    kind = "exhausted"


class DiskFull(Exhausted, OSError):
    """A disk is full, on this node or under the repository; `errno` says which limit was reached."""


class Cancelled(Error):
    """The operation was stopped."""

    kind = "cancelled"


class Unsupported(Error, NotImplementedError):
    """This version of towline, or this store, lacks what the operation needs."""

    kind = "unsupported"


class UnsupportedValue(UsageError, TypeError):
    """A state holds a value that cannot be saved; `place` is its path in the state."""


class Mismatch(UsageError, RuntimeError):
    """A saved state does not fit `into`; `place` is the path in the state. As in torch, `missing_keys` are paths that the saved
    state lacks, and `unexpected_keys` paths that `into` lacks."""

    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()


class SaveFailed(Error):
    """A background save failed; raised by the next call. `__cause__` is the original exception."""


class SaveConflict(SaveFailed, Conflict):
    """A background save failed because another process saved the step first, or changed a file while it was read."""


class Timeout(Error, TimeoutError):
    """The timeout of a wait is over. The operation continues."""

    kind = "timeout"


_BY_KIND = {
    cls.kind: cls
    for cls in (
        UsageError, NotFound, Damaged, Conflict, Busy, Unreachable, Denied, Exhausted, Cancelled, Unsupported
    )
}  # fmt: skip


#: Default errno of errors that came without one.
_NUMBERS = {NotFound: numbers.ENOENT, Denied: numbers.EACCES, DiskFull: numbers.ENOSPC}
#: Values of errno that mean a full disk, an exceeded quota or too long a file.
_FULL = (numbers.ENOSPC, numbers.EDQUOT, numbers.EFBIG)

#: Command-line syntax in the engine's messages. A command without a method in Python is left unchanged, with its arguments.
_COMMANDS = re.compile(
    r"`towline init (?P<quoted>[^`]+)`|towline init (?P<new>[^\s`]+)"
    r"|`towline (?P<named>[a-z]+) (?P<name>[^\s`-][^\s`]*)(?: --[a-z-]+)*`"
    r"|`?towline (?P<verb>[a-z]+)(?P<rest>(?: --[a-z-]+(?: [A-Z][A-Z=]*)?)*)`?(?P<more>[^;,)`]*)"
    r"|`?(?<![\w./-])--(?P<flag>[a-z][a-z-]*)(?: (?P<number>\d+))?`?"
)
_METHODS = ("collect", "expire", "restore", "save", "show", "verify")
_SWITCHES = ("allow-http", "data", "delete", "dry-run", "overwrite", "repair")


def make(kind: str, text: str, place: str | None = None, help: str | None = None, errno: int | None = None) -> Error:
    """Creates the exception for an error of the engine; `errno` is the system's error number of its cause."""
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
    """Translates command-line syntax in a message of the engine to Python calls."""
    return _COMMANDS.sub(_translated, text).replace("run the same command again", "do the same again")


def _translated(found: re.Match[str]) -> str:
    if new := found["quoted"] or found["new"]:
        return f"towline.open({new!r}, create=True)"
    if found["named"] is not None:
        return f"Repository.{found['named']}({found['name']!r})" if found["named"] in _METHODS else found[0]
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
