"""Memory that is copied, staged and lent: what the extension does with addresses."""

from __future__ import annotations

import itertools
import threading

import numpy
import pytest
from towline import _towline


def noise(length: int, seed: int = 0) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, length, numpy.uint8)


def test_copies_are_whole_whatever_the_threads():
    source = noise(40_000_003)
    target = numpy.zeros_like(source)
    cuts = [0, 1, 5_000_000, 5_000_000, 5_000_007, 39_999_999, len(source)]
    read, written = source.ctypes.data, target.ctypes.data
    _towline.copy([(written + a, read + a, b - a) for a, b in itertools.pairwise(cuts)])
    assert numpy.array_equal(source, target)


def test_a_stage_takes_what_fits():
    stager, source = _towline.Stager(), noise(1000)
    stage = stager.take(1000)
    stage.fill([(400, source.ctypes.data + 400, 600), (0, source.ctypes.data, 400)])
    for wrong in ([(1, source.ctypes.data, 1000)], [(1 << 63, source.ctypes.data, 8)]):
        with pytest.raises(ValueError, match="does not fit"):
            stage.fill(wrong)
    stage.release()
    for used in (lambda: stage.fill([]), lambda: stage.address):
        with pytest.raises(ValueError, match="belongs to a save"):
            used()


def test_there_is_one_region_and_it_stays_where_it_is():
    stager = _towline.Stager()
    stage = stager.take(1 << 20)
    address = stage.address
    assert not stager.idle() and stager.take(10, timeout=0.0) is None and stager.take(10, timeout=0.05) is None
    threading.Timer(0.1, stage.release).start()
    again = stager.take(1 << 19, timeout=10.0)
    assert again.address == address
    del again
    assert stager.idle(), "a stage that nobody holds is free"


def test_a_file_from_lent_memory_and_bytes(repository):
    source = noise(3_000_000)
    pieces = [b"head", (source.ctypes.data, len(source)), b"", (0, 0), b"tail"]
    repository._engine.save_files([("folder/file", pieces)], "name", {"metrics": {}})
    assert repository.read("name", "folder/file") == b"head" + source.tobytes() + b"tail"
    assert repository.read("name", "folder/file", 2, 6) == b"ad" + source[:2].tobytes()
    assert repository.read("name", "folder/file", 3, 3) == b""


def test_memory_is_not_lent_to_a_save_that_goes_on_by_itself(repository):
    source = noise(10)
    with pytest.raises(ValueError, match="not addresses"):
        repository._engine.begin_save_files([("f", [(source.ctypes.data, 10)])], "name", {"metrics": {}})


def test_layouts_that_lie_are_refused():
    header, starts, length = _towline.lay_out([("a", "F32", [2, 3], 24), ("b", "U8", [], 1)], {"k": "v"})
    assert starts == [len(header), len(header) + 24] and length == len(header) + 25 and b'"k":"v"' in header
    with pytest.raises(ValueError, match="25"):
        _towline.lay_out([("a", "F32", [2, 3], 25)])
    with pytest.raises(ValueError, match="one name"):
        _towline.lay_out([("a", "U8", [1], 1), ("a", "U8", [1], 1)])
