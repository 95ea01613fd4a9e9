"""Collecting: by hand, and in the background where steps expire."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import towline
from towline import _collecting
from towline._collecting import Collector
from towline.reports import CollectReport, Damage, SyncReport, VerifyReport

SIZE = 1 << 20


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    # No step has a chunk of another one.
    return {"noise": torch.randint(0, 256, (SIZE,), dtype=torch.uint8)}


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "pack").rglob("*") if path.is_file())


def save_steps(repository, count: int, **said) -> None:
    with towline.Checkpointer(repository, "run", **said) as checkpointer:
        for step in range(count):
            checkpointer.save(step, state(step)).wait()


def test_keep_last_frees_the_disk(repository, tmp_path, monkeypatch):
    # A loaded machine needs longer than a close waits.
    monkeypatch.setattr(_collecting, "_CLOSE_MAX", 120.0)
    save_steps(repository, 6, keep_last=2)
    assert [one.name for one in repository.ls()] == ["run/step-4", "run/step-5"]
    assert stored(tmp_path / "repository") < 3 * SIZE
    assert repository.verify(data=True).damaged == []
    restored = towline.Checkpointer(repository, "run").restore()
    assert torch.equal(restored["noise"], state(5)["noise"])


def test_without_collect_only_names_expire(repository, tmp_path):
    save_steps(repository, 4, keep_last=1, collect=False)
    assert [one.name for one in repository.ls()] == ["run/step-3"]
    assert stored(tmp_path / "repository") > 4 * SIZE
    report = repository.collect(grace=0, dry_run=True)
    # A pack that is rewritten is not counted.
    assert report.freed_bytes > SIZE and report.steps and stored(tmp_path / "repository") > 4 * SIZE
    for grace in (timedelta(hours=1), "1h", 3600.0):
        kept = repository.collect(grace=grace)
        assert kept.purged_packs == 0
    freed = repository.collect(grace=0)
    assert isinstance(freed, CollectReport) and freed.purged_packs > 0 and freed.freed_bytes > 3 * SIZE
    assert stored(tmp_path / "repository") < 2 * SIZE
    for wrong in (-1, timedelta(-1), "soon"):
        with pytest.raises(towline.UsageError, match="grace"):
            repository.collect(grace=wrong)


def test_hooks_collect_too(repository, tmp_path):
    from towline._folders import FolderSaver

    (tmp_path / "out").mkdir()
    saver = FolderSaver(repository, "run", "test", keep_last=1)
    for step in range(4):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "noise.bin").write_bytes(os.urandom(SIZE))
        saver.save(str(folder), step, None, str(tmp_path / "out"))
    saver.close()
    assert [one.name for one in repository.ls()] == ["run/step-3"]
    assert stored(tmp_path / "repository") < 2 * SIZE


def test_lightning_collects_too(repository, tmp_path):
    pytest.importorskip("lightning")
    from towline.lightning import TowlineCheckpointIO

    for collect, most in ((False, 10 * SIZE), (True, 2 * SIZE)):
        plugin = TowlineCheckpointIO(repository, "run", collect=collect)
        for step in range(3):
            path = str(tmp_path / f"epoch=0-step={step}.ckpt")
            plugin.save_checkpoint({"state": state(step), "global_step": step}, path)
            if step < 2:
                plugin.remove_checkpoint(path)
        plugin.teardown()
        assert stored(tmp_path / "repository") < most
        assert (stored(tmp_path / "repository") > 2 * SIZE) == (not collect)


def test_only_rank_0_collects(repository):
    checkpointer = towline.Checkpointer(repository, "run", rank=1, world_size=2, attempt="a", keep_last=1)
    checkpointer.save(1, state(1))
    towline.Checkpointer(repository, "run", rank=0, world_size=2, attempt="a").save(1, state(1)).wait()
    checkpointer.close()
    assert checkpointer._retention._collector is None


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root may become somebody who may write, but not delete what is root's"
)
def test_where_deletes_are_refused_names_expire_and_it_is_said_once():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        repository = towline.open(folder / "repository", cache=folder / "cache")
        save_steps(repository, 3)
        # As in a bucket whose policy lets trainings put, but not delete: files of another user in a folder with the sticky bit.
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o1777 if path.is_dir() else 0o666)
        os.seteuid(65534)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with towline.Checkpointer(repository, "run", keep_last=1) as checkpointer:
                    checkpointer.restore()
                    for step in range(3, 7):
                        checkpointer.save(step, state(step)).wait()
            names = [one.name for one in repository.ls()]
        finally:
            os.seteuid(0)
        assert names == ["run/step-6"]
        (said,) = [str(one.message) for one in caught if "towline" in str(one.message)]
        assert "does not let this process delete" in said and "`towline collect`" in said
        # A collector that may delete does what was left.
        towline.open(folder / "repository").collect(grace=0)
        assert stored(folder / "repository") < 2 * SIZE
        assert towline.open(folder / "repository").verify(data=True).damaged == []
    finally:
        shutil.rmtree(folder)


class Work:
    """A collect that goes on until it is let go, or stopped."""

    def __init__(self, error: Exception | None = None):
        self.over, self.error, self.cancelled = threading.Event(), error, False

    def wait(self) -> None:
        self.over.wait()

    def cancel(self) -> None:
        self.cancelled, self.error = True, towline.Cancelled("stopped")
        self.over.set()

    def result(self) -> str:
        if self.error is not None:
            raise self.error
        return "{}"


class Repository:
    """Whose collects the test lets go."""

    url = "somewhere"

    def __init__(self, *errors: Exception | None):
        self.begun: list[Work] = []
        self._errors, self._engine = list(errors), self

    def begin_collect(self, grace: timedelta) -> Work:
        assert grace == timedelta(0)
        self.begun.append(Work(self._errors.pop(0) if self._errors else None))
        return self.begun[-1]

    def wait_for(self, count: int) -> None:
        while len(self.begun) < count:
            time.sleep(0.001)


def test_requests_that_come_meanwhile_are_one():
    repository = Repository()
    collector = Collector(repository)
    for _ in range(5):
        collector.request()
    repository.wait_for(1)
    for _ in range(5):
        collector.request()
    repository.begun[0].over.set()
    threading.Thread(target=lambda: (repository.wait_for(2), repository.begun[1].over.set())).start()
    collector.close()
    assert len(repository.begun) == 2


def test_it_rests_longer_than_it_works(monkeypatch):
    monkeypatch.setattr(_collecting, "_REST_TIMES", 1_000_000)
    repository = Repository()
    collector = Collector(repository)
    collector.request()
    repository.wait_for(1)
    repository.begun[0].over.set()
    collector.request()
    collector.request()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert len(repository.begun) == 1
        time.sleep(0.01)
    threading.Thread(target=lambda: (repository.wait_for(2), repository.begun[1].over.set())).start()
    # The end is worth no rest.
    collector.close()
    assert len(repository.begun) == 2


def test_closing_does_not_wait_for_ever():
    repository = Repository()
    collector = Collector(repository)
    collector.request()
    repository.wait_for(1)
    collector.close(timeout=0.05)
    assert repository.begun[0].cancelled
    # It can be used again, as between two trainings.
    collector.request()
    repository.wait_for(2)
    repository.begun[1].over.set()
    collector.close()


def test_what_fails_is_said_once_and_tried_again():
    repository = Repository(
        towline.Unreachable("gone"), towline.Unreachable("gone"), towline.Damaged("map"), towline.Denied("no")
    )
    collector = Collector(repository)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in range(1, 6):
            collector.request()
            if count < 5:
                repository.wait_for(count)
                repository.begun[-1].over.set()
            collector.close()
    # After a refusal it does not try again.
    assert len(repository.begun) == 4
    assert ["gone" in str(one.message) for one in caught] == [True, False, False]


def test_verify_and_sync_are_methods_with_reports(repository, tmp_path):
    save_steps(repository, 2)
    with pytest.raises(towline.NotFound):
        repository.sync(tmp_path / "other")
    planned = repository.sync(towline.open(tmp_path / "planned", create=True), "run@latest", dry_run=True)
    assert [(one["name"], one["replaces"]) for one in planned.planned] == [("run/step-1", False)]
    assert towline.open(tmp_path / "planned").ls() == []
    report = repository.sync(tmp_path / "other", ["run/step-1"], create=True)
    assert isinstance(report, SyncReport) and report.names == 1 and report.moved_bytes > SIZE
    other = towline.open(tmp_path / "other", create=False)
    assert [one.name for one in other.ls()] == ["run/step-1"]
    again = repository.sync(other)
    assert again.names == 2 and again.skipped_bytes > SIZE
    towline.Checkpointer(other, "newer").save(1, state(1)).wait()
    repository.copy("run/step-0", "newer/step-1")
    kept = repository.sync(other, "newer")
    assert [(one["name"], one["reason"]) for one in kept.kept] == [("newer/step-1", "newer")] and kept.names == 0
    assert repository.sync(other, "newer", if_absent=True).kept[0]["reason"] == "exists"
    assert repository.sync(other, "newer", force=True).replaced == ["newer/step-1"]
    with pytest.raises(ValueError, match="exclude each other"):
        repository.sync(other, if_absent=True, force=True)
    with pytest.raises(towline.NotFound):
        repository.sync(other, "nothing")
    with pytest.raises(towline.UsageError):
        repository.sync(repository)
    assert torch.equal(towline.Checkpointer(other, "run").restore(0)["noise"], state(0)["noise"])
    verified = other.verify(data=True)
    assert isinstance(verified, VerifyReport) and verified.damaged == [] and verified.bytes > SIZE
    for pack in (tmp_path / "other" / "pack").rglob("*"):
        if pack.is_file():
            pack.chmod(0o600)
            pack.write_bytes(pack.read_bytes()[:-1000] + bytes(1000))
    damaged = other.verify(data=True)
    assert damaged.damaged and all(isinstance(one, Damage) and one.what and one.error for one in damaged.damaged)
    assert any("run/step-1" in one.names for one in damaged.damaged)


def test_reports_are_read_by_attribute_and_by_key():
    report = CollectReport.read({"freed_bytes": 3, "of_a_later_version": 1})
    assert report.freed_bytes == report["freed_bytes"] == 3
    with pytest.raises(KeyError):
        report["of_a_later_version"]
    with pytest.raises(AttributeError):
        report.freed_bytes = 4
