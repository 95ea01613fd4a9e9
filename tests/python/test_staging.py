"""The memory that states are staged in: made ready before it is needed, pinned where GPUs copy to it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import struct
import threading
import time
import warnings

import pytest
import torch
import towline
from towline import _devices, _staging


def a_state(value: float = 1.0, mib: int = 128) -> dict:
    return {"a": torch.full((mib << 17,), float(value)), "b": [torch.full((mib << 17,), value + 1.0)], "n": 7}


def resident(checkpointer: towline.Checkpointer) -> int:
    """Bytes of the idle staging memory that the kernel has allocated pages for."""
    length = checkpointer._staging.length
    stage = checkpointer._staging._stager.take(length, 0)
    assert stage is not None, "the memory is in use"
    page = mmap.PAGESIZE
    first, end = stage.address // page, -(-(stage.address + length) // page)
    stage.release()
    # One number a page, whose highest bit says that it is present:
    # https://www.kernel.org/doc/Documentation/admin-guide/mm/pagemap.rst
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        entries = struct.unpack(f"<{end - first}Q", pagemap.read((end - first) * 8))
    return sum(entry >> 63 for entry in entries) * page


def until_idle(checkpointer: towline.Checkpointer) -> None:
    until = time.monotonic() + 30
    while not checkpointer._staging._stager.idle():
        assert time.monotonic() < until, "the memory is still in use"
        time.sleep(0.01)


@pytest.fixture
def slow(monkeypatch):
    """Memory is made ready in many pieces, each once there is another release."""
    written, go, plain = threading.Event(), threading.Semaphore(0), ctypes.memset

    def memset(*arguments):
        written.set()
        go.acquire(timeout=20)
        return plain(*arguments)

    monkeypatch.setattr(ctypes, "memset", memset)
    monkeypatch.setattr(_staging, "_PIECE", 1 << 20)
    yield written, go
    go.release(1000)


def test_memory_is_there_before_the_first_save(repository):
    state = a_state()
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.prepare(state)
        until_idle(checkpointer)
        assert checkpointer._staging.length == resident(checkpointer) == 128 << 20
        for step in (1, 2):
            checkpointer.save(step, a_state(step)).wait()
        assert torch.equal(checkpointer.restore(1)["b"][0], a_state(1)["b"][0])
        assert torch.equal(checkpointer.restore(2)["b"][0], a_state(2)["b"][0])
    with pytest.raises(towline.UsageError, match="closed"):
        checkpointer.prepare(state)


def test_a_restore_prepares_for_the_save_to_come(repository):
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, a_state(1))
    state = a_state(2)
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.restore()
        checkpointer.restore(into=state, prepare=False)
        assert checkpointer._staging.length == 0, "nothing is known of a save to come"
        checkpointer.restore(into=state)
        until_idle(checkpointer)
        assert resident(checkpointer) == 128 << 20
        prepared = checkpointer._staging.length
        handle = checkpointer.save(2, state)
        assert checkpointer._staging.length == prepared == 128 << 20
        handle.wait()


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_save_does_not_wait_for_all_of_the_memory(repository, slow, when_busy):
    written, go = slow
    with towline.Checkpointer(repository, "run", when_busy=when_busy) as checkpointer:
        checkpointer.prepare(a_state())
        assert written.wait(10)
        handles = []
        saving = threading.Thread(target=lambda: handles.append(checkpointer.save(1, a_state(3))))
        saving.start()
        saving.join(0.2)
        assert saving.is_alive(), "memory that is being written was given to a state"
        go.release()
        saving.join(30)
        assert not saving.is_alive()
        handles[0].wait()
        assert torch.equal(checkpointer.restore()["a"], a_state(3)["a"])
        until_idle(checkpointer)


def test_preparing_again_and_while_a_save_goes_on(repository):
    with towline.Checkpointer(repository, "run") as checkpointer:
        for mib in (8, 64, 128, 8):
            checkpointer.prepare(a_state(mib=mib))
        handle = checkpointer.save(1, a_state(5))
        checkpointer.prepare(a_state())
        handle.wait()
        assert torch.equal(checkpointer.restore()["b"][0], a_state(5)["b"][0])
        checkpointer.prepare({"nothing": 0})
        until_idle(checkpointer)
        with pytest.raises(towline.UnsupportedValue, match=r"state\['f'\]"):
            checkpointer.prepare({"f": open})


def test_what_is_closed_prepares_no_more(repository, slow):
    written, go = slow
    checkpointer = towline.Checkpointer(repository, "run")
    checkpointer.prepare(a_state())
    assert written.wait(10)
    threading.Timer(0.1, go.release).start()
    checkpointer.close()
    assert checkpointer._staging._preparing is None
    until_idle(checkpointer)


def _child(checkpointer: towline.Checkpointer, told: multiprocessing.Queue) -> None:
    try:
        told.put(float(checkpointer.restore(into=a_state(mib=2))["a"].sum()))
        with contextlib.suppress(towline.UsageError):
            checkpointer.save(2, {"a": torch.ones(3)})
            told.put("the child saved with its parent's")
        with towline.Checkpointer(checkpointer.repository, "child") as own:
            own.prepare(a_state())
            own.save(1, a_state(4)).wait()
            told.put(float(own.restore()["a"][0]))
    except BaseException as error:
        told.put(repr(error))


def test_a_fork_while_memory_is_made_ready(repository, slow):
    written, go = slow
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, a_state(1, mib=2)).wait()
        checkpointer.prepare(a_state())
        assert written.wait(10)
        context = multiprocessing.get_context("fork")
        told = context.Queue()
        go.release(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = context.Process(target=_child_with_memory, args=(checkpointer, told), daemon=True)
            child.start()
        assert [told.get(timeout=60), told.get(timeout=60)] == [float(2 << 17), 4.0]
        child.join(60)
        go.release(1000)
        checkpointer.save(2, a_state(6)).wait()
        assert torch.equal(checkpointer.restore(2)["a"], a_state(6)["a"])


def _child_with_memory(checkpointer: towline.Checkpointer, told: multiprocessing.Queue) -> None:
    ctypes.memset = lambda *_: None
    _child(checkpointer, told)


def test_memory_is_pinned_no_more_before_it_goes(monkeypatch):
    said = []

    def pin(owner, address, length, device):
        said.append(f"pin {length}")
        return lambda: said.append(f"unpin {length}")

    monkeypatch.setattr(_devices, "pin", pin)
    staging = _staging.Staging()

    def staged(length: int, devices: tuple = ("gpu",)) -> _staging._towline.StagingBuffer:
        stage = staging.take(length)
        staging.pin(stage, length, devices)
        return stage

    staging.prepare(1000, ["gpu"])
    staging._preparing.join()
    for _ in range(2):
        staged(1000).release()
    assert said == ["pin 1000"]
    stage = staged(1000)
    # Copies to it may be under way: it stays pinned until it is given back.
    assert staging.take(2000, timeout=0) is None and said == ["pin 1000"]
    stage.release()
    staged(2000, devices=()).release()
    assert said == ["pin 1000", "unpin 1000"]
    staged(0).release()
    staged(2000).release()
    staging.close()
    assert said == ["pin 1000", "unpin 1000", "pin 2000", "unpin 2000"]
