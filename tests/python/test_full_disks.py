"""Disks that are full, under the repository and under the spool: what is told, and what becomes of the step."""

from __future__ import annotations

import time

import pytest
import towline

from .spooling import MIB, a_state, check, fill, run_script
from .spooling import far as far
from .spooling import small_disk as small_disk


def goes_on_after(checkpointer: towline.Checkpointer, make_room, kind: type[Exception]) -> None:
    """A save fails for a full disk, is told, and the training goes on."""
    handle = checkpointer.save(2, a_state(2))
    while not handle.done():
        time.sleep(0.01)
    assert isinstance(handle.error, kind), repr(handle.error)
    told = "run/step-2 was not saved: .*; run/step-3 was not saved either: call save again"
    with pytest.raises(towline.SaveFailed, match=told) as caught:
        checkpointer.save(3, a_state(3))
    assert caught.value.__cause__ is handle.error
    assert str(caught.value).count("(os error ") == 1, str(caught.value)
    assert checkpointer.steps() == [1]
    make_room()
    checkpointer.save(3, a_state(3)).wait()
    # The same step again, too.
    checkpointer.save(2, a_state(2)).wait()
    assert checkpointer.steps() == [1, 2, 3]
    for seed in (1, 2, 3):
        check(checkpointer, seed)
    verified = checkpointer.repository.verify(data=True)
    assert verified["damaged"] == []


def limited(url: str) -> None:
    """Run in a process of its own, whose files may only be so long."""
    import resource

    with towline.Checkpointer(url, "run") as checkpointer:
        checkpointer.save(1, a_state(1)).wait()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        goes_on_after(checkpointer, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)), towline.Error)


def test_files_that_may_not_grow(repository):
    script = """
        import sys
        from tests.python.test_full_disks import limited
        limited(sys.argv[1])
        print("all is well")
    """
    assert run_script(script, repository.url).stdout == "all is well\n"


def test_a_full_disk_under_the_repository(small_disk):
    repository = towline.open(small_disk / "repository", memory="64M")
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, a_state(1)).wait()
        ballast = fill(small_disk, 4 * MIB)
        goes_on_after(checkpointer, ballast.unlink, towline.Exhausted)


def test_a_full_disk_under_the_spool_is_no_end(small_disk, far):
    fill(small_disk, 4 * MIB)
    with towline.Checkpointer(far, "run", spool=small_disk) as checkpointer:
        with pytest.warns(
            UserWarning, match=rf"run/step-1 cannot be spooled to this node's disk.*No space.*{small_disk}"
        ):
            checkpointer.save(1, a_state(1)).wait()
        check(checkpointer, 1)
        checkpointer.save(2, a_state(2, mib=1)).wait("local").wait()
        far._engine.away = True
        # The warning comes from the saver's thread, at any moment from the save on.
        with (
            pytest.raises(towline.SaveFailed, match="no answer"),
            pytest.warns(UserWarning, match="step-3 cannot be spooled"),
        ):
            checkpointer.save(3, a_state(3)).wait("local")
        far._engine.away = False
        assert checkpointer.steps() == [1, 2]
        # The caller of `wait` got the error, and later steps are saved.
        checkpointer.save(4, a_state(4, mib=1)).wait()
        assert checkpointer.steps() == [1, 2, 4]
    assert [path for path in small_disk.rglob("*") if path.is_file() and path.name != "ballast"] == []
