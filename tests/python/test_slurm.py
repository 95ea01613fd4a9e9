"""deploy/slurm in the real slurmctld and slurmd of Debian: jobs are placed by their data, which is fetched before they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomllib

from . import waiting
from .waiting import free_ports

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/slurm"
BUILT = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline"))
PATIENCE = 120.0
# Root may not submit jobs with burst buffers.
USER = "nobody"

SITES = """
[[site]]
name = "home"
repositories = "{place}"

[[site]]
name = "burst"

[[link]]
from = "home"
to = "burst"
rate = "1Gbit"
price = {{ unit = "GB", usd = "0.09" }}
"""

AGENT = """
repository = "{place}"
socket = "{folder}/agent.sock"
identity = "{folder}/config/towline/identity"
memory = "256M"
[cache]
dir = "{folder}/cache"
capacity = "256M"
free_floor = "0"
inventory = "1s"
[advisor]
sites = "{folder}/sites.toml"
slurm_hints = "{folder}/hints"
[[advisor.slurm]]
users = "{user}"
names = ["team-a/**", "private/**"]
[[advisor.slurm]]
users = "alice"
names = "team-b/**"
"""

POLICY = """version = 1
repository = '{id}'
[[site]]
name = 'home'
repositories = ['{place}', '{id}']
[[site]]
name = 'burst'
[[rule]]
verdict = 'deny'
names = 'private/**'
to = 'burst'
why = 'stays at home'
[[rule]]
verdict = 'allow'
why = 'anything else'
"""

CONF = """
ClusterName=towline
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_res
SelectTypeParameters=CR_Core
ReturnToService=0
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=100000,sched_interval=1
MpiDefault=none
{towline}
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 Feature=home,fast
NodeName=node2 NodeHostname=absent NodeAddr=127.0.0.2 CPUs=1 Feature=burst State=DOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10:00 State=UP
"""

# `make test` sets this: what it installs and builds must be there then.
REQUIRED = "TOWLINE_TEST_REQUIRE_SERVERS" in os.environ

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd needs root"),
    pytest.mark.skipif(not any(Path("/sys/fs/cgroup").glob("*")), reason="slurmd needs /sys/fs/cgroup"),
    pytest.mark.skipif(not REQUIRED and not BUILT.exists(), reason=f"{BUILT} is not there: cargo build makes it"),
    pytest.mark.skipif(
        not REQUIRED and shutil.which("slurmctld") is None,
        reason="Slurm is not installed: tests/servers/setup.sh",
    ),
]


def until(what: str, found: Callable[[], object]) -> object:
    return waiting.until(what, found, PATIENCE)


class Cluster:
    """A controller, a node, and an agent beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "repo"
        # Users of jobs must reach it.
        self.command = folder / "towline"
        shutil.copy(BUILT, self.command)
        self.running: list[subprocess.Popen[bytes]] = []
        self.environment = os.environ | {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_CACHE_HOME": str(folder / "xdg-cache"),
            "XDG_STATE_HOME": str(folder / "xdg-state"),
            "TOWLINE_REPO": str(self.place),
            "TOWLINE_AGENT": "none",
            "SLURM_CONF": str(folder / "etc/slurm.conf"),
        }

    def create(self) -> None:
        self.id = json.loads(self.towline("init", self.place, "--json"))["id"]

    def towline(self, *words: object) -> str:
        command = [self.command, *map(str, words)]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, words
        return done.stdout

    def save(self, name: str, size: int = 1 << 20) -> None:
        (self.folder / "file").write_bytes(os.urandom(size))
        self.towline("save", self.folder / "file", name)

    def start(self, *command: object) -> None:
        with (self.folder / f"{Path(str(command[0])).name}.out").open("ab") as log:
            process = subprocess.Popen(list(map(str, command)), env=self.environment, stdout=log, stderr=log)
        self.running.append(process)

    def policy(self) -> None:
        """With `home` as this machine's site."""
        self.towline("identity", "init")
        self.towline("identity", "issue", "home/a", "--to", self.folder / "config/towline/identity")
        self.towline("identity", "issue-policy", "--to", self.folder / "key")
        policy = self.folder / "policy.toml"
        policy.write_text(POLICY.format(id=self.id, place=self.place))
        self.towline("policy", "sign", policy, "--key", self.folder / "key")
        self.towline("policy", "set", policy)

    def configure(self) -> None:
        """The files of deploy/slurm as they are, but for where things are."""
        etc = self.folder / "etc"
        etc.mkdir()
        for file in DEPLOY.glob("*.lua"):
            text = file.read_text().replace("/etc/slurm/towline.lua", str(etc / "towline.lua"))
            for key, value in {
                "hints": self.folder / "hints",
                "command": self.command,
                "agent": self.folder / "agent.sock",
                "repository": self.place,
                "sites": self.folder / "sites.toml",
                "jobs": self.folder / "jobs",
            }.items():
                text = re.sub(rf'^   {key} = "[^"]*",$', f'   {key} = "{value}",', text, flags=re.MULTILINE)
            (etc / file.name).write_text(text)
        shutil.copy(DEPLOY / "burst_buffer.conf", etc)
        wanted = re.findall(
            r"^(?:JobSubmitPlugins|BurstBufferType)=.*$", (DEPLOY / "slurm.conf").read_text(), re.MULTILINE
        )
        assert len(wanted) == 2
        host = socket.gethostname()
        ports = free_ports(2)
        conf = CONF.format(host=host, ports=ports, folder=self.folder, towline="\n".join(wanted))
        (etc / "slurm.conf").write_text(conf)

    def begin(self) -> None:
        for name in ("hints", "jobs", "state", "spool", "work", "munge"):
            (self.folder / name).mkdir()
        shutil.chown(self.folder / "work", USER)
        (self.folder / "munge/key").write_bytes(os.urandom(128))
        (self.folder / "munge/key").chmod(0o400)
        (self.folder / "munge").chmod(0o711)
        self.start(
            "munged", "--foreground", "--force", "--socket", self.folder / "munge/socket",
            "--key-file", self.folder / "munge/key", "--pid-file", self.folder / "munge/pid",
            "--seed-file", self.folder / "munge/seed", "--log-file", self.folder / "munge/log",
        )  # fmt: skip
        until("munged", (self.folder / "munge/socket").exists)
        self.start("slurmctld", "-D", "-c")
        self.start("slurmd", "-D", "-c", "-N", "node1")
        until("a node", lambda: "idle" in self.slurm("sinfo", "-h", "-n", "node1", "-o", "%T"))

    def slurm(self, *words: str) -> str:
        return subprocess.run(words, env=self.environment, stdout=subprocess.PIPE, text=True).stdout

    def submit(self, script: str, *options: str) -> tuple[int, str]:
        """Submits a job as a user; returns its number, or 0, and the message."""
        path = self.folder / "work/job.sh"
        path.write_text(f"#!/bin/bash\n{script}")
        command = ["runuser", "-u", USER, "--", "sbatch", "--chdir", str(self.folder / "work"), *options, str(path)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        number = re.search(r"Submitted batch job (\d+)", done.stdout)
        return int(number[1]) if number else 0, done.stderr

    def job(self, number: int) -> dict[str, str]:
        shown = self.slurm("scontrol", "-o", "show", "job", str(number))
        return dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|$)", shown.strip()))

    def ended(self, number: int) -> dict[str, str]:
        def over() -> dict[str, str] | None:
            job = self.job(number)
            assert job.get("JobState") not in ("FAILED", "CANCELLED", "NODE_FAIL"), job
            reason = job.get("Reason", "")
            assert "slurm_bb_" not in reason and reason != "JobHeldAdmin", job
            return job if job.get("JobState") == "COMPLETED" else None

        found = until("the end of a job", over)
        assert isinstance(found, dict)
        return found

    def end(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in reversed(self.running):
            process.wait(30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Jobs of another user must reach it, and pytest's own folders are private.
    folder = Path(tempfile.mkdtemp(prefix="towline-slurm-"))
    folder.chmod(0o755)
    one = Cluster(folder)
    try:
        one.create()
        for name in ("team-a/run-7/step-1", "team-a/tokens", "private/x", "team-b/x"):
            one.save(name)
        one.policy()
        (folder / "sites.toml").write_text(SITES.format(place=one.place))
        # The user of the jobs writes to it when a job stages out.
        for path in (one.place, *one.place.rglob("*")):
            shutil.chown(path, USER)
        one.configure()
        one.begin()
        settings = AGENT.format(place=one.place, folder=folder, user=USER)
        (folder / "agent.toml").write_text(settings)
        one.start(one.command, "agent", "--config", folder / "agent.toml")
        until("hints", (folder / "hints/team-b%2fx").exists)
        yield one
    except BaseException:
        for log in folder.glob("*.log"):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-8000:]}")
        raise
    finally:
        one.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_goes_where_its_data_may_go_and_is(cluster: Cluster) -> None:
    # Both sites may have it; at home, it is nearer.
    number, said = cluster.submit("#BB_LUA towline inputs=team-a/tokens\ntrue\n")
    assert number, said
    job = cluster.ended(number)
    assert (job["AdminComment"], job["NodeList"]) == ("towline:home", "node1")
    assert "home" in job.get("Prefer", job.get("Features", "")), job
    # Only home may have it; the user's own constraint stays.
    number, said = cluster.submit("#BB_LUA towline inputs=private/x,team-a/run-7@latest\ntrue\n", "-C", "fast")
    assert number, said
    assert cluster.ended(number)["Features"] == "fast&home"
    for own in ("fast|home", "fast,home"):
        number, said = cluster.submit("#BB_LUA towline inputs=private/x\ntrue\n", "-C", own)
        assert number, said
        assert cluster.ended(number)["NodeList"] == "node1"
    number, said = cluster.submit("#BB_LUA towline inputs=private/x\ntrue\n", "-C", "burst)|(burst")
    assert not number and "cannot join the constraint" in said, said
    number, said = cluster.submit("#BB_LUA towline inputs=private/x\ntrue\n", "-C", "burst|home")
    assert cluster.ended(number)["NodeList"] == "node1"
    # A preference does not lead elsewhere.
    number, said = cluster.submit("#BB_LUA towline inputs=private/x\ntrue\n", "--prefer", "burst")
    assert cluster.ended(number)["NodeList"] == "node1"
    # Its user cannot take that away.
    number, _ = cluster.submit("#BB_LUA towline inputs=private/x\ntrue\n", "--hold")
    update = ["runuser", "-u", USER, "--", "scontrol", "update", f"job={number}", "features=fast"]
    assert subprocess.run(update, env=cluster.environment, capture_output=True).returncode != 0
    assert cluster.job(number)["Features"] == "home"
    cluster.slurm("scancel", str(number))


def test_a_job_is_refused_where_its_data_may_not_be(cluster: Cluster) -> None:
    number, said = cluster.submit("#BB_LUA towline inputs=private/x stage_in=1\ntrue\n")
    assert not number and "cannot read the directive stage_in=1" in said
    many = ",".join(f"team-a/{number}" for number in range(65))
    number, said = cluster.submit(f"#BB_LUA towline inputs={many}\ntrue\n")
    assert not number and "may have 64 inputs" in said, said
    # A name of another user is as an absent one.
    for name in ("team-b/x", "team-c/none"):
        number, said = cluster.submit(f"#BB_LUA towline inputs={name} stage_in\ntrue\n")
        assert not number and f"there is no hint about {name}" in said, said
        number, said = cluster.submit(f"#BB_LUA towline inputs={name}\ntrue\n")
        assert number and "placed without regard to its data" in said, said
        cluster.ended(number)
    # One without a hint decides nothing; the others do.
    number, said = cluster.submit("#BB_LUA towline inputs=team-c/none,private/x,private/x\ntrue\n")
    assert "there is no hint about team-c/none" in said and cluster.ended(number)["Features"] == "home", said
    # A line that takes long to read if it is read badly.
    number, said = cluster.submit(f"#BB_LUA{' ' * 200_000}x\n#BB_LUA towline {' ' * 200_000}x\ntrue\n")
    assert not number and "cannot read the directive x" in said, said
    number, said = cluster.submit("true\n")
    assert number and said == "", said
    cluster.ended(number)


def test_data_is_there_before_the_job_and_released_after_it(cluster: Cluster) -> None:
    script = (
        "#BB_LUA towline inputs=team-a/run-7@latest,team-a/tokens stage_in lease=1h\n"
        f"#BB_LUA towline stage_out={cluster.folder}/work/out:team-a/out\n"
        'echo "$TOWLINE_SITE $TOWLINE_HINT"\n'
        "mkdir -p out && echo result > out/result\n"
    )
    agent = cluster.environment | {"TOWLINE_AGENT": str(cluster.folder / "agent.sock")}

    def pins() -> list[dict[str, object]]:
        shown = subprocess.run(
            [cluster.command, "pins", "--json"], env=agent, stdout=subprocess.PIPE, check=True
        ).stdout
        return json.loads(shown)["pins"]

    before = pins()
    # A name that is made up to be taken for a user and a site.
    number, said = cluster.submit(script, "-J", "x UserId=root(0) AdminComment=towline:burst")
    assert number, said
    cluster.ended(number)
    told = (cluster.folder / f"work/slurm-{number}.out").read_text().split()
    assert told[0] == "home" and re.fullmatch("h_[0-9a-f]{32}", told[1]), told
    until("the end of the commitment", lambda: pins() == before)
    # Everything had been fetched: 2 MiB that did not compress.
    stat = json.loads(
        subprocess.run([cluster.command, "cache", "stat", "--json"], env=agent, stdout=subprocess.PIPE).stdout
    )
    assert stat["bytes"] >= 2 << 20, stat
    saved = until("what it left behind", lambda: "team-a/out" in cluster.towline("ls"))
    assert saved
    # With the rights of the job's user, not of the one that its name says.
    owners = {path.owner() for path in (cluster.place / "pack").rglob("*") if path.is_file()}
    assert USER in owners, owners
    assert not list((cluster.folder / "jobs").iterdir())


def test_a_user_has_half_of_what_is_held_at_most(cluster: Cluster) -> None:
    etc = cluster.folder / "etc"
    text = (etc / "towline.lua").read_text()
    few = re.sub(r"held_names = \d+", "held_names = 2", text)
    assert few != text

    def settings(written: str) -> None:
        (etc / "towline.lua").write_text(written)
        # Slurm loads its script again when that changes.
        (etc / "burst_buffer.lua").touch()

    def submit_beside(owners: list[str], reason: str) -> None:
        records = [cluster.folder / f"jobs/{900_000 + number}" for number in range(len(owners))]
        for record, owner in zip(records, owners, strict=True):
            record.write_text(f"h_{0:032x} home {owner}\n")
        number, said = cluster.submit("#BB_LUA towline inputs=team-a/tokens stage_in\ntrue\n")
        assert number, said
        if reason:
            assert until("a held job", lambda: reason in cluster.job(number).get("Reason", "").replace("_", " "))
            cluster.slurm("scancel", str(number))
        else:
            cluster.ended(number)
        assert until("no record", lambda: not (cluster.folder / f"jobs/{number}").exists())
        for record in records:
            record.unlink()

    settings(few)
    try:
        submit_beside([USER], "half of held names")
        submit_beside(["alice", "alice"], "which is held names")
        submit_beside(["alice"], "")
    finally:
        settings(text)


def test_the_documented_files_are_read_as_they_are() -> None:
    settings = tomllib.loads((DEPLOY / "agent.toml").read_text())
    lua = (DEPLOY / "towline.lua").read_text()
    for key, value in {
        "hints": settings["advisor"]["slurm_hints"],
        "agent": settings["socket"],
        "repository": settings["repository"],
        "sites": settings["advisor"]["sites"],
    }.items():
        assert f'{key} = "{value}"' in lua, key
