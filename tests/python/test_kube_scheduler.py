"""deploy/kubernetes/scheduler: valid for Kubernetes, and the agent answers as the scheduler is told to ask."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import tomllib
import towline
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/kubernetes/scheduler"
VERSIONS = ("1.33.0", kubernetes_validate.latest_version())


def manifests() -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "deployment.yaml").read_text()))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(version):
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_manifests_name_what_there_is():
    kustomization = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    assert all((DEPLOY / file).exists() for file in kustomization["resources"] + generated["files"])
    (pod,) = (one["spec"]["template"]["spec"] for one in manifests() if one["kind"] == "Deployment")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["settings"]["configMap"]["name"] == generated["name"]
    containers = pod["initContainers"] + pod["containers"]
    for one in containers:
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes.keys()
        # Each configuration is one of the files.
        assert Path(one["args"][-1]).name in generated["files"]
    settings = tomllib.loads((DEPLOY / "agent.toml").read_text())
    assert {"name": "TOWLINE_AGENT", "value": settings["socket"]} in containers[0]["env"]
    assert settings["identity"] in [mount["mountPath"] for mount in containers[0]["volumeMounts"]]
    assert settings["advisor"]["sites"] in generated["files"]


def test_the_scheduler_asks_where_the_agent_answers(tmp_path):
    """With both files as they are; only the repository, the socket and the port are of this machine."""
    told = yaml.safe_load((DEPLOY / "kube-scheduler.yaml").read_text())
    (extender,) = told["extenders"]
    settings = tomllib.loads((DEPLOY / "agent.toml").read_text())
    assert extender["urlPrefix"].startswith(f"http://{settings['http']}/")
    repository = towline.open(tmp_path / "repository", create=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_bytes(b"0123456789" * 10_000)
    repository.save(tmp_path / "data", "run-7/step-1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for file in ("agent.toml", "sites.toml"):
        text = (DEPLOY / file).read_text().replace(settings["repository"], str(tmp_path / "repository"))
        text = text.replace(settings["socket"], "agent.sock").replace(":7070", f":{port}")
        (tmp_path / file).write_text(re.sub(r"^identity = .*\n", "", text, flags=re.MULTILINE))
    command = [sys.executable, "-m", "towline", "agent", "--config", str(tmp_path / "agent.toml")]
    agent = subprocess.Popen(command)
    try:
        url = extender["urlPrefix"].replace(":7070", f":{port}")
        for _ in range(600):
            try:
                urllib.request.urlopen(url.removesuffix("/kube") + "/health")
                break
            except OSError:
                time.sleep(0.1)
        annotations = {"towline.dev/inputs": "run-7@latest"}
        pod = {"metadata": {"name": "train", "namespace": "team-a-dev", "annotations": annotations}}
        asked = {"Pod": pod, "Nodes": None, "NodeNames": ["dgx-1", "ip-10-0-0-1"]}

        def call(verb: str):
            body = json.dumps(asked).encode()
            request = urllib.request.Request(f"{url}/{verb}", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                assert answer.status == 200
                return json.load(answer)

        passed = call(extender["filterVerb"])
        assert (passed["NodeNames"], passed["Error"]) == (asked["NodeNames"], "")
        scores = {one["Host"]: one["Score"] for one in call(extender["prioritizeVerb"])}
        # The repository is at home.
        assert scores["dgx-1"] == 10 > scores["ip-10-0-0-1"]
    finally:
        agent.terminate()
        assert agent.wait(60) == 0
