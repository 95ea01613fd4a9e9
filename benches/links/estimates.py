"""What hints say of transfers, and what they take: over a steady link, and over one that other traffic shares in bursts.

Each transfer is a warm of far from near. Before it, far's rate of the link and its spread are read as hints use them; the first
three transfers are not counted.
"""

import json
import os
import sys
import time
from contextlib import contextmanager

import report
from measure import MIB, fresh, note

from . import movers
from . import world as worlds

TRANSFERS = int(os.environ.get("BENCH_LINK_ESTIMATES", "23"))
LEARNING = 3
BYTES = 32 * MIB
BURST_PORT = 9190
SITES = """
[[site]]
name = "near"
[[site]]
name = "far"
[[link]]
from = "near"
to = "far"
price = { usd_month = "0" }
"""
SINK = """
import socket, threading
def drain(line):
    while line.recv(1 << 20):
        pass
server = socket.create_server(("0.0.0.0", int(__import__("sys").argv[1])))
while True:
    threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
# As much as goes for half a second to two, then nothing for as long.
BURSTS = """
import random, socket, sys, time
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
chance, block = random.Random(7), bytes(1 << 16)
while True:
    end = time.monotonic() + chance.uniform(0.5, 2)
    while time.monotonic() < end:
        line.sendall(block)
    time.sleep(chance.uniform(0.5, 2))
"""


@contextmanager
def world(bursty):
    """Two sites, 300 Mbit/s and 50 ms apart; with `bursty`, near also sends to a third one."""
    how = "rate=300M,up.delay=25ms,up.loss=0.1%"
    others = {"other": how} if bursty else {}
    with worlds.World(seed=1, near=how, far=how, **others) as place:
        if bursty:
            place.start("other", [sys.executable, "-c", SINK, str(BURST_PORT)])
            time.sleep(1)
            place.start("near", [sys.executable, "-c", BURSTS, place.address("other"), str(BURST_PORT)])
        yield place


def link(agents):
    """Far's measurement of the link from near, as hints use it; None before there is one."""
    status, body = agents.ask("far", "/v1/calibration")
    assert status == 200, body
    found = [one for one in json.loads(body)["links"] if one["from"] == "near"]
    return found[0] if found else None


def transfers(place, scratch):
    """Seconds of each transfer after the first three, the median that was said, and the 90th percentile."""
    mover = movers.Towline.bare(place, scratch, None)
    agents = mover.agents = movers.agents.Agents(mover, movers.agents.repository(place, scratch))
    found = []
    try:
        (scratch / "sites.toml").write_text(SITES)
        agents.start("near", peers=(), site="near")
        advisor = f'[advisor]\nsites = "{scratch / "sites.toml"}"\n'
        agents.start("far", peers=("near",), site="far", cache='inventory = "500ms"\n', more=advisor)
        for number in range(TRANSFERS):
            (scratch / "file").write_bytes(os.urandom(BYTES))
            agents.save(scratch / "file", f"tree-{number}")
            agents.warm("near", f"tree-{number}")
            # Until the last outcome is published; the first transfer has none.
            known = worlds.wait_for("the last outcome", 30, lambda: settled(agents, number))
            command = agents.command("far", "warm", f"tree-{number}", "--from", "near/near", "--wait")
            told = agents.finish(place.prefix("far"), command[2:], env={**agents.env, **mover.env})
            (task,) = told["tasks"]
            if number < LEARNING:
                continue
            said = task["report"]["fetched_bytes"] / known["rate"] + (known["overhead_s"] or 0)
            found.append((task["report"]["seconds"], said, said * known["spread"]))
    finally:
        mover.close()
        agents.close()
    return found


def settled(agents, number):
    """The link with the outcomes of all transfers before transfer `number`; an empty one before there can be any."""
    if number < 2:
        return link(agents) or {"rate": None}
    found = link(agents)
    return found if found and found["outcomes"] >= number - 1 else None


def section(scratch, samples):
    rows, targets = [], []
    for key, bursty, bound in (("steady", False, 0.08), ("bursty", True, 0.20)):
        with world(bursty) as place:
            found = transfers(place, fresh(scratch / "scratch"))
        samples["towline", f"estimates-{key}"] = found
        error = median_of([abs(said - took) / took for took, said, _ in found])
        within = sum(took <= most for took, _, most in found) / len(found)
        took = sorted(took for took, _, _ in found)
        note(f"  estimates {key}: error {error:.1%}, within p90 {within:.0%}")
        rows.append([key, str(len(found)), f"{took[0]:.2f} to {took[-1]:.2f}", f"{error:.1%}", f"{within:.0%}"])
        targets.append((f"{key}: median error", error, "<=", bound))
        targets.append((f"{key}: share within p90", within, ">=", 0.85))
    head = ["link", "transfers", "seconds", "median error", "within p90"]
    what = f"Hints of {BYTES / MIB:g} MiB over 300 Mbit/s, 50 ms, 0.1 % loss, after {LEARNING} transfers"
    return report.section(what, report.table(head, rows), targets)


def median_of(values):
    return sorted(values)[len(values) // 2]
