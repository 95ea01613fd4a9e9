"""Folders that frameworks write to may be open to others: what is planted there is neither followed nor saved."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import towline
from towline import _folders, _private, errors


def _checkpoint(folder, text):
    folder.mkdir(parents=True)
    (folder / "model.bin").write_text(text)


def test_a_planted_link_in_the_own_folder_is_refused(repository, tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    _checkpoint(victim, "keep")
    _checkpoint(tmp_path / "saved", "saved")
    repository.save(tmp_path / "saved", "run/step-5")
    out.mkdir()
    (out / "_towline").symlink_to(victim)
    with pytest.raises(errors.Denied, match="is a link"):
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    (out / "_towline").unlink()
    (out / "checkpoint-5").symlink_to(victim)
    with pytest.raises(errors.Denied, match="is a link"):
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert (victim / "model.bin").read_text() == "keep" and os.listdir(victim) == ["model.bin"]
    (out / "checkpoint-5").unlink()
    _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert (out / "checkpoint-5" / "model.bin").read_text() == "saved"
    # Again: what differs becomes as it was saved.
    (out / "checkpoint-5" / "more").write_text("x")
    _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert os.listdir(out / "checkpoint-5") == ["model.bin"]
    assert os.stat(out / "_towline").st_mode & 0o777 == 0o700


def deep(folder: Path, levels: int) -> None:
    """Makes folders in each other, deeper than a path can lead."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=descriptor)
        inside = os.open("a", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inside
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=descriptor))
    os.close(descriptor)


def test_folders_of_any_depth_are_removed(tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    _checkpoint(victim, "keep")
    _checkpoint(out / "checkpoint-5", "remove")
    (out / "checkpoint-5" / "link").symlink_to(victim)
    for name in ("wide", "wide/inner", "wide/other"):
        (out / "checkpoint-5" / name).mkdir()
    (out / "checkpoint-5" / "wide" / "inner" / "link").symlink_to(victim)
    (out / "checkpoint-5" / "wide" / "inner" / "file").write_text("remove")
    deep(out / "checkpoint-5", 5000)
    deep(out / "checkpoint-5" / "wide", 1500)
    _folders.remove(str(out / "checkpoint-5"))
    assert os.listdir(out) == ["_towline"] and os.listdir(out / "_towline") == []
    assert (victim / "model.bin").read_text() == "keep" and os.listdir(victim) == ["model.bin"]


OUTSIDE = {
    "absolute": ("training_args.bin", "/etc/passwd"),
    "the root": ("training_args.bin", "/"),
    "above": ("training_args.bin", "../other/training_args.bin"),
    "above a folder": ("inner/training_args.bin", "../../training_args.bin"),
    "only above": ("training_args.bin", ".."),
    "through a link": ("inner/training_args.bin", "link/../../training_args.bin"),
    "dots": ("training_args.bin", ".//./../x"),
}


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("existing", [False, True])
def test_a_checkpoint_with_a_link_out_of_it_is_not_restored_for_a_framework(repository, tmp_path, what, existing):
    path, target = OUTSIDE[what]
    out = tmp_path / "out"
    _checkpoint(tmp_path / "good", "good")
    repository.save(tmp_path / "good", "run/step-4")
    _checkpoint(tmp_path / "saved", "saved")
    (tmp_path / "saved" / "inner").mkdir()
    (tmp_path / "saved" / "inner" / "link").symlink_to("../inner")
    (tmp_path / "saved" / path).symlink_to(target)
    repository.save(tmp_path / "saved", "run/step-5")
    if existing:
        _folders.restore(repository, "run/step-4", str(out / "checkpoint-5"))
    with pytest.raises(errors.Denied) as error:
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert repr(path) in str(error.value) and repr(target) in str(error.value)
    assert "towline restore run/step-5 DEST" in error.value.help and error.value.place == f"run/step-5:{path}"
    assert (out / "checkpoint-5").exists() is existing
    if existing:
        assert os.listdir(out / "checkpoint-5") == ["model.bin"]
        assert (out / "checkpoint-5" / "model.bin").read_text() == "good"


def test_links_within_a_checkpoint_are_restored(repository, tmp_path):
    _checkpoint(tmp_path / "saved", "saved")
    (tmp_path / "saved" / "a" / "b").mkdir(parents=True)
    links = {
        "latest": "a/b",
        "a/model": "../model.bin",
        "a/b/root": "../..",
        "a/b/latest": ".././../latest",
        "dangling": "x",
    }
    for path, target in links.items():
        (tmp_path / "saved" / path).symlink_to(target)
    repository.save(tmp_path / "saved", "run/step-5")
    for _ in range(2):
        _folders.restore(repository, "run/step-5", str(tmp_path / "out" / "checkpoint-5"))
        for path, target in links.items():
            assert os.readlink(tmp_path / "out" / "checkpoint-5" / path) == target


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("method", ["open_tree", "restore", "find"])
def test_a_link_that_is_saved_while_a_checkpoint_is_restored_does_not_appear(repository, tmp_path, existing, method):
    out = tmp_path / "out"
    _checkpoint(tmp_path / "good", "good")
    _checkpoint(tmp_path / "bad", "bad")
    (tmp_path / "bad" / "link").symlink_to(tmp_path)
    repository.save(tmp_path / "good", "run/step-5")
    if existing:
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    other = towline.open(repository.url)

    class Between:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            if name == method:
                other.save(tmp_path / "bad", "run/step-5")
            return getattr(self.inner, name)

    repository._engine = Between(repository._engine)
    with pytest.raises(errors.Denied, match="out of the checkpoint"):
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert not (out / "checkpoint-5" / "link").is_symlink()


def test_a_planted_step_is_not_saved(repository, tmp_path):
    secret, out = tmp_path / "secret", tmp_path / "out"
    _checkpoint(secret, "secret")
    waiting = out / "_towline" / "run"
    waiting.mkdir(parents=True)
    (waiting / "0-step-5.x").symlink_to(secret)
    (waiting / "0-step-5.x.json").write_text(json.dumps({"name": "models/production", "options": {}}))
    _folders.FolderSaver(repository, "run", "test").save_pending(str(out))
    assert [one.name for one in repository.ls()] == []
    assert (secret / "model.bin").read_text() == "secret"


class Swap:
    """Puts a link in the place of `out/_towline`, as whoever may write to `out` can, right before the call to the system with
    the number `at`; takes it away again before that with the number `at + back`."""

    def __init__(self, out: Path, victim: Path, at: int, back: int):
        self.own, self.victim, self.at, self.back = out / "_towline", victim, at, back
        self.aside = out / "aside"
        self.seen, self._busy = 0, threading.RLock()

    def step(self) -> None:
        if not self._busy.acquire(blocking=False):
            return
        try:
            self.seen, seen = self.seen + 1, self.seen
            # Calls of this function are no calls of the package.
            if seen == self.at:
                self.plant()
            elif seen == self.at + self.back:
                self.take_back()
        finally:
            self._busy.release()

    def plant(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.own, self.aside)
        os.symlink(self.victim, self.own)

    def take_back(self) -> None:
        os.unlink(self.own)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.aside, self.own)


#: The swap that is under way, and the thread that plants.
_under_way: list[Swap] = []
_planting = threading.local()


def _heard(event: str, _: tuple) -> None:
    if _under_way and event.split(".")[0] in ("open", "os", "shutil", "fcntl") and not getattr(_planting, "now", False):
        _planting.now = True
        try:
            for swap in _under_way:
                swap.step()
        finally:
            _planting.now = False


@pytest.fixture(scope="module")
def heard() -> None:
    """Tells of calls to the system; it cannot be taken away again (https://docs.python.org/3/library/sys.html#sys.addaudithook)."""
    sys.addaudithook(_heard)


@contextlib.contextmanager
def swapped(swap: Swap) -> Iterator[None]:
    _under_way.append(swap)
    try:
        yield
    finally:
        _under_way.clear()


def content(folder: Path) -> dict[str, object]:
    """All in a folder, with modes, and the names of links."""
    found: dict[str, object] = {".": folder.stat().st_mode}
    for path in sorted(folder.rglob("*")):
        inside = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, inside)
    return found


def a_victim(place: Path) -> Path:
    """A folder of the user that has all the names which are used in `_towline`."""
    for name in (
        "restoring-checkpoint-5",
        "restoring-checkpoint-5/checkpoint-5",
        "gone-checkpoint-5",
        "run/0-step-5.x",
    ):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "thesis").write_text("years")
    (place / "lock").write_text("a door")
    return place


def restoring(repository: towline.Repository, out: Path) -> None:
    _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))


def removing(repository: towline.Repository, out: Path) -> None:
    _checkpoint(out / "checkpoint-5", "5")
    _folders.remove(str(out / "checkpoint-5"))
    assert not (out / "checkpoint-5").exists()


def locking(repository: towline.Repository, out: Path) -> None:
    with _folders.alone(str(out)):
        pass


def saving(repository: towline.Repository, out: Path) -> None:
    _checkpoint(out / "checkpoint-7", "7")
    saver = _folders.FolderSaver(repository, "other", "test")
    try:
        saver.save(str(out / "checkpoint-7"), 7, None, str(out))
    finally:
        with contextlib.suppress(errors.SaveFailed):
            saver.close()


def taking_up(repository: towline.Repository, out: Path) -> None:
    _folders.FolderSaver(repository, "run", "test").save_pending(str(out))


@pytest.mark.parametrize("back", [1 << 20, 1, 2])
@pytest.mark.parametrize("what", [restoring, removing, locking, saving, taking_up])
def test_a_link_put_there_between_any_two_steps_is_not_followed(
    repository, tmp_path, heard, monkeypatch, what: Callable[[towline.Repository, Path], None], back
):
    """S9: "A link that they put in the place of [...] Towline's own files there [...] is not followed: nothing outside of the
    folder is saved, changed or deleted"."""
    _checkpoint(tmp_path / "saved", "saved")
    repository.save(tmp_path / "saved", "run/step-5")
    restore = repository.restore

    def as_a_step(*given, **options):
        if _under_way:
            _under_way[0].step()
        return restore(*given, **options)

    monkeypatch.setattr(repository, "restore", as_a_step)
    before = content(a_victim(tmp_path / "victim"))
    for at in range(200):
        out = tmp_path / f"out-{at}"
        # An incomplete step that a killed process left.
        (out / "_towline" / "run" / "0-step-5.x").mkdir(parents=True)
        swap = Swap(out, tmp_path / "victim", at, back)
        refused = None
        with swapped(swap):
            try:
                what(repository, out)
            except (errors.Error, OSError) as error:
                refused = error
        assert content(tmp_path / "victim") == before, f"step {at}: {refused!r}"
        if swap.seen <= at:
            assert refused is None, "nobody was in the way"
            break
    else:
        pytest.fail("it has no end")
    assert at > 2
    assert not [one.name for one in repository.ls() if "thesis" in str(repository.show(one.name))]


@pytest.mark.parametrize("what", [restoring, removing, locking, saving, taking_up])
def test_links_that_come_and_go_all_the_time_are_not_followed(repository, tmp_path, what):
    _checkpoint(tmp_path / "saved", "saved")
    repository.save(tmp_path / "saved", "run/step-5")
    before = content(a_victim(tmp_path / "victim"))
    out, over = tmp_path / "out", threading.Event()
    out.mkdir()

    def come_and_go() -> None:
        at = 0
        while not over.is_set():
            at += 1
            with contextlib.suppress(OSError):
                os.rename(out / "_towline", out / f"aside-{at}")
            with contextlib.suppress(OSError):
                os.symlink(tmp_path / "victim", out / "_towline")
            with contextlib.suppress(OSError):
                os.unlink(out / "_towline")
            time.sleep(0.0001 * (at % 7))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        ends = time.monotonic() + 0.5
        while time.monotonic() < ends:
            with contextlib.suppress(errors.Error, OSError):
                what(repository, out)
            for made in out.glob("checkpoint-*"):
                (made / "model.bin").unlink(missing_ok=True)
                made.rmdir()
    finally:
        over.set()
        thread.join()
    assert content(tmp_path / "victim") == before


def test_what_is_planted_in_an_own_folder_is_not_followed(repository, tmp_path):
    """A folder that was open to others before, and what is in it."""
    before = content(a_victim(tmp_path / "victim"))
    _checkpoint(tmp_path / "saved", "saved")
    repository.save(tmp_path / "saved", "run/step-5")
    out = tmp_path / "out"
    (out / "_towline").mkdir(parents=True)
    for name in ("restoring-checkpoint-5", "gone-checkpoint-5", "run"):
        (out / "_towline" / name).symlink_to(tmp_path / "victim" / name)
    restoring(repository, out)
    assert (out / "checkpoint-5" / "model.bin").read_text() == "saved"
    assert sorted(os.listdir(out / "_towline")) == ["gone-checkpoint-5", "lock", "run"]
    _folders.remove(str(out / "checkpoint-5"))
    assert not (out / "checkpoint-5").exists()
    _checkpoint(out / "checkpoint-5", "5")
    saver = _folders.FolderSaver(repository, "run", "test")
    with pytest.raises(errors.Denied, match="is a link"):
        saver.save(str(out / "checkpoint-5"), 5, None, str(out))
    with pytest.raises(errors.Denied, match="is a link"):
        saver.save_pending(str(out))
    (out / "_towline" / "lock").unlink()
    (out / "_towline" / "lock").symlink_to(tmp_path / "victim" / "lock")
    with pytest.raises(errors.Denied, match="lock is a link"):
        restoring(repository, out)
    assert content(tmp_path / "victim") == before


def test_a_killed_restore_is_continued_in_a_private_folder_alone(repository, tmp_path):
    _checkpoint(tmp_path / "saved", "saved")
    repository.save(tmp_path / "saved", "run/step-5")
    own = _private.given(str(tmp_path / "out")).inside("_towline", own=True)
    os.mkdir(tmp_path / "out" / "_towline" / "restoring", 0o700)
    (tmp_path / "out" / "_towline" / "restoring" / "part").write_text("part")
    with own.fresh("restoring") as found:
        assert os.listdir(found.descriptor) == ["part"]
    # Others may have an open descriptor of it.
    os.chmod(tmp_path / "out" / "_towline" / "restoring", 0o770)
    with own.fresh("restoring") as found:
        assert os.listdir(found.descriptor) == [] and stat.S_IMODE(os.fstat(found.descriptor).st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_steps_of_others_are_not_saved(repository, tmp_path):
    run = tmp_path / "out" / "_towline" / "run"
    _checkpoint(run / "0-step-5.x", "planted")
    (run / "0-step-5.x.json").write_text(json.dumps({"name": "models/production", "options": {}}))
    os.chown(run / "0-step-5.x", 65534, 65534)
    saver = _folders.FolderSaver(repository, "run", "test")
    saver.save_pending(str(tmp_path / "out"))
    os.chown(run / "0-step-5.x", 0, 0)
    os.chown(run / "0-step-5.x.json", 65534, 65534)
    saver.save_pending(str(tmp_path / "out"))
    assert repository.ls() == []
    os.chown(run, 65534, 65534)
    with pytest.raises(errors.Denied, match="belongs to user 65534"):
        saver.save_pending(str(tmp_path / "out"))


def test_what_is_held_open_is_closed_again(repository, tmp_path):
    out = tmp_path / "out"

    def once(step: int) -> None:
        saver = _folders.FolderSaver(repository, "run", "test", collect=False)
        saver.save_pending(str(out))
        _checkpoint(out / f"checkpoint-{step}", "5")
        saver.save(str(out / f"checkpoint-{step}"), step, None, str(out))
        saver.close()
        _folders.remove(str(out / f"checkpoint-{step}"))
        _folders.restore(repository, f"run/step-{step}", str(out / f"checkpoint-{step}"))

    def open_in_it() -> list[str]:
        found = []
        for one in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{one}"))
        return [path for path in found if path.startswith(str(out))]

    once(1)
    once(2)
    assert open_in_it() == []
