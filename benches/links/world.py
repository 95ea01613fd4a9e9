"""A world of nodes: network namespaces joined by `link` (benches/links/link), with programs running in them.

The namespaces belong to the process of `link`, which ends when its input does: whatever becomes of this one, nothing is
left. Programs in nodes are told by the kernel to end when the thread that started them does.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = Path(os.environ.get("LINK", ROOT / "target/release/link"))


class Broken(Exception):
    """The world could not be made, or a program in it did not do what it was asked to."""


def possible():
    """None if worlds can be made here, else why not."""
    if os.geteuid() != 0:
        return "not root: network namespaces cannot be made"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    missing = [name for name in ("ip", "nsenter", "setpriv") if not shutil.which(name)]
    return f"not installed: {', '.join(missing)} (iproute2, util-linux)" if missing else None


class Place:
    """Where programs run. Each is a process that ends with this one, and all end with the place."""

    def __init__(self):
        self.running = []

    def prefix(self, node):
        return ["setpriv", "--pdeathsig", "KILL"]

    def address(self, node):
        return "127.0.0.1"

    def start(self, node, command, env=None, out=subprocess.DEVNULL, stdin=subprocess.DEVNULL):
        """Starts a program in a node; what it says goes to `out`."""
        words = [*self.prefix(node), *map(str, command)]
        child = subprocess.Popen(words, env=env, stdin=stdin, stdout=out, stderr=subprocess.STDOUT, text=True)
        self.running.append(child)
        return child

    def end(self, child, how=signal.SIGTERM):
        """Ends a program, by force after five seconds."""
        if child.poll() is None:
            child.send_signal(how)
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()
        if child in self.running:
            self.running.remove(child)

    def close(self):
        for child in list(self.running):
            self.end(child)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Loopback(Place):
    """One machine, one core to each node: what a core can do, with no link between."""

    def __init__(self, cores):
        super().__init__()
        self.cores = cores

    def prefix(self, node):
        return [*super().prefix(node), "taskset", "--cpu-list", str(self.cores[node])]

    def counts(self):
        return None


class World(Place):
    """Nodes by name, each with the settings of its link: `World(near="rate=300M,up.delay=25ms", far="rate=300M")`."""

    def __init__(self, seed=1, mtu=1500, **nodes):
        super().__init__()
        words = [
            str(LINK),
            "--seed",
            str(seed),
            "--mtu",
            str(mtu),
            *(f"{name},{how}".rstrip(",") for name, how in nodes.items()),
        ]
        # It stands for hardware: it goes before the programs that use it.
        nice = ["nice", "-n", "-10"] if os.geteuid() == 0 else []
        self.link = subprocess.Popen(
            [*nice, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.nodes = {node["name"]: node for node in self.heard()["nodes"]}

    def heard(self):
        line = self.link.stdout.readline()
        if not line:
            raise Broken(f"{LINK} ended with {self.link.wait()}")
        told = json.loads(line)
        if "error" in told:
            raise Broken(told["error"])
        return told

    def ask(self, line):
        self.link.stdin.write(f"{line}\n")
        self.link.stdin.flush()
        return self.heard()

    def counts(self):
        """What each node's link has carried, up and down: packets and bytes, lost and refused ones apart."""
        return self.ask("counts")

    def cut(self, node):
        """From now on nothing passes to or from the node."""
        self.ask(f"cut {node}")

    def heal(self, node):
        self.ask(f"heal {node}")

    def address(self, node):
        return self.nodes[node]["address"]

    def prefix(self, node):
        return [*super().prefix(node), "nsenter", f"--net={self.nodes[node]['net']}"]

    def close(self):
        super().close()
        try:
            # It says what it has carried, a last time, and ends.
            self.link.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self.link.kill()
            self.link.communicate()


def two_sites(rate, round_trip, loss, seed=1):
    """Two nodes, near and far, with that rate, half the round trip and that loss in each direction."""
    how = f"rate={rate},up.delay={round_trip / 2 * 1000:g}ms,up.loss={loss}"
    return World(seed=seed, near=how, far=how)


def wait_for(what, seconds, ready):
    """Asks until the answer is true; Broken after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        found = ready()
        if found:
            return found
        if time.monotonic() > until:
            raise Broken(f"{what}: not within {seconds} s")
        time.sleep(0.02)
