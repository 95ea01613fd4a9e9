"""States taken apart and put together: everything that a training keeps, and what it cannot."""

from __future__ import annotations

import collections
import json
import math
import struct

import numpy
import pytest
import torch
import towline
from towline import _torch, state


def again(value, into=None, pickle=False, map_location=None, **said):
    """What a value is after a way through files, without the files."""
    described = state.describe(value, pickle)
    leaves = {leaf.name: leaf for leaf in described.leaves}
    assert len(leaves) == len(described.leaves), "names are distinct"
    json.loads(described.document)

    def read(wanted):
        for name, tensor in wanted:
            held = leaves[name].tensor.contiguous()
            assert _torch.nbytes(held) == _torch.nbytes(tensor), name
            tensor.view(-1).view(torch.uint8).copy_(held.reshape(-1).view(torch.uint8))

    held = {leaf.name: (leaf.word, tuple(leaf.shape)) for leaf in described.leaves}
    return state.restore(described.document, held, read, into, map_location, pickle, **said)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are they the same bits?"""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (one.detach().contiguous().reshape(-1) for one in (a, b))
    return a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 7, -(1 << 80), "text", "", 0.1, -0.0, math.inf, -math.inf, 1e-320, b"", b"\x00\xff" * 3, bytearray(b"x"),
        b"y" * 10_000, (), (1, (2, "a")), [], [1, [2.5]], {}, {"!": 1}, {1: "a", (2, 3): "b", None: 0, 2.5: 1.5}, {3, "a"},
        frozenset({1}), 1 - 2j, torch.Size([2, 3]), torch.float16, torch.device("cpu"), {"a": {"b": {}}},
        {"": 0, "a.b": 1, "a": {"b": 2}},
    ],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value):
    back = again({"value": value})["value"]
    assert back == value and type(back) is type(value)
    assert repr(back) == repr(value), "zeros keep their sign"


def test_nan_and_its_like_come_back():
    assert math.isnan(again(math.nan))
    assert str(again(complex(math.nan, -0.0))) == "(nan-0j)"


def test_ordered_dicts_keep_order_and_attributes():
    value = collections.OrderedDict([("b", 1), ("a", 2)])
    value._metadata = collections.OrderedDict([("", {"version": 2})])
    back = again(value)
    assert type(back) is collections.OrderedDict and list(back) == ["b", "a"] and back._metadata == value._metadata


def test_schedulers_that_count():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    told = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict()
    back = again(told)
    assert back == told and type(back["milestones"]) is collections.Counter


def test_objects_with_a_state_are_kept_as_they_are_if_asked_for():
    value = {"model": torch.nn.Linear(2, 2)}
    assert b"pickle" not in state.describe(value, pickle=True).document
    assert b"pickle" in state.describe(value, pickle=True, stateful=False).document
    with pytest.raises(towline.UnsupportedValue, match=r"state\['model'\]"):
        state.describe(value, stateful=False)


DTYPES = [
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
]


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_every_type_and_shape_comes_back_bit_for_bit(dtype):
    for shape in ((), (0,), (3, 0, 2), (1,), (5, 7)):
        bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        if dtype is torch.bool:
            bits %= 2
        tensor = bits.view(dtype).reshape(shape) if bits.numel() else torch.empty(shape, dtype=dtype)
        assert same(again({"t": tensor})["t"], tensor), shape


def test_nan_payloads_and_negative_zeros_are_bits():
    words = [0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800001]
    tensor = torch.tensor([struct.unpack("<i", struct.pack("<I", word))[0] for word in words], dtype=torch.int32).view(
        torch.float32
    )
    assert same(again([tensor])[0], tensor)


def test_tensors_that_lie_otherwise_in_memory():
    base = torch.arange(24, dtype=torch.float32)
    for view in (base.view(4, 6).t(), base[::3], base[3:9], base.view(2, 3, 4).permute(2, 0, 1), base.view(4, 6)[:, 1]):
        assert same(again(view.clone() if view is base else view), view)
    assert same(again(torch.complex(base, base).conj()), torch.complex(base, base).conj().resolve_conj())
    assert same(again(torch.complex(base, base).conj().imag), torch.complex(base, base).conj().imag.resolve_neg())


def test_expanded_tensors_stay_small():
    value = torch.tensor([1.0, 2.0]).unsqueeze(0).expand(1000, 2)
    described = state.describe({"t": value})
    assert sum(leaf.length for leaf in described.leaves) == 8
    back = again({"t": value})["t"]
    assert same(back, value) and back.stride() == value.stride()


def test_shared_memory_is_kept_once_and_shared_again():
    weight = torch.randn(10, 4)
    value = {"embedding": weight, "head": weight, "row": weight[2], "other": torch.randn(3)}
    described = state.describe(value)
    assert sum(leaf.length for leaf in described.leaves) == 160 + 12
    back = again(value)
    for key, tensor in value.items():
        assert same(back[key], tensor), key
    back["head"][2] = 7.0
    assert torch.equal(back["embedding"][2], torch.full((4,), 7.0)) and torch.equal(back["row"], torch.full((4,), 7.0))


def test_parts_of_one_storage_that_do_not_overlap_are_tensors_of_their_own():
    flat = torch.arange(10.0)
    described = state.describe({"a": flat[:4], "b": flat[4:]})
    assert sorted(leaf.name for leaf in described.leaves) == ["a", "b"]


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors(layout):
    dense = torch.tensor([[0, 1.5, 0, 0], [0, 0, 0, -2], [3, 0, 0, 0], [0, 0, 0, 0]])
    make = {
        "coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)), "bsc": lambda: dense.to_sparse_bsc((2, 2)),
    }[layout]  # fmt: skip
    value = make()
    back = again(value)
    assert back.layout == value.layout and torch.equal(back.to_dense(), dense)
    if layout == "coo":
        assert back.is_coalesced() == value.is_coalesced()


def test_quantised_tensors():
    plain = torch.randn(4, 5)
    per_tensor = torch.quantize_per_tensor(plain, 0.1, 3, torch.qint8)
    per_channel = torch.quantize_per_channel(
        plain, torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.int64), 0, torch.quint8
    )
    for value in (per_tensor, per_channel):
        back = again(value)
        assert (
            back.dtype == value.dtype
            and back.qscheme() == value.qscheme()
            and torch.equal(back.int_repr(), value.int_repr())
        )
        assert torch.equal(back.dequantize(), value.dequantize())


def test_parameters_and_gradients():
    value = {"p": torch.nn.Parameter(torch.randn(2)), "f": torch.nn.Parameter(torch.randn(2), requires_grad=False)}
    back = again(value)
    assert isinstance(back["p"], torch.nn.Parameter) and back["p"].requires_grad
    assert isinstance(back["f"], torch.nn.Parameter) and not back["f"].requires_grad


@pytest.mark.parametrize(
    "dtype", ["f4", "<i8", ">i4", "?", "u1", "f2", "S3", "<U2", "c16", "M8[s]", [("a", "<i4"), ("b", "f8")]]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays(dtype, shape):
    value = numpy.zeros(shape, dtype)
    if value.size:
        value.reshape(-1).view("u1")[:: value.itemsize] = 1 if value.dtype != bool else True
    back = again([value])[0]
    assert type(back) is numpy.ndarray and back.dtype == value.dtype and back.shape == value.shape
    assert back.tobytes() == value.tobytes() and back.flags.writeable
    scalar = value.reshape(-1)[0] if value.size and not isinstance(dtype, list) else numpy.float32(1.5)
    assert again(scalar) == scalar and type(again(scalar)) is type(scalar)


STRUCTURES = {
    "nested": [("a", "<f4"), ("b", [("c", "<i2"), ("d", "S3", (2,)), ("e", [("f", "u1")])])],
    "padded": numpy.dtype([("a", "u1"), ("b", "<f8"), ("c", "u1")], align=True),
    "titled": [(("title of a", "a"), "<f4"), ("b", "u1")],
    "arrays": [("a", "<f4", (2, 3)), ("b", [("c", "u1")], (2,))],
}


@pytest.mark.parametrize("dtype", STRUCTURES.values(), ids=STRUCTURES)
def test_arrays_of_structures(dtype):
    value = numpy.zeros(2, dtype)
    value.view("u1")[:] = numpy.arange(value.nbytes)
    back = again([value, value[1]])
    for before, after in zip([value, value[1]], back, strict=True):
        assert type(after) is type(before) and after.dtype == before.dtype and after.tobytes() == before.tobytes()
    assert back[0].dtype.fields == value.dtype.fields


@pytest.mark.parametrize(
    "value", [numpy.str_(""), numpy.bytes_(b""), numpy.zeros((), "V0")[()]], ids=["str", "bytes", "void"]
)
def test_numpy_scalars_without_bytes(value):
    back = again(value)
    assert type(back) is type(value) and back.tobytes() == value.tobytes()


def test_random_states():
    import random

    value = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    back = again(value)
    random.setstate(back["python"])
    numpy.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert random.getstate() == value["python"]


class Opaque:
    """Nothing that a word is for."""

    def __init__(self, value):
        self.value = value


#: A dtype whose fields overlap.
OVERLAPPING = numpy.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        ({"a": [1, {"f": lambda: 0}]}, "state['a'][1]['f']", "function"),
        ({"o": Opaque(1)}, "state['o']", "Opaque"),
        ({"m": torch.empty(3, device="meta")}, "state['m']", "meta"),
        ({Opaque(1): 1}, "state", "Opaque"),
        ({"a": numpy.array([object()])}, "state['a']", "ndarray"),
        ({"a": numpy.matrix([1])}, "state['a']", "matrix"),
        ({"a": numpy.zeros(1, OVERLAPPING)}, "state['a']", "ndarray"),
    ],
)
def test_what_cannot_be_kept_is_named(value, place, what):
    with pytest.raises(towline.UnsupportedValue, match=what) as caught:
        state.describe(value)
    assert caught.value.place.startswith(place) and caught.value.help


def test_a_state_that_holds_itself_is_refused():
    value = {"a": []}
    value["a"].append(value)
    with pytest.raises(towline.UnsupportedValue, match="part of itself"):
        state.describe(value)


def test_pickling_is_asked_for_on_both_sides():
    value = {"o": Opaque(5)}
    assert again(value, pickle=True)["o"].value == 5
    described = state.describe(value, pickle=True)
    with pytest.raises(towline.UsageError, match="pickle=True"):
        state.restore(described.document, {}, lambda wanted: None)


def test_tensors_are_filled_where_they_are():
    value = {"w": torch.randn(3, 4), "n": 5, "list": [torch.ones(2)]}
    into = {"w": torch.zeros(3, 4), "list": [torch.zeros(2)], "more": 1}
    tensors = into["w"], into["list"][0]
    back = again(value, into, strict=False)
    assert back["w"] is tensors[0] and back["list"][0] is tensors[1] and back["n"] == 5
    assert torch.equal(tensors[0], value["w"]) and torch.equal(tensors[1], value["list"][0])
    other_order = {"w": torch.zeros(4, 3).t()}
    back = again(value, other_order)
    assert back["w"] is other_order["w"] and torch.equal(back["w"], value["w"])


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64)])
def test_a_tensor_that_does_not_fit_is_told_before_any_is_filled(wrong):
    into = {"a": torch.zeros(2), "w": wrong}
    with pytest.raises(towline.UsageError, match=r"state\['w'\]"):
        again({"a": torch.ones(2), "w": torch.randn(3, 4)}, into)
    assert torch.equal(into["a"], torch.zeros(2))


def test_modules_and_optimizers_are_their_states():
    def train(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def step(training, data):
        training["optimizer"].zero_grad()
        loss = training["model"](data).pow(2).mean()
        loss.backward()
        training["optimizer"].step()
        training["scheduler"].step()
        return loss.item().hex()

    torch.manual_seed(0)
    data = [torch.randn(6, 4) for _ in range(8)]
    one = train(1)
    [step(one, data[at]) for at in range(4)]
    described = state.describe(one)
    kept = {leaf.name: leaf.tensor.clone() for leaf in described.leaves}
    losses = [step(one, data[at]) for at in range(4, 8)]

    def read(wanted):
        for name, tensor in wanted:
            tensor.copy_(kept[name].view(tensor.shape))

    held = {leaf.name: (leaf.word, tuple(leaf.shape)) for leaf in described.leaves}
    two = train(2)
    back = state.restore(described.document, held, read, two)
    assert back["model"] is two["model"] and back["optimizer"] is two["optimizer"]
    assert [step(two, data[at]) for at in range(4, 8)] == losses


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"{}", b'{"towline":1}'])
def test_a_damaged_document_is_told(document):
    with pytest.raises(towline.Damaged):
        state.restore(document, {}, lambda wanted: None)


def test_documents_of_the_future_are_refused():
    with pytest.raises(towline.Unsupported, match="newer"):
        state.restore(b'{"towline":2,"state":0}', {}, lambda wanted: None)
    for word in ("hologram", "stateful", "shaped", "", 5, ["tuple"]):
        document = json.dumps({"towline": 1, "state": {"!": word}}).encode()
        with pytest.raises(towline.Unsupported, match="does not know"):
            state.restore(document, {}, lambda wanted: None)
    with pytest.raises(towline.Damaged, match="lacks"):
        state.restore(b'{"towline":1,"state":{"!":"tensor","t":"gone"}}', {}, lambda wanted: None)


def _restored(document, leaf):
    def fill(wanted):
        for _, tensor in wanted:
            tensor.copy_(leaf.view(tensor.shape))

    held = ({torch.int64: "I64", torch.uint8: "U8"}[leaf.dtype], tuple(leaf.shape))
    return state.restore(json.dumps({"towline": 1, "state": document}).encode(), {"0": held}, fill)


def test_strides_that_leave_gaps_are_damage():
    leaf = torch.arange(6).reshape(2, 3)
    assert _restored({"!": "tensor", "t": "0", "stride": [1, 2]}, leaf).equal(leaf)
    for stride in ([1 << 40, 1], [1, 1], [0, 1], [1], [-1, 2]):
        with pytest.raises(towline.Damaged, match="gaps"):
            _restored({"!": "tensor", "t": "0", "stride": stride}, leaf)


def test_an_empty_tensor_is_empty():
    leaf = torch.empty(0, dtype=torch.uint8)
    node = {"!": "tensor", "t": "0", "dtype": "float32"}
    assert _restored({**node, "shape": [0, 1 << 40]}, leaf).shape == (0, 1 << 40)
    with pytest.raises(towline.Damaged, match="not empty"):
        _restored({**node, "shape": [1 << 32]}, leaf)


def test_nodes_that_name_the_same_bytes_share_them():
    leaf = torch.zeros(1 << 20, dtype=torch.uint8)
    many = _restored([{"!": "bytes", "t": "0"} for _ in range(500)], leaf)
    assert len(many) == 500 and all(one is many[0] for one in many)


def test_a_document_that_is_nested_too_deeply_is_damaged():
    nested = 0
    for _ in range(900):
        nested = [nested]
    with pytest.raises(towline.Damaged):
        _restored(nested, torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize(("dtype", "shape"), [("|u1", [1 << 40]), ("|V2000000000", [1]), ("<f8", [3])])
def test_an_array_takes_no_more_memory_than_is_stored(dtype, shape):
    described = state.describe(numpy.zeros(1, numpy.uint8), False)
    document = json.loads(described.document)
    document["state"].update(dtype=dtype, shape=shape)
    held = {leaf.name: (leaf.word, leaf.shape) for leaf in described.leaves}
    with pytest.raises(towline.Damaged, match="another number is stored"):
        state.restore(json.dumps(document).encode(), held, lambda _: None)
