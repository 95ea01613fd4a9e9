"""deploy/kubernetes: valid for Kubernetes, the same in the documents, and run as a kubelet would run it, as far as that goes
without a cluster: the containers' commands, environments and mounts, with a folder of this machine for each volume."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import tomllib
import towline
import yaml

from .pods import Pod, container

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/kubernetes"
#: The first version in which a sidecar is for everybody, and the newest that the schemas are there for.
VERSIONS = ("1.33.0", kubernetes_validate.latest_version())
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "M": 1 << 20, "G": 1 << 30}

TRAIN = """
import argparse, os, pathlib

told = argparse.ArgumentParser()
told.add_argument("--output", type=pathlib.Path)
output = told.parse_args().output
done = max((int(folder.name.split("-")[1]) for folder in output.glob("checkpoint-*")), default=0)
print("went on from", done)
for step in (done + 1, done + 2):
    folder = output / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(step.to_bytes(2, "little") * 50_000)
    (folder / "trainer_state.json").write_text('{"global_step": %d}' % step)
"""


def job() -> dict:
    return yaml.safe_load((DEPLOY / "job.yaml").read_text())


def settings() -> dict:
    return tomllib.loads((DEPLOY / "agent.toml").read_text())


def number(size: str) -> int:
    digits, unit = re.fullmatch(r"(\d+)(\w+)", size).groups()
    return int(digits) * UNITS[unit]


def seconds(span: str) -> int:
    return int(re.fullmatch(r"(\d+)s", span)[1])


def covered(container: dict, path: str) -> str | None:
    """The volume that `path` of a container lies in."""
    mounts = container["volumeMounts"]
    return next((one["name"] for one in mounts if f"{path}/".startswith(f"{one['mountPath']}/")), None)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_is_valid(version):
    kubernetes_validate.validate(job(), version, strict=True)


def test_what_is_wrong_with_a_manifest_is_seen():
    wrong = job()
    wrong["spec"]["template"]["spec"]["initContainers"][0]["startupProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_the_manifest_names_what_there_is():
    pod, kustomization = job()["spec"]["template"]["spec"], yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    assert all((DEPLOY / file).exists() for file in kustomization["resources"])
    (generated,) = kustomization["configMapGenerator"]
    assert all((DEPLOY / file).exists() for file in generated["files"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["settings"]["configMap"]["name"] == generated["name"]
    for one in pod["initContainers"] + pod["containers"]:
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes.keys()


def test_the_settings_fit_the_manifest():
    pod, told = job()["spec"]["template"]["spec"], settings()
    agent, training = container(pod, "towline"), container(pod, "training")
    assert covered(agent, agent["args"][-1]) == "settings"
    for path in (told["socket"], *(watched["folder"] for watched in told["sidecar"]["watch"])):
        assert covered(agent, path) and covered(agent, path) == covered(training, path), path
    assert covered(agent, told["cache"]["dir"]) == "cache"
    for one in (agent, training):
        assert {"name": "TOWLINE_AGENT", "value": told["socket"]} in one["env"]
        # One user for both is said once, for the pod.
        assert "runAsUser" not in one.get("securityContext", {})
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"]
    assert seconds(told["grace"]) < pod["terminationGracePeriodSeconds"]
    (cache,) = (volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "cache")
    assert number(told["cache"]["capacity"]) < number(cache)
    assert number(told["memory"]) < number(agent["resources"]["limits"]["memory"])


def test_the_documents_show_the_files_as_they_are():
    shown = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs/operations.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [text for language, text in shown if language == "yaml"] == [(DEPLOY / "job.yaml").read_text()]
    assert (DEPLOY / "agent.toml").read_text() in [text for language, text in shown if language == "toml"]


@pytest.fixture
def user() -> dict[str, object]:
    """The user of the manifest, where this process may become that one."""
    told = job()["spec"]["template"]["spec"]["securityContext"]
    one = {"user": told["runAsUser"], "group": told["runAsGroup"], "extra_groups": [told["fsGroup"]]}
    if os.getuid() != 0:
        return {}
    try:
        subprocess.run([sys.executable, "-c", "import towline"], capture_output=True, check=True, **one)
    except (subprocess.CalledProcessError, PermissionError):
        # Such as where the interpreter lies in root's home.
        return {}
    return one


@pytest.fixture
def folder(user) -> Iterator[Path]:
    """A folder that the manifest's user may enter, with the path of a socket in it no longer than it may be."""
    made = Path(tempfile.mkdtemp(prefix="pod-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def repository(folder, user) -> Path:
    """What the agent's settings want to be there."""
    path = folder / "repository"
    saved = towline.open(path)
    (folder / "base").mkdir()
    (folder / "base" / "weights.bin").write_bytes(os.urandom(100_000))
    for name in settings()["sidecar"]["warm"]:
        saved.save(folder / "base", name)
    if user:
        for found in [path, *path.rglob("*")]:
            os.chown(found, user["user"], user["group"])
    return path


@pytest.fixture
def start(folder, repository, user) -> Iterator:
    pods = []

    def start() -> Pod:
        text = (DEPLOY / "agent.toml").read_text().replace(settings()["repository"], str(repository))
        files = {"settings": {"agent.toml": text}}
        pods.append(Pod(job()["spec"]["template"]["spec"], folder / f"pod-{len(pods)}", files, user))
        return pods[-1]

    yield start
    for pod in pods:
        pod.end_abruptly()


def steps(repository: Path) -> list[str]:
    return [one.name for one in towline.open(repository).ls(settings()["sidecar"]["watch"][0]["run"])]


def test_a_pod_saves_what_its_training_writes(start, repository, tmp_path):
    pod = start()
    pod.wait_until_started()
    assert "went on from 0" in pod.train(TRAIN)
    # It ends before the watch would have taken the checkpoints to be whole.
    assert pod.end() == 0, pod.log("towline")
    run = settings()["sidecar"]["watch"][0]["run"]
    assert steps(repository) == [f"{run}/step-1", f"{run}/step-2"]
    towline.open(repository).restore(f"{run}/step-2", tmp_path / "back")
    assert (tmp_path / "back/weights.bin").read_bytes() == (2).to_bytes(2, "little") * 50_000


def test_a_container_that_starts_again_saves_what_the_killed_one_did_not(start, repository):
    pod = start()
    pod.wait_until_started()
    pod.end_abruptly()
    pod.train(TRAIN)
    # The volumes are the pod's: what the training wrote meanwhile is there.
    pod.agent = pod.start("towline")
    pod.wait_until_started()
    assert pod.end() == 0, pod.log("towline")
    assert len(steps(repository)) == 2


def test_a_new_pod_goes_on_with_the_latest_checkpoint(start, repository):
    pod = start()
    pod.wait_until_started()
    pod.train(TRAIN)
    assert pod.end() == 0, pod.log("towline")
    later = start()
    later.wait_until_started()
    (found,) = (later.folder / "ckpt").glob("checkpoint-*")
    assert found.name == "checkpoint-2"
    assert (found / "weights.bin").read_bytes() == (2).to_bytes(2, "little") * 50_000
    assert "went on from 2" in later.train(TRAIN)
    assert later.end() == 0, later.log("towline")
    assert len(steps(repository)) == 4
