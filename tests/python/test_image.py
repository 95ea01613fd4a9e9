"""deploy/image: an image that foreign tools read, with nothing in it that it does not need, run as its user."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "deploy/image"
PROGRAM = ROOT / "target/debug/towline"
USER = 65532
#: The image's environment has a PATH of its own.
CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"

pytestmark = [
    pytest.mark.skipif(
        not PROGRAM.exists() and "TOWLINE_TEST_REQUIRE_SERVERS" not in os.environ,
        reason="no program in target/debug: cargo build",
    ),
    pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="images are built on Debian and Ubuntu"),
]


def build(program: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, IMAGE / "build.py", "--program", program, "--out", out, *more]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the tests, which is larger than that of a release, without symbols."""
    stripped = tmp_path_factory.mktemp("program") / "towline"
    subprocess.run(["strip", "-o", stripped, PROGRAM], check=True)
    return stripped


@pytest.fixture(scope="module")
def image(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("image")
    built = build(program, out)
    assert built.returncode == 0, built.stderr
    assert re.fullmatch(r"\S+/towline.tar: towline 0\.1\.0 for \w+, [\d.]+ MB, sha256:[0-9a-f]{64}\n", built.stdout)
    return out


@pytest.fixture(scope="module")
def layout(image: Path) -> dict[str, bytes]:
    with tarfile.open(image / "towline.tar") as archive:
        return {info.name: archive.extractfile(info).read() for info in archive if info.isreg()}  # type: ignore[union-attr]


def blob(layout: dict[str, bytes], described: dict[str, Any]) -> bytes:
    """A blob, whose digest and size are those of its descriptor."""
    algorithm, digest = described["digest"].split(":")
    data = layout[f"blobs/{algorithm}/{digest}"]
    assert (len(data), hashlib.sha256(data).hexdigest()) == (described["size"], digest)
    return data


def manifest_of(layout: dict[str, bytes]) -> dict[str, Any]:
    (entry,) = json.loads(layout["index.json"])["manifests"]
    return json.loads(blob(layout, entry))


def test_the_image_is_complete_and_says_how_it_is_run(layout: dict[str, bytes]) -> None:
    manifest = manifest_of(layout)
    config = json.loads(blob(layout, manifest["config"]))
    layers = [gzip.decompress(blob(layout, one)) for one in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    assert (config["config"]["User"], config["config"]["StopSignal"]) == (f"{USER}:{USER}", "SIGTERM")
    # The Containerfile says the same.
    told = (IMAGE / "Containerfile").read_text()
    said = dict(re.findall(r"^([A-Z]+) (.*)$", told, re.MULTILINE))
    assert said["USER"] == config["config"]["User"] and said["WORKDIR"] == config["config"]["WorkingDir"]
    assert json.loads(said["ENTRYPOINT"]) == config["config"]["Entrypoint"]
    assert json.loads(said["CMD"]) == config["config"]["Cmd"]
    environment = [word for line in re.findall(r"^ENV (.*)$", told, re.MULTILINE) for word in line.split()]
    assert environment == config["config"]["Env"]


def test_nothing_is_in_it_that_it_does_not_need(image: Path) -> None:
    with tarfile.open(image / "root.tar") as archive:
        entries = {info.name: info for info in archive}
    programs = {name for name, info in entries.items() if "/bin" in name and info.isreg()}
    assert programs == {"usr/bin/towline"}
    writable = {name for name, info in entries.items() if info.uid == USER or (info.mode & 0o022 and not info.issym())}
    assert writable == {"home/towline", "run/towline", "tmp", "var/lib/towline"}
    assert not [name for name, info in entries.items() if info.mode & 0o6000 or info.isdev() or info.islnk()]
    bill = json.loads((image / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    named = {component["name"] for component in bill["components"]}
    assert {"libc6", "ca-certificates", "tokio", "rustls", "zstd"} <= named
    assert not {"proptest", "criterion", "tempfile", "serde_derive"} & named, "only what is linked"


def test_the_same_input_gives_the_same_image(program: Path, image: Path, tmp_path: Path) -> None:
    # Packages are those of the first build: a mirror may change meanwhile.
    shutil.copytree(image / "packages", tmp_path / "packages")
    assert build(program, tmp_path).returncode == 0
    for file in ("towline.tar", "root.tar", "sbom.cdx.json"):
        assert (tmp_path / file).read_bytes() == (image / file).read_bytes(), file


def test_an_image_that_is_too_large_is_refused(program: Path, image: Path, tmp_path: Path) -> None:
    shutil.copytree(image / "packages", tmp_path / "packages")
    refused = build(program, tmp_path, "--largest", "1000000")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: image is too large: expected at most 1000000 bytes, got ")
    assert not (tmp_path / "towline.tar").exists()


def test_what_is_no_program_is_said(tmp_path: Path) -> None:
    absent = build(tmp_path / "absent", tmp_path)
    assert (absent.returncode, absent.stderr) == (
        1,
        f"error: there is no program at {tmp_path}/absent: `make image` builds it\n",
    )
    (tmp_path / "text").write_text("no program")
    refused = build(tmp_path / "text", tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: cannot run {tmp_path}/text: Permission denied"), refused.stderr
    assert not list(tmp_path.glob("*.tar"))


@pytest.mark.skipif(
    shutil.which("skopeo") is None and "TOWLINE_TEST_REQUIRE_SERVERS" not in os.environ,
    reason="no skopeo: tests/servers/setup.sh installs it",
)
def test_skopeo_reads_it(image: Path, layout: dict[str, bytes], tmp_path: Path) -> None:
    copy = ["skopeo", "copy", "--insecure-policy", f"oci-archive:{image}/towline.tar", f"dir:{tmp_path}/copy"]
    subprocess.run(copy, check=True, stdout=subprocess.DEVNULL)
    manifest = manifest_of(layout)
    assert json.loads((tmp_path / "copy/manifest.json").read_text()) == manifest
    for one in manifest["layers"]:
        assert (tmp_path / "copy" / one["digest"].removeprefix("sha256:")).stat().st_size == one["size"]


@pytest.fixture
def root(image: Path) -> Iterator[Path]:
    """The image's files. Only the places of volumes can be written to, as with a read-only root."""
    # Sockets have short paths.
    root = Path("/tmp") / f"towline-image-{os.getpid()}"
    with tarfile.open(image / "root.tar") as archive:
        archive.extractall(root, filter="fully_trusted")
    for path in ("home/towline", "tmp"):
        os.chown(root / path, 0, 0)
        os.chmod(root / path, 0o755)
    yield root
    shutil.rmtree(root)


def inside(root: Path, *words: str) -> list[str | Path]:
    """Command that runs the image's entry point as its user."""
    return [CHROOT, f"--userspec={USER}:{USER}", root, "/usr/bin/towline", *words]


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_it_runs_as_its_user_from_a_root_that_it_cannot_write_to(root: Path, layout: dict[str, bytes]) -> None:
    config = json.loads(blob(layout, manifest_of(layout)["config"]))["config"]
    environment = dict(word.split("=", 1) for word in config["Env"])
    volume = root / "var/lib/towline"
    (volume / "tree").mkdir()
    (volume / "tree/weights.bin").write_bytes(os.urandom(3_000_000))
    (root / "etc/towline/agent.toml").write_text(
        'repository = "/var/lib/towline/repository"\nsocket = "/run/towline/agent.sock"\nmemory = "256M"\n'
        '[cache]\ndir = "/var/lib/towline/cache"\ncapacity = "64M"\nfree_floor = "0"\n'
    )

    def ran(*words: str) -> str:
        done = subprocess.run(inside(root, *words), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Usage: towline" in ran(*config["Cmd"])
    repository = "/var/lib/towline/repository"
    ran("init", repository)
    ran("save", "/var/lib/towline/tree", "run/step-1", "--repo", repository)
    agent = subprocess.Popen(
        inside(root, "agent", "--config", "/etc/towline/agent.toml"), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        asked = {**environment, "TOWLINE_AGENT": "/run/towline/agent.sock"}
        end = time.monotonic() + 60
        while (ready := subprocess.run(inside(root, "top", "--ready"), env=asked, capture_output=True)).returncode:
            assert agent.poll() is None and time.monotonic() < end, ready.stderr
            time.sleep(0.05)
        done = subprocess.run(
            inside(root, "warm", "run@latest", "--wait"), env=asked, cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    finally:
        agent.send_signal(signal.SIGTERM)
        _, said = agent.communicate(timeout=60)
    assert (agent.returncode, said) == (0, "listening at /run/towline/agent.sock\n")
    ran("restore", "run@latest", "/var/lib/towline/restored", "--repo", repository)
    assert (volume / "restored/weights.bin").read_bytes() == (volume / "tree/weights.bin").read_bytes()
    assert (volume / "restored/weights.bin").stat().st_uid == USER
