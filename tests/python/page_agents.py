"""Agents for the tests of the page: one at each of two sites, with runs, pins, a committed hint, a policy and audit logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from .waiting import free_ports, until

ROOT = Path(__file__).parents[2]
BUILT = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline")).resolve()

POLICY = """
version = 1
repository = "{id}"

[[site]]
name = "home"
jurisdiction = "DE"
repositories = "{place}"

[[site]]
name = "cloud"
jurisdiction = "US"

[[rule]]
verdict = "deny"
names = "raw/**"
to = "cloud"
why = "raw data stays at home"

[[rule]]
verdict = "allow"
why = "the rest is for both sites"
"""

SITES = """
[[site]]
name = "home"
repositories = "{place}"
gpus = [{{ model = "H100", count = 64, usd_hour = "1.10" }}]

[[site]]
name = "cloud"
provider = "aws"
region = "us-east-1"
gpus = [{{ model = "H100", count = 512, usd_hour = "2.50" }}]

[[link]]
from = "home"
to = "cloud"
rate = "1Gbit"
delay = "20ms"
price = {{ unit = "GB", usd = "0.05" }}
"""

SETTINGS = """
repositories = ["{place}"]
socket = "{folder}/agent.sock"
http = "127.0.0.1:{http}"
tokens = "{folder}/tokens"
identity = "{folder}/tls"
listen = "127.0.0.1:{listen}"
callers = ["home/agent"]
memory = "512M"
[peers]
addresses = ["127.0.0.1:{peer}"]
[cache]
dir = "{folder}/cache"
capacity = "256M"
free_floor = "1M"
inventory = "{inventory}"
usage = "1s"
[audit]
dir = "{folder}/audit"
[advisor]
sites = "{sites}"
[[allow]]
agents = "**"
names = "**"
"""

# Answers for `/v1/tasks` as of an agent with ten thousand transfers, each of which goes on.
MANY = """
const real = window.fetch;
window.asked = 0;
window.fetch = async (path, options) => {
  if (path !== "/v1/tasks") return real(path, options);
  window.asked += 1;
  const tasks = Array.from({ length: 10000 }, (_, at) => ({
    id: String(at), kind: "warm", name: `run-${at % 97}/step-${at}`, state: "running", started: "2026-11-27T00:00:00Z",
    seconds: window.asked,
    progress: { phase: `look ${window.asked}`, total: 1e9, done: 1e5 * window.asked * (1 + at % 7), moved: 0 },
  }));
  return new Response(JSON.stringify({ tasks }));
};
"""


class Agents:
    """Two sites, `home` and `cloud`, that share a repository."""

    def __init__(self, folder: Path, inventory: str = "200ms") -> None:
        self.folder, self.inventory = folder, inventory
        self.running: dict[str, subprocess.Popen] = {}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("TOWLINE")}
        self.environment |= {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("DATA", "CACHE", "STATE")}
        self.environment |= {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder)}
        self.place = folder / "repository"
        self.http, home, other, cloud = free_ports(4)
        self.ports = {"home": (self.http, home, cloud), "cloud": (other, cloud, home)}
        identity = self.json("init", self.place)["id"]
        self.run("identity", "init")
        self.run("identity", "issue", "home/person", "--to", folder / "config/towline/identity")
        (folder / "sites.toml").write_text(SITES.format(place=self.place))
        (folder / "policy.toml").write_text(POLICY.format(id=identity, place=self.place))
        self.run("identity", "issue-policy", "--to", folder / "policy-key")
        self.run("policy", "sign", folder / "policy.toml", "--key", folder / "policy-key")
        self.run("policy", "set", folder / "policy.toml", "--repo", self.place)
        for site in self.ports:
            self.run("identity", "issue", f"{site}/agent", "--to", folder / site / "tls")
            self.start(site)
        self.save()

    def save(self) -> None:
        """Saves runs; commits a hint at `cloud`; pins at `home`."""
        for run, steps in {"run": (10, 20, 30), "alpha/tune": (5,), "raw/notes": (1,)}.items():
            for step in steps:
                (self.folder / "file").write_bytes(os.urandom(1 << 20) + bytes(3 << 20))
                label = ["--label", "tenant=team-a"] if run == "run" else []
                name = f"{run}/step-{step}"
                self.run("save", self.folder / "file", name, "--repo", self.place, "--metric", "loss=0.25", *label)
        hint = ["hint", "run@latest", "--repo", self.place, "--gpus", "8", "--at", "cloud", "--commit=cloud", "--wait"]
        self.run(*hint, agent="home")
        self.run("warm", "alpha/tune@latest", "--pin", "2h", "--wait", agent="home")

    def start(self, site: str) -> None:
        """Starts the agent of a site."""
        folder = self.folder / site
        http, listen, peer = self.ports[site]
        places = {"folder": folder, "place": self.place, "sites": self.folder / "sites.toml"}
        ports = {"http": http, "listen": listen, "peer": peer}
        settings = SETTINGS.format(**places, **ports, inventory=self.inventory)
        (folder / "agent.toml").write_text(settings)
        self.launch(site, folder)

    def launch(self, name: str, folder: Path) -> None:
        """Starts an agent with the settings in a folder."""
        command = [BUILT, "agent", "--config", folder / "agent.toml", "--json"]
        environment = self.environment | {"XDG_CACHE_HOME": str(folder / "index")}
        with (folder / "log").open("w") as log:
            agent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
        assert b"listening" in agent.stdout.readline(), (folder / "log").read_text()
        self.running[name] = agent

    def stop(self, site: str) -> None:
        """Stops the agent of a site."""
        agent = self.running.pop(site)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0

    def end(self) -> None:
        """Stops all agents."""
        for agent in self.running.values():
            agent.kill()
            agent.wait()

    def token(self, site: str = "home") -> str:
        """Token with all rights of an agent."""
        return until("no token", lambda: (self.folder / site / "agent.token").read_text().strip(), 10)

    def run(self, *words: object, agent: str | None = None) -> str:
        """Output of a command, beside the agent of a site."""
        environment = self.environment | {"TOWLINE_AGENT": str(self.socket(agent)) if agent else "none"}
        command = [BUILT, *map(str, words), "--json"]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"
        return done.stdout

    def json(self, *words: object, agent: str | None = None) -> dict:
        """As `run`, parsed."""
        return json.loads(self.run(*words, agent=agent))

    def socket(self, site: str) -> Path:
        """Socket of the agent of a site."""
        return self.folder / site / "agent.sock"

    def page(self, site: str = "home", *words: str) -> subprocess.Popen:
        """`towline page`, beside the agent of a site."""
        environment = self.environment | {"TOWLINE_AGENT": str(self.socket(site))}
        command = [BUILT, "page", "--json", *words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
