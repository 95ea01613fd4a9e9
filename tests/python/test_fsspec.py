"""The file system `towline://`: as people use it, and what it promises when things go wrong."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import towline

from .ranks import leave

fsspec = pytest.importorskip("fsspec")
# Nothing to do where the wheel is installed, which has the entry point.
fsspec.register_implementation("towline", "towline.fsspec.TowlineFileSystem", clobber=True)

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The repository that addresses are in."""
    url = str(tmp_path / "repository")
    monkeypatch.setenv("TOWLINE_REPO", url)
    return url


@pytest.fixture
def fs(url: str) -> Any:
    return fsspec.filesystem("towline", skip_instance_cache=True)


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def names(fs: Any) -> list[str]:
    return [one.name for one in fs.shared.repository.ls()]


def version(fs: Any, name: str) -> int:
    return fs.shared.engine.find(name)[1]


class Calls:
    """Counts the calls of an object's methods."""

    def __init__(self, inner: Any):
        self.inner, self.counts = inner, Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self.inner, name)


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


# Writing


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


# Many at once


def test_threads_that_close_files_together_share_commits(fs: Any):
    fs.pipe("t/first", b"")
    seq, together = version(fs, "t"), threading.Barrier(32)
    engine = fs.shared.engine
    counted = Calls(engine)
    fs.shared.repository._engine = counted

    def write(number: int) -> None:
        own = fsspec.filesystem("towline")
        with own.open(f"t/{number}", "wb") as file:
            file.write(noise(number, 10_000))
            together.wait()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(write, range(32)))
    fs.shared.repository._engine = engine
    assert len(fs.ls("t")) == 33 and all(fs.cat(f"t/{n}") == noise(n, 10_000) for n in range(32))
    assert version(fs, "t") > seq and counted.counts["amend"] < 20, counted.counts


def test_one_bad_file_does_not_spoil_others(fs: Any):
    fs.pipe("t/f", b"1")
    together = threading.Barrier(9)

    def write(number: int) -> BaseException | None:
        own = fsspec.filesystem("towline")
        try:
            # The last is below what is a file.
            with own.open("t/f/x" if number == 8 else f"t/{number}", "wb") as file:
                file.write(b"2")
                together.wait()
        except FileExistsError as error:
            return error
        return None

    with ThreadPoolExecutor(9) as pool:
        outcomes = list(pool.map(write, range(9)))
    assert outcomes[:8] == [None] * 8 and isinstance(outcomes[8], FileExistsError)
    assert len(fs.ls("t")) == 9


def _write_files(url: str, rank: int) -> None:
    fs = fsspec.filesystem("towline", repo=url)
    for number in range(4):
        fs.pipe(f"run/step-1/{rank}-{number}", noise(rank * 10 + number, 200_000))


def test_processes_write_one_tree_together(fs: Any, url: str):
    fs.shared.repository.ls()
    workers = [SPAWN.Process(target=_write_files, args=(url, rank)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    wanted = {f"run/step-1/{rank}-{n}": noise(rank * 10 + n, 200_000) for rank in range(3) for n in range(4)}
    assert fs.cat("run/step-1", recursive=True) == wanted and names(fs) == ["run/step-1"]


def test_a_forked_child_reads_and_writes(fs: Any, url: str):
    fs.pipe("t/f", b"parent's")
    reader = fs.open("t/f")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = fsspec.filesystem("towline")
            assert reader.read() == b"parent's" and own.cat("t/f") == b"parent's"
            own.pipe("t/g", b"child's")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert fs.cat("t/g") == b"child's"


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


# Those who come with an address


def test_pandas(fs: Any):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"n": range(50_000), "text": [f"row {n}" for n in range(50_000)]})
    frame.to_csv("towline://tables/a.csv", index=False)
    assert pd.read_csv("towline://tables/a.csv").equals(frame)
    pytest.importorskip("pyarrow")
    frame.to_parquet("towline://tables/a.parquet")
    assert pd.read_parquet("towline://tables/a.parquet").equals(frame)
    assert pd.read_parquet("towline://tables/a.parquet", columns=["n"])["n"].sum() == frame["n"].sum()
    assert names(fs) == ["tables"]


def test_pandas_with_options(tmp_path: Path):
    pd = pytest.importorskip("pandas")
    options = {"repo": str(tmp_path / "elsewhere")}
    frame = pd.DataFrame({"n": [1, 2, 3]})
    frame.to_csv("towline://t/a.csv", index=False, storage_options=options)
    assert pd.read_csv("towline://t/a.csv", storage_options=options).equals(frame)


def test_pyarrow_datasets(fs: Any):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    table = pa.table({"n": list(range(9000)), "p": [n % 3 for n in range(9000)]})
    ds.write_dataset(
        table, "big/table", format="parquet", partitioning=["p"], partitioning_flavor="hive", filesystem=fs
    )
    assert names(fs) == ["big/table"]
    read = ds.dataset("big/table", filesystem=fs, format="parquet", partitioning="hive")
    assert read.to_table(filter=ds.field("p") == 1).num_rows == 3000
    assert read.to_table().sort_by("n").column("n").to_pylist() == list(range(9000))
    pq.write_table(table, "big/one.parquet", filesystem=fs)
    assert pq.read_table("big/one.parquet", filesystem=fs).equals(table)


def test_datasets(fs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"n": list(range(1000)), "text": [str(n) for n in range(1000)]})
    data.save_to_disk("towline://sets/train", num_shards=3)
    assert names(fs) == ["sets/train"]
    assert datasets.load_from_disk("towline://sets/train")["n"][:] == data["n"][:]
    both = datasets.DatasetDict(a=data, b=data.select(range(10)))
    both.save_to_disk("towline://sets/both")
    assert len(datasets.load_from_disk("towline://sets/both")["b"]) == 10 and "sets/both" in names(fs)


# torch.distributed.checkpoint


def state(torch: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tensors = {f"layer.{n}": torch.randn(64 + n, 1000) for n in range(12)}
    return {
        "model": tensors,
        "optimizer": {"big": torch.randn(2_000_000), "step": torch.tensor(float(seed))},
        "n": seed,
    }


def zeros(torch: Any, like: Any) -> Any:
    if isinstance(like, dict):
        return {key: zeros(torch, value) for key, value in like.items()}
    return torch.zeros_like(like) if isinstance(like, torch.Tensor) else 0


def same(torch: Any, a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(torch, a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_dcp_saves_and_loads_with_no_code(fs: Any):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    for step in (100, 200):
        dcp.save(state(torch, step), checkpoint_id=f"towline://run-7/step-{step}", no_dist=True)
    assert names(fs) == ["run-7/step-100", "run-7/step-200"]
    assert fs.ls("run-7/step-100", detail=False) == ["run-7/step-100/.metadata", "run-7/step-100/__0_0.distcp"]
    for address, step in (("run-7/step-100", 100), ("run-7@latest", 200)):
        into = zeros(torch, state(torch, step))
        dcp.load(into, checkpoint_id=f"towline://{address}", no_dist=True)
        assert same(torch, into, state(torch, step))
    # Saved once more in its place, and in several files by threads.
    writer = dcp.FsspecWriter("towline://run-7/step-200", thread_count=4)
    dcp.save(state(torch, 3), storage_writer=writer, no_dist=True)
    into = zeros(torch, state(torch, 3))
    dcp.load(into, storage_reader=dcp.FsspecReader("towline://run-7/step-200"), no_dist=True)
    assert same(torch, into, state(torch, 3))


def _train(rank: int, ranks: int, folder: str, url: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(TOWLINE_REPO=url, XDG_CACHE_HOME=f"{folder}/cache-{rank}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(5)
        whole = torch.randn(1001, 500)
        sharded = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "own": {f"{rank}": torch.full((10,), float(rank))}}
        if ranks == 2:
            dcp.save(sharded, checkpoint_id="towline://gang/step-1")
            future = dcp.async_save(sharded, checkpoint_id="towline://gang/step-2")
            future.result()
        for step in (1, 2):
            into = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])}
            dcp.load(into, checkpoint_id=f"towline://gang/step-{step}")
            assert torch.equal(into["w"].full_tensor(), whole)
    finally:
        dist.destroy_process_group()
    leave()


def test_dcp_with_two_ranks_and_one(fs: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fs.shared.repository.ls()
    for ranks in (2, 1):
        workers = [SPAWN.Process(target=_train, args=(rank, ranks, str(tmp_path), url)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(240)
            assert worker.exitcode == 0
    assert names(fs) == ["gang/step-1", "gang/step-2"]
    for step in (1, 2):
        files = [path.rpartition("/")[2] for path in fs.ls(f"gang/step-{step}", detail=False)]
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_what_is_looked_in_is_found_with_folders(fs: Any, tmp_path: Path):
    for path in ("run/a", "run/b/c"):
        fs.pipe(f"towline://{path}", b"x")
    folder, memory = tmp_path / "local", fsspec.filesystem("memory")
    for path in ("run/a", "run/b/c"):
        memory.pipe(f"/{path}", b"x")
    found = fs.find("towline://run", withdirs=True, detail=True)
    assert {path: told["type"] for path, told in found.items()} == {
        path.lstrip("/"): told["type"] for path, told in memory.find("/run", withdirs=True, detail=True).items()
    }
    assert fs.find("run/b", withdirs=True) == ["run/b", "run/b/c"] and fs.find("run/b") == ["run/b/c"]
    assert fs.find("run/a", withdirs=True) == ["run/a"] and fs.find("run/none", withdirs=True) == []
    # A flat folder, as rsync copies one.
    fs.pipe({f"flat/{number}": bytes([number]) for number in range(3)})
    generic = pytest.importorskip("fsspec.generic")
    generic.rsync("towline://flat", f"file://{folder}", fs=generic.GenericFileSystem(default_method="current"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {str(at): bytes([at]) for at in range(3)}


@pytest.mark.parametrize("protocol", ["blockcache", "filecache", "simplecache"])
def test_caches_of_fsspec(fs: Any, tmp_path: Path, protocol: str):
    data = noise(5, 9 << 20)
    fs.pipe("towline://tree/file", data)
    address, options = f"{protocol}::towline://tree/file", {protocol: {"cache_storage": str(tmp_path / "kept")}}
    for _ in range(2):
        with fsspec.open(address, **options) as file:
            file.seek(5 << 20)
            assert file.read(100) == data[5 << 20 :][:100]
            file.seek(10)
            assert file.read(3 << 20) == data[10:][: 3 << 20] and file.read(2) == data[10 + (3 << 20) :][:2]
            buffer = bytearray(1000)
            file.seek(len(data) - 500)
            assert file.readinto(buffer) == 500 and buffer[:500] == data[-500:] and file.read() == b""
    with fsspec.open(address, **options) as file:
        assert file.read() == data


def test_a_blockcache_reads_a_block_once(fs: Any, tmp_path: Path):
    fs.pipe("towline://tree/file", noise(6, 9 << 20))
    cached = fsspec.filesystem("blockcache", fs=fs, cache_storage=str(tmp_path / "kept"))
    cached.cat_file("tree/file", 1 << 20, 2 << 20)
    read: list[Any] = []
    fs.shared.read = lambda *asked: read.append(asked) or type(fs.shared).read(fs.shared, *asked)
    with cached.open("tree/file") as file:
        file.seek(1 << 20)
        file.read(100)
        assert read == []
        file.seek(7 << 20)
        file.read(100)
        assert len(read) == 1


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
