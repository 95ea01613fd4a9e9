"""Objects of classes that Python makes to hold values: dataclasses, named tuples and enumerations.

What is stored of one is the name of its class and its values. A name in stored data never imports anything: the class is that
of the object at the same place of `into`, or one that `allow_classes` was given, or, where the caller trusts pickles, the one
that the name says.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from typing import Any, TypeVar

from .errors import UsageError

_Class = TypeVar("_Class", bound=type)

#: Dataclasses that are containers or numbers as well have more to keep than their fields.
_OTHERS = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex)

_allowed: dict[str, type] = {}


def allow_classes(*classes: type) -> Any:
    """Lets states be restored that hold objects of these classes: dataclasses, named tuples and enumerations, for as long as
    the process lives. Returns the class, if there is one, so that it can stand as a decorator.

    Without it `restore` makes such objects only where `into` has one of the class at the same place. No code of the class runs
    but `__new__`, and the properties that its fields may be.
    """
    for cls in classes:
        if not isinstance(cls, type) or kind(cls) is None:
            raise UsageError(f"{cls!r} is no dataclass, named tuple or enumeration")
        _allowed[named(cls)] = cls
    return classes[0] if len(classes) == 1 else None


def is_allowed(cls: type) -> bool:
    """Was it given to `allow_classes`?"""
    return _allowed.get(named(cls)) is cls


def kind(cls: type) -> str | None:
    """What the document calls objects of a class; None: something else."""
    if issubclass(cls, enum.Enum):
        return "Enum"
    if issubclass(cls, tuple):
        return "namedtuple" if isinstance(getattr(cls, "_fields", None), tuple) else None
    return "dataclass" if dataclasses.is_dataclass(cls) and not issubclass(cls, _OTHERS) else None


def named(cls: type) -> str:
    """How the document names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def parts(value: Any) -> list[tuple[str, Any]]:
    """The values that a dataclass's object or a named tuple holds, by name."""
    if isinstance(value, tuple):
        named: Any = value
        return list(zip(named._fields, named, strict=True))
    fields = [field.name for field in dataclasses.fields(value)]
    others = [name for name in getattr(value, "__dict__", ()) if name not in fields]
    return [(name, getattr(value, name)) for name in (*fields, *others) if hasattr(value, name)]


def find(name: str, wanted: str, into: Any, trusted: bool) -> type | None:
    """The class called `name`, of the kind `wanted`: see above. Its module may have moved since it was saved."""
    own = name.partition(":")[2]
    if kind(type(into)) == wanted and type(into).__qualname__ == own:
        return type(into)
    found = [cls for there, cls in _allowed.items() if there == name or there.partition(":")[2] == own]
    chosen = _allowed.get(name) or (found[0] if len(found) == 1 else None)
    if chosen is None and trusted:
        chosen = _imported(name)
    return chosen if chosen is not None and kind(chosen) == wanted else None


def _imported(name: str) -> type | None:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def made(cls: Any, values: dict[str, Any]) -> Any:
    """An object of a class that holds these values. Raises ValueError, if it cannot."""
    if issubclass(cls, tuple):
        if set(values) != set(cls._fields):
            raise ValueError(f"it has the fields {list(cls._fields)}, and {list(values)} were saved")
        return cls._make(values[name] for name in cls._fields)
    value = cls.__new__(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, field in fields.items():
        if name not in values and field.default is not dataclasses.MISSING:
            values[name] = field.default
        elif name not in values and field.default_factory is not dataclasses.MISSING:
            values[name] = field.default_factory()
        elif name not in values:
            raise ValueError(f"its field {name} was not saved, and has no default")
    for name, held in values.items():
        try:
            # Also where it is frozen.
            object.__setattr__(value, name, held)
        except AttributeError as error:
            raise ValueError(f"{name} was saved, and it has no such field") from error
    return value


def member(cls: type[enum.Enum], name: str | None, value: Any) -> enum.Enum:
    """The member of an enumeration, or the flags. Raises ValueError, if there is none."""
    if name is not None and name in cls.__members__:
        return cls.__members__[name]
    if issubclass(cls, enum.Flag):
        return cls(value)
    raise ValueError(f"it has no member {name}")
