"""Files that a process writes through a memory map while they are saved: not every write sets their times."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy
import pytest


@pytest.mark.parametrize("place", ["/var/tmp", "/dev/shm"])
def test_writes_through_a_memory_map_are_saved(repository, place):
    with tempfile.TemporaryDirectory(dir=place) as folder:
        path = Path(folder, "optimizer.bin")
        path.write_bytes(bytes(1 << 20))
        numbers = numpy.memmap(path, numpy.uint8, "r+")
        for step in range(1, 5):
            numbers[:] = step
            repository.save(folder, f"run/step-{step}")
            assert set(repository.read(f"run/step-{step}", "optimizer.bin")) == {step}
        # On a disk the first write after the map is gone would set the times.
        del numbers
        numbers = numpy.memmap(path, numpy.uint8, "r+")
        numbers[:] = 9
        numbers.flush()
        repository.save(folder, "run/step-9")
        assert set(repository.read("run/step-9", "optimizer.bin")) == {9}
