"""A pod as a kubelet would run it, as far as that goes without a cluster: the commands, environments and mounts of its
containers, with a folder of this machine for each volume."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in pod["initContainers"] + pod["containers"] if one["name"] == name)


class Pod:
    """A pod with the spec `told`, in `folder`. `files` are those of its volumes that are no emptyDirs; `user` are the arguments
    of a process that make it the pod's user; `program` is the command `towline`, if that is not the one of the package."""

    def __init__(
        self,
        told: dict[str, Any],
        folder: Path,
        files: dict[str, dict[str, str]],
        user: dict[str, object],
        program: Path | None = None,
    ):
        self.told, self.folder, self.files, self.user = told, folder, files, user
        folder.mkdir()
        folder.chmod(0o777)
        self.path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if program:
            (folder / "bin").mkdir()
            (folder / "bin/towline").symlink_to(program)
            self.path = f"{folder / 'bin'}:{self.path}"
        for volume in self.told["volumes"]:
            self._make(volume)
        self.agent = self.start("towline")

    def _make(self, volume: dict[str, Any]) -> None:
        made = self.folder / volume["name"]
        made.mkdir(parents=True)
        if "emptyDir" in volume:
            # As the kubelet makes it, with a group for all (https://kubernetes.io/docs/tasks/configure-pod-container/security-context/).
            if os.getuid() == 0:
                os.chown(made, 0, self.told["securityContext"]["fsGroup"])
            made.chmod(0o2777)
            return
        (made / "..now").mkdir()
        (made / "..data").symlink_to("..now")
        for name, text in self.files[volume["name"]].items():
            (made / "..now" / name).write_text(self.mapped("towline", text))
            (made / name).symlink_to(f"..data/{name}")

    def mapped(self, name: str, text: str) -> str:
        """`text` with the paths of a container's mounts as they are on this machine."""
        for mount in container(self.told, name)["volumeMounts"]:
            text = re.sub(rf"(?<![\w/]){mount['mountPath']}(?![\w-])", str(self.folder / mount["name"]), text)
        return text

    def start(self, name: str, command: list[str] | None = None) -> subprocess.Popen:
        """The process of a container, or another one in it."""
        told = container(self.told, name)
        command = command or told["command"] + told.get("args", [])
        environment = {one["name"]: self.mapped(name, one["value"]) for one in told["env"]}
        log = (self.folder / f"{name}.log").open("a")
        return subprocess.Popen(
            [self.mapped(name, word) for word in command],
            env={"PATH": self.path, "HOME": "/", **environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **self.user,
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_until_started(self) -> None:
        """As the kubelet does, but more often."""
        probe = container(self.told, "towline")["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            if self.start("towline", probe["exec"]["command"]).wait(60) == 0:
                return
            assert self.agent.poll() is None, self.log("towline")
            time.sleep(0.2)
        pytest.fail(f"the startup probe never succeeded: {self.log('towline')}")

    def train(self, program: str) -> str:
        """Runs the training, with `program` as train.py."""
        (self.folder / "train.py").write_text(program)
        assert self.start("training").wait(120) == 0, self.log("training")
        return self.log("training")

    def end(self) -> int:
        """SIGTERM, and no more time than the pod has."""
        self.agent.send_signal(signal.SIGTERM)
        return self.agent.wait(self.told["terminationGracePeriodSeconds"])

    def end_abruptly(self) -> None:
        self.agent.kill()
        self.agent.wait()
