"""Check of stored texts of numpy: it takes any four bytes for a character, and makes a str of them that Python fails with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .errors import Damaged

if TYPE_CHECKING:
    import numpy as np


def check_texts(array: np.ndarray[Any, Any], where: str) -> None:
    """Raises Damaged if a text in `array`, or in a field of it, has a code point that Unicode lacks. `where` is the path of the
    array in the state."""
    import numpy

    for name in array.dtype.names or ():
        check_texts(array[name], where)
    if array.dtype.kind != "U" or not array.dtype.itemsize:
        return
    points = numpy.dtype((f"{array.dtype.byteorder}u4", (array.dtype.itemsize // 4,)))
    most = array.view(points).max(initial=0)
    if most > sys.maxunicode:
        error = Damaged(f"{where} has a text with the code point {most:#x}, and Unicode ends at {sys.maxunicode:#x}")
        error.place = where
        raise error
