"""Threads and processes that write by the file system `towline://` together."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .file_system import Calls, fsspec, names, noise, version
from .file_system import fs as fs
from .file_system import url as url

SPAWN = multiprocessing.get_context("spawn")


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
