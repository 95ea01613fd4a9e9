"""Writing, moving and removing by the file system `towline://`: what is there when, and what an error leaves."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .file_system import Calls, fsspec, names, noise, version
from .file_system import fs as fs
from .file_system import url as url


def test_a_file_is_there_once_it_is_closed_and_not_before(fs: Any):
    with fs.open("t/f", "wb") as file:
        file.write(b"0123")
        file.flush()
        assert not fs.exists("t/f") and file.tell() == 4
        file.write(bytearray(b"4567"))
        assert file.seek(1) == 1 and file.write(b"x") == 1
    assert fs.cat("t/f") == b"0x234567"
    with fs.open("t/f", "ab") as file:
        file.write(b"89")
    with fs.open("t/g", "w", encoding="utf-8") as file:
        file.write("\u00e9\n")
    assert fs.cat("t/f") == b"0x23456789" and fs.cat("t/g") == "\u00e9\n".encode()
    fs.touch("t/empty")
    assert fs.info("t/empty")["size"] == 0 and fs.cat("t/empty") == b""
    with pytest.raises(FileExistsError):
        fs.open("t/f", "xb")
    with fs.open("t/h", "xb") as file:
        file.write(b"new")


def test_long_files_are_staged_on_the_disk(fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = noise(7, 40_000_000)
    with fs.open("t/f", "wb") as file:
        for at in range(0, len(whole), 3_333_333):
            file.write(whole[at : at + 3_333_333])
        assert not isinstance(file._staged, io.BytesIO)
    assert fs.cat("t/f") == whole
    assert not list(tmp_path.glob("towline-*")), "nothing is left of it"


def test_what_an_exception_leaves_is_discarded(fs: Any):
    fs.pipe("t/f", b"old")
    with pytest.raises(ZeroDivisionError), fs.open("t/f", "wb") as file:
        file.write(b"half")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), fs.open("t/f", "w") as file:
        file.write("half")
        raise ZeroDivisionError
    dropped = fs.open("t/g", "wb")
    dropped.write(b"never closed")
    del dropped
    assert fs.cat("t/f") == b"old" and not fs.exists("t/g")
    code = "import fsspec, os; f = fsspec.open('towline://t/g', 'wb').open(); f.write(b'x'); os._exit(9)"
    register = (
        "import fsspec; fsspec.register_implementation('towline', 'towline.fsspec.TowlineFileSystem', clobber=True);"
    )
    assert subprocess.run([sys.executable, "-c", register + code], env=os.environ, check=False).returncode == 9
    assert fs.ls("t", detail=False) == ["t/f"]


@pytest.mark.parametrize("compression", [None, "gzip", "bz2", "xz", "infer"])
@pytest.mark.parametrize("mode", ["wb", "w"])
def test_files_that_fsspec_opens_are_discarded_too(fs: Any, mode: str, compression: str | None):
    """`fsspec.open` closes its files without saying why."""
    data = "a line\n" * 1000 if mode == "w" else b"a line\n" * 1000

    def opened(how: str = mode) -> Any:
        return fsspec.open("towline://t/f.gz", how, compression=compression)

    with pytest.raises(ZeroDivisionError), opened() as file:
        file.write(data)
        raise ZeroDivisionError
    assert names(fs) == []
    with opened() as file:
        file.write(data)
    with opened(mode.replace("w", "r")) as file:
        assert file.read() == data
    before = fs.cat("t/f.gz")
    with pytest.raises(ZeroDivisionError), opened() as file:
        file.write(data[:7])
        raise ZeroDivisionError
    assert fs.cat("t/f.gz") == before
    # Not by an exception that another block is left by, or that was dealt with.
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with opened() as file:
            file.write(data[:7])
    with opened() as file:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            file.write(data[:14])
    with opened(mode.replace("w", "r")) as file:
        assert file.read() == data[:14]
    several = fsspec.open_files(["towline://t/a", "towline://t/b"], mode, compression=compression)
    with pytest.raises(ZeroDivisionError), several as files:
        files[0].write(data)
        raise ZeroDivisionError
    assert not fs.exists("t/a") and not fs.exists("t/b")


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_compressed_files(fs: Any, mode: str):
    data = "a line\n" * 1000 if mode == "w" else b"a line\n" * 1000
    packed = {"compression": "gzip"}
    with fs.open("t/a.gz", mode, **packed) as file:
        file.write(data)
    file = fs.open("t/b.gz", mode, compression="infer")
    file.write(data)
    assert not fs.exists("t/b.gz")
    file.close()
    file.close()
    with pytest.raises(ValueError):
        file.write(data)
    with pytest.raises(ZeroDivisionError), fs.open("t/c.gz", mode, **packed) as file:
        file.write(data)
        raise ZeroDivisionError
    # Never closed.
    for said in (packed, {}):
        file = fs.open("t/c.gz", mode, **said)
        file.write(data)
        del file
    with fs.transaction, fs.open("t/d.gz", mode, **packed) as file:
        file.write(data)
    for name in "abd":
        with fs.open(f"t/{name}.gz", mode.replace("w", "r"), **packed) as file:
            assert file.read() == data
        assert gzip.decompress(fs.cat(f"t/{name}.gz")) == b"a line\n" * 1000
    with pytest.raises(LookupError):
        fs.open("t/c.gz", "w", encoding="of the moon")
    assert not fs.exists("t/c.gz")
    with fs.open("t/plain", mode, compression="infer") as file:
        file.write(data)
    assert fs.cat("t/plain") == b"a line\n" * 1000


def test_what_is_in_the_way_is_said(fs: Any):
    fs.pipe("t/d/f", b"1")
    with pytest.raises(IsADirectoryError):
        fs.open("t/d", "wb")
    with pytest.raises(IsADirectoryError):
        fs.open("t/d")
    with pytest.raises(IsADirectoryError):
        fs.rm("t/d")
    with pytest.raises(FileExistsError), fs.open("t/d/f/g", "wb") as file:
        file.write(b"below a file")
    with pytest.raises(FileExistsError):
        fs.makedirs("t/d/f", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("t/d")
    with pytest.raises(FileExistsError):
        fs.mkdir("t/d")
    for lacking in (lambda: fs.rm("t/none"), lambda: fs.mv("t/none", "t/f"), lambda: fs.cat("t/none")):
        with pytest.raises(FileNotFoundError):
            lacking()
    assert fs.find("t") == ["t/d/f"]


def test_a_repository_that_cannot_be_written_says_so(fs: Any, url: str):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    fs.pipe("t/f", b"1")
    for folder, _, _ in os.walk(url):
        os.chmod(folder, 0o555)
    try:
        with pytest.raises(PermissionError):
            fs.pipe("t/g", b"2")
        assert fs.cat("t/f") == b"1"
    finally:
        for folder, _, _ in os.walk(url):
            os.chmod(folder, 0o755)


def test_files_and_folders_move_within_trees_and_between_them(fs: Any):
    fs.pipe({"t/m.tmp": b"new", "t/m": b"old", "t/d/a": b"a", "t/d/e/b": b"b", "u/x": b"x"})
    before = version(fs, "t")
    fs.rename("towline://t/m.tmp", "towline://t/m")
    assert fs.cat("t/m") == b"new" and not fs.exists("t/m.tmp") and version(fs, "t") > before
    fs.mv("t/d", "t/moved", recursive=True)
    assert fs.find("t") == ["t/m", "t/moved/a", "t/moved/e/b"]
    fs.mv("t/m", "u/n")
    assert fs.cat("u/n") == b"new" and fs.find("t") == ["t/moved/a", "t/moved/e/b"]
    fs.mv("t/moved", "u", recursive=True)
    assert fs.find("u") == ["u/moved/a", "u/moved/e/b", "u/n", "u/x"]
    fs.mv("u/x", "u/moved/")
    assert fs.cat("u/moved/x") == b"x"
    fs.mv("u", "v/w", recursive=True)
    assert "v/w" in names(fs) and "u" not in names(fs) and fs.cat("v/w/n") == b"new"
    fs.cp("v/w/n", "v/w/copy")
    assert fs.cat("v/w/copy") == b"new" == fs.cat("v/w/n")
    with pytest.raises(ValueError, match="into itself"):
        fs.mv("v/w/moved", "v/w/moved/e/f", recursive=True)


def test_a_move_to_another_tree_keeps_all_and_can_be_taken_back(fs: Any, tmp_path: Path):
    sub = tmp_path / "tree" / "sub"
    (sub / "real").mkdir(parents=True)
    (sub / "empty").mkdir()
    (sub / "real" / "x").write_bytes(b"x")
    (sub / "run.sh").write_bytes(b"#!/bin/sh")
    (sub / "run.sh").chmod(0o755)
    links = {"current": "real", "dangling": "/not/here", "file": "real/x"}
    for link, target in links.items():
        (sub / link).symlink_to(target)
    (tmp_path / "tree" / "tool").write_bytes(b"#!/bin/sh")
    (tmp_path / "tree" / "tool").chmod(0o755)
    repository = fs.shared.repository
    repository.save(tmp_path / "tree", "src/a")
    fs.pipe("dst/b/x", b"x")
    fs.mv("src/a/sub", "dst/b/sub", recursive=True)
    fs.mv("src/a/tool", "dst/b/tool")
    assert repository.history("src/a").kept, "undelete takes it back"
    repository.restore("dst/b", tmp_path / "moved")
    moved = tmp_path / "moved" / "sub"
    assert {link: os.readlink(moved / link) for link in links} == links
    assert (moved / "empty").is_dir() and (moved / "current" / "x").read_bytes() == b"x"
    assert [(one.stat().st_mode & 0o777) for one in (moved / "run.sh", tmp_path / "moved" / "tool")] == [0o755] * 2
    # To a new name, and a whole tree into another one.
    fs.mv("dst/b/sub", "dst/new", recursive=True)
    assert fs.find("dst/new") == [f"dst/new/{one}" for one in ("file", "real/x", "run.sh")]
    fs.mv("dst/new", "dst/b/again", recursive=True)
    assert "dst/new" not in names(fs) and fs.cat("dst/b/again/real/x") == b"x"
    with pytest.raises(FileExistsError):
        fs.pipe("src/c/again/f", b"f")
        fs.mv("src/c/again", "dst/b", recursive=True)
    assert fs.cat("src/c/again/f") == b"f", "nothing is removed"


def test_a_move_leaves_what_others_save_at_its_source_meanwhile(fs: Any, monkeypatch: pytest.MonkeyPatch):
    fs.pipe({"run/step-1/x": b"1", "run/step-2/x": b"2", "dst/b/y": b"y"})
    graft = fs.shared.graft

    def grafting(source: Any, target: Any) -> None:
        graft(source, target)
        fs.pipe("run/step-3/x", b"3")

    monkeypatch.setattr(fs.shared, "graft", grafting)
    fs.mv("run", "dst/b/moved", recursive=True)
    assert fs.cat("dst/b/moved/step-2/x") == b"2"
    assert fs.find("run") == ["run/step-3/x"]


def test_a_move_leaves_what_others_save_below_it_meanwhile(fs: Any, monkeypatch: pytest.MonkeyPatch):
    fs.pipe({"run/step-1/x": b"1", "dst/b/y": b"y"})
    graft = fs.shared.graft

    def grafting(source: Any, target: Any) -> None:
        graft(source, target)
        fs.shared.repository.copy("run/step-1", "run/step-1/more")

    monkeypatch.setattr(fs.shared, "graft", grafting)
    fs.mv("run/step-1", "dst/b/moved", recursive=True)
    assert fs.cat("dst/b/moved/x") == b"1" and names(fs) == ["dst/b", "run/step-1/more"]


def test_files_folders_and_trees_are_removed(fs: Any):
    fs.pipe({"t/a": b"1", "t/d/b": b"2", "t/d/c": b"3", "r/step-1/f": b"4", "r/step-2/f": b"5"})
    fs.rm("towline://t/a")
    fs.rm("t/d/b*")
    assert fs.find("t") == ["t/d/c"]
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("t/d")
    fs.rm("t/d", recursive=True)
    assert not fs.exists("t/d") and fs.isdir("t")
    fs.rmdir("t")
    assert not fs.exists("t")
    fs.rm("r", recursive=True)
    assert names(fs) == [] and fs.ls("") == []
    removals = [fs.shared.repository.history(f"r/step-{step}").kept[0].taken.entry for step in (1, 2)]
    assert removals[0] == removals[1], "in one commit"


@pytest.mark.parametrize("root", ["", "/", "towline://", ["t", ""]])
def test_the_root_is_not_removed(fs: Any, root: Any):
    fs.pipe({"t/a": b"1", "r/step-1/f": b"2"})
    fs.makedirs("made")
    for recursive in (True, False):
        with pytest.raises(ValueError, match="names one by one"):
            fs.rm(root, recursive=recursive)
    assert names(fs) == ["r/step-1", "t"] and fs.isdir("made")
    for name in fs.ls("", detail=False):
        fs.rm(name, recursive=True)
    assert names(fs) == [] and fs.ls("") == []


def test_made_folders_are_there_until_they_are_removed(fs: Any):
    fs.makedirs("towline://a/b/c", exist_ok=True)
    fs.makedirs("a/b/c", exist_ok=True)
    assert fs.isdir("a/b/c") and fs.isdir("a") and fs.ls("a", detail=False) == ["a/b"] and names(fs) == []
    other = fsspec.filesystem("towline", skip_instance_cache=True)
    assert other.isdir("a/b/c"), "folders are the process's, not one file system's"
    fs.rm("a", recursive=True)
    assert not fs.exists("a")
    with pytest.raises(FileNotFoundError):
        fs.mkdir("x/y", create_parents=False)


def test_a_dict_is_piped_by_one_commit_for_a_tree(fs: Any):
    fs.pipe("towline://tree/old", b"old")
    counted = Calls(fs.shared.engine)
    fs.shared.repository._engine = counted
    files = {f"towline://tree/{number}": noise(number, 100) for number in range(20)}
    fs.pipe({**files, "towline://run/step-1/a": b"a", "towline://run/step-1/b/c": memoryview(b"c")})
    assert counted.counts["amend"] == 2
    assert fs.cat(list(files)) == {path.removeprefix("towline://"): data for path, data in files.items()}
    assert names(fs) == ["run/step-1", "tree"] and fs.cat("run/step-1/b/c") == b"c" and fs.cat("tree/old") == b"old"
    with pytest.raises(FileExistsError):
        fs.pipe({"tree/new": b"x", "tree/old": b"y"}, mode="create")
    with pytest.raises(IsADirectoryError):
        fs.pipe({"tree/new": b"x", "run/step-1/b": b"y"})
    assert not fs.exists("tree/new"), "all of it or nothing"
    with fs.transaction:
        fs.pipe({"tree/new": b"x", "tree/newer": b"y"})
        assert not fs.exists("tree/new")
    assert fs.cat("tree/newer") == b"y"


# Transactions


def test_a_transaction_is_one_commit_for_a_tree(fs: Any):
    fs.pipe({"t/a": b"a", "t/b": b"b", "t/m": b"old"})
    fs.shared.repository._engine = counted = Calls(fs.shared.repository._engine)
    with fs.transaction:
        for number in range(20):
            fs.pipe(f"t/{number}", b"n")
        with fs.open("t/m.tmp", "wb") as file:
            file.write(b"new")
        fs.rm("t/m")
        fs.mv("t/m.tmp", "t/m")
        fs.mv("t/a", "t/c")
        fs.rm("t/b")
        fs.pipe("t/gone", b"x")
        fs.rm("t/gone")
        fs.pipe("other/f", b"another tree")
        assert fs.ls("t", detail=False) == ["t/a", "t/b", "t/m"] and fs.cat("t/m") == b"old"
    assert counted.counts["amend"] == 2
    fs.shared.repository._engine = counted.inner
    assert set(fs.ls("t", detail=False)) == {"t/c", "t/m", *(f"t/{n}" for n in range(20))}
    assert fs.cat("t/m") == b"new" and fs.cat("other/f") == b"another tree"
    fs.pipe("t/after", b"1")
    assert fs.exists("t/after"), "files are committed at once again"


def test_a_transaction_that_fails_leaves_nothing(fs: Any):
    fs.pipe({"t/a": b"a"})
    seq = version(fs, "t")
    with pytest.raises(ZeroDivisionError), fs.transaction:
        fs.pipe("t/b", b"b")
        fs.rm("t/a")
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="outside of it"), fs.transaction:
        fs.pipe("t/b", b"b")
        fs.rm("t", recursive=True)
    assert version(fs, "t") == seq and fs.find("t") == ["t/a"]
    fs.pipe("t/b", b"b")
    assert fs.cat("t/b") == b"b"
