"""A cold gang: eight agents, each on a thin line, want one checkpoint at once that lies in S3 behind a line as thin.

On 100 Mbit/s each, eight agents, the lines and S3 take all of two cores; on a quarter of that the lines are what bounds them.
"""

import tempfile
import time

import report
from measure import GIB, MIB, Failed, folder_bytes, fresh, note, touch_memory

from . import agents, movers
from . import world as worlds

COUNT = 8
# A rack behind a thin way out: the agents are near each other, and the origin is not.
ORIGIN, AGENT = "up.delay=10ms,down.delay=10ms", "up.delay=250us,down.delay=250us"
FULL, QUARTER = 100, 25
LIMIT = 1200


def world(count, rate):
    """The origin is near, the agents are far, far2, ...; each on so many Mbit/s."""
    return worlds.World(
        near=f"rate={rate}M,{ORIGIN}", **{name: f"rate={rate}M,{AGENT}" for name in names(count)}
    )


def names(count):
    return ["far", *(f"far{at}" for at in range(2, count + 1))]


def all_at_once(place, commands, env):
    """Runs one command in each node; seconds until the last has ended, and bytes that the origin sent."""
    before, began = place.counts()["near"]["up"]["bytes"], time.monotonic()
    told = {node: tempfile.TemporaryFile("w+") for node in commands}
    children = {node: place.start(node, command, env=env[node], out=told[node]) for node, command in commands.items()}
    ends = {}
    while len(ends) < len(children):
        for node, child in children.items():
            if node not in ends and child.poll() is not None:
                ends[node] = time.monotonic() - began
                if child.returncode != 0:
                    told[node].seek(0)
                    said = told[node].read()[-2000:]
                    raise Failed(f"{node}: {' '.join(map(str, child.args))}: exit {child.returncode}\n{said}")
        if time.monotonic() - began > LIMIT:
            raise Failed(f"{len(children) - len(ends)} of {len(children)} are not there after {LIMIT} s")
        time.sleep(0.02)
    return max(ends.values()), place.counts()["near"]["up"]["bytes"] - before


def towline(scratch, source, count, rate):
    """Agents that know each other, and the repository; nobody says where from."""
    with world(count, rate) as place:
        mover = movers.Towline.bare(place, fresh(scratch / "scratch"), source)
        own = agents.Agents(mover, agents.S3(place, mover.scratch, "near"))
        try:
            own.save(source, "bench")
            every = names(count)
            for node in every:
                own.start(node, peers=[other for other in every if other != node], site="far")
            commands = {node: own.command(node, "warm", "bench", "--wait") for node in every}
            touch_memory(scratch, 2 * count * folder_bytes(source)[0])
            env = {node: {**own.env, "TOWLINE_AGENT": str(own.socket(node))} for node in every}
            return all_at_once(place, commands, env)
        finally:
            own.close()


def rclone(scratch, source, count, rate):
    """Each node fetches for itself."""
    with world(count, rate) as place:
        base = fresh(scratch / "scratch")
        each = {node: movers.Rclone(place, base / node, source) for node in names(count)}
        first = next(iter(each.values()))
        try:
            first.serve()
            touch_memory(scratch, count * folder_bytes(source)[0])
            return all_at_once(
                place, {node: mover.command() for node, mover in each.items()}, dict.fromkeys(each, first.env)
            )
        finally:
            first.close()


def section(sources, scratch, samples):
    """Two tables, and Towline's targets; `sources` for each rate."""
    return "\n".join(part(sources[rate], scratch, samples, rate) for rate in (FULL, QUARTER))


def part(source, scratch, samples, rate):
    """One table, and Towline's targets."""
    size = folder_bytes(source)[0]
    rows, targets = [], []
    for name, how, here in (("towline", towline, movers.Towline.path()), ("rclone", rclone, movers.Rclone.path())):
        # Eight times a quarter of the rate is half an hour, and tells nothing new.
        if not here or (name == "rclone" and rate == QUARTER):
            note(f"  {name} on {rate} Mbit/s: left out")
            continue
        found = {}
        for count in (1, COUNT):
            seconds, sent = found[count] = how(scratch, source, count, rate)
            note(f"  {name:22} gang of {count}  {seconds:8.2f} s, the origin sent {sent / MIB:.0f} MiB")
        (alone, once), (together, sent) = found[1], found[COUNT]
        samples[name, "gang" if rate == FULL else "thin gang"] = found
        rows.append([name, f"{alone:.1f}", f"{together:.1f}", f"{together / alone:.2f}", f"{sent / once:.2f}"])
        if name == "towline":
            targets = [
                (f"copies sent by the origin, {rate} Mbit/s", sent / once, "<=", 1.05),
                (f"time / 1 agent, {rate} Mbit/s", together / alone, "<=", 1.5),
            ]
    head = ["", "1 agent, s", f"{COUNT} agents, s", "ratio", "origin sent / one copy"]
    what = f"A cold gang of {COUNT} agents on {rate} Mbit/s each, {size / GIB:g} GiB behind an origin on {rate} Mbit/s"
    return report.section(what, report.table(head, rows), targets)
