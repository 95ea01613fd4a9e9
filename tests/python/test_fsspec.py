"""The file system `towline://`: names, looking and reading, as people use it, and what it promises when things go wrong."""

from __future__ import annotations

import io
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import towline

from .file_system import Calls, fsspec, names, noise
from .file_system import fs as fs
from .file_system import url as url

# Names


@pytest.mark.parametrize(
    ("saved", "made", "path", "name"),
    [
        ([], [], "run-7/step-100/.metadata", "run-7/step-100"),
        ([], [], "a/step-1/b/step-2/f", "a/step-1"),
        ([], [], "a/step-x/f", "a/step-x"),
        ([], ["a"], "a/b/c/f", "a"),
        ([], ["a/b", "a/b/c"], "a/b/c/d/f", "a/b"),
        ([], [], "a/b/f", "a/b"),
        ([], [], "table/year=2026/month=1/f", "table"),
        ([], ["table/year=2026"], "table/year=2026/f", "table"),
        (["a/x/y"], [], "a/x/b/c/f", "a/x"),
        (["a/x", "a/b/x"], [], "a/b/c/f", "a"),
        (["run/x"], [], "run/step-1/f", "run/step-1"),
        (["a/b/x", "a/y"], [], "a/b/z", "a/b"),
    ],
)
def test_a_path_is_a_name_and_a_path_in_its_tree(fs: Any, saved: list, made: list, path: str, name: str):
    for file in saved:
        fs.pipe(file, b"x")
    for folder in made:
        fs.makedirs(folder)
    before = set(names(fs))
    fs.pipe(f"towline://{path}", b"hello")
    assert set(names(fs)) - before <= {name} and name in names(fs)
    assert fs.shared.repository.read(name, path[len(name) + 1 :]) == b"hello"
    assert fs.cat(f"towline://{path}") == b"hello" and fs.isfile(path)


def test_a_step_in_a_saved_folder_is_read_there(fs: Any, tmp_path: Path):
    (tmp_path / "dir" / "step-5").mkdir(parents=True)
    (tmp_path / "dir" / "step-5" / "f").write_bytes(b"in the tree")
    fs.shared.repository.save(tmp_path / "dir", "run")
    assert fs.cat("run/step-5/f") == b"in the tree"
    fs.pipe("run/step-5/g", b"beside it")
    fs.pipe("run/step-6/f", b"a step")
    assert names(fs) == ["run", "run/step-6"]
    assert fs.ls("run", detail=False) == ["run/step-5", "run/step-6"]
    assert fs.find("run") == ["run/step-5/f", "run/step-5/g", "run/step-6/f"]


def test_a_file_above_all_folders_is_refused_with_the_way_out(fs: Any):
    with pytest.raises(PermissionError, match="towline://NAME/f"):
        fs.pipe("towline://f", b"x")
    with pytest.raises(towline.UsageError, match="not a name"):
        fs.pipe("towline://a b/f", b"x")


def test_choices_of_a_step_are_read_and_not_written(fs: Any):
    for step in (1, 10, 9):
        fs.pipe(f"run/step-{step}/f", f"{step}".encode())
    assert fs.cat("towline://run@latest/f") == b"10"
    assert fs.ls("run@upto=9", detail=False) == ["run@upto=9/f"]
    with pytest.raises(towline.UsageError, match="only read"):
        fs.pipe("towline://run@latest/f", b"x")


def test_options_name_the_repository(fs: Any, tmp_path: Path):
    other = str(tmp_path / "other")
    with fsspec.open("towline://a/f", "wb", repo=other) as file:
        file.write(b"there")
    assert not fs.exists("a/f")
    with fsspec.open("towline://a/f", repo=other) as file:
        assert file.read() == b"there"
    assert fsspec.filesystem("towline", repo=other).fsid != fs.fsid
    again = pickle.loads(pickle.dumps(fsspec.filesystem("towline", repo=other)))
    assert again.cat("a/f") == b"there"


# Looking


def test_folders_are_listed_walked_and_matched(fs: Any):
    for path in ("t/a", "t/d/b.txt", "t/d/e/c.txt", "u/v/x"):
        fs.pipe(path, path.encode())
    assert fs.ls("", detail=False) == ["t", "u"]
    assert fs.ls("towline://t", detail=False) == ["t/a", "t/d"] and fs.ls("t/a", detail=False) == ["t/a"]
    assert fs.find("") == ["t/a", "t/d/b.txt", "t/d/e/c.txt", "u/v/x"] and fs.find("t/d/e/c.txt") == ["t/d/e/c.txt"]
    assert fs.find("t", maxdepth=2) == ["t/a", "t/d/b.txt"]
    assert fs.find("t", withdirs=True, detail=True)["t/d"]["type"] == "directory"
    assert fs.glob("t/**/*.txt") == ["t/d/b.txt", "t/d/e/c.txt"] and fs.glob("*/d/*") == ["t/d/b.txt", "t/d/e"]
    assert [(one, sorted(dirs), sorted(files)) for one, dirs, files in fs.walk("t/d")] == [
        ("t/d", ["e"], ["b.txt"]),
        ("t/d/e", [], ["c.txt"]),
    ]
    told = fs.info("t/d/b.txt")
    assert (told["size"], told["type"], told["name"]) == (9, "file", "t/d/b.txt")
    assert fs.isdir("t") and fs.isdir("u") and fs.isdir("t/d/e") and not fs.exists("t/z") and not fs.isdir("t/a")
    assert fs.du("t") == len("t/at/d/b.txtt/d/e/c.txt") and fs.modified("t/a").year > 2000
    for missing in ("nothing", "t/nothing", "t/a/nothing"):
        with pytest.raises(FileNotFoundError):
            fs.ls(missing)
        with pytest.raises(FileNotFoundError):
            fs.open(missing)


def test_links_are_the_files_that_they_lead_to(fs: Any, tmp_path: Path):
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "a").write_bytes(b"hello")
    for name, target in {
        "to-a": "d/a",
        "d/up": "../to-a",
        "gone": "nowhere",
        "out": "/etc/passwd",
        "round": "round",
        "to-d": "d",
    }.items():
        (tree / name).symlink_to(target)
    fs.shared.repository.save(tree, "linked")
    assert fs.cat_file("linked/to-a") == fs.cat_file("linked/d/up") == b"hello"
    info = fs.info("linked/to-a")
    assert (info["type"], info["size"], info["islink"], info["destination"]) == ("file", 5, True, "d/a")
    assert fs.find("linked") == ["linked/d/a", "linked/d/up", "linked/to-a"]
    for name in ("gone", "out", "round", "to-d"):
        assert fs.info(f"linked/{name}")["type"] == "link"
        with pytest.raises(FileNotFoundError):
            fs.cat_file(f"linked/{name}")
    fs.get("linked", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out" / "d" / "up").read_bytes() == b"hello"


# Reading


def test_any_way_of_reading_gives_the_bytes(fs: Any):
    whole = noise(1, 11_000_000)
    fs.pipe("t/f", whole)
    dice = random.Random(2)
    with fs.open("t/f", block_size=1 << 16) as file:
        assert file.seekable() and file.readable() and not file.writable() and file.size == len(whole)
        for _ in range(300):
            at, size = dice.randrange(len(whole) + 9), int(2 ** (dice.random() * 21))
            assert file.seek(at) == at
            if dice.random() < 0.5:
                assert file.read(size) == whole[at : at + size]
            else:
                buffer = bytearray(size)
                count = file.readinto(buffer)
                assert buffer[:count] == whole[at : at + size] and count == max(0, min(size, len(whole) - at))
            assert file.tell() == at + min(size, max(0, len(whole) - at))
        file.seek(-5, io.SEEK_END)
        assert file.read() == whole[-5:] and file.read() == b"" and file.readinto(bytearray(3)) == 0
        with pytest.raises(OSError):
            file.seek(-1)
    with pytest.raises(ValueError):
        file.read()
    assert b"".join(fs.open("t/f").readlines()) == whole
    assert fs.read_block("t/f", 5, 100) == whole[5:105] and fs.head("t/f", 10) == whole[:10]


def test_reads_are_few(fs: Any):
    whole = noise(3, 40_000_000)
    fs.pipe("t/f", whole)
    with fs.open("t/f") as file:
        file._tree.opened = calls = Calls(file._tree.opened)
        got = b"".join(iter(lambda: file.read(100_000), b""))
        assert got == whole and calls.counts["read"] <= 8, "sequential reads read ahead"
        calls.counts.clear()
        file.seek(1_000_000)
        buffer = bytearray(30_000_000)
        assert file.readinto(buffer) == len(buffer) and buffer == whole[1_000_000:31_000_000]
        assert calls.counts == {"read_into": 1}, "a large read goes straight to its memory"
    fs.pipe("t/small", whole[:3_000_000])
    with fs.open("t/small") as file:
        file._tree.opened = calls = Calls(file._tree.opened)
        for at in (2_999_900, 5, 1_500_000):
            file.seek(at)
            assert file.read(90) == whole[at : at + 90]
        assert calls.counts["read"] == 1, "a small file is read once"


def test_many_ranges_are_one_call(fs: Any, monkeypatch: pytest.MonkeyPatch):
    whole = noise(4, 5_000_000)
    fs.pipe({"t/f": whole, "t/g": whole[::-1], "u/h": b"0123456789"})
    calls: Counter = Counter()
    read = type(fs.shared).read
    monkeypatch.setattr(
        type(fs.shared), "read", lambda shared, tree, ranges: calls.update(read=1) or read(shared, tree, ranges)
    )
    starts, ends = [7, 4_999_000, None, -3, 100], [2_000_000, 9_000_000, 10, None, 50]
    got = fs.cat_ranges(["t/f", "t/g", "t/f", "u/h", "t/f"], starts, ends, on_error="raise")
    assert got == [whole[7:2_000_000], whole[::-1][4_999_000:], whole[:10], b"789", b""]
    assert calls["read"] == 2, "one for each tree"
    assert fs.cat_file("u/h", start=-4, end=-1) == b"678" and fs.cat_file("u/h", 8, 100) == b"89"
    lacking = fs.cat_ranges(["t/f", "t/none"], 0, 3, on_error="return")
    assert lacking[0] == whole[:3] and isinstance(lacking[1], FileNotFoundError)
    calls.clear()
    assert fs.cat(["t/f", "t/g"]) == {"t/f": whole, "t/g": whole[::-1]} and calls["read"] == 1
    assert fs.cat("t", recursive=True).keys() == {"t/f", "t/g"}
    assert fs.cat(["u/h", "u/none"], on_error="omit").keys() == {"u/h"}


def test_an_open_file_stays_as_it_was(fs: Any):
    fs.pipe("t/f", noise(5, 20_000_000))
    with fs.open("t/f") as file:
        assert file.read(10) == noise(5, 20_000_000)[:10]
        fs.pipe("t/f", b"another")
        assert file.read() == noise(5, 20_000_000)[10:]
    assert fs.cat("t/f") == b"another"


def test_damage_is_found_and_named(fs: Any, url: str):
    whole = noise(6, 3_000_000)
    fs.pipe("t/f", whole)
    for pack in Path(url, "pack").glob("*/*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    with fs.open("t/f") as file, pytest.raises(towline.Damaged):
        file.read()
    with pytest.raises(towline.Damaged):
        fs.cat_file("t/f")
