"""Loads tensors to a real GPU with torch, in every way that docs/staging.md names, and compares them with what was saved.

    python3 benches/gpu/torch_check.py

Needs a Python that has the package and torch. Without a GPU it says so, and ends with exit code 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import towline

DEVICE = "cuda:0"
DEADLINE_SECONDS = 60
TOWLINE = (sys.executable, "-m", "towline")


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    state = {f"layers.{n}": torch.randn(2048, 1024, generator=draw).bfloat16() * 0.02 for n in range(24)}
    state["embed"] = torch.randn(4096, 512, generator=draw)
    state["steps"] = torch.arange(9)
    state["mask"] = torch.rand(1001, generator=draw) > 0.5
    state["none"] = torch.empty(0, 4)
    return state


def same(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == saved.keys(), f"{what}: {found.keys() ^ saved.keys()}"
    for key, tensor in found.items():
        assert tensor.device == torch.device(DEVICE), f"{what}: {key} is on {tensor.device}"
        assert torch.equal(tensor.cpu(), saved[key]), f"{what}: {key} differs"
    print(f"ok  {what}", flush=True)


def loads(repo: str, saved: dict[str, torch.Tensor]) -> None:
    same(towline.load("base", repo=repo, device=DEVICE), saved, "load")
    some = towline.load("base", repo=repo, device=DEVICE, tensors=["layers.1*", "embed[100:200, :]"])
    expected = {key: tensor for key, tensor in saved.items() if key.startswith("layers.1")}
    same(some, {**expected, "embed": saved["embed"][100:200]}, "load of some tensors and a box")
    same(dict(towline.open(repo).stream("base", device=DEVICE, ahead="16M")), saved, "stream")


def loads_into_reused_memory(repo: str, saved: dict[str, torch.Tensor]) -> None:
    """Memory that torch's allocator gives out again while a kernel that was queued earlier still writes to it."""
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            for _ in range(3):
                before = [torch.zeros_like(tensor, device=DEVICE) for tensor in saved.values()]
                torch.cuda._sleep(200_000_000)
                for tensor in before:
                    tensor.fill_(1)
                del before, tensor
                found = towline.load("base", repo=repo, device=DEVICE)
                same(found, saved, f"load behind queued kernels, stream {stream.cuda_stream}")


def restores(folder: Path, saved: dict[str, torch.Tensor]) -> None:
    state = {key: tensor.to(DEVICE) for key, tensor in saved.items()}
    checkpointer = towline.Checkpointer(str(folder / "runs"), "run-7")
    checkpointer.save(1, state).wait()
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    places = {key: tensor.data_ptr() for key, tensor in into.items()}
    checkpointer.restore(into=into)
    assert {key: tensor.data_ptr() for key, tensor in into.items()} == places
    same(into, saved, "save from the GPU and restore into its tensors")


def loads_from_an_agent(folder: Path, repo: str, saved: dict[str, torch.Tensor]) -> None:
    settings, socket = folder / "agent.toml", folder / "agent.sock"
    settings.write_text(
        f'repository = "{repo}"\nsocket = "{socket}"\n[cache]\ndir = "{folder / "cache"}"\ncapacity = "1G"\n'
        '[staging]\nmemory = "1G"\n'
    )
    agent = subprocess.Popen([*TOWLINE, "agent", "--config", str(settings), "--quiet"])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not socket.exists():
            assert agent.poll() is None and time.monotonic() < deadline, "the agent does not start"
            time.sleep(0.05)
        os.environ["TOWLINE_AGENT"] = str(socket)
        towline.load("base", repo=repo)
        listed = subprocess.run([*TOWLINE, "stage", "--list", "--json"], stdout=subprocess.PIPE, check=True)
        assert len(json.loads(listed.stdout)["trees"]) == 1, listed.stdout
        same(towline.load("base", repo=repo, device=DEVICE), saved, "load from an agent's memory")
    finally:
        os.environ["TOWLINE_AGENT"] = "none"
        agent.terminate()
        agent.wait()


def main() -> None:
    if not torch.cuda.is_available():
        print("nothing checked: torch finds no GPU")
        sys.exit(3)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    os.environ["TOWLINE_AGENT"] = "none"
    with tempfile.TemporaryDirectory() as work:
        folder, saved = Path(work), weights()
        repo = str(folder / "repo")
        towline.safetensors.save_file(saved, "model.safetensors", repo=repo, name="base")
        for decode_on in ("cpu", "gpu"):
            os.environ["TOWLINE_DECODE_ON"] = decode_on
            print(f"decoded on the {decode_on}:", flush=True)
            loads(repo, saved)
            loads_into_reused_memory(repo, saved)
            restores(folder / decode_on, saved)
        loads_from_an_agent(folder, repo, saved)


main()
