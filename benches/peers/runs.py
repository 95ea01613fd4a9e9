"""A training run's checkpoints, of a really trained model: what each program stores of them, and what Towline reads back.

BENCH_RUNS_DATA (.peers/runs) holds the steps; train.py makes them where they are missing (about 20 minutes, 9 GB), as
BENCH_TRAIN_ARGS (such as `--width 512 --layers 8`) say.
"""

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import report
import savers
import tools
from measure import GIB, Failed, folder_bytes, fresh, note, run, same

DATA = Path(os.environ.get("BENCH_RUNS_DATA", tools.PEERS / "runs")).resolve()
TRAIN_ARGS = os.environ.get("BENCH_TRAIN_ARGS", "").split()
APART = (1, 10, 20, 40)
TARGETED = 20  # steps apart that the bounds are about
ZIPNN, ZIPNN_XOR = "ZipNN", "ZipNN, its own xor"
PARTS = {"fp32 state": "state.safetensors", "bf16 weights": "model.safetensors", "state and weights": "."}


def part_of(step, part):
    """The path that is saved of a step: one of its files, or its folder."""
    return step / PARTS[part]


def plain_bytes(path):
    return folder_bytes(path)[0] if path.is_dir() else path.stat().st_size


def worker(program, *words):
    """What a script that runs in the environment with torch answers."""
    command = [savers.PYTHON, savers.HERE / program, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command[:3]))}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


@dataclass
class Steps:
    """The checkpoints on disk: folders by step, and the steps that are evenly spaced."""

    main: dict
    spaced: list
    lora: list

    @classmethod
    def there(cls):
        main = {int(step.name[5:]): step for step in sorted((DATA / "main").glob("step-*"))}
        spacing = json.loads((DATA / "made.json").read_text())["spacing"]
        spaced = [step for number, step in main.items() if (number - min(main)) % spacing == 0]
        return cls(main, spaced, sorted((DATA / "lora").glob("step-*")))

    def apart(self):
        """The key step's number, and those of the steps that follow it at the distances of the table."""
        key = min(self.main)
        return key, {distance: self.main[key + distance] for distance in APART}


def trained():
    """The checkpoints, made where they are missing."""
    note(f"  checkpoints in {DATA}")
    made = subprocess.run([savers.PYTHON, savers.HERE / "train.py", "--out", DATA, *TRAIN_ARGS], stdout=sys.stderr)
    if made.returncode != 0:
        raise Failed(f"train.py: exit {made.returncode}")
    return Steps.there()


def growth(saver, source, step):
    """Saves one more step: bytes that the repository grew by, and CPU seconds."""
    before = saver.stored()
    sample = run(saver.keep(source, step), saver.env)
    return saver.stored() - before, sample.cpu


def begin(kind, room):
    saver = kind(fresh(room))
    if saver.init():
        run(saver.init(), saver.env)
    return saver


def stored_apart(kind, room, steps, part, distances=APART):
    """Stored bytes of the key step (under 0) and of each step after it, in a repository that holds only the key step."""
    key, after = steps.apart()
    saver, stored = begin(kind, room / "key"), {}
    stored[0], _ = growth(saver, part_of(steps.main[key], part), key)
    for distance in distances:
        shutil.rmtree(room / "after", ignore_errors=True)
        shutil.copytree(saver.room, room / "after")
        stored[distance], _ = growth(kind(room / "after"), part_of(after[distance], part), key + distance)
    shutil.rmtree(room)
    note(f"  {saver.name:20} {part}: " + ", ".join(f"+{at} {size / 1e6:.2f} MB" for at, size in stored.items()))
    return stored


def zipnn_apart(steps, part):
    """The same for ZipNN, which keeps no repository: each step alone, and by its xor with the key step."""
    key, after = steps.apart()
    paths = {0: part_of(steps.main[key], part)} | {distance: part_of(step, part) for distance, step in after.items()}
    alone = worker("codecs.py", "sizes", *paths.values())["stored"]
    xored = worker("codecs.py", "xor", *paths.values())
    by_distance = {ZIPNN: {at: alone[str(path)] for at, path in paths.items()}}
    by_distance[ZIPNN_XOR] = {at: xored[str(path)] for at, path in paths.items() if at != 0}
    return by_distance


def differences(kinds, room, steps, part):
    """Table (a) of one part: stored bytes over plain ones by distance, and Towline's over those of the others."""
    stored = {kind.name: stored_apart(kind, room / "apart", steps, part) for kind in kinds} | zipnn_apart(steps, part)
    plain = plain_bytes(part_of(steps.main[min(steps.main)], part))
    distances = (0, *APART)
    text = lambda found, at: f"{found[at] / plain:.4f}" if at in found else ""
    rows = [[name, *(text(found, at) for at in distances)] for name, found in stored.items()]
    over = {}
    if "towline" in stored:
        others = [name for name in stored if name not in ("towline", ZIPNN, ZIPNN_XOR)]
        best = lambda at: min(stored[name][at] for name in others) if others else None
        over = {at: (stored["towline"][at] / stored[ZIPNN][at], best(at) and stored["towline"][at] / best(at)) for at in distances}
        rows.append(["towline's over ZipNN's", *(f"{over[at][0]:.3f}" for at in distances)])
        rows.append(["over the others' best", *(f"{over[at][1]:.3f}" if over[at][1] else "" for at in distances)])
    head = [f"{part}, {plain / 1e6:.1f} MB: stored / plain", "key step", *(f"+{at}" for at in APART)]
    return report.table(head, rows), over


def derived(room, steps):
    """What the bf16 copy beside its masters costs Towline, over its plain bytes: the worse of a key step and a later one."""
    if not savers.Towline.path():
        return None
    sizes = [
        stored_apart(savers.Towline, room / "derived", steps, part, (TARGETED,)) for part in ("state and weights", "fp32 state")
    ]
    copy = plain_bytes(part_of(steps.main[min(steps.main)], "bf16 weights"))
    return max((sizes[0][at] - sizes[1][at]) / copy for at in (0, TARGETED))


def whole_run(saver, steps, part):
    """Saves every spaced step: stored bytes and CPU seconds."""
    cpu = 0.0
    for step in steps.spaced:
        cpu += growth(saver, part_of(step, part), step.name[5:])[1]
    note(f"  {saver.name:20} {len(steps.spaced)} steps of {part}: {saver.stored() / 1e6:.0f} MB, {cpu:.0f} CPU s")
    return saver.stored(), cpu


def whole_runs(kinds, room, steps):
    """Table (b), and (d) of what Towline saved while it is there."""
    parts, found, reads = ("state and weights", "bf16 weights"), {}, {}
    for kind in kinds:
        for part in parts:
            saver = begin(kind, room / "whole")
            found[kind.name, part] = whole_run(saver, steps, part)
            if kind is savers.Towline:
                reads[part] = restores(saver, room, steps, part)
            shutil.rmtree(saver.room)
    for part in parts:
        files = [file for step in steps.spaced for file in safetensors_of(part_of(step, part))]
        answer = worker("codecs.py", "sizes", *files)
        found[ZIPNN, part] = (sum(answer["stored"].values()), answer["cpu"])
    plain = {part: sum(plain_bytes(part_of(step, part)) for step in steps.spaced) for part in parts}
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        each = [(*found[name, part], plain[part]) for part in parts]
        rows.append([name, *(cell for size, cpu, all_ in each for cell in (f"{size / all_:.4f}", f"{cpu / (all_ / GIB):.1f}"))])
    head = [f"{len(steps.spaced)} steps: stored / plain", "state and weights", "CPU s/GiB", "bf16 weights alone", "CPU s/GiB"]
    return report.table(head, rows), reads


def safetensors_of(path):
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


@dataclass
class Read:
    """One restore: bytes fetched and seconds, for a step out of its run and for the same step stored alone."""

    fetched: int
    seconds: float
    alone_fetched: int
    alone_seconds: float


def restored(saver, source, step, room):
    """Restores one step, compares it: bytes fetched and seconds."""
    out = fresh(room / "out") / "step"
    began = time.monotonic()
    done = subprocess.run(saver.bring(step, out), env=saver.env, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise Failed(f"restore of step {step}: exit {done.returncode}\n{done.stderr[-2000:]}")
    same(source, out)
    return json.loads(done.stdout)["fetched_bytes"], seconds


def restores(saver, room, steps, part):
    """Every step out of the run, and out of a repository that holds nothing else."""
    reads = []
    for step in steps.spaced:
        source, number = part_of(step, part), step.name[5:]
        alone = begin(savers.Towline, room / "alone")
        growth(alone, source, number)
        reads.append(Read(*restored(saver, source, number, room), *restored(alone, source, number, room)))
    return reads


def restores_table(reads):
    """Table (d): what restoring a step reads and takes, over the same step stored alone."""
    rows, ratios = [], {}
    for part, found in reads.items():
        bytes_ = [read.fetched / read.alone_fetched for read in found]
        time_ = median(read.seconds for read in found) / median(read.alone_seconds for read in found)
        ratios[part] = (max(bytes_), time_)
        rows.append([part, f"{median(bytes_):.3f}", f"{max(bytes_):.3f}", f"{median(r.seconds for r in found):.2f}", f"{time_:.2f}"])
    head = ["towline restore of any step, over the same stored alone", "bytes read, median", "worst", "seconds, median", "time"]
    return report.table(head, rows), ratios


def tensor_bytes(path):
    """The tensors of a safetensors file: where each lies, by name."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 8 + int.from_bytes(view[:8], "little")
    tensors = {name: tensor["data_offsets"] for name, tensor in json.loads(bytes(view[8:at])).items() if name != "__metadata__"}
    return {name: view[at + begin_ : at + end] for name, (begin_, end) in tensors.items()}


def changed_bytes(before, after):
    """Bytes of the tensors that are not what they were a step before."""
    old, new = (tensor_bytes(part_of(step, "fp32 state")) for step in (before, after))
    return sum(len(tensor) for name, tensor in new.items() if name not in old or old[name] != tensor)


def lora(kinds, room, steps):
    """Table (c): steps of a LoRA phase after its first, over the bytes that changed."""
    changed = sum(changed_bytes(*pair) for pair in zip(steps.lora, steps.lora[1:]))
    plain = sum(plain_bytes(step) for step in steps.lora[1:])
    rows, over = [], {}
    for kind in kinds:
        saver = begin(kind, room / "lora")
        sizes = [growth(saver, part_of(step, "fp32 state"), step.name[5:])[0] for step in steps.lora]
        over[saver.name] = sum(sizes[1:]) / changed
        rows.append([saver.name, f"{sum(sizes[1:]) / 1e6:.2f}", f"{over[saver.name]:.3f}"])
        shutil.rmtree(saver.room)
    what = f"LoRA phase, {len(steps.lora) - 1} steps of {plain / 1e6:.0f} MB, {changed / 1e6:.2f} MB changed"
    return report.table([what, "stored, MB", "stored / changed"], rows), over.get("towline")


def speeds(steps):
    """Table (e): the peers' codecs by kind of tensor."""
    key = steps.main[min(steps.main)]
    found = worker("codecs.py", "speeds", part_of(key, "fp32 state"), part_of(key, "bf16 weights"))
    rows = [
        [kind, *(f"{by[codec][what]:.3f}" if what == "ratio" else f"{by[codec][what]:.2f}" for codec in by for what in ("in", "out", "ratio"))]
        for kind, by in found.items()
    ]
    return report.table(["GB of plain bytes a CPU second", "ZipNN in", "out", "plain / stored", "zstd-1 in", "out", "plain / stored"], rows)


def section(room, present):
    """The whole section, in `room` (on disk: a run is gigabytes); `present` picks the tools that are here."""
    if not savers.PYTHON.exists():
        note(f"  {savers.PYTHON} is not there (benches/peers/setup.sh)")
        return None
    steps, kinds, room = trained(), present(savers.SAVERS), fresh(room / "runs")
    plain = sum(plain_bytes(step) for step in steps.spaced)
    if shutil.disk_usage(room).free < 1.5 * plain:
        raise Failed(f"{room}: {1.5 * plain / GIB:.0f} GiB of free disk wanted")
    codecs = speeds(steps)
    state, of_state = differences(kinds, room, steps, "fp32 state")
    weights, of_weights = differences(kinds, room, steps, "bf16 weights")
    copy = derived(room, steps)
    adapters, of_adapters = lora(kinds, room, steps)
    whole, reads = whole_runs(kinds, room, steps)
    tables = [state, weights, whole, adapters, codecs]
    ratios = {}
    if reads:
        read, ratios = restores_table(reads)
        tables.insert(3, read)
    shutil.rmtree(room)
    targets = bounds(of_state, of_weights, copy, of_adapters, ratios)
    what = f"Checkpoints of a trained GPT, {plain / len(steps.spaced) / 1e6:.0f} MB a step, each program's own compression"
    return report.section(what, "\n\n".join(tables), targets)


def bounds(of_state, of_weights, copy, of_adapters, reads):
    """What was wanted of Towline, beside what it did."""
    none = (None, None)
    over_zipnn, over_others = of_state.get(TARGETED, none)
    state_read, state_time = reads.get("state and weights", none)
    weights_read, weights_time = reads.get("bf16 weights", none)
    return [
        (f"fp32 state {TARGETED} steps after its key, of ZipNN's", over_zipnn, "<=", 0.85),
        (f"fp32 state {TARGETED} steps after its key, of the others' best", over_others, "<=", 0.75),
        (f"bf16 weights {TARGETED} steps after their key, of ZipNN's", of_weights.get(TARGETED, none)[0], "<=", 0.36),
        ("a bf16 copy beside its masters, of its plain bytes", copy, "<=", 0.01),
        ("LoRA steps, of their changed bytes", of_adapters, "<=", 1.02),
        ("any step restored, bytes read, of it stored alone", state_read, "<=", 1.9),
        ("any step restored, time, of it stored alone", state_time, "<=", 1.9),
        ("bf16 weights restored, bytes read, of them stored alone", weights_read, "<=", 1.4),
        ("bf16 weights restored, time, of them stored alone", weights_time, "<=", 1.4),
    ]
