"""Check of what `torch.save` wrote before `torch.load(weights_only=True)` reads it.

That runs no code. But it hashes keys: of a tuple that holds another one twice, which holds another one twice, and so on, for
ever; of a deep one until the stack overflows.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from typing import Any

#: Limits of one value: values in it, each as often as it is in there, for each byte of the pickle; and how deep they are in each
#: other.
_VALUES_PER_BYTE, _DEPTH_MAX = 64, 200
#: Maximum bytes of a pickle. Tensors are beside it.
_LENGTH_MAX = 256 << 20

#: Opcodes that put what is on top of the stack into the value below it.
_INTO = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_ALL_INTO = ("APPENDS", "SETITEMS", "ADDITEMS")
_MARK = [0, 0]


def check(held: bytes | memoryview) -> None:
    """Raises UnpicklingError for an archive whose values could take for ever, or too much of the stack."""
    try:
        with zipfile.ZipFile(io.BytesIO(held)) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("data.pkl"):
                    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _LENGTH_MAX:
                        raise pickle.UnpicklingError("its pickle is compressed, or too long")
                    _check_pickle(archive.read(entry))
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise pickle.UnpicklingError(f"it is no archive of torch: {error}") from error


def _check_pickle(pickled: bytes) -> None:
    """Follows the opcodes with a count and a depth in the place of each value."""
    most = _VALUES_PER_BYTE * (len(pickled) + 1024)
    stack: list[list[int]] = []
    memo: dict[Any, list[int]] = {}
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
            else:
                before = opcode.stack_before
                parts = _popped(stack) if pickletools.markobject in before else [stack.pop() for _ in before]
                for _ in opcode.stack_after:
                    stack.append([1, 1])
                    _add(stack, parts)
            if stack and (stack[-1][0] > most or stack[-1][1] > _DEPTH_MAX):
                raise pickle.UnpicklingError("its values are too many, or too deep in each other")
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError(f"its pickle is malformed: {error!r}") from error


def _popped(stack: list[list[int]]) -> list[list[int]]:
    """Pops what is above the last mark, and the mark."""
    parts = []
    while (part := stack.pop()) is not _MARK:
        parts.append(part)
    return parts


def _add(stack: list[list[int]], parts: list[list[int]]) -> None:
    """Adds `parts` to the value on top of the stack."""
    value = stack[-1]
    value[0] += sum(part[0] for part in parts)
    value[1] = max([value[1], *(part[1] + 1 for part in parts)])
