"""A training run's checkpoints, of a really trained model: what each program stores of them, and what Towline reads back.

BENCH_RUNS_DATA (.peers/runs) holds the steps; train.py makes them where they are missing (15 minutes of a quiet core, 8 GB),
as BENCH_TRAIN_ARGS (such as `--width 512 --layers 8`) say.
"""

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from statistics import median

import report
import savers
from measure import GIB, Failed, Kept, fresh, note, run, same
from steps import APART, DATA, changed_bytes, part_of, plain_bytes, safetensors_of, trained

TARGETED = 20  # steps apart that the bounds are about
EACH = 8  # steps of a run that saves each: a key step and those after it
ZIPNN, ZIPNN_XOR = "ZipNN", "ZipNN, with xor"


def worker(program, *words):
    """What a script that runs in the environment with torch answers."""
    command = [savers.PYTHON, savers.HERE / program, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command[:3]))}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def growth(saver, source, step):
    """Saves one more step: bytes that the repository grew by, and CPU seconds."""
    before = saver.stored()
    sample = run(saver.keep(source, step), saver.env)
    return saver.stored() - before, sample.cpu


def begin(kind, scratch):
    saver = kind(fresh(scratch))
    if saver.init():
        run(saver.init(), saver.env)
    return saver


def stored_apart(kind, scratch, steps, part, distances=APART):
    """Stored bytes of the key step, then of each step after it in a repository that holds only the key step."""
    key, after = steps.apart()
    saver = begin(kind, scratch / "key")
    stored = [growth(saver, part_of(steps.main[key], part), key)[0]]
    for distance in distances:
        shutil.rmtree(scratch / "after", ignore_errors=True)
        shutil.copytree(saver.scratch, scratch / "after")
        stored.append(growth(kind(scratch / "after"), part_of(after[distance], part), key + distance)[0])
    shutil.rmtree(scratch)
    note(f"  {saver.name}, {part}: " + ", ".join(f"{size / 1e6:.2f}" for size in stored) + " MB")
    return stored


def zipnn_apart(steps, part):
    """The same for ZipNN, which keeps no repository: each step alone, and by its xor with the key step."""
    key, after = steps.apart()
    paths = [str(part_of(step, part)) for step in (steps.main[key], *after.values())]
    alone, xored = worker("codecs.py", "sizes", *paths)["stored"], worker("codecs.py", "xor", *paths)
    return [[alone[path] for path in paths], [None, *(xored[path] for path in paths[1:])]]


def differences(kinds, scratch, steps, part, kept):
    """Table (a) of one part: stored bytes over plain ones by distance, and Towline's over those of the others.

    Also Towline's TARGETED steps after its key, over ZipNN's and over the least of the rest.
    """
    stored = {}
    for kind in kinds:
        work = lambda kind=kind: stored_apart(kind, scratch / "apart", steps, part)
        stored[kind.name] = work() if kind is savers.Towline else kept.of(f"{kind.name}, {part}", work)
    others = [sizes for name, sizes in stored.items() if name != savers.Towline.name]
    stored[ZIPNN], stored[ZIPNN_XOR] = kept.of(f"{ZIPNN}, {part}", lambda: zipnn_apart(steps, part))
    plain = plain_bytes(part_of(steps.main[min(steps.main)], part))
    rows = [[name, *("" if size is None else f"{size / plain:.4f}" for size in sizes)] for name, sizes in stored.items()]
    over = []
    for than, sizes in (("ZipNN", stored[ZIPNN]), ("best other", list(map(min, zip(*others))))):
        ratios = [own / size for own, size in zip(stored.get(savers.Towline.name, []), sizes)]
        over.append(ratios[1 + APART.index(TARGETED)] if ratios else None)
        if ratios:
            rows.append([f"towline / {than}", *(f"{ratio:.3f}" for ratio in ratios)])
    head = [f"{part}, {plain / 1e6:.1f} MB: stored / plain", "key step", *(f"+{at}" for at in APART)]
    return report.table(head, rows), over


def derived(scratch, steps):
    """What the bf16 copy beside its masters costs Towline, over its plain bytes: the worse of a key step and a later one."""
    if not savers.Towline.path():
        return None
    parts = ("state and weights", "fp32 state")
    both, state = (stored_apart(savers.Towline, scratch / "derived", steps, part, (TARGETED,)) for part in parts)
    copy = plain_bytes(part_of(steps.main[min(steps.main)], "bf16 weights"))
    return max((with_copy - without) / copy for with_copy, without in zip(both, state))


def whole_run(saver, steps, part):
    """Saves every spaced step: stored bytes and CPU seconds."""
    cpu = sum(growth(saver, part_of(step, part), step.name[5:])[1] for step in steps.spaced)
    note(f"  {saver.name}, {len(steps.spaced)} steps of {part}: {saver.stored() / 1e6:.0f} MB, {cpu:.0f} CPU s")
    return saver.stored(), cpu


def by_peer(kind, scratch, steps, part):
    saver = begin(kind, scratch / "whole")
    found = whole_run(saver, steps, part)
    shutil.rmtree(saver.scratch)
    return found


def by_zipnn(steps, part):
    files = [file for step in steps.spaced for file in safetensors_of(part_of(step, part))]
    answer = worker("codecs.py", "sizes", *files)
    return sum(answer["stored"].values()), answer["cpu"]


def by_towline(scratch, steps, part, reads):
    """Also restores every step, while the run is there, into `reads`, and the last one again after it was settled."""
    saver = begin(savers.Towline, scratch / "whole")
    found = whole_run(saver, steps, part)
    reads[part] = restores(saver, scratch, steps, part)
    reads[part].append(settled(saver, scratch, steps, part, reads[part][-1]))
    shutil.rmtree(saver.scratch)
    return found


def whole_runs(kinds, scratch, steps, kept):
    """Table (b), and what (d) is made of. restic at its most is left out: minutes a GiB, and table (a) has it."""
    kinds = [kind for kind in kinds if kind is not savers.ResticMax]
    parts, reads = ("state and weights", "bf16 weights"), {}
    plain = {part: sum(plain_bytes(part_of(step, part)) for step in steps.spaced) for part in parts}

    def row(name, work):
        found = [(*work(part), plain[part]) for part in parts]
        return [name, *(cell for size, cpu, all_ in found for cell in (f"{size / all_:.4f}", f"{cpu / (all_ / GIB):.1f}"))]

    def keeping(name, work):
        return row(name, lambda part: kept.of(f"{name}, {len(steps.spaced)} steps of {part}", lambda: work(part)))

    rows = []
    for kind in kinds:
        if kind is savers.Towline:
            rows.append(row(kind.name, lambda part: by_towline(scratch, steps, part, reads)))
        else:
            rows.append(keeping(kind.name, lambda part, kind=kind: by_peer(kind, scratch, steps, part)))
    rows.append(keeping(ZIPNN, lambda part: by_zipnn(steps, part)))
    head = [f"{len(steps.spaced)} steps: stored / plain", *(word for part in parts for word in (part, "CPU s/GiB"))]
    return report.table(head, rows), reads


@dataclass
class Read:
    """One restore: bytes fetched and seconds, for a step out of its run and for the same step stored alone."""

    fetched: int
    seconds: float
    alone_fetched: int
    alone_seconds: float


def restored(saver, source, step, scratch):
    """Restores one step, compares it: bytes fetched and seconds."""
    out = fresh(scratch / "out") / "step"
    began = time.monotonic()
    done = subprocess.run(saver.bring(step, out), env=saver.env, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise Failed(f"restore of step {step}: exit {done.returncode}\n{done.stderr[-2000:]}")
    same(source, out)
    return json.loads(done.stdout)["fetched_bytes"], seconds


def restores(saver, scratch, steps, part):
    """Every step out of the run, and out of a repository that holds nothing else."""
    reads = []
    for step in steps.spaced:
        source, number = part_of(step, part), step.name[5:]
        alone = begin(savers.Towline, scratch / "alone")
        growth(alone, source, number)
        reads.append(Read(*restored(saver, source, number, scratch), *restored(alone, source, number, scratch)))
    return reads


@dataclass
class Settled:
    """The last step of a run, once it is settled: bytes read over the same step stored alone, and the run's stored bytes over before."""

    read: float
    stored: float


def settled(saver, scratch, steps, part, last):
    """Settles the last step; `last` is what its restore read before."""
    step, before = steps.spaced[-1], saver.stored()
    for words in (saver.settle(step.name[5:]), saver.collect(), saver.collect()):
        run(words, saver.env)
    fetched, _ = restored(saver, part_of(step, part), step.name[5:], scratch)
    return Settled(fetched / last.alone_fetched, saver.stored() / before)


def settled_table(reads):
    """Table (f): what settling the last step does to its read and to the run."""
    found = {part: all_[-1] for part, all_ in reads.items() if isinstance(all_[-1], Settled)}
    rows = [[part, f"{one.read:.3f}", f"{one.stored:.3f}"] for part, one in found.items()]
    head = ["the last step, settled", "bytes read / stored alone", "run stored / before"]
    worst = (max(one.read for one in found.values()), max(one.stored for one in found.values())) if found else (None, None)
    return report.table(head, rows), worst


def restores_table(reads):
    """Table (d): what restoring a step reads and takes, over the same step stored alone."""
    rows, ratios = [], {}
    for part, found in reads.items():
        found = [read for read in found if isinstance(read, Read)]
        bytes_ = [read.fetched / read.alone_fetched for read in found]
        time_ = median(read.seconds for read in found) / median(read.alone_seconds for read in found)
        ratios[part] = (max(bytes_), time_)
        seconds = median(read.seconds for read in found)
        rows.append([part, f"{median(bytes_):.3f}", f"{max(bytes_):.3f}", f"{time_:.2f}", f"{seconds:.2f}"])
    head = ["restore of any step / of the same step stored alone", "bytes read, median", "worst", "time, median", "seconds"]
    return report.table(head, rows), ratios


def each_step(kind, scratch, steps, part):
    """Saves EACH steps, one after another: stored bytes of each, CPU seconds of all, and seconds to restore the last (Towline's)."""
    saver, key = begin(kind, scratch / "each"), min(steps.main)
    found = [growth(saver, part_of(steps.main[key + at], part), key + at) for at in range(EACH)]
    last, seconds = key + EACH - 1, None
    if isinstance(saver, savers.Towline):
        seconds = median(restored(saver, part_of(steps.main[last], part), last, scratch)[1] for _ in range(3))
    shutil.rmtree(saver.scratch)
    sizes = [size for size, _ in found]
    note(f"  {saver.name}, each step of {part}: " + ", ".join(f"{size / 1e6:.2f}" for size in sizes) + " MB")
    return sizes, sum(cpu for _, cpu in found), seconds


def each_step_table(kinds, scratch, steps, kept):
    """Table (g): a run that saves each step. Also the ratios with `predict`: of the steps after the key step, and of all."""
    part, rows, predicted = "fp32 state", [], (None, None)
    plain = plain_bytes(part_of(steps.main[min(steps.main)], part))
    kinds = [kind for kind in kinds if kind is not savers.ResticMax]
    for kind in kinds + [savers.TowlinePredicting] * (savers.Towline in kinds):
        work = lambda kind=kind: each_step(kind, scratch, steps, part)
        is_own = issubclass(kind, savers.Towline)
        sizes, cpu, seconds = work() if is_own else kept.of(f"{kind.name}, each step of {part}", work)
        after, all_ = sum(sizes[1:]) / (EACH - 1) / plain, sum(sizes) / EACH / plain
        predicted = (after, all_) if kind is savers.TowlinePredicting else predicted
        restore = "" if seconds is None else f"{seconds:.2f}"
        rows.append([kind.name, f"{sizes[0] / plain:.4f}", f"{after:.4f}", f"{all_:.4f}", f"{cpu / (EACH * plain / GIB):.1f}", restore])
    head = [f"each step saved, {EACH} of {plain / 1e6:.1f} MB: stored / plain", "key step", "the others", "all", "CPU s/GiB"]
    return report.table([*head, "restore of the last, seconds"], rows), predicted


def adapters(kind, scratch, steps):
    """Stored bytes of each step of the LoRA phase."""
    saver = begin(kind, scratch / "lora")
    sizes = [growth(saver, part_of(step, "fp32 state"), step.name[5:])[0] for step in steps.lora]
    shutil.rmtree(saver.scratch)
    return sizes


def lora(kinds, scratch, steps, kept):
    """Table (c): steps of a LoRA phase after its first, over the bytes that changed."""
    changed = sum(changed_bytes(*pair) for pair in zip(steps.lora, steps.lora[1:]))
    plain = sum(plain_bytes(step) for step in steps.lora[1:])
    rows, over = [], {}
    for kind in kinds:
        work = lambda kind=kind: adapters(kind, scratch, steps)
        sizes = work() if kind is savers.Towline else kept.of(f"{kind.name}, LoRA", work)
        over[kind.name] = sum(sizes[1:]) / changed
        rows.append([kind.name, f"{sum(sizes[1:]) / 1e6:.2f}", f"{over[kind.name]:.3f}"])
    what = f"LoRA phase, {len(steps.lora) - 1} steps of {plain / 1e6:.0f} MB, {changed / 1e6:.2f} MB changed"
    return report.table([what, "stored, MB", "stored / changed"], rows), over.get(savers.Towline.name)


def speeds(steps):
    """Table (e): the peers' codecs by kind of tensor."""
    key = steps.main[min(steps.main)]
    found = worker("codecs.py", "speeds", part_of(key, "fp32 state"), part_of(key, "bf16 weights"))
    each = lambda by: [f"{by['in']:.2f}", f"{by['out']:.2f}", f"{by['ratio']:.3f}"]
    rows = [[kind, *each(by["zipnn"]), *each(by["zstd-1"])] for kind, by in found.items()]
    head = ["GB of plain bytes per CPU second", "ZipNN in", "out", "plain / stored", "zstd-1 in", "out", "plain / stored"]
    return report.table(head, rows)


def section(scratch, present):
    """The whole section, in `scratch` (on disk: a run is gigabytes); `present` picks the tools that are here."""
    if not savers.PYTHON.exists():
        note(f"  {savers.PYTHON} is not there (benches/peers/setup.sh)")
        return None
    steps, kinds = trained(), present(savers.SAVERS)
    kept = Kept(scratch / "runs-peers.json", {"made": json.loads((DATA / "made.json").read_text()), **savers.versions()})
    scratch = fresh(scratch / "runs")
    plain = sum(plain_bytes(step) for step in steps.spaced)
    if shutil.disk_usage(scratch).free < 1.5 * plain:
        raise Failed(f"{scratch}: {1.5 * plain / GIB:.0f} GiB of free disk wanted")
    codecs = speeds(steps)
    state, of_state = differences(kinds, scratch, steps, "fp32 state", kept)
    weights, of_weights = differences(kinds, scratch, steps, "bf16 weights", kept)
    copy = derived(scratch, steps)
    adapted, of_adapted = lora(kinds, scratch, steps, kept)
    whole, reads = whole_runs(kinds, scratch, steps, kept)
    read, of_reads = restores_table(reads)
    last, of_settled = settled_table(reads)
    each, of_each = each_step_table(kinds, scratch, steps, kept)
    shutil.rmtree(scratch)
    targets = bounds(of_state, of_weights, copy, of_adapted, of_reads)
    targets.append(("last step settled, bytes read / stored alone", of_settled[0], "<=", 1.05))
    targets.append(("last step settled, run stored / before", of_settled[1], "<=", 1.05))
    targets.append(("each step saved, predicted steps, stored / plain", of_each[0], "<=", 0.30))
    targets.append((f"each step saved, all, every {EACH}th a key step, stored / plain", of_each[1], "<=", 0.36))
    what = f"Checkpoints of a trained GPT, {plain / len(steps.spaced) / 1e6:.0f} MB a step, each program's own compression"
    return report.section(what, "\n\n".join([state, weights, whole, read, last, each, adapted, codecs]), targets)


def bounds(of_state, of_weights, copy, of_adapters, reads):
    """What was wanted of Towline, beside what it did."""
    state_read, state_time = reads.get("state and weights", (None, None))
    weights_read, weights_time = reads.get("bf16 weights", (None, None))
    return [
        (f"fp32 state, {TARGETED} steps after the key step / ZipNN", of_state[0], "<=", 0.85),
        (f"fp32 state, {TARGETED} steps after the key step / best other", of_state[1], "<=", 0.75),
        (f"bf16 weights, {TARGETED} steps after the key step / ZipNN", of_weights[0], "<=", 0.36),
        ("bf16 copy of fp32 weights, stored / plain", copy, "<=", 0.01),
        ("LoRA steps, stored / changed bytes", of_adapters, "<=", 1.02),
        ("restore of any step, bytes read / stored alone", state_read, "<=", 1.9),
        ("restore of any step, time / stored alone", state_time, "<=", 1.9),
        ("restore of bf16 weights, bytes read / stored alone", weights_read, "<=", 1.4),
        ("restore of bf16 weights, time / stored alone", weights_time, "<=", 1.4),
    ]
