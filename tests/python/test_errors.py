"""The engine's errors as Python's exceptions: classes, numbers of the system, and words."""

from __future__ import annotations

import errno
import os

import pytest
import towline
from towline import errors

from .spooling import MIB, fill, small_disk  # noqa: F401


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("--overwrite replaces it; or name another folder", "overwrite=True replaces it; or name another folder"),
        ("`--keep-last 1` keeps the latest step only", "keep_last=1 keeps the latest step only"),
        ("--keep-last, --keep-every or --keep-min", "keep_last, keep_every or keep_min"),
        ("`towline verify --data --repair`, then save", "Repository.verify(data=True, repair=True), then save"),
        ("look at it (`towline show`), then save", "look at it (Repository.show()), then save"),
        ("`towline save --metric NAME=VALUE` sets one", "metrics={NAME: VALUE} of a save sets one"),
        ("raise --memory", "raise the memory of towline.open"),
        ("run the same command again to resume", "do the same again to resume"),
        ("towline init /data/new", "towline.open('/data/new', create=True)"),
        ("`towline init /data/a new one`; or", "towline.open('/data/a new one', create=True); or"),
        # What only the command line has stays its own.
        ("start one: towline agent --config FILE", "start one: towline agent --config FILE"),
        ("`towline doctor` tells what the store does", "`towline doctor` tells what the store does"),
        ("not found at /data/a--overwrite/b", "not found at /data/a--overwrite/b"),
    ],
)
def test_words_of_the_command_line(said, text):
    assert str(errors.make("conflict", said)) == text
    made = errors.make("conflict", "something", "place", said)
    assert type(made) is towline.Conflict and type(errors.make("busy", said)) is towline.Busy
    assert str(made) == f"something ({text})" and made.help == text


def test_an_error_of_a_restore_says_what_to_pass(repository, tmp_path):
    (tmp_path / "file").write_text("one")
    repository.save(tmp_path / "file", "name")
    (tmp_path / "out").write_text("two")
    with pytest.raises(towline.Conflict, match="overwrite=True") as caught:
        repository.restore("name", tmp_path / "out")
    assert "--" not in str(caught.value)
    repository.restore("name", tmp_path / "out", overwrite=True)
    with pytest.raises(towline.UsageError, match="keep_last, keep_every") as caught:
        repository.expire("run")
    assert "--" not in str(caught.value)


def test_numbers_of_the_system(repository, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        repository.show("nothing")
    assert caught.value.errno == errno.ENOENT
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        full = errors.make("exhausted", "no space", errno=number)
        assert isinstance(full, (towline.DiskFull, OSError)) and full.errno == number and str(full) == "no space"
    memory = errors.make("exhausted", "too little memory")
    assert isinstance(memory, towline.Exhausted) and not isinstance(memory, OSError)


def test_a_full_disk_is_an_oserror(small_disk, tmp_path):  # noqa: F811
    fsspec = pytest.importorskip("fsspec")
    repository = towline.open(small_disk / "repository", memory="64M")
    fs = fsspec.filesystem("towline", repo=repository.url, skip_instance_cache=True)
    fs.pipe("towline://tree/small", b"small")
    ballast = fill(small_disk, 2 * MIB)
    noise = os.urandom(16 * MIB)
    with pytest.raises(OSError) as caught:
        fs.pipe("towline://tree/large", noise)
    assert caught.value.errno == errno.ENOSPC and isinstance(caught.value, towline.Exhausted)
    (tmp_path / "file").write_bytes(noise)
    with pytest.raises(towline.DiskFull) as caught:
        repository.save(tmp_path / "file", "name")
    assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    assert fs.ls("tree", detail=False) == ["tree/small"] and fs.cat("towline://tree/small") == b"small"
    fs.pipe("towline://tree/large", noise)
    assert fs.cat("towline://tree/large") == noise
