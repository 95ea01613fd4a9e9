"""Distributed checkpoints beside torch's own writers and readers; run by .venv, answers in JSON.

    sharded.py SCRATCH [ROUNDS]

1 GiB of fp32 in 64 tensors, each sharded over the ranks along its rows; ranks are processes of this machine, joined by gloo.
Every round does everything once, in turns; the first warms up and does not count. Figures are seconds, from one barrier to the
next. Loads are from a warm folder into tensors that are there.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import towline
from towline.dcp import StorageReader, StorageWriter

sys.argv, ARGS = sys.argv[:1], sys.argv[1:]
import hooks  # noqa: E402 - it reads the command line

ROWS, COLUMNS, TENSORS = 2048, 2048, 64
SAVERS, STEP = 2, "run/step-1"


def state(rank, ranks, filled=None):
    """A rank's rows of each tensor."""
    mesh = init_device_mesh("cpu", (ranks,))
    share = -(-ROWS // ranks)
    rows = max(0, min(share, ROWS - rank * share))
    made = {}
    for at in range(TENSORS):
        generator = torch.Generator().manual_seed(at * 100 + rank)
        local = torch.full((rows, COLUMNS), filled) if filled is not None else torch.randn(rows, COLUMNS, generator=generator) * 0.02
        made[f"layers.{at}.weight"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
        )
    return made


class Group:
    """The ranks, and the seconds that they take together."""

    def __init__(self, rank, ranks, scratch, what):
        self.rank, self.found = rank, {}
        dist.init_process_group("gloo", init_method=f"file://{scratch}/group-{what}", rank=rank, world_size=ranks)

    def time(self, what, work):
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        self.found.setdefault(what, []).append(time.perf_counter() - began)

    def end(self, scratch, what):
        if self.rank == 0:
            told = {name: seconds[1:] for name, seconds in self.found.items()}
            (scratch / f"{what}.json").write_text(json.dumps(told))
        dist.barrier()
        dist.destroy_process_group()


def saving(rank, scratch, rounds):
    """Every save is new: neither a folder nor a repository is saved to twice."""
    group, held = Group(rank, SAVERS, scratch, "save"), state(rank, SAVERS)
    ways = {
        "FileSystemWriter": lambda at: FileSystemWriter(scratch / f"files-{at}"),
        "FsspecWriter": lambda at: FsspecWriter(f"{scratch}/fsspec-{at}"),
        "towline": lambda at: StorageWriter(str(scratch / f"repository-{at}"), STEP),
        "towline, compression='if-faster'": lambda at: StorageWriter(str(scratch / f"fast-{at}"), STEP, compression="if-faster"),
    }
    for at in range(rounds + 1):
        if rank == 0:
            for kind in ("repository", "fast"):
                towline.open(str(scratch / f"{kind}-{at}"), create=True)
        dist.barrier()
        for what, way in ways.items():
            writer = way(at)
            group.time(what, lambda: dcp.save(held, storage_writer=writer))  # noqa: B023 - called at once
        if rank == 0 and at < rounds:
            for kind in ("files", "fsspec", "repository", "fast"):
                shutil.rmtree(scratch / f"{kind}-{at}")
    group.end(scratch, "save")


def loading(rank, ranks, scratch, rounds):
    what = f"load on {ranks}"
    group, target, truth = Group(rank, ranks, scratch, what), state(rank, ranks, filled=1.0), None
    ways = {
        "FileSystemReader": lambda: FileSystemReader(scratch / f"files-{rounds}"),
        "FsspecReader": lambda: FsspecReader(f"{scratch}/fsspec-{rounds}"),
        "towline": lambda: StorageReader(str(scratch / f"repository-{rounds}"), STEP),
        "towline, saved with compression='if-faster'": lambda: StorageReader(str(scratch / f"fast-{rounds}"), STEP),
    }
    for _ in range(rounds + 1):
        for way, make in ways.items():
            for tensor in target.values():
                tensor.to_local().fill_(1.0)
            reader = make()
            group.time(way, lambda: dcp.load(target, storage_reader=reader))  # noqa: B023 - called at once
            sums = [float(tensor.to_local().double().sum()) for tensor in target.values()]
            truth = truth or sums
            assert sums == truth, f"{way} loaded something else"
    group.end(scratch, what)


def main():
    scratch, rounds = Path(ARGS[0]).resolve(), int(ARGS[1]) if len(ARGS) > 1 else 5
    hooks.fresh(scratch).mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    mp.spawn(saving, (scratch, rounds), nprocs=SAVERS)
    for ranks in (1, 2, 3):
        mp.spawn(loading, (ranks, scratch, rounds), nprocs=ranks)
    told = {what: json.loads((scratch / f"{what}.json").read_text()) for what in ("save", *(f"load on {n}" for n in (1, 2, 3)))}
    shutil.rmtree(scratch)
    print(json.dumps({"torch": torch.__version__, "bytes": 4 * ROWS * COLUMNS * TENSORS, "seconds": told}))


if __name__ == "__main__":
    hooks.recycling()
    main()
