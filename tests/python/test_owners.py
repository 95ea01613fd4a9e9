"""Steps in a spool whose process still runs: others leave them to it, and take them once it has ended, however it did."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import towline
from towline import _owners, _private, spool

from .spooling import a_state, in_spool
from .spooling import far as far

BEGIN = """
    import os, signal, sys, time
    import torch, towline
    from towline import _folders, spool
    from tests.python.spooling import Far, a_state, linked
    from pathlib import Path

    repository = towline.open(sys.argv[1])
    repository._engine = Far(repository._engine)
    place = Path(sys.argv[2])

    def told(text):
        print(text, flush=True)
        return sys.stdin.readline()
"""

LOOP = """
    checkpointer = towline.Checkpointer(repository, "run", spool=place)
    checkpointer.save(1, {"step": 1}).wait()
    repository._engine.away = True
    for step in (2, 3):
        checkpointer.save(step, {"step": step}).wait("local")
    told("local")
    repository._engine.away = False
    checkpointer.save(4, {"step": 4})
    checkpointer.close()
    told("durable")
"""

HALF = """
    write = spool._write_record
    spool._write_record = lambda *said: (told("half"), write(*said))
    checkpointer = towline.Checkpointer(repository, "run", spool=place)
    checkpointer.save(1, {"step": 1}).wait()
    checkpointer.close()
    told("durable")
"""

FOLDERS = """
    saver = _folders.FolderSaver(repository, "run", "test")
    saver.save_pending(str(place))
    repository._engine.away = True
    linked(place, saver, 1, 2)
    told("local")
    repository._engine.away = False
    saver.close()
    told("durable")
"""

FORKS = """
    checkpointer = towline.Checkpointer(repository, "run", spool=place, close_retry=0)
    repository._engine.away = True
    checkpointer.save(1, {"step": 1}).wait("local")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    told(f"{child}")
"""


class Training:
    """A training in another process."""

    def __init__(self, script: str, url: str, folder: Path):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
        command = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(script), url, str(folder)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def begin(repository) -> Iterator:
    begun: list[Training] = []

    def begin(script: str, folder: Path) -> Training:
        begun.append(Training(script, repository.url, folder))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def names(repository) -> list[str]:
    return [one.name for one in repository.ls()]


def restored(repository, folder: Path) -> object:
    """As an evaluation does, which says nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        with towline.Checkpointer(repository, "run", spool=folder) as reads:
            return reads.restore()


def test_a_reader_leaves_the_steps_of_a_running_training_alone(far, tmp_path, begin):
    training = begin(LOOP, tmp_path / "spool")
    assert training.says() == "local"
    before = in_spool(tmp_path / "spool")
    assert restored(far, tmp_path / "spool") == {"step": 1} and in_spool(tmp_path / "spool") == before
    training.go_on()
    assert training.says() == "durable", "its steps were superseded"
    assert names(far) == [f"run/step-{step}" for step in (1, 2, 3, 4)]
    # Nothing is left, the locks included.
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file()] == []


def test_a_reader_leaves_a_step_alone_that_is_being_written(far, tmp_path, begin):
    training = begin(HALF, tmp_path / "spool")
    assert training.says() == "half"
    assert restored(far, tmp_path / "spool") is None and len(in_spool(tmp_path / "spool")) == 1
    training.go_on()
    assert training.says() == "durable" and names(far) == ["run/step-1"]


def test_an_owner_that_cannot_be_looked_at_counts_as_running(tmp_path, monkeypatch):
    (tmp_path / "owner").touch()
    folder = os.open(tmp_path, os.O_RDONLY)

    def without_descriptors(*_arguments, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    assert not _owners._is_locked(folder, "nobody")
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", without_descriptors)
        assert _owners._is_locked(folder, "owner")
    assert not _owners._is_locked(folder, "owner"), "nobody holds it"
    os.close(folder)


def test_the_steps_are_taken_once_the_training_is_killed(far, tmp_path, begin):
    training = begin(LOOP, tmp_path / "spool")
    assert training.says() == "local"
    training.process.send_signal(signal.SIGKILL)
    training.process.wait()
    assert restored(far, tmp_path / "spool") == {"step": 3}
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file()] == []


def test_the_lock_of_a_killed_process_without_steps_goes(far, tmp_path, begin):
    training = begin(LOOP.replace("(2, 3)", "()"), tmp_path / "spool")
    assert training.says() == "local" and list((tmp_path / "spool").rglob("owner-*"))
    assert restored(far, tmp_path / "spool") == {"step": 1}
    assert list((tmp_path / "spool").rglob("owner-*")), "the lock of a running process goes"
    training.process.kill()
    training.process.wait()
    assert restored(far, tmp_path / "spool") == {"step": 1}
    assert not list((tmp_path / "spool").rglob("owner-*"))


def test_a_forked_child_holds_no_lock(far, tmp_path, begin):
    """As a worker that outlives the training."""
    training = begin(FORKS, tmp_path / "spool")
    child = int(training.says())
    try:
        assert restored(far, tmp_path / "spool") is None
        training.process.kill()
        training.process.wait()
        assert restored(far, tmp_path / "spool") == {"step": 1}
    finally:
        os.kill(child, signal.SIGKILL)


CHILD = """
    owner, folder = _owners.Owner(), _private.given(sys.argv[1])
    owner.new_name(folder)
    child = os.fork()
    if child == 0:
        new = _owners.Owner()
        name = new.new_name(folder)
        # Only its parent's.
        del owner
        gc.collect()
        os._exit(0 if new.new_name(folder)[:16] == name[:16] and locks(folder) == 2 else 1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
LOCKS = """
    import fcntl, gc, os, sys
    from towline import _owners, _private

    def locks(folder):
        names = [name for name in os.listdir(folder.descriptor) if name.startswith("owner-")]
        return sum(_owners.is_live(folder.descriptor, "0-step-1." + name.removeprefix("owner-")) for name in names)
"""


def test_a_forked_child_keeps_its_own_lock(tmp_path):
    """The descriptor of its lock is that of its parent's, whose object it has, too."""
    script = textwrap.dedent(LOCKS) + textwrap.dedent(CHILD)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


def test_folders_of_a_running_training_are_left_alone(repository, tmp_path, begin):
    from towline import _folders

    training = begin(FOLDERS, tmp_path)
    assert training.says() == "local"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        reads = _folders.FolderSaver(repository, "run", "test")
        assert reads.save_pending(str(tmp_path)) == [] and reads.steps() == []
    assert len(list((tmp_path / "_towline").rglob("weights"))) == 2
    training.go_on()
    assert training.says() == "durable" and names(repository) == ["run/step-1", "run/step-2"]


def test_lightning_loads_while_a_training_runs(far, tmp_path, begin, monkeypatch):
    pytest.importorskip("lightning")
    from towline.lightning import TowlineCheckpointIO

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "state" / "towline" / "spool"
    with towline.Checkpointer(far, "run", spool=tmp_path / "elsewhere") as first:
        labels = {"lightning.file": "last.ckpt", "lightning.folder": str(tmp_path)}
        first._save_as("run/last.ckpt", 0, {"step": 0}, None, labels=labels)
    training = begin(LOOP, folder)
    assert training.says() == "local"
    assert TowlineCheckpointIO(far, "run").load_checkpoint(tmp_path / "last.ckpt") == {"step": 0}
    training.go_on()
    assert training.says() == "durable" and "run/step-4" in names(far)


def test_steps_of_a_running_training_in_another_repository_are_not_lost(far, tmp_path, caplog):
    others = tmp_path / "spool" / "01ARZ3NDEKTSV4RRFFQ69G5FAV-0000000000000000"
    replaced = others.with_name(f"01ARZ3NDEKTSV4RRFFQ69G5FAV-{far._engine.spool_name().rpartition('-')[2]}")
    owner = _owners.Owner()
    for place in (others, replaced):
        spool.put(str(place), "run/step-5", {}, [("state.json", [b"{}"])], owner=owner)
    assert restored(far, tmp_path / "spool") is None
    assert not [one for one in caplog.records if "wait on this node" in one.getMessage()]
    owner.release()
    with pytest.warns(UserWarning, match="another repository than the one for which 1 earlier saves"):
        towline.Checkpointer(far, "run", spool=tmp_path / "spool").close()
    assert [one for one in caplog.records if "wait on this node" in one.getMessage()]


def test_a_second_checkpointer_of_a_process_waits_for_the_first(far, tmp_path):
    """As in a notebook, whose cell is run again."""
    first = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    first.save(1, a_state(1))
    first.wait("local")
    assert restored(far, tmp_path / "spool")["seed"] == 1
    first.close()


def test_a_step_that_failed_for_good_is_taken_although_its_owner_runs(far, tmp_path, monkeypatch):
    """As in a notebook whose user renews a token, and runs the cell again."""
    first = towline.Checkpointer(far, "run", spool=tmp_path / "spool", close_retry=0)
    first.save(4, {"step": 4}).wait()
    denied_save(far, first, monkeypatch)
    monkeypatch.setattr(spool, "_PATIENCE", 0.0)
    assert restored(far, tmp_path / "spool") == {"step": 5}
    with pytest.raises(towline.SaveFailed, match="expired"):
        first.close()
    assert names(far) == ["run/step-4", "run/step-5"]
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file()] == []


def test_another_process_takes_a_step_that_failed_for_good(far, tmp_path, monkeypatch, begin):
    first = towline.Checkpointer(far, "run", spool=tmp_path / "spool", close_retry=0)
    denied_save(far, first, monkeypatch)
    other = begin(RESTORE, tmp_path / "spool")
    assert other.says() == "{'step': 5}"
    with pytest.raises(towline.SaveFailed, match="expired"):
        first.close()


def denied_save(far, checkpointer, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(far._engine, "begin_save_files", deny, raising=False)
        with pytest.raises(towline.SaveFailed, match="expired"):
            checkpointer.save(5, {"step": 5}).wait()


def deny(*_):
    raise towline.Denied("the token is expired")


RESTORE = """
    checkpointer = towline.Checkpointer(repository, "run", spool=place)
    told(checkpointer.restore())
"""


def test_the_steps_are_released_when_the_saver_ends_after_close(far, tmp_path, monkeypatch):
    """`close` ran out of time before."""
    first = towline.Checkpointer(far, "run", spool=tmp_path / "spool", close_retry=0)
    begin_save, goes_on = far._engine.begin_save_files, threading.Event()

    def wait_and_fail(*said):
        goes_on.wait()
        raise towline.Unreachable("no answer")

    far._engine.begin_save_files = wait_and_fail
    first.save(5, {"step": 5}).wait("local")
    far._engine.away = True
    with pytest.raises(towline.SaveFailed):
        first.close(timeout=0)
    assert first._saver.is_alive()
    goes_on.set()
    first._saver.join()
    far._engine.begin_save_files, far._engine.away = begin_save, False
    monkeypatch.setattr(spool, "_PATIENCE", 0.0)
    assert restored(far, tmp_path / "spool") == {"step": 5}


def test_where_locks_are_refused_a_remark_says_so_once(far, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"step": step}).wait()
    (told,) = [one.getMessage() for one in caplog.records if "cannot be locked" in one.getMessage()]
    assert str(tmp_path / "spool") in told and "No locks available" in told
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file()] == []


def test_a_spool_that_was_removed_meanwhile_is_locked_again(tmp_path):
    owner, place = _owners.Owner(), tmp_path / "spool"
    kept = spool.put(str(place), "run/step-1", {}, [("state.json", [b"{}"])], owner=owner)
    assert _owners.is_live(kept.run.descriptor, kept.name) and _owners.is_mine(kept.run.descriptor, kept.name)
    kept.run.remove("owner-" + kept.name.rpartition(".")[2][:16])
    kept = spool.put(str(place), "run/step-2", {}, [("state.json", [b"{}"])], owner=owner)
    assert _owners.is_live(kept.run.descriptor, kept.name)
    owner.release()
    assert not _owners.is_live(kept.run.descriptor, kept.name)


CLAIM = """
    saver = _folders.FolderSaver(repository, "run", "accelerate")
    saver.claim(str(place))
    told("claimed")
    saver.close()
    told("released")
"""


def test_a_folder_is_of_one_training_at_a_time(repository, tmp_path, begin):
    from towline import _folders

    training = begin(CLAIM, tmp_path)
    assert training.says() == "claimed"
    second, third = (_folders.FolderSaver(repository, "other", "accelerate") for _ in range(2))
    assert second.is_claimed(str(tmp_path))
    with pytest.raises(towline.UsageError, match=f"writes the states of its training to {tmp_path}.*another folder"):
        second.claim(str(tmp_path))
    training.go_on()
    assert training.says() == "released"
    second.claim(str(tmp_path))
    # Of one process both may write there, one after the other.
    third.claim(str(tmp_path))
    assert not second.is_claimed(str(tmp_path))
    second.close()
    assert _owners.claim(_private.given(str(tmp_path)).inside("_towline", own=True), grace=0) is not None
