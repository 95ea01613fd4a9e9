#!/usr/bin/env python3
"""Costs of layouts of a run in a bucket, simulated: what is written, kept and read until the run is deleted.

    layouts.py [--step GB] [--rate GBIT]

Ratios are those of docs/benchmarks.md (a trained GPT, fp32 state and weights). Prices are those of S3 Standard in us-east-1
(https://aws.amazon.com/s3/pricing/): 0.023 USD a GB and month, 0.09 USD a GB that leaves the region. Requests cost less than a
thousandth of that with packs of 64 MiB, and are left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Stored bytes over plain bytes: of a step alone, and of a difference to a step so many steps before.
ALONE = 0.8225
DIFFERENCES = ((1, 0.6115), (10, 0.6720), (20, 0.6879), (40, 0.7029))
#: Bytes that a restore of a difference reads over those of the same step alone.
WITH_BASES = 1.518
KEY_EVERY = 8
MONTH = 30.0
STORAGE, EGRESS = 0.023, 0.09


def difference(distance: int) -> float:
    """Stored over plain bytes of a difference, between the measured distances by their logarithms."""
    for (near, low), (far, high) in itertools.pairwise(DIFFERENCES):
        if distance <= far:
            return low + (high - low) * math.log(distance / near) / math.log(far / near)
    return DIFFERENCES[-1][1]


@dataclass
class Schedule:
    """A training: `saves` steps in `days`, of which the last `keep` stay, until `kept_days` after the end. It pauses `pauses`
    times. The latest step is read from another region `far` times."""

    name: str
    saves: int
    days: float
    keep: int
    kept_days: float
    far: int
    pauses: int


SCHEDULES = (
    Schedule("own cluster, three bursts to another region", 336, 7, 20, 30, 3, 3),
    Schedule("spot machines, preempted each two hours", 288, 1, 20, 7, 0, 12),
    Schedule("fine-tuning, started at eight sites afterwards", 50, 0.5, 50, 30, 8, 1),
    Schedule("archive, read once", 50, 2, 50, 180, 1, 1),
)


@dataclass
class Bytes:
    """Bytes over those of a plain step: written by the training, written and read by others near the bucket, read by a restore of
    the latest step, and of each step in the end."""

    saved: float = 0
    moved_near: float = 0
    latest: float = 0
    steps: list[float] = field(default_factory=list)


def of_key(step: int) -> float:
    """Stored size of a step by its place after its key step."""
    return ALONE if step % KEY_EVERY == 0 else difference(step % KEY_EVERY)


def mean_latest(saves: int) -> float:
    reads = [ALONE if step % KEY_EVERY == 0 else WITH_BASES * ALONE for step in range(saves)]
    return sum(reads) / saves


def keys(schedule: Schedule) -> Bytes:
    """Differences to a key step, each eighth: what a save writes, and nothing else."""
    steps = [of_key(step) for step in range(schedule.saves)]
    return Bytes(sum(steps), 0, mean_latest(schedule.saves), steps)


def alone(schedule: Schedule) -> Bytes:
    steps = [ALONE] * schedule.saves
    return Bytes(sum(steps), 0, ALONE, steps)


def settled(schedule: Schedule) -> Bytes:
    """The same, and the latest step is stored again when the run pauses: read with its bases, written alone."""
    found = keys(schedule)
    found.moved_near = schedule.pauses * (WITH_BASES * ALONE + ALONE)
    # Each settled step stays so, and is the base of the next ones.
    for pause in range(1, schedule.pauses + 1):
        found.steps[schedule.saves * pause // schedule.pauses - 1] = ALONE
    found.latest = ALONE
    return found


def newest_alone(schedule: Schedule) -> Bytes:
    """Each save writes its step alone; the one before is then stored again as a difference, near the bucket."""
    found = keys(schedule)
    found.saved = schedule.saves * ALONE
    again = [size for size in found.steps[:-1] if size != ALONE]
    found.moved_near = sum(2 * ALONE + size for size in again)
    found.steps[-1] = ALONE
    found.latest = ALONE
    return found


def backward(schedule: Schedule) -> Bytes:
    """Older steps are differences to the newest, one hop: with each save all of the group are stored again."""
    found = newest_alone(schedule)
    found.moved_near = 0.0
    for step in range(1, schedule.saves):
        group = step % KEY_EVERY
        found.moved_near += sum(2 * ALONE + difference(max(1, distance)) for distance in range(1, group + 1))
    return found


LAYOUTS = (
    ("differences to key steps", keys),
    ("the same, settled at pauses", settled),
    ("newest alone, older ones again", newest_alone),
    ("differences to the newest", backward),
    ("each step alone", alone),
)


def rows(schedule: Schedule, gb: float, gbit: float) -> Iterator[list[str]]:
    for name, layout in LAYOUTS:
        found = layout(schedule)
        kept = sum(found.steps[-schedule.keep :]) * gb
        month = kept * STORAGE * (schedule.kept_days + schedule.days / 2) / MONTH
        egress = schedule.far * found.latest * gb * EGRESS
        seconds = found.latest * gb * 8 / gbit
        yield [
            name,
            f"{found.saved / schedule.saves:.2f}",
            f"{found.moved_near / schedule.saves:.2f}",
            f"{kept:.0f}",
            f"{found.latest:.2f}",
            f"{seconds:.0f}",
            f"{month + egress:.2f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=100, metavar="GB", help="plain bytes of a step")
    parser.add_argument("--rate", type=float, default=10, metavar="GBIT", help="rate of a restore, Gbit/s")
    given = parser.parse_args()
    for schedule in SCHEDULES:
        head = [
            schedule.name,
            "saved / step",
            "moved near it / step",
            "kept, GB",
            "latest read / step",
            "seconds",
            "USD",
        ]
        table = [head, *rows(schedule, given.step, given.rate)]
        widths = [max(len(row[at]) for row in table) for at in range(len(head))]
        for number, row in enumerate(table):
            first, *rest = (
                cell.ljust(width) if at == 0 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print(f"| {' | '.join([first, *rest])} |")
            if number == 0:
                print(f"| {' | '.join(['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])])} |")
        print()


if __name__ == "__main__":
    main()
