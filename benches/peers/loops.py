"""The sections on training loops: what hooks.py and sharded.py measured, as tables."""

import json
import os
import subprocess
from statistics import median

import report
import tools
from measure import GIB, Failed

PYTHON = tools.ROOT / ".venv/bin/python"
FLOOR = tools.ROOT / "target/release/floor"
#: Loaders of weights that setup.sh installs.
LOADERS = os.environ.get("BENCH_LOADERS", tools.PEERS / "loaders")
#: What a table's rows are, in their order; the one that the others are told in is the first.
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
RESTORES = (
    "torch.load",
    "towline restore",
    "towline restore into",
    "towline restore into, saved raw",
    "read + BLAKE3 of the same bytes",
    "safetensors load_file",
    "dcp.load",
)


def measured(script, scratch, rounds, *more):
    """What a worker says."""
    command = [os.environ.get("BENCH_PYTHON", PYTHON), "-W", "ignore", tools.ROOT / "benches/peers" / script, scratch, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(LOADERS)}
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise Failed(f"{script}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(seconds):
    return f"{min(seconds):.3f}-{max(seconds):.3f}"


def section(scratch, rounds):
    """A training loop of one process."""
    told = measured("hooks.py", scratch / "hooks", max(rounds, 3), FLOOR)
    seconds, took = told["seconds"], {what: median(found) for what, found in told["seconds"].items()}
    lost = {what: median(found) for what, found in told["lost"].items()}
    importing = 1000 * median(told["import"])
    grown, state = told["growth"]
    rows = [[what, f"{took[what]:.4f}", spread(seconds[what]), f"{took[what] / took['memcpy']:.2f}"] for what in SAVES]
    body = [report.table(["saving, seconds", "median", "range", "/ memcpy"], rows)]
    rows = [[what, f"{took[what]:.3f}", spread(seconds[what]), f"{took['torch.load'] / took[what]:.2f}"] for what in RESTORES]
    body += ["", report.table(["restoring, seconds", "median", "range", "speed / torch.load"], rows)]
    rows = [[what, f"{lost[what]:.2f}", spread(found)] for what, found in told["lost"].items()]
    body += ["", report.table(["training time lost to a background save, seconds", "median", "range"], rows)]
    body += [
        "",
        f"Importing towline takes {importing:.0f} ms after torch; the package is {told['installed'] / 1e6:.1f} MB installed. From the "
        f"20th to the 200th save of {state / 1e6:.0f} MB the process grows by {grown / 1e6:.1f} MB.",
    ]
    allowed = 0.005 + 10e-6 * told["tensors"]
    quick = lost["towline, compression='if-faster'"]
    targets = [
        ("save, blocking time / memcpy", took["towline save"] / took["memcpy"], "<=", 1.15),
        ("background save, blocking time / (5 ms + 10 us per tensor)", took["towline save, background"] / allowed, "<=", 1.0),
        ("background staging, time / memcpy", took["towline staged, background"] / took["memcpy"], "<=", 1.3),
        ("training time lost / dcp.async_save, thread", lost["towline"] / lost["dcp.async_save, thread"], "<=", 0.5),
        ("training time lost / dcp.async_save, process", lost["towline"] / lost["dcp.async_save, process"], "<=", 0.5),
        ("if-faster: training time lost / dcp.async_save, thread", quick / lost["dcp.async_save, thread"], "<=", 0.5),
        ("restore, speed / torch.load", took["torch.load"] / took["towline restore"], ">=", 1.3),
        ("restore into, speed / torch.load", took["torch.load"] / took["towline restore into"], ">=", 1.3),
        ("restore into, saved raw, time / read + BLAKE3", took["towline restore into, saved raw"] / took[RESTORES[4]], "<=", 1.25),
        ("restore, speed / safetensors", took["safetensors load_file"] / took["towline restore"], ">=", 1.0),
        ("memory growth over 180 saves / one state", grown / state, "<=", 0.1),
        ("import after torch, ms", importing, "<=", 50),
    ]
    what = (
        f"A training loop: {told['bytes'] / GIB:.2f} GiB of a GPT and AdamW in {told['tensors']} tensors, on disk, torch {told['torch']}"
    )
    return report.section(what, "\n".join(body), targets)


def sharded(scratch, rounds):
    """Distributed checkpoints."""
    told = measured("sharded.py", scratch / "sharded", max(rounds, 3))
    body, ratio = [], {}
    for what, found in told["seconds"].items():
        first = next(iter(found))
        took = {way: median(seconds) for way, seconds in found.items()}
        for way in found:
            ratio[what, way] = lambda over, what=what, way=way, took=took: took[over] / took[way]
        rows = [[way, f"{took[way]:.2f}", spread(found[way]), f"{took[first] / took[way]:.2f}"] for way in found]
        head = {"save": "save on 2 ranks, seconds", "load on 1": "load on 1 rank, seconds"}.get(what, f"{what} ranks, seconds")
        body += [report.table([head, "median", "range", f"speed / {first}"], rows), ""]
    fast, loaded = "towline, compression='if-faster'", "towline, saved with compression='if-faster'"
    targets = [
        ("2 ranks save, speed / FileSystemWriter", ratio["save", "towline"]("FileSystemWriter"), ">=", 1.5),
        ("2 ranks save if-faster, speed / FileSystemWriter", ratio["save", fast]("FileSystemWriter"), ">=", 1.5),
        ("2 ranks load, speed / FileSystemReader", ratio["load on 2", "towline"]("FileSystemReader"), ">=", 1.5),
        ("2 ranks load an if-faster save, speed / FileSystemReader", ratio["load on 2", loaded]("FileSystemReader"), ">=", 1.5),
        ("resharded to 1, speed / FsspecReader", ratio["load on 1", "towline"]("FsspecReader"), ">=", 3.0),
        ("resharded to 3, speed / FsspecReader", ratio["load on 3", "towline"]("FsspecReader"), ">=", 3.0),
    ]
    what = f"Distributed checkpoints: {told['bytes'] / GIB:.2f} GiB in 64 sharded tensors, on disk, torch {told['torch']}"
    return report.section(what, "\n".join(body).rstrip(), targets)


#: How weights are loaded; the first is the floor of those that hash every byte.
LOADS = (
    "read + BLAKE3 of the same bytes",
    "read + BLAKE3 into memory",
    "torch.load",
    "safetensors load_file",
    "Run:ai Model Streamer",
    "fastsafetensors",
    "towline load, raw, hashed",
    "towline load, encoded, hashed",
    "towline load, raw, agent reads",
    "towline load, encoded, agent reads",
    "towline load, raw, in memory",
    "towline load, encoded, in memory",
)


def weights(scratch, rounds):
    """Loading weights on a host."""
    told = measured("weights.py", scratch / "weights", max(rounds, 3), FLOOR, tools.Towline.path())
    seconds, took = told["seconds"], {what: median(found) for what, found in told["seconds"].items()}
    floor = took[LOADS[0]]
    rows = [[what, f"{took[what]:.3f}", spread(seconds[what]), f"{floor / took[what]:.2f}"] for what in LOADS]
    body = report.table(["loading, seconds", "median", "range", "speed / read + BLAKE3"], rows)
    mapped = took["towline load, raw, in memory"]
    targets = [
        ("load, raw, hashed, speed / read + BLAKE3", floor / took["towline load, raw, hashed"], ">=", 0.95),
        ("the same, speed / read + BLAKE3 into memory", took[LOADS[1]] / took["towline load, raw, hashed"], ">=", 0.95),
        ("load, in memory, speed / torch.load", took["torch.load"] / mapped, ">=", 1.0),
        ("load, in memory, speed / Run:ai Model Streamer", took["Run:ai Model Streamer"] / mapped, ">=", 1.0),
        ("load, in memory, speed / fastsafetensors", took["fastsafetensors"] / mapped, ">=", 1.0),
        ("load, in memory, speed / safetensors", took["safetensors load_file"] / mapped, ">=", 1.0),
    ]
    what = (
        f"Weights: {told['bytes'] / GIB:.2f} GiB of bf16 in {told['tensors']} tensors, one file, huge pages for shared memory: "
        f"{told['pages']}, torch {told['torch']}"
    )
    return report.section(what, body, targets)
