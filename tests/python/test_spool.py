"""What waits on a node's disk: when it is whole, what becomes of it later, and who may use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import towline
from towline import _backlog, _folders

from .spooling import a_state, check, in_spool, leave, run_script, spool_of
from .spooling import far as far


@pytest.mark.parametrize("at", ["_sync", "_write_record", "os.rename"])
def test_killed_before_a_state_is_whole_on_the_disk(far, tmp_path, at):
    """What was on its way to the disk is forgotten, and what was there before is kept."""
    script = """
        import os, signal, sys
        import towline
        from towline import spool
        from tests.python.spooling import Far, a_state

        repository = towline.open(sys.argv[1])
        repository._engine = Far(repository._engine)
        repository._engine.away = True
        checkpointer = towline.Checkpointer(repository, "run", spool=sys.argv[2])
        checkpointer.save(1, a_state(1)).wait("local")

        def kill(*said, **more):
            os.kill(os.getpid(), signal.SIGKILL)

        module, _, name = ("towline.spool." + sys.argv[3]).rpartition(".")
        setattr(os if module.endswith("os") else spool, name, kill)
        print("local", flush=True)
        # As the saver does it, which tries again and again to save the first.
        spool.put(checkpointer._spool, "run/step-2", {"metrics": {}}, [("state.json", [b"half of it"])])
    """
    ended = run_script(script, far.url, str(tmp_path / "spool"), at)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "local\n")
    folders = [path.name for path in (tmp_path / "spool").rglob("0-step-*") if path.is_dir()]
    assert len(folders) == 2, "the kill came too early or too late"
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.steps() == [1]
        check(checkpointer, 1)
    assert list((tmp_path / "spool").rglob("0-step-*")) == []


def test_killed_before_a_linked_folder_is_whole(repository, tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "weights").write_bytes(b"1" * 1000)
    script = """
        import os, signal, sys
        from towline import _private, spool
        spool._write_record = lambda *said: os.kill(os.getpid(), signal.SIGKILL)
        source = os.open(sys.argv[2] + "/checkpoint-1", os.O_RDONLY)
        own = _private.given(sys.argv[2]).inside("_towline", own=True)
        spool.link(own, "run/step-1", {"metrics": {}}, source)
    """
    assert run_script(script, repository.url, str(tmp_path)).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "_towline").rglob("weights"))) == 1
    saver = _folders.FolderSaver(repository, "run", "test")
    saver.save_pending(str(tmp_path))
    assert repository.ls() == [] and list((tmp_path / "_towline").rglob("weights")) == []
    assert (tmp_path / "checkpoint-1" / "weights").read_bytes() == b"1" * 1000


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(repository, tmp_path):
    """S9: "A link that they put in the place of a checkpoint [...] is not followed: nothing outside the folder is saved"."""
    (tmp_path / "outside" / "keys").mkdir(parents=True)
    (tmp_path / "outside" / "keys" / "secret").write_bytes(b"secret")
    out = tmp_path / "out"
    out.mkdir()
    saver = _folders.FolderSaver(repository, "run", "test")
    (out / "checkpoint-1").symlink_to(tmp_path / "outside")
    with pytest.raises(towline.Denied, match="planted"):
        saver.save(str(out / "checkpoint-1"), 1, None, str(out))
    # Within a checkpoint, links stay links.
    (out / "checkpoint-2" / "sub").mkdir(parents=True)
    (out / "checkpoint-2" / "sub" / "weights").write_bytes(b"2" * 1000)
    (out / "checkpoint-2" / "to-folder").symlink_to(tmp_path / "outside" / "keys")
    (out / "checkpoint-2" / "to-file").symlink_to(tmp_path / "outside" / "keys" / "secret")
    saver.save(str(out / "checkpoint-2"), 2, None, str(out))
    saver.close()
    assert [one.name for one in repository.ls()] == ["run/step-2"]
    repository.restore("run/step-2", tmp_path / "back")
    assert (tmp_path / "back" / "to-folder").is_symlink() and (tmp_path / "back" / "to-file").is_symlink()
    assert (tmp_path / "back" / "sub" / "weights").read_bytes() == b"2" * 1000


def test_a_link_in_the_place_of_a_spool_is_not_followed(far, tmp_path):
    """S9: "nothing outside of the folder is saved, changed or deleted"."""
    other = tmp_path / "shared"
    other.mkdir(mode=0o755)
    (tmp_path / "spool").mkdir()
    place = Path(spool_of(far, tmp_path / "spool"))
    place.symlink_to(other)
    with pytest.warns(UserWarning, match=f"{re.escape(str(place))} is a link"):
        checkpointer = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    with pytest.warns(UserWarning, match="the save continues without it"):
        checkpointer.save(1, a_state(1, 1)).wait()
    checkpointer.close()
    assert list(other.iterdir()) == [] and other.stat().st_mode & 0o777 == 0o755


def test_what_was_left_does_not_replace_what_was_saved_since(far, tmp_path):
    left, earlier = leave(far, tmp_path / "spool", b"of the past"), time.time() - 5
    os.utime(left + ".json", (earlier, earlier))
    # Another node went on meanwhile.
    with towline.Checkpointer(far, "run", spool=tmp_path / "elsewhere") as checkpointer:
        checkpointer.save(1, "of now").wait()
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.restore(1) == "of now"
    assert list((tmp_path / "spool").rglob("0-step-*")) == []
    # What was left later counts.
    left = leave(far, tmp_path / "spool", b"later")
    later = time.time() + 5
    os.utime(left + ".json", (later, later))
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.restore(1) == "later"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"name": "models/base", "options": {}}, "is of 'models/base', expected 'run/step-1'"),
        ({"name": "run/step-1", "options": {"metrics": 5}}, "options of another version"),
        ({"name": "run/step-1"}, "cannot be read"),
        ([], "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_a_record_counts_only_for_its_step(far, tmp_path, record, told):
    left = leave(far, tmp_path / "spool", b"planted")
    Path(left + ".json").write_text(record if record == "{" else json.dumps(record))
    with pytest.warns(UserWarning, match=told), towline.Checkpointer(far, "run", spool=tmp_path / "spool") as later:
        assert later.steps() == []
    assert far.ls() == [] and os.path.exists(left), "nothing is saved, and nothing is lost"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act for another user")
def test_a_spool_that_another_user_made_is_not_used(far, tmp_path):
    left = leave(far, tmp_path / "spool", b"planted")
    os.chown(Path(left).parents[1], 4711, 4711)
    with pytest.warns(UserWarning, match="belongs to user 4711"):
        later = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    assert far.ls() == []
    with pytest.warns(UserWarning, match="the save continues without it"):
        later.save(2, {"a": 1}).wait()
    assert later.steps() == [2]
    later.close()


def test_what_is_local_survives_the_loss_of_the_cache(far, tmp_path):
    """The cache may be removed at any time; steps that wait are no cache."""
    with towline.Checkpointer(far, "run", close_retry=0) as checkpointer:
        far._engine.away = True
        checkpointer.save(1, a_state(1, mib=1)).wait("local")
        spooled = list((tmp_path / "state" / "towline" / "spool").rglob("0-step-1.*.json"))
        assert len(spooled) == 1 and spooled[0].parents[1].stat().st_mode & 0o077 == 0
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with pytest.raises(towline.SaveFailed, match="only on the disk of this node"):
            checkpointer.close()
    far._engine.away = False
    with towline.Checkpointer(far, "run") as later:
        assert later.steps() == [1]


@pytest.mark.parametrize("away", [False, True])
def test_a_step_that_another_process_saved_is_refused_and_leaves_the_spool(far, tmp_path, monkeypatch, away):
    monkeypatch.setattr(_backlog, "_PAUSE", 0.05)
    late = towline.Checkpointer(far, "run", spool=tmp_path / "spool")
    with towline.Checkpointer(far.url, "run") as first:
        far._engine.away = away
        if away:
            # It is spooled before the other process saves the step, and uploaded after it.
            late.save(1, a_state(10)).wait("local")
        first.save(1, a_state(1)).wait()
        far._engine.away = False
    handle = late._handles[-1] if away else late.save(1, a_state(10))
    while not handle.done():
        time.sleep(0.01)
    with pytest.raises(towline.SaveConflict, match="saved by another process"):
        late.close()
    assert isinstance(handle.error, towline.Conflict) and in_spool(tmp_path / "spool") == []
    with towline.Checkpointer(far, "run", spool=tmp_path / "spool") as after:
        check(after, 1)


def test_the_next_process_replaces_no_step_that_another_one_saved_before_it_was_spooled(far, tmp_path):
    late = towline.Checkpointer(far, "run", spool=tmp_path / "spool", close_retry=0)
    with towline.Checkpointer(far.url, "run") as first:
        first.save(1, a_state(1)).wait()
    far._engine.away = True
    late.save(1, a_state(10)).wait("local")
    with pytest.raises(towline.SaveFailed, match="only on the disk of this node"):
        late.close()
    assert in_spool(tmp_path / "spool") != []
    far._engine.away = False
    with (
        pytest.warns(UserWarning, match="run/step-1: only on .* dropped: another process has continued the run"),
        towline.Checkpointer(far, "run", spool=tmp_path / "spool") as after,
    ):
        check(after, 1)
    assert in_spool(tmp_path / "spool") == []
