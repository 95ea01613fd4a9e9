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

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/skypilot"
TOWLINE = Path(sys.executable).with_name("towline")

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


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyPilot keeps its state in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))


def places(url: str, change: dict[str, object], *, inputs: str | None = None) -> list[str]:
    """Places of the documented task, with changes of its resources, after the policy of `url` was applied by SkyPilot itself."""
    import sky
    from sky import admin_policy
    from sky.server.requests.request_names import AdminPolicyRequestName
    from sky.utils import config_utils

    config = yaml.safe_load((DEPLOY / "task.yaml").read_text())
    config["resources"] |= change
    if inputs is not None:
        config["envs"]["TOWLINE_INPUTS"] = inputs
    config = {key: value for key, value in config.items() if value is not None}
    task = sky.Task.from_yaml_config(config)
    request = admin_policy.UserRequest(
        task, config_utils.Config({"kept": {"as": "it is"}}), next(iter(AdminPolicyRequestName)), None, True
    )
    answer = admin_policy.RestfulAdminPolicy(url).apply(request)
    assert dict(answer.skypilot_config) == {"kept": {"as": "it is"}}
    before, after = task.to_yaml_config(), answer.task.to_yaml_config()
    assert {key: value for key, value in after.items() if key != "resources"} == {
        key: value for key, value in before.items() if key != "resources"
    }
    resources = answer.task.resources
    listed = list(resources) if isinstance(resources, list) else sorted(resources, key=str)
    for one in listed:
        assert one.accelerators == {"H100": 8}, one
    return [one.infra.to_str() or "anywhere" for one in listed]


def test_places_are_ordered_by_what_the_data_costs_there(url: str) -> None:
    assert places(url, {}) == ["kubernetes/onprem", "aws/us-east-1", "gcp/us-central1"]
    # Among the places that the user wants.
    assert places(url, {"any_of": [{"infra": "gcp"}, {"infra": "aws/us-east-1/us-east-1a"}]}) == [
        "aws/us-east-1/us-east-1a",
        "gcp/us-central1",
    ]
    assert places(url, {"infra": "gcp"}) == ["gcp/us-central1"]
    # One that the sites file does not describe comes last.
    assert places(url, {"any_of": [{"infra": "azure/eastus"}, {"infra": "aws"}]}) == ["aws/us-east-1", "azure/eastus"]


def test_places_where_the_data_may_not_go_are_left_out(url: str) -> None:
    import sky

    assert places(url, {}, inputs="team-a/europe/x,team-a/tokens") == ["kubernetes/onprem", "gcp/us-central1"]
    assert places(url, {}, inputs="team-a/private/x") == ["kubernetes/onprem"]
    with pytest.raises(
        sky.exceptions.UserRequestRejectedByPolicy, match=r"may go to none of its places.*stays at home"
    ):
        places(url, {"infra": "aws"}, inputs="team-a/private/x")


def test_a_task_that_asks_for_what_is_not_there_is_rejected(url: str) -> None:
    import sky

    # A name that tasks may not ask for is as an absent one.
    said = set()
    for name in ("team-a/none", "team-b/x", "team-b/none"):
        with pytest.raises(sky.exceptions.UserRequestRejectedByPolicy, match="no such name") as caught:
            places(url, {}, inputs=name)
        said.add(str(caught.value).replace(name, "NAME"))
    assert len(said) == 1, said
    with pytest.raises(sky.exceptions.UserRequestRejectedByPolicy, match="TOWLINE_OBJECTIVE"):
        config = {"envs": {"TOWLINE_INPUTS": "team-a/tokens", "TOWLINE_OBJECTIVE": "speed"}}
        ask(url, config)
    # One that reads nothing stays as it is.
    config = {"name": "t", "run": "echo 1", "resources": {"infra": "aws"}}
    shown = sky.Task.from_yaml_config(config).to_yaml_config()
    assert ask(url, config) == {key: value for key, value in shown.items() if key in config}


def ask(url: str, config: dict[str, object]) -> dict[str, object]:
    """The task that `config` describes, after the policy."""
    import sky
    from sky import admin_policy
    from sky.server.requests.request_names import AdminPolicyRequestName
    from sky.utils import config_utils

    request = admin_policy.UserRequest(
        sky.Task.from_yaml_config(config), config_utils.Config({}), next(iter(AdminPolicyRequestName)), None, True
    )
    shown = admin_policy.RestfulAdminPolicy(url).apply(request).task.to_yaml_config()
    return {key: value for key, value in shown.items() if key in config}
