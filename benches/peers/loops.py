"""The section on training loops: what hooks.py measured, as tables."""

import json
import os
import subprocess
from statistics import median

import report
import tools
from measure import GIB, Failed

PYTHON = tools.ROOT / ".venv/bin/python"
SAVES = (
    "memcpy",
    "towline save",
    "towline save, background",
    "towline staged, background",
    "towline durable, background",
    "dcp.async_save",
    "dcp.async_save, async stager",
    "dcp staged, async stager",
    "dcp.save",
    "torch.save",
)
RESTORES = ("towline restore", "towline restore into", "torch.load", "safetensors load_file", "dcp.load")


def section(room, rounds):
    """Runs hooks.py, and says what it found."""
    command = [os.environ.get("BENCH_PYTHON", PYTHON), "-W", "ignore", tools.ROOT / "benches/peers/hooks.py", room / "hooks"]
    done = subprocess.run([*command, str(max(rounds, 5))], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"hooks.py: exit {done.returncode}\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    took = {what: median(seconds) for what, seconds in told["seconds"].items()}
    lost = {what: median(seconds) for what, seconds in told["lost"].items()}
    imports = {what: median(seconds) for what, seconds in told["import"].items()}
    importing = 1000 * (imports["torch and towline"] - imports["torch"])
    rows = [[what, f"{took[what]:.4f}", f"{took[what] / took['memcpy']:.2f}"] for what in SAVES]
    body = [report.table(["saving, seconds", "median", "of a memcpy"], rows)]
    rows = [[what, f"{took[what]:.3f}", f"{took['torch.load'] / took[what]:.2f}"] for what in RESTORES]
    body += ["", report.table(["restoring, seconds", "median", "torch.load's speed"], rows)]
    rows = [[what, f"{seconds:.2f}"] for what, seconds in lost.items()]
    body += ["", report.table(["seconds that the loop loses to a background save", "median"], rows)]
    body += ["", f"Importing towline takes {importing:.0f} ms beyond torch; it takes {told['installed'] / 1e6:.1f} MB installed."]
    allowed = 0.005 + 10e-6 * told["tensors"]
    targets = [
        ("save blocks, of one memcpy", took["towline save"] / took["memcpy"], "<=", 1.15),
        ("save in the background blocks, of 5 ms + 10 us a tensor", took["towline save, background"] / allowed, "<=", 1.0),
        ("staged in the background, of one memcpy", took["towline staged, background"] / took["memcpy"], "<=", 1.3),
        ("the loop loses, of dcp.async_save's in a thread", lost["towline"] / lost["dcp.async_save, thread"], "<=", 0.5),
        ("the loop loses, of dcp.async_save's in a process", lost["towline"] / lost["dcp.async_save, process"], "<=", 0.5),
        ("restore, over torch.load", took["torch.load"] / took["towline restore"], ">=", 1.3),
        ("restore into, over torch.load", took["torch.load"] / took["towline restore into"], ">=", 1.3),
        ("restore, over safetensors", took["safetensors load_file"] / took["towline restore"], ">=", 1.0),
        ("import beyond torch, ms", importing, "<=", 50),
    ]
    what = (
        f"A training loop: {told['bytes'] / GIB:.2f} GiB of a GPT and AdamW in {told['tensors']} tensors, in memory (tmpfs), "
        f"torch {told['torch']}"
    )
    return report.section(what, "\n".join(body), targets)
