"""A step of a run at a site that holds nothing of it: its bytes and time, beside those of the same step stored for itself.

The run is the trained one of the section `runs` (BENCH_RUNS_DATA, BENCH_TRAIN_ARGS). The link: 300 Mbit/s, 50 ms, 0.1 % loss.
"""

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import report
from measure import Failed, folder_bytes, fresh, median, note, same
from steps import Steps, part_of, trained

from . import bench, movers
from . import world as worlds

# Steps saved before the transfer: the key step, and differences to it; the last one is moved.
SAVED = 5
# Transfers by Towline, which are compared with each other; each has losses of its own.
OWN_RUNS = 7


@dataclass
class Case:
    """What is moved: the paths of the steps, the last of which goes, and what of that is asked for."""

    name: str
    steps: list
    below: str | None = None

    @property
    def source(self):
        return self.steps[-1]

    def wanted(self):
        """The path that the other programs move."""
        return self.source / self.below if self.below else self.source


class Towline(movers.Towline):
    """The last step of a run that near holds, to far, which holds nothing of it."""

    name = "towline"

    def __init__(self, place, scratch, case):
        super().__init__(place, scratch, case.source)
        self.case = case
        self.what = f"run/step-{len(case.steps)}"

    def serve(self):
        for number, step in enumerate(self.case.steps, 1):
            self.keep(step, f"run/step-{number}")
        self.agents.start("near", peers=(), site="near")
        self.agents.warm("near", self.what)
        self.agents.start("far", peers=("near",), site="far")

    def keep(self, step, name):
        return self.agents.ran("near", "save", step, name, "--repo", self.agents.repository.location)

    def command(self):
        return self.agents.command("far", *self.words(), "--wait")

    def words(self):
        return ["warm", self.target(), "--from", "near/near"]

    def target(self):
        return f"{self.what}:{self.case.below}" if self.case.below else self.what

    def restore(self):
        repository = self.agents.repository
        return ["restore", self.target(), self.scratch / "restored", "--repo", repository.location, *repository.flags]

    def restored_again(self):
        """Seconds of a restore after the warm."""
        began = time.monotonic()
        self.agents.finish(self.place.prefix("far"), self.restore(), self.asking())
        return time.monotonic() - began

    def foreseen(self):
        """Bytes that a dry run says would move."""
        told = self.agents.finish(self.place.prefix("far"), [*self.words(), "--dry-run"], self.asking())
        return told["tasks"][0]["report"]["lacking_bytes"]

    def asking(self):
        return {**self.agents.env, "TOWLINE_AGENT": str(self.agents.socket("far"))}


class Alone(Towline):
    """The same step in a repository that has nothing else."""

    name = "towline, stored alone"

    def serve(self):
        self.case = Case(self.case.name, self.case.steps[-1:], self.case.below)
        self.what = "run/step-1"
        super().serve()


class Restored(Towline):
    """The same step, restored to files at once: its chunks are written as they arrive."""

    name = "towline, restored"

    def command(self):
        self.env |= self.agents.env  # a restore reads the name from the repository itself
        return self.agents.command("far", *self.restore())

    def check(self):
        super().check()
        same(self.case.wanted(), self.scratch / "restored")


class Rsync(movers.Rsync):
    """The files as they are."""

    def __init__(self, place, scratch, case):
        super().__init__(place, scratch, folder_of(case, scratch))


class RsyncZstd(movers.Rsync):
    """The files, compressed with zstd -3 before."""

    name = "rsync of zstd -3"

    def __init__(self, place, scratch, case):
        source = folder_of(case, scratch)
        for path in [path for path in source.rglob("*") if path.is_file()]:
            subprocess.run(["zstd", "-3", "-q", "--rm", path], check=True)
        super().__init__(place, scratch, source)


class Rclone(movers.Rclone):
    """The files as they are."""

    def __init__(self, place, scratch, case):
        super().__init__(place, scratch, folder_of(case, scratch))


def folder_of(case, scratch):
    """A folder with what is asked for of a step."""
    folder, wanted = scratch / "source", case.wanted()
    if wanted.is_dir():
        shutil.copytree(wanted, folder)
    else:
        folder.mkdir(parents=True)
        shutil.copyfile(wanted, folder / wanted.name)
    return folder


def cases(steps, scratch):
    """What is moved, by the names of the issue's table."""
    spaced = steps.spaced[:SAVED]
    parts = {
        "fp32 state": [folder_with(scratch, step, "fp32 state") for step in spaced],
        "bf16 weights": [folder_with(scratch, step, "bf16 weights") for step in spaced],
    }
    found = [Case(name, made) for name, made in parts.items()]
    found.append(Case("LoRA", steps.lora[:SAVED]))
    found.append(Case("bf16 file beside its masters", spaced, Path(part_of(spaced[0], "bf16 weights")).name))
    return [case for case in found if len(case.steps) > 1]


def folder_with(scratch, step, part):
    """A folder that has one file of a step."""
    folder = scratch / "parts" / part.replace(" ", "-") / step.name
    if not folder.exists():
        folder.mkdir(parents=True)
        shutil.copyfile(part_of(step, part), folder / part_of(step, part).name)
    return folder


def section(scratch, samples):
    """The table, and the targets of each case."""
    trained()
    steps = Steps.there()
    tables, targets = [], []
    for case in cases(steps, scratch):
        rows, found = [], {}
        for kind in bench.present([Towline, Restored, Alone, Rsync, RsyncZstd, Rclone]):
            runs = OWN_RUNS if issubclass(kind, Towline) else bench.RUNS
            found[kind.name] = [measured(kind, scratch, case, seed) for seed in range(1, runs + 1)]
            samples[kind.name, f"cold, {case.name}"] = [run.sample for run in found[kind.name]]
        plain = folder_bytes(case.wanted())[0] if case.wanted().is_dir() else case.wanted().stat().st_size
        alone = [run.sample for run in found.get(Alone.name, [])]
        for name, runs in found.items():
            of_name = [run.sample for run in runs]
            carried, seconds = median(of_name, "carried"), median(of_name, "seconds")
            cells = [f"{carried / 1e6:.2f}", f"{carried / plain:.3f}"]
            cells += [over(carried, median(alone, "carried")), f"{seconds:.2f}", over(seconds, median(alone, "seconds"))]
            rows.append([name, *cells])
        head = [f"{case.name}, {plain / 1e6:.1f} MB", "carried, MB", "/ plain", "/ alone", "seconds", "/ alone"]
        tables.append(report.table(head, rows))
        own, foreseen = [run.sample for run in found[Towline.name]], found[Towline.name][0].foreseen
        at_once = median([run.sample for run in found[Restored.name]], "seconds")
        in_turn = median(own, "seconds") + median(found[Towline.name], "again")
        # Stored bytes, as the agent counts them: the link's count holds headers, acknowledgements and losses too.
        told = lambda runs: [sample.told["tasks"][0]["progress"]["moved"] for sample in runs]
        targets += [
            (f"{case.name}: moved / stored alone", max(told(own)) / max(told(alone)), "<=", 1.02),
            (f"{case.name}: moved / plain", max(told(own)) / plain, "<=", 1.0),
            (f"{case.name}: seconds / alone", median(own, "seconds") / median(alone, "seconds"), "<=", 1.05),
            (f"{case.name}: foreseen / moved", foreseen / told(own)[0], "<=", 1.001),
            (f"{case.name}: restored at once / warmed, then restored", at_once / in_turn, "<=", 1.0),
        ]
    return report.section(
        f"A step to a cold site, 300 Mbit/s, 50 ms, 0.1 % loss ({bench.congestion()})", "\n\n".join(tables), targets
    )


def over(value, base):
    return f"{value / base:.3f}" if base else ""


@dataclass
class Run:
    """One transfer; of Towline's warm also the bytes that a dry run said before, and the seconds of a restore after it."""

    sample: bench.Moved
    foreseen: int | None = None
    again: float | None = None


def measured(kind, scratch, case, seed):
    """One transfer; `seed` is that of the losses."""
    with worlds.two_sites("300M", 0.05, 0.001, seed) as place:
        mover = kind(place, fresh(scratch / "scratch"), case)
        try:
            mover.serve()
            warms = kind is Towline
            foreseen = mover.foreseen() if warms else None
            sample = bench.moved(place, mover, mover.command())
            mover.check()
            again = mover.restored_again() if warms else None
        finally:
            mover.close()
    if not sample.whole:
        raise Failed(f"{kind.name}, {case.name}: not whole within {bench.LIMIT} s")
    note(f"  {kind.name:24} {case.name:24} {bench.described(sample, sample.carried)}")
    return Run(sample, foreseen, again)
