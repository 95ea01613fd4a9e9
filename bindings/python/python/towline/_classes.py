"""Dataclasses, named tuples and enumerations in states.

The name of the class and the values are stored. A name in stored data never causes an import: the class is that of the object at
the same place in `into`, or one given to `allow_classes`. Only if the caller trusts pickles, the class is imported by name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
from collections.abc import Iterable
from typing import Any, TypeVar

from .errors import Damaged, UsageError

_Class = TypeVar("_Class", bound=type)

#: Base classes whose content is not in the fields of a dataclass.
_OTHERS = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex)

#: Methods that run when an attribute is read, set or deleted.
_DESCRIPTOR = ("__get__", "__set__", "__delete__")

#: Stands for an attribute that a class does not have.
_LACKING = object()

_allowed: dict[str, type] = {}


def allow_classes(*classes: type) -> Any:
    """Allows states with objects of these classes (dataclasses, named tuples, enumerations) to be restored in this process.
    Returns the class, if one is given, so that it can be used as a decorator.

    Without it, `restore` creates such an object only if `into` has one of the same class at the same place. Of the class, only
    this runs: `__new__`, factories of default values, and properties and other descriptors with the name of a field; `_make` of a
    named tuple; `_missing_` of flags; and `__hash__` and `__eq__` of objects that are keys or elements of sets.
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
    """Values of a dataclass object or named tuple, by name: those of its fields, and those of its other attributes that `made`
    sets. Other objects have none."""
    word = kind(type(value))
    if word == "namedtuple":
        return list(zip(value._fields, value, strict=True))
    if word != "dataclass":
        return []
    cls, fields = type(value), _fields(type(value))
    found = [(name, getattr(value, name)) for name in fields if hasattr(value, name)]
    others = getattr(value, "__dict__", {})
    return found + [(name, others[name]) for name in others if name not in fields and _may_be_set(cls, name)]


def unkept(value: Any) -> list[str]:
    """Names of attributes of a dataclass object or named tuple that are not stored, and that Python does not compute anew."""
    cls, word = type(value), kind(type(value))
    fields = _fields(cls) if word == "dataclass" else []
    attributes = getattr(value, "__dict__", {}) if word in ("dataclass", "namedtuple") else {}
    return [
        str(name)
        for name in attributes
        if name not in fields and not _is_computed(cls, name) and not (word == "dataclass" and _may_be_set(cls, name))
    ]


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _may_be_set(cls: type, name: Any) -> bool:
    """True if an attribute that is no field may be set on an object of a class: it calls nothing, and hides plain data at most,
    such as the first value of a counter."""
    if not isinstance(name, str) or name.startswith("__"):
        return False
    held = _in_class(cls, name)
    return held is _LACKING or not (callable(held) or any(hasattr(held, special) for special in _DESCRIPTOR))


def _is_computed(cls: type, name: Any) -> bool:
    """True for an attribute that Python itself sets on objects: the value of a cached property, and what `Config[int](...)` was
    called on. Neither is stored."""
    return name == "__orig_class__" or isinstance(_in_class(cls, name), functools.cached_property)


def hides(cls: type, name: Any) -> bool:
    """True if an attribute of this name cannot be one of an object of a class, or hides one of the class."""
    return not isinstance(name, str) or _in_class(cls, name) is not _LACKING


def _in_class(cls: type, name: Any) -> Any:
    """Attribute of a class or its bases as it is there, without calling its `__get__`; its metaclass does not count."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _LACKING)


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


def made(cls: Any, values: dict[str, Any], where: str, trusted: bool = False) -> Any:
    """Creates an object of a class with these values. Raises ValueError if they do not fit, and Damaged if one is neither a field
    nor an attribute that may be set; `where` is the place in the state. If the caller trusts pickles, attributes of the class
    are set, too: earlier versions saved them."""
    if issubclass(cls, tuple):
        if set(values) != set(cls._fields):
            raise ValueError(f"it has the fields {list(cls._fields)}, but {list(values)} were saved")
        return cls._make(values[name] for name in cls._fields)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {name: held for name, held in values.items() if name in fields or not _is_computed(cls, name)}
    _check(cls, (name for name in values if name not in fields), where, trusted)
    for name, field in fields.items():
        if name not in values and field.default is not dataclasses.MISSING:
            values[name] = field.default
        elif name not in values and field.default_factory is not dataclasses.MISSING:
            values[name] = field.default_factory()
        elif name not in values:
            raise ValueError(f"its field {name} was not saved, and has no default")
    try:
        value = cls.__new__(cls)
    except TypeError as error:
        raise ValueError(f"its __new__ makes none without arguments: {error}") from error
    for name, held in values.items():
        try:
            # Works for frozen dataclasses, too.
            object.__setattr__(value, name, held)
        except AttributeError as error:
            raise ValueError(f"{name} was saved, and it has no such field") from error
    return value


def _check(cls: type, names: Iterable[str], where: str, trusted: bool) -> None:
    """Raises Damaged if one of the names, which are no fields, may not be set on an object of a class."""
    for name in names:
        if _may_be_set(cls, name) or (trusted and not name.startswith("__")):
            continue
        if name.startswith("__"):
            what, help = "begins with two underscores", "restore another step"
        else:
            what = "the class has, but neither as a field nor as plain data"
            help = "if the class has changed since, make it a field again; or pass pickle=True if you trust whoever saved it"
        error = Damaged(
            f"the document of a state has at {where} a {named(cls)} with the attribute {name!r}, which {what}: expected a field, "
            f"plain data, or a name that the class lacks; towline saves no other ({help})"
        )
        error.place, error.help = where, help
        raise error


def namespace(cls: Any, values: dict[str, Any], where: str) -> Any:
    """Creates a namespace with these values. Raises Damaged if one would hide an attribute of its class."""
    if hiding := next((name for name in values if hides(cls, name)), None):
        error = Damaged(
            f"the document of a state has at {where} a {cls.__name__} with the attribute {hiding!r}, which the class has: "
            "expected a name that it lacks; towline saves no other (restore another step)"
        )
        error.place, error.help = where, "restore another step"
        raise error
    made = cls()
    vars(made).update(values)
    return made


def member(cls: type[enum.Enum], name: str | None, value: Any) -> enum.Enum:
    """Member of an enumeration, or combination of flags. Raises ValueError if there is none."""
    if name is not None and name in cls.__members__:
        return cls.__members__[name]
    if issubclass(cls, enum.Flag):
        return cls(value)
    raise ValueError(f"it has no member {name}")
