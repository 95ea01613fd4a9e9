"""Measures what `link` was asked to be: rate, delay and loss, with plain sockets. `python3 benches/links/selftest.py`."""

import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import world as worlds  # noqa: E402

UDP_SEGMENT = 103
PAYLOAD = 1472  # a full packet of 1500 bytes, with the headers of IP and UDP


def echo(port):
    """Gives each datagram back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.bind(("0.0.0.0", port))
        print("ready", flush=True)
        while True:
            data, who = door.recvfrom(2048)
            door.sendto(data, who)


def pings(host, port, count):
    """Round trips of small datagrams, one at a time, in seconds; what does not come back is left out."""
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.connect((host, port))
        door.settimeout(2)
        for _ in range(count):
            began = time.monotonic()
            door.send(b"ping")
            try:
                door.recv(64)
                times.append(time.monotonic() - began)
            except TimeoutError:
                pass
    print(json.dumps({"median": sorted(times)[len(times) // 2], "least": min(times), "most": max(times)}))


def count(port):
    """Counts full datagrams until half a second passes without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        door.bind(("0.0.0.0", port))
        print("ready", flush=True)
        door.recv(2048)
        door.settimeout(0.5)
        packets, began, last = 1, time.monotonic(), 0.0
        try:
            while True:
                door.recv(2048)
                packets, last = packets + 1, time.monotonic()
        except TimeoutError:
            pass
    print(json.dumps({"packets": packets, "rate": (packets - 1) * 1500 * 8 / max(last - began, 1e-9)}))


def flood(host, port, rate, seconds):
    """Sends full datagrams at about that many bits a second, many to a call."""
    many = 32
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.setsockopt(socket.SOL_UDP if hasattr(socket, "SOL_UDP") else 17, UDP_SEGMENT, PAYLOAD)
        door.setsockopt(socket.SOL_SOCKET, 32, 8 << 20)  # SO_SNDBUFFORCE
        door.connect((host, port))
        data, sent, began = bytes(many * PAYLOAD), 0, time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            if sent * 1500 * 8 < rate * now:
                door.send(data)
                sent += many
            else:
                time.sleep(0.0002)
    print(json.dumps({"sent": sent, "seconds": now}))


def bulk(host, port, seconds):
    """One TCP connection, as fast as it goes."""
    data, sent = bytes(1 << 18), 0
    with socket.create_connection((host, port)) as door:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sent += door.send(data)
    print(json.dumps({"sent": sent}))


def sink(port):
    """Takes one TCP connection's bytes; the rate is of what came after the first second."""
    with socket.create_server(("0.0.0.0", port)) as listener:
        print("ready", flush=True)
        door, _ = listener.accept()
        scratch, began, taken, early = bytearray(1 << 20), time.monotonic(), 0, (0, 0.0)
        while got := door.recv_into(scratch):
            taken += got
            if not early[0] and time.monotonic() - began > 1:
                early = (taken, time.monotonic())
        print(json.dumps({"bytes": taken, "rate": (taken - early[0]) * 8 / max(time.monotonic() - early[1], 1e-9)}))


def pair(world, receiver, sender):
    """Runs a receiver in far and a sender in near; what each said at its end."""
    own = [sys.executable, __file__]
    there = world.start("far", [*own, *receiver], out=subprocess.PIPE)
    there.stdout.readline()
    here = world.start("near", [*own, *sender], out=subprocess.PIPE)
    sent = json.loads(here.communicate(timeout=60)[0])
    got = None if receiver[0] == "echo" else json.loads(there.communicate(timeout=60)[0])
    world.end(there)
    return sent, got


def judge(rate, round_trip, loss):
    """One link measured: rows of what, asked, measured, and whether that is near enough."""
    with worlds.two_sites(f"{rate}", round_trip, loss) as world:
        far, rows = world.address("far"), []
        times, _ = pair(world, ["echo", 9000], ["pings", far, 9000, 40])
        rows.append(
            (
                "round trip, ms",
                round_trip * 1e3,
                times["median"] * 1e3,
                round_trip <= times["least"] and times["median"] < round_trip + 2e-3,
            )
        )
        before = world.counts()
        sent, got = pair(world, ["count", 9001], ["flood", far, 9001, rate * 0.7, 4])
        told = {key: count - before["near"]["up"][key] for key, count in world.counts()["near"]["up"].items()}
        # A sender that woke late may have filled the queue: that is no loss by chance.
        passed = sent["sent"] - told["refused_packets"]
        share, sigma = 1 - got["packets"] / passed, math.sqrt(max(loss, 1e-5) / passed)
        rows.append(("loss at 0.7 of the rate, %", loss * 100, share * 100, abs(share - loss) < 4 * sigma + 1e-4))
        rows.append(
            (
                "packets there and lost, of sent",
                1,
                (got["packets"] + told["lost_packets"]) / passed,
                got["packets"] + told["lost_packets"] == passed,
            )
        )
        sent, got = pair(world, ["count", 9002], ["flood", far, 9002, rate * 1.3, 4])
        # On a busy machine the flood itself may fall short: the link has to carry what it was given.
        offered = min(rate, sent["sent"] * 1500 * 8 / sent["seconds"])
        rows.append(
            ("rate of a flood, Mbit/s", offered / 1e6, got["rate"] / 1e6, 0.95 * offered < got["rate"] < 1.03 * rate)
        )
        before = world.counts()["far"]["down"]["bytes"]
        _, got = pair(world, ["sink", 9003], ["bulk", far, 9003, 5])
        carried = world.counts()["far"]["down"]["bytes"] - before
        rows.append(("rate of one TCP, Mbit/s", rate / 1e6, got["rate"] / 1e6, got["rate"] < rate))
        rows.append(
            (
                "bytes on the link over the TCP's",
                1500 / 1448,
                carried / got["bytes"],
                1.0 < carried / got["bytes"] < 1.1,
            )
        )
    return rows


def main():
    reason = worlds.possible()
    if reason:
        sys.exit(reason)
    good = True
    for rate, round_trip, loss in ((100e6, 0.02, 0.0), (300e6, 0.05, 0.001), (1e9, 0.05, 0.001), (1e9, 0.002, 0.0)):
        print(f"{rate / 1e6:g} Mbit/s, {round_trip * 1e3:g} ms, {loss * 100:g} %")
        for what, asked, measured, near in judge(rate, round_trip, loss):
            good &= near
            print(f"  {what:34} {asked:10.3f} {measured:10.3f} {'' if near else 'OFF'}")
    sys.exit(not good)


if __name__ == "__main__":
    doors = {"echo": echo, "pings": pings, "count": count, "flood": flood, "bulk": bulk, "sink": sink}
    if len(sys.argv) > 1:
        arguments = [
            float(word) if "." in word and word.count(".") == 1 else int(word) if word.isdigit() else word
            for word in sys.argv[2:]
        ]
        doors[sys.argv[1]](*arguments)
    else:
        main()
