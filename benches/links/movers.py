"""How each program is asked to move a folder from the node near to the node far, and how it goes on after it was killed."""

import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import tools
from measure import Failed, same

from . import agents
from . import world as worlds

BARE = Path(os.environ.get("BARE", tools.ROOT / "target/release/bare"))


class Mover:
    """One program, with a folder of its own. `serve` is not timed, `command` is."""

    name = program = ""
    # Whether far ends with the files themselves.
    files = True
    # How it is interrupted.
    ends_by = signal.SIGTERM

    def __init__(self, place, scratch, source):
        self.place, self.scratch, self.source = place, scratch, source
        self.out = scratch / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(scratch / "home"), "LANG": "C.UTF-8"}
        self.serving = []

    @classmethod
    def path(cls):
        return tools.find(cls.program)

    def serve(self):
        """Has near offer the source, and far ready to ask."""

    def command(self):
        """What far runs: it ends when everything is there."""
        raise NotImplementedError

    def again(self):
        """What far runs after an interruption."""
        return self.command()

    def interrupted(self):
        """Follows an interruption: what must run again before `again`."""

    def arrived(self):
        """The folder that should be the source."""
        return self.out

    def pids(self, node):
        """Processes of a node that work for it besides the one that is timed."""
        return [child.pid for child in self.serving if child.poll() is None] if node == "near" else []

    def check(self):
        """After a run that came to its end: Failed, if it was not what it is taken for."""
        if self.files:
            same(self.source, self.arrived())

    def start(self, node, command, **more):
        child = self.place.start(node, command, env=self.env, **more)
        self.serving.append(child)
        return child

    def close(self):
        for child in self.serving:
            self.place.end(child)
        self.serving.clear()

    def listening(self, port):
        """Waits until something in near listens at a port of TCP."""
        state = " 0A "  # TCP_LISTEN, in /proc/net/tcp

        def found():
            text = Path(f"/proc/{self.serving[-1].pid}/net/tcp").read_text()
            return any(f":{port:04X} " in line and state in line for line in text.splitlines())

        worlds.wait_for(f"{self.name} listens", 20, found)


def said(child, pattern, seconds):
    """The first match of a pattern in what a program says."""
    until, text = time.monotonic() + seconds, ""
    while time.monotonic() < until:
        if select.select([child.stdout], [], [], 0.2)[0]:
            piece = os.read(child.stdout.fileno(), 1 << 16).decode(errors="replace")
            if not piece:
                raise worlds.Broken(f"{child.args}: ended: {text[-1000:]}")
            text += piece
            found = re.search(pattern, text)
            if found:
                return found
    raise worlds.Broken(f"{child.args}: said nothing like {pattern} in {seconds} s: {text[-1000:]}")


class Rsync(Mover):
    name = program = "rsync"

    def serve(self):
        self.offer(self.source)
        command = [self.path(), "--daemon", "--no-detach", f"--config={self.scratch / 'rsyncd.conf'}", "--port=8730"]
        self.start("near", command)
        self.listening(8730)

    def offer(self, folder):
        """The daemon reads its settings for each connection."""
        text = f"use chroot = no\nuid = root\ngid = root\n[data]\npath = {folder}\nread only = yes\n"
        (self.scratch / "rsyncd.conf").write_text(text)

    def next(self, after):
        self.offer(after)
        self.source, before = after, self.source
        return new_bytes(before, after)

    def command(self):
        return [self.path(), "-a", "--partial", f"rsync://{self.place.address('near')}:8730/data/", f"{self.out}/"]


class Rclone(Mover):
    name = program = "rclone"
    streams = 8

    def serve(self):
        self.env["RCLONE_CONFIG"] = str(self.scratch / "none")
        self.start("near", [self.path(), "serve", "http", "--addr", f"{self.place.address('near')}:8731", self.source])
        self.listening(8731)

    def command(self):
        # Files at once times streams of a file are the streams.
        lanes = ["--transfers", "4", "--multi-thread-streams", str(self.streams // 4), "--multi-thread-cutoff", "8M"]
        url = f"http://{self.place.address('near')}:8731"
        return [self.path(), "copy", *lanes, "--http-url", url, ":http:", self.out]


class Sendme(Mover):
    name = program = "sendme"
    ticket = None

    def serve(self):
        address = f"{self.place.address('near')}:8732"
        words = ["--relay", "disabled", "--ticket-type", "addresses", "--magic-ipv4-addr", address, "--no-progress"]
        scratch = self.scratch / "near"
        scratch.mkdir(exist_ok=True)
        command = ["env", "-C", scratch, self.path(), "send", *words, self.source]
        child = self.start("near", command, out=subprocess.PIPE, stdin=subprocess.PIPE)
        self.ticket = said(child, r"\b(blob[a-z0-9]{40,})", 120)[1]

    def command(self):
        return ["env", "-C", self.out, self.path(), "receive", "--relay", "disabled", "--no-progress", self.ticket]

    def arrived(self):
        return self.out / self.source.name


class Bare(Mover):
    """A transport with nothing on top of it, out of memory and into none."""

    files = False
    transport, streams = "", 1

    @classmethod
    def path(cls):
        return str(BARE) if BARE.exists() else None

    def serve(self):
        size = sum(path.stat().st_size for path in self.source.rglob("*") if path.is_file())
        address = f"{self.place.address('near')}:8733"
        words = [self.path(), "serve", self.transport, address, self.scratch / "cert", size, self.streams]
        child = self.start("near", words, out=subprocess.PIPE)
        said(child, "ready", 10)

    def command(self):
        return [self.path(), "fetch", self.transport, f"{self.place.address('near')}:8733", self.scratch / "cert"]


class Quinn(Bare):
    name, transport = "bare quinn", "quinn"


class Quinn4(Bare):
    name, transport, streams = "bare quinn, 4 streams", "quinn", 4


class Rustls(Bare):
    name, transport = "bare rustls", "rustls"


class Towline(Mover):
    """Two agents: near holds the source in its cache, far is warmed from it. The repository is at near's side."""

    name = "towline"
    files = False
    transport = "auto"
    ends_by = signal.SIGKILL

    path = classmethod(lambda cls: agents_path())

    def __init__(self, place, scratch, source):
        super().__init__(place, scratch, source)
        self.agents = agents.Agents(self, agents.repository(place, scratch))

    def serve(self):
        self.agents.save(self.source, "bench")
        self.agents.start("near", peers=(), site="near")
        self.agents.warm("near", "bench")
        self.agents.start("far", peers=("near",), site="far")

    @classmethod
    def bare(cls, place, scratch, source):
        """One without agents: somebody else starts them."""
        mover = cls.__new__(cls)
        Mover.__init__(mover, place, scratch, source)
        return mover

    def next(self, after):
        saved = self.agents.save(after, "bench")
        self.agents.warm("near", "bench")
        return saved["stored_bytes"]

    def command(self):
        return self.agents.command("far", "warm", "bench", "--from", "near/near", "--wait")

    def pids(self, node):
        return self.agents.pids(node)

    def check(self):
        # What near could not give would have come from the repository.
        brought = self.agents.brought("far")
        if brought["repository"] > 0.02 * brought["remote"]:
            raise Failed(f"not from near, but: {brought}")

    def interrupted(self):
        self.agents.restart("far")

    def close(self):
        super().close()
        self.agents.close()


class TowlineTcp(Towline):
    name, transport = "towline, TCP", "tcp"


class TowlineQuic(Towline):
    name, transport = "towline, QUIC", "quic"


def new_bytes(before, after):
    """Bytes of a tree that are not at the same place of the file of the same name."""
    total = 0
    for path in after.iterdir():
        one, other = np.memmap(path, np.uint8, "r"), np.memmap(before / path.name, np.uint8, "r")
        total += int(np.count_nonzero(one != other))
    return total


def agents_path():
    """Towline's program, where it has agents."""
    path = tools.Towline.path()
    if path is None:
        return None
    asked = subprocess.run([path, "agent", "--help"], capture_output=True)
    return path if asked.returncode == 0 else None
