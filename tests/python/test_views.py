"""Views in the document of a state: none reaches beyond the memory that was stored."""

from __future__ import annotations

import json

import pytest
import towline

torch = pytest.importorskip("torch")

from towline._restoring import _lies_within, restore  # noqa: E402
from towline.state import describe  # noqa: E402

from .test_state import again  # noqa: E402


@pytest.mark.parametrize(
    ("view", "within"),
    [
        ((0, [2, 3], [3, 1]), True),
        ((4, [5], [1]), True),
        ((8, [5], [1]), False),
        ((0, [1 << 20], [1]), False),
        ((0, [2, 2], [5, 1]), False),
        ((0, [3], [0]), True),
        ((0, [0, 1 << 40], [1, 1]), True),
        ((-4, [1], [1]), False),
        ((0, [2], [-1]), False),
        ((0, [2, 2], [1]), False),
    ],
)
def test_a_view_lies_within_its_memory_or_is_refused(view, within):
    assert _lies_within(*view, itemsize=4, nbytes=24) is within


FLOATS = {"a": ("F32", (2,))}


def restored(node, held=FLOATS, **options):
    document = json.dumps({"towline": 1, "state": node}).encode()

    def read(leaves):
        for _, tensor in leaves:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))

    return restore(document, held, read, **options)


def a_view(*view, **more):
    return {"!": "tensor", "t": "a", "dtype": "float32", "view": list(view), **more}


HUGE = 1 << 40


@pytest.mark.parametrize(
    "node",
    [
        # Strides for more elements than are stored, beside a view or of a view.
        a_view(0, [HUGE], [0], stride=[1]),
        a_view(0, [HUGE], [0]),
        a_view(4, [HUGE, 1], [0, 1]),
        a_view(0, [1 << 20, 1 << 20], [0, 0]),
        [a_view(0, [1 << 27], [0]) for _ in range(3)],
        {"!": "quantized", "dtype": "quint8", "scale": 1.0, "zero_point": 0, "int": a_view(0, [HUGE], [0])},
        {
            "!": "sparse",
            "layout": "coo",
            "parts": [a_view(0, [1, HUGE], [1, 0]), a_view(0, [HUGE], [0])],
            "shape": [2],
            "coalesced": False,
        },
        # Shapes and starts that are none.
        a_view(0, [1.5], [1]),
        a_view(2, [1], [1]),
        a_view(0, [True], [1]),
        {"!": "tensor", "t": "a", "dtype": "float32", "shape": [3]},
        {"!": "tensor", "t": "a", "dtype": "float64", "shape": ["x"]},
    ],
)
def test_a_document_describes_no_more_than_is_stored(node):
    with pytest.raises(towline.Damaged):
        restored(node)


def test_an_expanded_tensor_shares_what_is_stored_of_it():
    back = restored([a_view(4, [3, 2], [0, 0]), a_view(0, [2], [1])], map_location="cpu")
    assert back[0].stride() == (0, 0) and torch.equal(back[0], torch.ones(3, 2))
    back[1][1] = 7.0
    assert torch.equal(back[0], torch.full((3, 2), 7.0))


def test_an_expanded_tensor_of_any_size_fills_a_tensor_of_its_shape():
    into = torch.zeros(1, dtype=torch.float32).expand(HUGE)
    described = {"x": a_view(0, [4], [0])}
    own = torch.full((4,), 5.0)
    restored(described, into={"x": own})
    assert torch.equal(own, torch.zeros(4))
    # As large without a copy: refused when it is saved, with a remedy.
    with pytest.raises(
        towline.UnsupportedValue, match=r"state\['x'\].*an expanded tensor of 4398046511104 bytes.*contiguous"
    ):
        describe({"x": into})


def test_a_view_of_a_tensor_that_was_filled_in_place_begins_where_that_does():
    """The tensor of `into` may be in the middle of a storage."""
    whole = torch.full((6,), -1.0)
    node = {"x": {"!": "tensor", "t": "a"}, "y": a_view(4, [1], [1])}
    back = restored(node, into={"x": whole[3:5]})
    assert back["y"].item() == 1.0 and torch.equal(whole, torch.tensor([-1.0, -1.0, -1.0, 0.0, 1.0, -1.0]))


def test_values_of_a_sparse_tensor_that_are_expanded_are_stored_whole():
    values = torch.ones(1).expand(3)
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (4,))
    assert torch.equal(again({"s": tensor})["s"].to_dense(), tensor.to_dense())
