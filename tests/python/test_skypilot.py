"""deploy/skypilot with the real client of SkyPilot: tasks run where their data may go, and where it is near."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/skypilot"
TOWLINE = Path(sys.executable).with_name("towline")
SKYPILOT = Path(sys.prefix) / "skypilot/bin/python"

POLICY = """version = 1
repository = '{id}'
[[site]]
name = 'home'
repositories = ['{place}', '{id}']
[[site]]
name = 'aws-use1'
[[site]]
name = 'gcp-usc1'
[[rule]]
verdict = 'deny'
names = 'team-a/private/**'
to = ['aws-use1', 'gcp-usc1']
why = 'stays at home'
[[rule]]
verdict = 'deny'
names = 'team-a/europe/**'
to = 'aws-use1'
why = 'not to AWS'
[[rule]]
verdict = 'allow'
why = 'anything else'
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where an agent with the settings of deploy/skypilot answers; only the repository and the port are of this machine."""
    folder = tmp_path_factory.mktemp("skypilot")
    place = folder / "repo"
    environment = os.environ | {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_STATE_HOME": str(folder / "state"),
        "TOWLINE_REPO": str(place),
        "TOWLINE_AGENT": "none",
    }

    def towline(*words: object) -> str:
        command = [TOWLINE, *map(str, words)]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    repository = json.loads(towline("init", place, "--json"))["id"]
    for name in ("run-7/step-1", "tokens", "private/x", "europe/x"):
        (folder / "file").write_bytes(os.urandom(1 << 20))
        towline("save", folder / "file", f"team-a/{name}")
    towline("save", folder / "file", "team-b/x")
    towline("identity", "init")
    towline("identity", "issue", "home/a", "--to", folder / "config/towline/identity")
    towline("identity", "issue-policy", "--to", folder / "key")
    (folder / "policy.toml").write_text(POLICY.format(id=repository, place=place))
    towline("policy", "sign", folder / "policy.toml", "--key", folder / "key")
    towline("policy", "set", folder / "policy.toml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = (DEPLOY / "agent.toml").read_text()
    settings = settings.replace("s3://models/team", str(place)).replace(":7070", f":{port}")
    settings = settings.replace("/etc/towline/identity", str(folder / "config/towline/identity"))
    (folder / "agent.toml").write_text(f'socket = "{folder}/agent.sock"\n{settings}')
    (folder / "sites.toml").write_text((DEPLOY / "sites.toml").read_text().replace("s3://models", str(place)))
    agent = subprocess.Popen([TOWLINE, "agent", "--config", folder / "agent.toml"], env=environment)
    told = yaml.safe_load((DEPLOY / "config.yaml").read_text())["admin_policy"]
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.1)
        yield told.replace(":7070", f":{port}")
    finally:
        agent.terminate()
        assert agent.wait(60) == 0


class Client:
    """SkyPilot's own client, and where it asks."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        # SkyPilot keeps its state in the home folder.
        environment = os.environ | {"HOME": str(home)}
        command = [SKYPILOT, Path(__file__).with_name("skypilot_client.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def apply(self, config: dict[str, Any]) -> dict[str, Any]:
        """What becomes of a task."""
        self.process.stdin.write(json.dumps({"url": self.url, "config": config}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def task(self, change: dict[str, Any], *, inputs: str | None = None) -> dict[str, Any]:
        """What becomes of the documented task, with changes of its resources."""
        config = yaml.safe_load((DEPLOY / "task.yaml").read_text())
        config["resources"] |= change
        if inputs is not None:
            config["envs"]["TOWLINE_INPUTS"] = inputs
        return self.apply(config)

    def places(self, change: dict[str, Any], *, inputs: str | None = None) -> list[str]:
        """Its places; everything else stays as it is."""
        found = self.task(change, inputs=inputs)
        assert "rejected" not in found, found
        for key in found["before"].keys() | found["after"].keys():
            assert key == "resources" or found["before"].get(key) == found["after"].get(key), key
        assert all(one["accelerators"] == {"H100": 8} for one in found["places"]), found
        return [one["infra"] or "anywhere" for one in found["places"]]

    def rejection(self, change: dict[str, Any], *, inputs: str) -> str:
        return self.task(change, inputs=inputs)["rejected"]


@pytest.fixture(scope="module")
def client(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    one = Client(url, tmp_path_factory.mktemp("home"))
    yield one
    one.process.stdin.close()
    assert one.process.wait(60) == 0


def test_places_are_ordered_by_what_the_data_costs_there(client: Client) -> None:
    assert client.places({}) == ["kubernetes/onprem", "aws/us-east-1", "gcp/us-central1"]
    # Among the places that the user wants.
    assert client.places({"any_of": [{"infra": "gcp"}, {"infra": "aws/us-east-1/us-east-1a"}]}) == [
        "aws/us-east-1/us-east-1a",
        "gcp/us-central1",
    ]
    assert client.places({"infra": "gcp"}) == ["gcp/us-central1"]
    # One that the sites file does not describe comes last.
    assert client.places({"any_of": [{"infra": "azure/eastus"}, {"infra": "aws"}]}) == ["aws/us-east-1", "azure/eastus"]


def test_places_where_the_data_may_not_go_are_left_out(client: Client) -> None:
    assert client.places({}, inputs="team-a/europe/x,team-a/tokens") == ["kubernetes/onprem", "gcp/us-central1"]
    assert client.places({}, inputs="team-a/private/x") == ["kubernetes/onprem"]
    assert client.places({"any_of": [{"infra": "aws"}, {"infra": "k8s"}]}, inputs="team-a/private/x") == [
        "kubernetes/onprem"
    ]
    said = client.rejection({"infra": "aws"}, inputs="team-a/private/x")
    assert "may go to none of its places" in said and "stays at home" in said, said


def test_a_task_that_asks_for_what_is_not_there_is_rejected(client: Client) -> None:
    # A name that tasks may not ask for is as an absent one.
    names = ("team-a/none", "team-b/x", "team-b/none")
    said = {client.rejection({}, inputs=name).replace(name, "NAME") for name in names}
    assert len(said) == 1 and "no such name" in said.pop()
    wrong = client.apply({"envs": {"TOWLINE_INPUTS": "team-a/tokens", "TOWLINE_OBJECTIVE": "speed"}})
    assert "TOWLINE_OBJECTIVE" in wrong["rejected"]
    # One that reads nothing stays as it is.
    found = client.apply({"name": "t", "run": "echo 1", "resources": {"infra": "aws"}})
    assert found["before"] == found["after"]
