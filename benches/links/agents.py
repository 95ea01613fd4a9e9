"""Towline's agents in a world: their certificates, settings and repository."""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import tools
from measure import Failed

from . import world as worlds

PORT, S3_PORT = 7071, 9080
MINISTACK = Path(os.environ.get("TOWLINE_VENV", tools.ROOT / ".venv")) / "bin/ministack"


class Folder:
    """A repository in a folder that every node reaches: for one machine, where there is no link to pass it by."""

    def __init__(self, scratch):
        self.location, self.env, self.settings, self.flags = str(scratch / "repository"), {}, "", []

    def start(self):
        pass

    def end(self):
        pass


class S3:
    """A repository in S3, whose server runs in a node: whoever reads it passes that node's link."""

    def __init__(self, place, scratch, node):
        self.place, self.scratch, self.node = place, scratch, node
        self.endpoint = f"http://{place.address(node)}:{S3_PORT}"
        self.location = "s3://bench/run"
        # The link of a bench is trusted: what passes it in clear is the repository's part, not the agents'.
        self.flags = ["--allow-http"]
        self.settings = f'endpoint = "{self.endpoint}"\nallow_http = true\n'
        # MiniStack takes its root key with any secret.
        self.env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
        self.env |= {"AWS_ENDPOINT_URL": self.endpoint}

    def start(self):
        if not MINISTACK.exists():
            raise Failed(f"{MINISTACK} is not there: tests/servers/setup.sh installs it")
        data = self.scratch / "s3"
        data.mkdir()
        own = {"AUTH": "true", "BIND_HOST": "0.0.0.0", "MINISTACK_HOST": self.place.address(self.node)}
        own |= {"GATEWAY_PORT": str(S3_PORT), "PERSIST_STATE": "0", "S3_PERSIST": "1", "S3_DATA_DIR": str(data)}
        own |= {"STATE_DIR": str(self.scratch / "state"), "PATH": os.environ["PATH"], "HOME": str(self.scratch)}
        with (self.scratch / "s3.log").open("w") as log:
            self.server = self.place.start(self.node, [MINISTACK], env=own, out=log)
        # From its own node: asking passes no link.
        asking = ["curl", "-sf", "-o", "/dev/null", f"{self.endpoint}/_ministack/health"]
        ready = lambda: subprocess.run([*self.place.prefix(self.node), *asking]).returncode == 0
        worlds.wait_for("MiniStack answers", 60, ready)

    def end(self):
        # The next one wants its port.
        self.place.end(self.server)


def repository(place, scratch, node="near"):
    """Where a scenario's repository is: in a world behind the link of `node`."""
    return S3(place, scratch, node) if isinstance(place, worlds.World) else Folder(scratch)


class Agents:
    """The agents of one scenario, one to a node, with certificates of one authority."""

    def __init__(self, mover, repository):
        self.mover, self.place, self.repository = mover, mover.place, repository
        self.scratch = mover.scratch
        self.sites, self.running = {}, {}
        self.env = {**mover.env, **repository.env}
        self.run("identity", "init", "--authority", self.scratch / "authority")
        repository.start()
        self.ran("near" if "near" in self.nodes() else "origin", "init", repository.location)

    def nodes(self):
        return self.place.nodes if isinstance(self.place, worlds.World) else ("near", "far")

    def run(self, *words):
        self.finish([], words)

    def ran(self, node, *words):
        """Runs a verb in a node, alone with the repository; what it said as JSON."""
        return self.finish(self.place.prefix(node), [*self.repository.flags, *words])

    def finish(self, prefix, words, env=None):
        command = [*prefix, self.mover.path(), "--json", *map(str, words)]
        done = subprocess.run(command, env=env or self.env, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    def save(self, source, name, node="near"):
        return self.ran(node, "save", source, name, "--repo", self.repository.location, "--compression", "off")

    def socket(self, node):
        return self.scratch / f"{node}.sock"

    def start(self, node, peers, site, cache="", more=""):
        """Starts an agent that knows those nodes, with an empty cache and further settings; returns when it is ready."""
        identity, folder = self.scratch / f"identity-{node}", self.scratch / f"cache-{node}"
        shutil.rmtree(folder, ignore_errors=True)
        if not identity.exists():
            self.run("identity", "issue", f"{site}/{node}", "--to", identity, "--authority", self.scratch / "authority")
        address = self.place.address
        # On one machine every agent has the same address.
        port = {name: PORT + at for at, name in enumerate(self.nodes())} if address("near") == "127.0.0.1" else {}
        known = ", ".join(f'"{address(peer)}:{port.get(peer, PORT)}"' for peer in peers)
        (self.scratch / f"{node}.toml").write_text(
            f'identity = "{identity}"\nsocket = "{self.socket(node)}"\n'
            f'listen = "{address(node)}:{port.get(node, PORT)}"\n'
            f'repository = "{self.repository.location}"\n{self.repository.settings}memory = "512M"\n'
            f'[cache]\ndir = "{folder}"\ncapacity = "6G"\nfree_floor = "256M"\n{cache}'
            f'[peers]\naddresses = [{known}]\ntransport = "{self.mover.transport}"\n'
            f'[[allow]]\nagents = "**"\nnames = "**"\n{more}'
        )
        self.launch(node)

    def launch(self, node):
        with (self.scratch / f"{node}.log").open("a") as log:
            command = [self.mover.path(), "agent", "--config", self.scratch / f"{node}.toml"]
            self.running[node] = self.place.start(node, command, env=self.env, out=log)
        worlds.wait_for(f"the agent {node} is ready", 30, lambda: self.ready(node))

    def ready(self, node):
        if self.running[node].poll() is not None:
            raise Failed(f"the agent {node} ended:\n{(self.scratch / f'{node}.log').read_text()[-2000:]}")
        try:
            return self.ask(node, "/ready")[0] == 200
        except OSError:
            return False

    def ask(self, node, path):
        """Asks an agent through its socket: status and body."""
        door = http.client.HTTPConnection("localhost", timeout=5)
        door.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.sock.connect(str(self.socket(node)))
        try:
            door.request("GET", path)
            answer = door.getresponse()
            return answer.status, answer.read()
        finally:
            door.close()

    def restart(self, node):
        """Kills an agent and starts it with the cache that it has."""
        self.place.end(self.running.pop(node), worlds.signal.SIGKILL)
        self.launch(node)

    def command(self, node, *words):
        """A verb that an agent is asked for."""
        self.mover.env["TOWLINE_AGENT"] = str(self.socket(node))
        return [self.mover.path(), "--json", *words]

    def warm(self, node, name):
        """Warms a name from the repository, untimed."""
        env = {**self.env, "TOWLINE_AGENT": str(self.socket(node))}
        self.finish(self.place.prefix(node), ["warm", name, "--from", "repository", "--wait"], env)

    def pids(self, node):
        return [self.running[node].pid] if node in self.running else []

    def brought(self, node):
        """Stored bytes that an agent has brought so far, by where from: as its metrics tell."""
        text = self.ask(node, "/metrics")[1].decode()
        found = re.findall(r'^towline_chunk_from_bytes_total\{source="(\w+)"\} (\d+)', text, re.MULTILINE)
        return {source: int(count) for source, count in found}

    def close(self):
        for child in self.running.values():
            self.place.end(child)
        self.running.clear()
        self.repository.end()
