"""What loading weights takes on a host, beside torch, safetensors, Run:ai's streamer and fastsafetensors; answers in JSON.

    weights.py SCRATCH [ROUNDS [FLOOR [TOWLINE]]]

A model of 1 GiB in bf16, one safetensors file of 64 tensors, in a warm page cache. Every round does everything once, in turns; the
first round warms up and does not count. Figures are seconds until every page of every tensor is there: a loader that maps does its
work when the pages are touched. FLOOR is the program of benches/tools, TOWLINE the command, which runs the agent.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch

import towline

sys.argv, ARGS = sys.argv[:1], sys.argv[1:]
from hooks import Clock, fresh, recycling  # noqa: E402 - it reads the command line

TENSORS, ROWS, COLUMNS = 64, 2048, 4096


def weights():
    generator = torch.Generator().manual_seed(1)
    make = lambda: (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).to(torch.bfloat16)
    return {f"layers.{at}.weight": make() for at in range(TENSORS)}


def touched(tensors):
    """Every page of them is there: one element of each page is read."""
    for tensor in tensors.values():
        tensor.view(-1)[::2048].sum()
    return tensors


def runai(path):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        # Its buffer is used again: a tensor that is kept must be cloned.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def fast(path):
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=str(path), nogds=True, device="cpu") as file:
        return {name: file.get_tensor(name).clone().detach() for name in file.keys()}  # noqa: SIM118 - no mapping


class Agent:
    """An agent that keeps tensors in memory."""

    def __init__(self, scratch, towline_command):
        settings = scratch / "agent.toml"
        settings.write_text(
            f'repositories = ["{scratch}/encoded", "{scratch}/raw"]\nsocket = "agent.sock"\nmemory = "1G"\n'
            '[cache]\ndir = "cache"\ncapacity = "4G"\nfree_floor = "1M"\n[staging]\nmemory = "3G"\n'
        )
        self.socket, self.command = scratch / "agent.sock", towline_command
        self.process = subprocess.Popen([towline_command, "agent", "--config", settings, "--json"], stdout=subprocess.PIPE)
        self.process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def clear(self):
        subprocess.run([self.command, "stage", "--clear"], env={**os.environ, "TOWLINE_AGENT": str(self.socket)}, check=True, capture_output=True)

    def load(self, repository):
        os.environ["TOWLINE_AGENT"] = str(self.socket)
        try:
            return repository.load("model")
        finally:
            os.environ["TOWLINE_AGENT"] = "none"


def main():
    scratch, rounds = Path(ARGS[0]), int(ARGS[1]) if len(ARGS) > 1 else 5
    floor, command = (ARGS[2] if len(ARGS) > 2 else None), (ARGS[3] if len(ARGS) > 3 else None)
    os.environ["TOWLINE_AGENT"] = "none"
    model, clock = weights(), Clock()
    (fresh(scratch) / "plain").mkdir(parents=True)
    file = scratch / "plain/model.safetensors"
    safetensors.torch.save_file(model, file)
    torch.save(model, scratch / "model.pt")
    repositories = {}
    for how, compression in {"raw": "off", "encoded": "auto"}.items():
        repositories[how] = towline.open(scratch / how, create=True)
        repositories[how].save(scratch / "plain", "model", compression=compression)
    with Agent(scratch, command) as agent:
        for _ in range(rounds + 1):
            clock.of("read + BLAKE3 of the same bytes", lambda: subprocess.run([floor, "read", scratch / "plain"], check=True))
            into_memory = subprocess.run([floor, "load", scratch / "plain"], check=True, capture_output=True).stdout
            clock.found.setdefault("read + BLAKE3 into memory", []).append(float(into_memory))
            clock.of("torch.load", lambda: touched(torch.load(scratch / "model.pt")))
            clock.of("safetensors load_file", lambda: touched(safetensors.torch.load_file(file)))
            clock.of("Run:ai Model Streamer", lambda: touched(runai(file)))
            clock.of("fastsafetensors", lambda: touched(fast(file)))
            for how, repository in repositories.items():
                clock.of(f"towline load, {how}, hashed", lambda: touched(repository.load("model")))  # noqa: B023
                agent.clear()
                clock.of(f"towline load, {how}, agent reads", lambda: touched(agent.load(repository)))  # noqa: B023
                clock.of(f"towline load, {how}, in memory", lambda: touched(agent.load(repository)))  # noqa: B023
        for repository in repositories.values():
            for loaded in (repository.load("model"), agent.load(repository)):
                assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())
    told = {"bytes": sum(tensor.nbytes for tensor in model.values()), "tensors": TENSORS, "torch": torch.__version__}
    told["pages"] = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().split("[")[1].split("]")[0]
    told["seconds"] = {what: seconds[1:] for what, seconds in clock.found.items()}
    fresh(scratch)
    print(json.dumps(told))


if __name__ == "__main__":
    recycling()
    main()
