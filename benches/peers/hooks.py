"""What saving and restoring costs a training loop, beside torch's own ways; run by .venv, answers in JSON.

    hooks.py ROOM [ROUNDS]

The state is that of a GPT of 92 M parameters (benches/peers/train.py's, wider) after a step of AdamW, 1.03 GiB in fp32. Every
round does everything once, in turns, in one process; figures are seconds. What is compared with `torch.load` is checked: every
byte that Towline reads is.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import towline

sys.argv, ARGS = sys.argv[:1], sys.argv[1:]
import train  # noqa: E402 - it reads the command line only when it is run

WIDTH, LAYERS, CONTEXT = 768, 13, 128


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
        self.found.setdefault(what, []).append(time.perf_counter() - began)
        return made


def memcpy(state, copies):
    for name, tensor in state.items():
        ctypes.memmove(copies[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def blocking(room, state, rounds, clock):
    """How long each way of saving keeps the loop."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpointer = towline.Checkpointer(room / "repository", "run", keep_last=1)
    stager = DefaultStager(StagingOptions(False, True, True, False))
    for at in range(rounds):
        for tensor in state.values():
            tensor.view(-1)[:1000].add_(0.001)
        clock.of("memcpy", lambda: memcpy(state, copies))
        handle = clock.of("towline save", lambda: checkpointer.save(2 * at, state))
        handle.wait()
        began = time.perf_counter()
        handle = clock.of("towline save, background", lambda: checkpointer.save(2 * at + 1, state, stage="background"))
        handle.wait("staged")
        clock.found.setdefault("towline staged, background", []).append(time.perf_counter() - began)
        handle.wait()
        clock.found.setdefault("towline durable, background", []).append(time.perf_counter() - began)
        made = clock.of("dcp.async_save", lambda: dcp.async_save(state, checkpoint_id=room / "dcp"))
        made.result()
        began = time.perf_counter()
        made = clock.of(
            "dcp.async_save, async stager",
            lambda: dcp.async_save(state, checkpoint_id=room / "dcp", async_stager=stager),
        )
        made.staging_completion.result()
        clock.found.setdefault("dcp staged, async stager", []).append(time.perf_counter() - began)
        made.upload_completion.result()
        clock.of("dcp.save", lambda: dcp.save(state, checkpoint_id=room / "dcp"))
        clock.of("torch.save", lambda: torch.save(state, room / "state.pt"))
        safetensors.torch.save_file(state, room / "state.safetensors")
    checkpointer.close()
    stager.close()


def restoring(room, state, rounds, clock):
    """From a warm folder, into fresh tensors and into those that there are."""
    checkpointer = towline.Checkpointer(room / "repository", "run")
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for _ in range(rounds):
        clock.of("towline restore", checkpointer.restore)
        clock.of("towline restore into", lambda: checkpointer.restore(into=target))
        clock.of("torch.load", lambda: torch.load(room / "state.pt"))
        loaded = clock.of("safetensors load_file", lambda: touched(safetensors.torch.load_file(room / "state.safetensors")))
        del loaded
        clock.of("dcp.load", lambda: dcp.load(copies, checkpoint_id=room / "dcp"))
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name
    checkpointer.close()


def touched(tensors):
    """Every page of them is there."""
    return sum(float(tensor.view(-1)[::1024].sum()) for tensor in tensors.values())


def slow_down(room, model, optimizer, rounds):
    """Seconds that a background save takes from the loop: from its begin to its end, less the steps' own time."""
    found = {}
    state = flat_state(model, optimizer)
    # Without a group, torch has no process mode.
    torch.distributed.init_process_group("gloo", init_method=f"file://{room}/group", rank=0, world_size=1)
    checkpointer = towline.Checkpointer(room / "slow", "run", keep_last=1, stage="background")
    checkpointer.protect(optimizer)

    def lost(what, begin, over):
        alone = []
        for _ in range(3):
            began = time.perf_counter()
            step(model, optimizer)
            alone.append(time.perf_counter() - began)
        began, steps = time.perf_counter(), 0
        going = begin()
        while not over(going):
            step(model, optimizer)
            steps += 1
        found.setdefault(what, []).append(time.perf_counter() - began - steps * sorted(alone)[1])

    for at in range(rounds):
        lost("towline", lambda at=at: checkpointer.save(at, state), lambda handle: handle.done())
        for kind in (dcp.state_dict_saver.AsyncCheckpointerType.THREAD, dcp.state_dict_saver.AsyncCheckpointerType.PROCESS):
            lost(
                f"dcp.async_save, {kind.value}",
                lambda kind=kind: dcp.async_save(
                    state, checkpoint_id=room / "dcp-slow", async_checkpointer_type=kind
                ),
                lambda made: made.done(),
            )
    checkpointer.close()
    torch.distributed.destroy_process_group()
    return found


def import_seconds(rounds):
    """What importing towline takes beyond torch."""
    found = {}
    for _ in range(rounds):
        for what, text in {"torch": "import torch", "torch and towline": "import torch, towline, towline.checkpointer"}.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", text], check=True)
            found.setdefault(what, []).append(time.perf_counter() - began)
    return found


def main():
    room, rounds = Path(ARGS[0]), int(ARGS[1]) if len(ARGS) > 1 else 5
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    state, clock = flat_state(model, optimizer), Clock()
    told = {"bytes": sum(tensor.nbytes for tensor in state.values()), "tensors": len(state), "torch": torch.__version__}
    blocking(room, state, rounds, clock)
    restoring(room, state, rounds, clock)
    told["seconds"] = clock.found
    told["lost"] = slow_down(room, model, optimizer, rounds)
    told["import"] = import_seconds(rounds)
    wheel = Path(towline.__file__).parent
    told["installed"] = sum(file.stat().st_size for file in wheel.rglob("*") if file.is_file())
    shutil.rmtree(room)
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
