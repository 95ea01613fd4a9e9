"""Dataclasses, named tuples and enumerations in states.

The name of the class and the values are stored. A name in stored data never causes an import: the class is that of the object at
the same place in `into`, or one given to `allow_classes`. Only if the caller trusts pickles, the class is imported by name.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from typing import Any, TypeVar

from .errors import UsageError

_Class = TypeVar("_Class", bound=type)

#: Base classes whose content is not in the fields of a dataclass.
_OTHERS = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex)

_allowed: dict[str, type] = {}


def allow_classes(*classes: type) -> Any:
    """Allows states with objects of these classes (dataclasses, named tuples, enumerations) to be restored in this process.
    Returns the class, if one is given, so that it can be used as a decorator.

    Without it, `restore` creates such an object only if `into` has one of the same class at the same place. Of the class, only
    `__new__` runs, and properties with the name of a field.
    """
    for cls in classes:
        if not isinstance(cls, type) or kind(cls) is None:
            raise UsageError(f"{cls!r} is no dataclass, named tuple or enumeration")
        _allowed[named(cls)] = cls
    return classes[0] if len(classes) == 1 else None


def is_allowed(cls: type) -> bool:
    """True if the class was given to `allow_classes`."""
    return _allowed.get(named(cls)) is cls


def kind(cls: type) -> str | None:
    """Word for objects of a class in the document; None for other classes."""
    if issubclass(cls, enum.Enum):
        return "Enum"
    if issubclass(cls, tuple):
        return "namedtuple" if isinstance(getattr(cls, "_fields", None), tuple) else None
    return "dataclass" if dataclasses.is_dataclass(cls) and not issubclass(cls, _OTHERS) else None


def named(cls: type) -> str:
    """Name of a class in the document."""
    return f"{cls.__module__}:{cls.__qualname__}"


def parts(value: Any) -> list[tuple[str, Any]]:
    """Values of a dataclass object or named tuple, by name."""
    if isinstance(value, tuple):
        named: Any = value
        return list(zip(named._fields, named, strict=True))
    fields = [field.name for field in dataclasses.fields(value)]
    others = [name for name in getattr(value, "__dict__", ()) if name not in fields]
    return [(name, getattr(value, name)) for name in (*fields, *others) if hasattr(value, name)]


def find(name: str, wanted: str, into: Any, trusted: bool) -> type | None:
    """Finds the class `name` of the kind `wanted`: see the module's docstring. It may be in another module than when saved."""
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
    """Creates an object of a class with these values. Raises ValueError if they do not fit."""
    if issubclass(cls, tuple):
        if set(values) != set(cls._fields):
            raise ValueError(f"it has the fields {list(cls._fields)}, but {list(values)} were saved")
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
            # Works for frozen dataclasses, too.
            object.__setattr__(value, name, held)
        except AttributeError as error:
            raise ValueError(f"{name} was saved, and it has no such field") from error
    return value


def member(cls: type[enum.Enum], name: str | None, value: Any) -> enum.Enum:
    """Member of an enumeration, or combination of flags. Raises ValueError if there is none."""
    if name is not None and name in cls.__members__:
        return cls.__members__[name]
    if issubclass(cls, enum.Flag):
        return cls(value)
    raise ValueError(f"it has no member {name}")
