"""What saving and restoring costs a training loop, beside torch's own ways; run by .venv, answers in JSON.

    hooks.py SCRATCH [ROUNDS [FLOOR]]

The state is that of a GPT of 92 M parameters (benches/peers/train.py's, wider) after a step of AdamW, 1.03 GiB in fp32. Every
round does everything once, in turns, in one process; the first round warms up and does not count. Figures are seconds. What is
compared with `torch.load` is checked: every byte that Towline reads is. FLOOR is the program of benches/tools.

Freed memory is used again rather than given back (glibc's tunables, for all alike): where a machine's memory is its host's,
as here, a page that is touched for the first time costs ten times the copy of its bytes.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import towline

sys.argv, ARGS = sys.argv[:1], sys.argv[1:]
import train  # noqa: E402 - it reads the command line only when it is run

WIDTH, LAYERS, CONTEXT = 768, 13, 128
#: https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html
RECYCLE = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_ARENA_MAX": "1"}


def model_and_optimizer():
    torch.manual_seed(1)
    model = train.Gpt(WIDTH, LAYERS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer


def step(model, optimizer, batch=1):
    tokens = torch.randint(0, 256, (batch, CONTEXT + 1))
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def flat_state(model, optimizer):
    """The tensors of a training, by name: what safetensors can hold, too."""
    state = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{key}.{name}"] = optimizer.state[parameter][key]
    return state


class Clock:
    """Seconds by what was done, a list for all rounds."""

    def __init__(self):
        self.found = {}

    def of(self, what, work):
        began = time.perf_counter()
        made = work()
        self.put(what, began)
        return made

    def put(self, what, began):
        self.found.setdefault(what, []).append(time.perf_counter() - began)


def fresh(path):
    """The path of a folder that is not there."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def memcpy(state, copies):
    for name, tensor in state.items():
        ctypes.memmove(copies[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def blocking(scratch, state, rounds, clock):
    """How long each way of saving keeps the loop, each step in a folder of its own."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpointer = towline.Checkpointer(scratch / "repository", "run", keep_last=2)
    stager = DefaultStager(StagingOptions(False, True, True, False))
    for at in range(rounds + 1):
        for tensor in state.values():
            tensor.view(-1)[:1000].add_(0.001)
        clock.of("memcpy", lambda: memcpy(state, copies))
        clock.of("towline save", lambda: checkpointer.save(2 * at, state)).wait()
        began = time.perf_counter()
        handle = clock.of("towline save, background", lambda: checkpointer.save(2 * at + 1, state, stage="background"))
        handle.wait("staged")
        clock.put("towline staged, background", began)
        handle.wait()
        clock.put("towline durable, background", began)
        made = clock.of("dcp.async_save", lambda: dcp.async_save(state, checkpoint_id=fresh(scratch / "dcp")))
        made.result()
        began = time.perf_counter()
        made = clock.of(
            "dcp.async_save, async stager",
            lambda: dcp.async_save(state, checkpoint_id=fresh(scratch / "dcp"), async_stager=stager),
        )
        made.staging_completion.result()
        clock.put("dcp staged, async stager", began)
        made.upload_completion.result()
        clock.of("dcp.save", lambda: dcp.save(state, checkpoint_id=fresh(scratch / "dcp")))
        clock.of("torch.save", lambda: torch.save(state, scratch / "state.pt"))
    fresh(scratch / "plain").mkdir()
    safetensors.torch.save_file(state, scratch / "plain/state.safetensors")
    checkpointer.close()
    stager.close()


def restoring(scratch, state, rounds, clock, floor):
    """From a warm folder, into fresh tensors and into those that there are."""
    checkpointer = towline.Checkpointer(scratch / "repository", "run")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    raw = towline.Checkpointer(scratch / "raw", "run", compression="off")
    raw.save(0, state).wait()
    for _ in range(rounds + 1):
        if floor:
            clock.of("read + BLAKE3 of the same bytes", lambda: subprocess.run([floor, "read", scratch / "plain"], check=True))
        clock.of("towline restore", checkpointer.restore)
        clock.of("towline restore into", lambda: checkpointer.restore(into=target))
        clock.of("towline restore into, saved raw", lambda: raw.restore(into=target))
        clock.of("torch.load", lambda: torch.load(scratch / "state.pt"))
        clock.of("safetensors load_file", lambda: touched(safetensors.torch.load_file(scratch / "plain/state.safetensors")))
        clock.of("dcp.load", lambda: dcp.load(target, checkpoint_id=scratch / "dcp"))
    for tensor in target.values():
        tensor.zero_()
    checkpointer.restore(into=target)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name
    checkpointer.close()
    raw.close()


def touched(tensors):
    """Every page of them is there."""
    return sum(float(tensor.view(-1)[::1024].sum()) for tensor in tensors.values())


def slow_down(scratch, model, optimizer, rounds):
    """Seconds that a background save takes from the loop: from its begin to its end, less the steps' own time."""
    found = {}
    state = flat_state(model, optimizer)
    # Without a group, torch has no process mode.
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=0, world_size=1)
    ways = {"towline": "auto", "towline, compression='if-faster'": "if-faster"}
    savers = {
        what: towline.Checkpointer(scratch / "slow", f"run-{at}", keep_last=1, stage="background", compression=how)
        for at, (what, how) in enumerate(ways.items())
    }
    for checkpointer in savers.values():
        checkpointer.protect(optimizer)

    def alone():
        began = time.perf_counter()
        step(model, optimizer)
        return time.perf_counter() - began

    def lost(what, begin, over):
        before = [alone() for _ in range(2)]
        began, steps = time.perf_counter(), 0
        going = begin()
        while not over(going):
            step(model, optimizer)
            steps += 1
        took = time.perf_counter() - began
        usual = median([*before, *(alone() for _ in range(2))])
        found.setdefault(what, []).append(took - steps * usual)

    kinds = dcp.state_dict_saver.AsyncCheckpointerType
    for at in range(rounds + 1):
        for what, checkpointer in savers.items():
            lost(what, lambda saver=checkpointer: saver.save(at, state), lambda handle: handle.done())
        for kind in (kinds.THREAD, kinds.PROCESS):
            folder = fresh(scratch / "dcp-slow")
            lost(
                f"dcp.async_save, {kind.value}",
                lambda: dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind),  # noqa: B023
                lambda made: made.done(),
            )
    for checkpointer in savers.values():
        checkpointer.close()
    torch.distributed.destroy_process_group()
    return {what: seconds[1:] for what, seconds in found.items()}


def growth(scratch):
    """Bytes of memory that this process has more after 200 saves than after 20, and those of the state."""
    state = {f"w{at}": torch.randn(1 << 20) for at in range(16)}
    with towline.Checkpointer(scratch / "many", "run", keep_last=1) as checkpointer:
        for at in range(200):
            for tensor in state.values():
                tensor.add_(0.001)
            checkpointer.save(at, state)
            if at == 20:
                checkpointer.wait()
                before = resident()
        checkpointer.wait()
        return resident() - before, sum(tensor.nbytes for tensor in state.values())


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def import_seconds(rounds):
    """What importing towline takes once torch is there."""
    text = "import torch, time; began = time.perf_counter(); import towline, towline.checkpointer; print(time.perf_counter() - began)"
    run = lambda: float(subprocess.run([sys.executable, "-c", text], check=True, capture_output=True).stdout)
    return [run() for _ in range(rounds + 1)][1:]


def recycling():
    """Begins this program again, with freed memory kept, unless it was begun so."""
    if not RECYCLE.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **RECYCLE, "HF_HUB_OFFLINE": "1"})


def main():
    scratch, rounds, floor = Path(ARGS[0]), int(ARGS[1]) if len(ARGS) > 1 else 5, ARGS[2] if len(ARGS) > 2 else None
    fresh(scratch).mkdir(parents=True)
    model, optimizer = model_and_optimizer()
    for _ in range(3):
        step(model, optimizer)
    state, clock = flat_state(model, optimizer), Clock()
    told = {"bytes": sum(tensor.nbytes for tensor in state.values()), "tensors": len(state), "torch": torch.__version__}
    blocking(scratch, state, rounds, clock)
    restoring(scratch, state, rounds, clock, floor)
    told["seconds"] = {what: seconds[1:] for what, seconds in clock.found.items()}
    told["lost"] = slow_down(scratch, model, optimizer, rounds)
    told["growth"] = growth(scratch)
    told["import"] = import_seconds(rounds)
    wheel = Path(towline.__file__).parent
    told["installed"] = sum(file.stat().st_size for file in wheel.rglob("*") if file.is_file())
    fresh(scratch)
    print(json.dumps(told))


if __name__ == "__main__":
    recycling()
    main()
