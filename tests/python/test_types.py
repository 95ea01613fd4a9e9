"""Types and texts that a document of a state names, and that torch or numpy take for more than they are."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import numpy
import pytest
import torch
import towline
from towline import state
from towline.dcp import metadata as dcp_metadata


def document(node: object) -> bytes:
    return json.dumps({"towline": 1, "state": node}).encode()


def restored(node: object, leaf: bytes | None = None) -> object:
    """Restores the state `node`; the bytes of its tensor `a` are `leaf`."""
    held = {} if leaf is None else {"a": ("U8", (len(leaf),))}

    def read(leaves: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in leaves:
            tensor.copy_(torch.frombuffer(bytearray(leaf), dtype=torch.uint8))

    return state.restore(document(node), held, read)


def test_a_type_that_is_a_module_of_torch_is_not_imported():
    nodes = [{"!": "torch.dtype", "v": "_inductor"}, {"!": "tensor", "t": "a", "dtype": "_inductor", "shape": [1]}]
    program = (
        "import sys, json, torch, towline\n"
        "from towline import state\n"
        "from towline.dcp import folder, metadata\n"
        "before = set(sys.modules)\n"
        "def refused(call, *arguments):\n"
        "    try: call(*arguments)\n"
        "    except towline.Unsupported: return\n"
        "    raise SystemExit('not refused')\n"
        f"for node in {nodes!r}:\n"
        "    document = json.dumps({'towline': 1, 'state': node}).encode()\n"
        "    refused(state.restore, document, {'a': ('U8', (1,))}, lambda _: None)\n"
        "refused(metadata.dtype_named, '_inductor')\n"
        "refused(folder.decode, b'ctorch\\n_inductor\\n.', ())\n"
        "more = [name for name in set(sys.modules) - before if name.startswith('torch._inductor')]\n"
        "assert not more, more[:3]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_types_of_torch_are_found_by_their_names():
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.quint8):
        assert restored({"!": "torch.dtype", "v": str(dtype).removeprefix("torch.")}) is dtype
        assert dcp_metadata.dtype_named(str(dtype).removeprefix("torch.")) is dtype
    for name in ("float33", "Tensor", "nn"):
        with pytest.raises(towline.Unsupported, match=f"has no type '{name}'"):
            restored({"!": "torch.dtype", "v": name})
    with pytest.raises(towline.Damaged):
        restored({"!": "torch.dtype", "v": []})


BEYOND = (0x41).to_bytes(4, "little") + (0x110000).to_bytes(4, "little")
LAST = (0x41).to_bytes(4, "little") + (0x10FFFF).to_bytes(4, "little")


def scalar(dtype: object, content: bytes) -> dict:
    return {"!": "numpy", "dtype": dtype, "v": base64.b64encode(content).decode()}


def array(dtype: object, shape: list[int]) -> dict:
    return {"!": "ndarray", "t": "a", "dtype": dtype, "shape": shape}


STRUCTURE = [["number", "<u4"], ["word", "<U2", [2]]]
NESTED = [["inner", [["number", "u1"], ["word", "<U1"]]], ["number", "u1"]]


@pytest.mark.parametrize(
    ("description", "good", "bad"),
    [
        (array("<U2", [2]), LAST + LAST, LAST + BEYOND),
        (array("<U1", [1, 2]), LAST, BEYOND),
        (array(">U1", [1]), b"\0\x10\xff\xff", b"\0\x11\0\0"),
        (array("<U2", []), LAST, BEYOND),
        (array(STRUCTURE, [1]), b"\xff" * 4 + LAST * 2, b"\0" * 4 + LAST + BEYOND),
        (array(NESTED, [2]), b"\xff" + LAST[4:] + b"\xff\0" + LAST[4:] + b"\0", (b"\0" + BEYOND[4:] + b"\0") * 2),
    ],
    ids=["texts", "rows", "swapped", "no dimension", "structure", "nested"],
)  # fmt: skip
def test_a_text_beyond_unicode_is_damaged(description, good, bad):
    made = restored(description, good)
    assert made.dtype.itemsize * made.size == len(good) and made.tobytes() == good
    repr(made)
    with pytest.raises(
        towline.Damaged, match=r"state\['value'\] has a text with the code point 0x110000, and Unicode ends at 0x10ffff"
    ):
        restored({"value": description}, bad)
    if made.size == 1:
        of_one = scalar(description["dtype"], good)
        assert restored(of_one) == made.reshape(-1)[0]
        with pytest.raises(towline.Damaged, match="code point 0x110000"):
            restored(scalar(description["dtype"], bad))


def test_texts_of_a_state_come_back():
    # Half of a pair of UTF-16 is a character for Python.
    held = {
        "words": numpy.array(["a", "\U0010ffff", "\ud800"]),
        "swapped": numpy.array(["\u00e9", "bc"]).astype(">U2"),
        "none": numpy.array([], "<U5"),
        "structure": numpy.array([(1, "x"), (2, "\U0001f600")], [("n", "u1"), ("w", "<U3")]),
        "empty": numpy.str_(""),
        "word": numpy.str_("\u4e2d\u6587"),
    }
    described = state.describe(held)
    leaves = {leaf.name: leaf for leaf in described.leaves}

    def read(wanted: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in wanted:
            tensor.copy_(leaves[name].tensor)

    back = state.restore(described.document, {name: (one.word, one.shape) for name, one in leaves.items()}, read)
    for key, value in held.items():
        assert type(back[key]) is type(value) and numpy.array_equal(back[key], value), key
