"""Check of what `torch.save` wrote before `torch.load(weights_only=True)` reads it.

That runs no code. But it hashes keys: of a tuple that holds another one twice, which holds another one twice, and so on, for
ever; of a deep one until the stack overflows; of many integers with one hash for very long. And it calls types with sizes, and
takes the length of a storage from the pickle: beyond its record, versions of torch that do not compare both read other memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from typing import Any, NamedTuple

import torch

from ..errors import Damaged

#: Limits of one value: values and bytes that are made in it, each as often as it is in there, for each byte of the pickle; and
#: how deep they are in each other.
_VALUES_PER_BYTE, _DEPTH_MAX = 64, 200
#: Maximum bytes of a pickle. Tensors are beside it.
_LENGTH_MAX = 256 << 20
#: Maximum integers that may have the hash of another one: those from Python's modulus on (sys.hash_info).
_LARGE_MAX, _MODULUS = 256, (1 << 61) - 1

#: Callables of a pickle of plain values and tensors, beside the functions of torch that rebuild tensors. Others, such as
#: `torch.Tensor` and its storages, allocate whatever size they are called with.
_CALLED = {
    "__builtin__ complex", "__builtin__ frozenset", "__builtin__ set", "builtins complex", "builtins frozenset",
    "builtins set", "collections Counter", "collections OrderedDict", "torch Size", "torch device",
    "torch.serialization _get_layout",
}  # fmt: skip
_BYTEARRAYS = {"__builtin__ bytearray", "builtins bytearray"}
#: Makes bytes of a text: new ones each time, of a text that may be in the pickle once.
_ENCODE = "_codecs encode"
_REBUILDING = ("torch._utils _rebuild_", "torch._tensor _rebuild_", "torch.nn.parameter _rebuild_")

#: Maximum characters of a storage's key; torch numbers them.
_KEY_LEN_MAX = 256
#: Parts of the persistent id of a storage: the word "storage", type, key, device and number of elements.
_ID_LEN = 5

#: Opcodes that put what is on top of the stack into the value below it.
_INTO = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_ALL_INTO = ("APPENDS", "SETITEMS", "ADDITEMS")


class _Value:
    """Facts about a value: values in it, depth, characters of text, its name if it is a global, whether it is, or holds, an
    integer; itself, if it is an integer or a short text; and its parts, if it is a tuple as long as the id of a storage."""

    __slots__ = ("atom", "count", "depth", "integer", "name", "parts", "text")

    def __init__(self, name: str | None = None, text: int = 0, integer: bool = False, atom: int | str | None = None):
        self.count, self.depth, self.name, self.text, self.integer = 1, 1, name, text, integer
        self.atom = atom
        self.parts: tuple[_Value, ...] = ()


_MARK = _Value()


class _Entry(NamedTuple):
    name: str
    held: bytes


def checked(held: bytes | memoryview) -> io.BytesIO:
    """Archive with the entries of `held`, to be read in its place: readers of archives differ in what they find in one. Raises
    UnpicklingError for one whose values could take for ever, too much of the stack, or more memory than they are; and Damaged for
    a storage that is longer than its record."""
    try:
        with zipfile.ZipFile(io.BytesIO(held)) as archive:
            entries = _entries(archive, bytes(held[:4]), len(held))
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError) as error:
        raise pickle.UnpicklingError(f"it is no archive of torch: {error}") from error
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for entry in entries:
            archive.writestr(entry.name, entry.held)
    made.seek(0)
    return made


def _entries(archive: zipfile.ZipFile, begins: bytes, length: int) -> list[_Entry]:
    found = archive.infolist()
    names = [entry.filename.lower() for entry in found]
    pickles = [entry for entry in found if entry.filename.lower().endswith("data.pkl")]
    if begins != b"PK\x03\x04" or len(set(names)) != len(names):
        raise pickle.UnpicklingError("it begins with something else, or has a name twice")
    if len(pickles) != 1 or not pickles[0].filename.endswith("/data.pkl") or pickles[0].file_size > _LENGTH_MAX:
        raise pickle.UnpicklingError("it has no pickle, several, or one that is too long")
    # Entries that overlap would be more than all of it.
    if (
        any(entry.compress_type != zipfile.ZIP_STORED for entry in found)
        or sum(one.file_size for one in found) > length
    ):
        raise pickle.UnpicklingError("its entries are compressed, or more than it has")
    entries = [_Entry(entry.filename, archive.read(entry)) for entry in found]
    storages = _check_pickle(next(entry.held for entry in entries if entry.name == pickles[0].filename))
    _check_storages(storages, pickles[0].filename.removesuffix("data.pkl"), entries)
    return entries


def _check_storages(storages: dict[str, int], folder: str, entries: list[_Entry]) -> None:
    """Raises Damaged if a storage, with its bytes by key, has no record or a shorter one."""
    # torch ignores case where it looks for a record.
    held = {entry.name.lower(): len(entry.held) for entry in entries}
    for key, length in storages.items():
        record = f"{folder}data/{key}"
        found = held.get(record.lower(), 0)
        if length > found:
            raise Damaged(
                f"an archive of torch has a storage of {length} bytes, and {found} bytes for it in its record {record} (save the "
                "object again: torch.save writes no such archive)"
            )


def _check_pickle(pickled: bytes) -> dict[str, int]:
    """Follows the opcodes with a count and a depth in the place of each value. Returns the bytes of each storage by key."""
    most = _VALUES_PER_BYTE * (len(pickled) + 1024)
    stack: list[_Value] = []
    memo: dict[Any, _Value] = {}
    storages: dict[str, int] = {}
    large = 0
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if name == "MARK":
                stack.append(_MARK)
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name == "DUP":
                stack.append(stack[-1])
            elif name == "POP_MARK":
                _popped(stack)
            elif name in _INTO:
                _add(stack, [stack.pop() for _ in range(_INTO[name])])
            elif name in _ALL_INTO:
                _add(stack, _popped(stack))
            elif name == "GLOBAL":
                stack.append(_Value(name=argument))
            elif opcode.stack_before == [] and len(opcode.stack_after) == 1:
                number = argument if isinstance(argument, int) and not isinstance(argument, bool) else None
                large += number is not None and abs(number) >= _MODULUS
                text = len(argument) if isinstance(argument, (bytes, str)) else 0
                atom = argument if isinstance(argument, str) and text <= _KEY_LEN_MAX else number
                stack.append(_Value(text=text, integer=number is not None, atom=atom))
            else:
                before = opcode.stack_before
                parts = _popped(stack) if pickletools.markobject in before else [stack.pop() for _ in before]
                made = 0
                if name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "STACK_GLOBAL"):
                    made = _called(name, parts)
                elif name == "BINPERSID":
                    key, length = _storage(parts[0])
                    storages[key] = max(length, storages.get(key, 0))
                for _ in opcode.stack_after:
                    stack.append(_Value())
                    _add(stack, parts)
                    stack[-1].count += made
                if name == "TUPLE" and len(parts) == _ID_LEN:
                    stack[-1].parts = tuple(reversed(parts))
            if stack and (stack[-1].count > most or stack[-1].depth > _DEPTH_MAX):
                raise pickle.UnpicklingError("its values are too many, or too deep in each other")
            if large > _LARGE_MAX:
                raise pickle.UnpicklingError("it has too many large integers")
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError(f"its pickle is malformed: {error!r}") from error
    return storages


def _storage(named: _Value) -> tuple[str, int]:
    """Key and bytes of the storage with a persistent id."""
    if len(named.parts) == _ID_LEN and named.parts[0].atom == "storage":
        _, kind, key, _, count = named.parts
        width = _width(kind.name or "")
        if width and isinstance(key.atom, str) and isinstance(count.atom, int) and count.atom >= 0:
            return key.atom, count.atom * width
    raise pickle.UnpicklingError("its pickle names something by an id that is not one of a storage")


def _width(storage: str) -> int:
    """Bytes of an element of a type of storages, such as `torch FloatStorage`; 0 for other types."""
    name = storage.rpartition(" ")[2]
    if name == "UntypedStorage":
        return 1
    dtype = getattr(vars(torch).get(name), "_dtype", None) if name.endswith("Storage") else None
    return int(dtype.itemsize) if isinstance(dtype, torch.dtype) else 0


def _called(opcode: str, parts: list[_Value]) -> int:
    """Bytes that a call makes. `parts` are the arguments, and what is called with them."""
    called = parts[-1].name if opcode in ("REDUCE", "NEWOBJ") else None
    if called in _CALLED or (called or "").startswith(_REBUILDING):
        return 0
    if called == _ENCODE or (called in _BYTEARRAYS and not any(part.integer for part in parts)):
        return sum(part.text for part in parts)
    raise pickle.UnpicklingError(f"its pickle calls {called or 'something'}")


def _popped(stack: list[_Value]) -> list[_Value]:
    """Pops what is above the last mark, and the mark."""
    parts = []
    while (part := stack.pop()) is not _MARK:
        parts.append(part)
    return parts


def _add(stack: list[_Value], parts: list[_Value]) -> None:
    """Adds `parts` to the value on top of the stack."""
    value = stack[-1]
    value.count += sum(part.count for part in parts)
    value.depth = max([value.depth, *(part.depth + 1 for part in parts)])
    value.text += sum(part.text for part in parts)
    value.integer = value.integer or any(part.integer for part in parts)
