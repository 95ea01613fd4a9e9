"""Views in the document of a state: none reaches beyond the memory that was stored."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from towline._restoring import _lies_within  # noqa: E402


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
