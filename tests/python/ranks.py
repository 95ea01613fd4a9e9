"""Functions run by several ranks, each a process, that talk over gloo."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.multiprocessing as mp

#: A rank that takes longer hangs.
TIMEOUT = 240


def run(world_size: int, folder: Path, work: Callable[..., None], *said: Any) -> list[int]:
    """Runs `work(rank, world_size, *said)` on every rank; how each ended. One that raised prints why."""
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, str(folder), work, said)) for rank in range(world_size)
    ]
    before = dict(os.environ)
    # Several ranks share the cores; addresses are those of this machine.
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    try:
        for rank in ranks:
            rank.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    until = time.monotonic() + TIMEOUT
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks]


def _rank(rank: int, world_size: int, folder: str, work: Callable[..., None], said: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        work(rank, world_size, *said)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        # Others may wait for this rank for ever: they see that it is gone.
        os._exit(1)
    leave()


def leave() -> NoReturn:
    """Ends a rank that succeeded: exit handlers run, the interpreter is not finalized.

    Threads of gloo release tensors late, and torch aborts a process whose interpreter is then being finalized ("terminate
    called without an active exception", https://github.com/pytorch/pytorch/issues/190489; one in a hundred here).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ended_well(code: int, stderr: str) -> bool:
    """Whether a script that cannot call `leave` succeeded: by its exit code, or aborted by torch in finalization."""
    return code == 0 or (code == -signal.SIGABRT and "terminate called without an active exception" in stderr)
