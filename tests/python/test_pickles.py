"""What torch has saved is checked before torch reads it."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile

import pytest
import torch
from towline.dcp import _pickles


def archive(pickled: bytes) -> bytes:
    """What `torch.save` writes, with another pickle."""
    made, other = io.BytesIO(), io.BytesIO()
    torch.save({"a": 1}, made)
    with zipfile.ZipFile(made) as found, zipfile.ZipFile(other, "w") as written:
        for name in found.namelist():
            written.writestr(name, pickled if name.endswith("data.pkl") else found.read(name))
    return other.getvalue()


def test_values_that_take_for_ever_are_refused_before_torch_reads_them():
    shared = ()
    for _ in range(60):
        shared = (shared, shared)
    begin, end = b"\x80\x02" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE, pickle.NONE + pickle.SETITEM + pickle.STOP
    doubled = begin + (pickle.DUP + pickle.TUPLE2) * 60 + end
    nested = begin + pickle.TUPLE1 * 300_000 + end
    for bomb in (pickle.dumps([shared], 2), doubled, nested, b"\x80\x02.", b"", b"garbage"):
        with pytest.raises(pickle.UnpicklingError):
            _pickles.check(archive(bomb))
    for wrong in (b"", b"PK", pickle.dumps(1)):
        with pytest.raises(pickle.UnpicklingError):
            _pickles.check(wrong)


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        [1.5, None, True, (2, "x")],
        {"a": {"b": [torch.ones(3), torch.zeros(2)]}, 5: (1, 2)},
        collections.OrderedDict(a=torch.ones(2), b=torch.ones(2)),
        [{"step": n, "name": f"layer.{n}", "parts": (n, n + 1)} for n in range(20_000)],
        ["x" * 1000] * 100_000,
    ],
)
def test_what_torch_saves_is_read(value):
    made = io.BytesIO()
    torch.save(value, made)
    _pickles.check(made.getbuffer())
