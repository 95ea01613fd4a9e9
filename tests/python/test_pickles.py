"""What torch has saved is checked before torch reads it."""

from __future__ import annotations

import collections
import io
import pickle
import types
import zipfile

import pytest
import torch
import towline
from torch.distributed.checkpoint.metadata import MetadataIndex
from towline.dcp import StorageReader, _pickles


class Unsavable:
    """Pickles to a tensor that torch makes, but cannot save."""

    def __reduce__(self):
        storage = torch.ones(4).untyped_storage()
        about = (storage, 0, (1,), (1,), False, collections.OrderedDict(), torch.quint4x2)
        return torch._utils._rebuild_tensor_v3, about


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_object_that_torch_cannot_save_again_is_not_supported(repository):
    made = io.BytesIO()
    torch.save({"x": Unsavable()}, made)
    item = types.SimpleNamespace(storage_index=MetadataIndex("object"))
    with pytest.raises(
        towline.Unsupported, match="run/step-1 has an object at object that torch loads but cannot save"
    ):
        StorageReader(repository)._without_code("run/step-1", item, made.getbuffer())


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
            _pickles.checked(archive(bomb))
    for wrong in (b"", b"PK", pickle.dumps(1)):
        with pytest.raises(pickle.UnpicklingError):
            _pickles.checked(wrong)


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
        {
            "random": tuple(range(1 << 31, (1 << 31) + 624)),
            "set": {1, 2},
            "bytes": b"\xff" * 1000,
            "array": bytearray(b"ab" * 500),
        },
        [torch.float16, torch.Size([2]), torch.device("cpu"), 2j, torch.nn.Parameter(torch.ones(2))],
    ],
)
def test_what_torch_saves_is_read(value):
    made = io.BytesIO()
    torch.save(value, made)
    assert repr(torch.load(_pickles.checked(made.getbuffer()), weights_only=True)) == repr(value)


def call(name: str, arguments: bytes) -> bytes:
    return archive(b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + arguments + b"R.")


@pytest.mark.parametrize("name", ["torch Tensor", "torch FloatStorage", "builtins bytearray", "torch._utils getattr"])
def test_calls_with_a_size_are_refused(name):
    with pytest.raises(pickle.UnpicklingError, match="calls"):
        _pickles.checked(call(name, b"J\x00\x00\x00\x7f\x85"))


def test_what_other_readers_of_archives_would_find_is_refused_or_left_out():
    good = archive(pickle.dumps(1, 2))
    bomb = b"\x80\x02" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 60 + b"Ns."
    with pytest.raises(pickle.UnpicklingError, match="begins with something else"):
        _pickles.checked(bomb + good)
    for extra, compressed in [("archive/DATA.PKL", False), ("archive/data.pkl", False), ("archive/data/0", True)]:
        made = io.BytesIO(good)
        with zipfile.ZipFile(made, "a") as added:
            kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
            added.writestr(extra, bomb + bytes(10_000), compress_type=kind)
        with pytest.raises(pickle.UnpicklingError):
            _pickles.checked(made.getvalue())


def test_bytes_that_are_made_of_one_text_again_and_again_are_counted():
    text = b"X" + (100_000).to_bytes(4, "little") + b"x" * 100_000
    begin = b"\x80\x02]q\x00(" + text + b"q\x01c_codecs\nencode\nq\x02"
    many = begin + b"h\x02h\x01X\x06\x00\x00\x00latin1\x86R" * 1000 + b"e."
    with pytest.raises(pickle.UnpicklingError, match="too many"):
        _pickles.checked(archive(many))


def with_records(value: object, records: dict[str, bytes]) -> bytes:
    """An archive that `torch.save` writes of `value`, with other records of storages."""
    made, other = io.BytesIO(), io.BytesIO()
    torch.save(value, made)
    with zipfile.ZipFile(made) as found, zipfile.ZipFile(other, "w") as written:
        for name in found.namelist():
            written.writestr(name, records.get(name, found.read(name)))
    return other.getvalue()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2000),
        torch.zeros(1000, dtype=torch.float64),
        torch.zeros(1000, dtype=torch.complex64)[5:],
        torch.zeros(8000, dtype=torch.float8_e4m3fn),
        torch.quantize_per_tensor(torch.zeros(8000), 0.5, 0, torch.qint8),
    ],
)
def test_a_storage_longer_than_its_record_is_refused(tensor):
    for records in ({}, {"archive/data/0": bytes(8000)}):
        assert torch.load(_pickles.checked(with_records({"x": tensor}, records)), weights_only=True)
    for short in (bytes(7999), b"A" * 16, b""):
        planted = with_records({"y": tensor[:4], "x": tensor}, {"archive/data/0": short})
        with pytest.raises(towline.Damaged, match=f"storage of 8000 bytes, and {len(short)} bytes .* archive/data/0"):
            _pickles.checked(planted)
    without = with_records({"x": tensor}, {}).replace(b"archive/data/0", b"archive/data/1")
    with pytest.raises(towline.Damaged, match="and 0 bytes for it in its record archive/data/0"):
        _pickles.checked(without)


@pytest.mark.parametrize(
    "named",
    [
        b"N",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\xff\xff\xff\xfft",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x88t",
        b"(X\x07\x00\x00\x00storagectorch\nfloat\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01t",
        b"(X\x07\x00\x00\x00storagectorch.storage\nTypedStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01t",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nK\x00X\x03\x00\x00\x00cpuK\x01t",
        b"(X\x07\x00\x00\x00anotherctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01t",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000K\x01t",
    ],
)
def test_an_id_that_is_not_one_of_a_storage_is_refused(named):
    with pytest.raises(pickle.UnpicklingError, match="not one of a storage"):
        _pickles.checked(archive(b"\x80\x02" + named + b"Q."))


def test_integers_of_one_hash_are_counted():
    many = {n * ((1 << 61) - 1): 0 for n in range(1, 1000)}
    with pytest.raises(pickle.UnpicklingError, match="large integers"):
        _pickles.checked(archive(pickle.dumps(many, 2)))
