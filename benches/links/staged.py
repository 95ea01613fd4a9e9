"""Weights staged into memory at a site that holds nothing of them: the time beside that of the transfer alone.

Staged at once, chunks are decoded into memory as they arrive. Staged after a warm, they are read from the cache: the same work, one
part after the other.
"""

import os
from pathlib import Path

import report
from measure import GIB, Failed, checkpoint, fresh, median, note

from . import agents, bench, movers
from . import world as worlds

# How the weights are stored: without a codec, and as towline stores them by default.
STORED = {"raw": "off", "encoded": "auto"}


class Warmed(movers.Towline):
    """The transfer alone: far keeps the chunks as they are stored."""

    name = "warmed"
    compression = "auto"

    def __init__(self, place, scratch, source):
        movers.Mover.__init__(self, place, scratch, source)
        # Not a folder, on loopback either: nothing is nearer to far than that.
        self.agents = agents.Agents(self, agents.S3(place, scratch, "near"))

    def serve(self):
        words = ["--repo", self.agents.repository.location, "--compression", self.compression]
        self.agents.ran("near", "save", self.source, "bench", *words)
        self.agents.start("near", peers=(), site="near")
        self.agents.warm("near", "bench")
        self.agents.start("far", peers=("near",), site="far", more=f"[staging]\nmemory = {2 * bench.SIZE}\n")

    def stage(self):
        return self.agents.command("far", "stage", "bench")


class Staged(Warmed):
    """Staged at once."""

    name = "staged at once"

    def command(self):
        return self.stage()


class InTurn(Warmed):
    """Warmed, and then staged from far's cache."""

    name = "warmed, then staged"


def measured(place, kind, scratch, source, how):
    """One transfer to a far that holds nothing."""
    mover = kind(place, fresh(scratch / "scratch"), source)
    mover.compression = STORED[how]
    try:
        mover.serve()
        sample = bench.moved(place, mover, mover.command())
        if kind is InTurn and sample.whole:
            sample = sum_of(sample, bench.moved(place, mover, mover.stage()))
        mover.check()
    finally:
        mover.close()
    if not sample.whole:
        raise Failed(f"{kind.name}, {how}: not whole within {bench.LIMIT} s")
    return sample


def sum_of(first, then):
    """Two transfers as one; what the second said."""
    cpu = {"far_cpu": first.far_cpu + then.far_cpu, "near_cpu": first.near_cpu + then.near_cpu}
    carried = first.carried + then.carried
    return bench.Moved(first.seconds + then.seconds, **cpu, carried=carried, whole=then.whole, told=then.told)


def table(where, kinds, scratch, source, samples, key):
    """Table of one place, and the samples by kind and by how the weights are stored; `where(seed)` makes the place."""
    found, rows = {}, []
    for how in STORED:
        for seed in range(1, bench.RUNS + 1):
            for kind in kinds:
                with where(seed) as place:
                    sample = measured(place, kind, scratch, source, how)
                found.setdefault((kind, how), []).append(sample)
                note(f"  {kind.name:22} {how:9} {bench.described(sample, bench.SIZE)}")
        for kind in kinds:
            runs = samples[f"{kind.name}, {how}", key] = found[kind, how]
            cpu = f"{median(runs, 'far_cpu'):.2f} + {median(runs, 'near_cpu'):.2f}"
            rows.append([f"{how}, {kind.name}", bench.spread(runs), cpu, *stages(runs)])
    head = ["", "seconds", "CPU seconds, far + near", "first tensor, s", "overlap"]
    return report.table(head, rows), found


def stages(runs):
    """When the first tensor was there, and how many stages ran at a time; of the median run."""
    run = sorted(runs, key=lambda sample: sample.seconds)[len(runs) // 2]
    times = (run.told or {}).get("times")
    if not times:
        return ["", ""]
    overlap = (times["read"] + times["decode"] + times["copy"]) / times["total"]
    return [f"{times['first_tensor']:.2f}", f"{overlap:.2f}"]


def section(scratch, samples):
    """Two tables, over a link and on loopback, and the targets."""
    source = checkpoint(scratch / "weights", bench.SIZE)
    sites = lambda seed: worlds.two_sites("1000M", 0.05, 0.001, seed)
    over_link, link = table(sites, [Warmed, Staged], scratch, source, samples, "staged")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    machine = lambda _: worlds.Loopback({"near": cores, "far": cores})
    on_loopback, loopback = table(machine, [Warmed, Staged, InTurn], scratch, source, samples, "staged, loopback")
    targets = []
    for how in STORED:
        ratio = seconds(link[Staged, how]) / seconds(link[Warmed, how])
        targets.append((f"{how}, over the link: staged at once / warmed", ratio, "<=", 1.05))
    for how in STORED:
        ratio = seconds(loopback[Staged, how]) / seconds(loopback[InTurn, how])
        targets.append((f"{how}, loopback: staged at once / warmed, then staged", ratio, "<=", 1.1))
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().split("[")[1].split("]")[0]
    what = f"{bench.SIZE / GIB:g} GiB of weights staged at a cold site, 1 Gbit/s, 50 ms, 0.1 % loss, and loopback, huge pages: {pages}"
    return report.section(what, f"{over_link}\n\n{on_loopback}", targets)


def seconds(runs):
    return median(runs, "seconds")
