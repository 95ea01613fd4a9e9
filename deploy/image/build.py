#!/usr/bin/env python3
"""Builds an OCI image of a program, without a daemon and without a base image.

build.py --program target/release/towline --out target/image

The image holds the program, the libraries of Debian that it needs, the certificates of public authorities, and nothing else: no
shell, no package manager. It runs as user 65532 and needs no writable root. Packages come from the sources of this machine's apt,
which verifies them; the same program and the same versions of the packages give the same image, byte by byte.

Writes to OUT: `towline.tar`, an OCI archive; `root.tar`, the same files as one archive, for the Containerfile; `sbom.cdx.json`,
the packages and crates that are in it, which also lies in the image.

Formats: https://github.com/opencontainers/image-spec/blob/v1.1.0/{image-layout,manifest,config,layer}.md and
https://cyclonedx.org/docs/1.5/json/. `var/lib/dpkg/status.d` is where scanners look for packages of images without dpkg
(https://github.com/GoogleContainerTools/distroless/blob/main/PACKAGE_METADATA.md).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import posixpath
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The user that images without root have by custom.
USER = 65532
#: Folders with a fixed place in the image, and their owners.
FOLDERS = {
    "dev": 0, "etc": 0, "etc/ssl": 0, "etc/ssl/certs": 0, "etc/towline": 0, "home": 0, "home/towline": USER, "proc": 0, "run": 0,
    "run/towline": USER, "sys": 0, "usr": 0, "usr/bin": 0, "usr/lib": 0, "usr/lib64": 0, "usr/share": 0, "usr/share/doc": 0,
    "var": 0, "var/lib": 0, "var/lib/towline": USER, "var/lib/dpkg": 0, "var/lib/dpkg/status.d": 0,
}  # fmt: skip
#: Architectures by their names in Debian: the one of libraries, and the loader.
ARCHITECTURES = {
    "amd64": ("x86_64-linux-gnu", "usr/lib64/ld-linux-x86-64.so.2"),
    "arm64": ("aarch64-linux-gnu", "usr/lib/ld-linux-aarch64.so.1"),
}
#: Libraries by their packages. The name service of glibc loads the last ones when it looks up a host.
LIBRARIES = {
    "libc6": ["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2", "libnss_dns.so.2",
              "libnss_files.so.2"],
    "libgcc-s1": ["libgcc_s.so.1"],
}  # fmt: skip
CERTIFICATES = "ca-certificates"
#: Largest image, in bytes as it is pulled.
LARGEST = 60_000_000


@dataclass
class Entry:
    """A file, folder or link of a layer."""

    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    owner: int = 0
    data: bytes = b""
    target: str = ""


@dataclass
class Package:
    """A package of Debian, unpacked."""

    fields: dict[str, str]
    files: dict[str, bytes]
    links: dict[str, str]
    control: str

    def file(self, path: str) -> bytes:
        """The file at `path`, behind links within the package."""
        for _ in range(8):
            if path in self.files:
                return self.files[path]
            if path not in self.links:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self.links[path]))
        raise SystemExit(f"error: {self.fields['Package']} {self.fields['Version']} has no file {path}")


@dataclass
class Layer:
    """Entries of one layer, by their paths."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Adds a file, and the folders above it."""
        for at in reversed(Path(path).parents[:-1]):
            self.entries.setdefault(str(at), folder())
        self.entries[path] = Entry(mode=mode, data=data)

    def tar(self, seconds: int) -> bytes:
        """The layer's archive: sorted, and every time is `seconds`."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path, entry in sorted(self.entries.items()):
                info = tarfile.TarInfo(path)
                info.type, info.mode, info.uid, info.gid = entry.kind, entry.mode, entry.owner, entry.owner
                info.mtime, info.size, info.linkname = seconds, len(entry.data), entry.target
                archive.addfile(info, io.BytesIO(entry.data))
        return out.getvalue()


def folder(owner: int = 0) -> Entry:
    return Entry(kind=tarfile.DIRTYPE, mode=0o755, owner=owner)


def run(*command: str | Path, cwd: Path = ROOT) -> bytes:
    try:
        return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, check=True).stdout
    except OSError as error:
        raise SystemExit(
            f"error: cannot run {command[0]}: {error.strerror}; images are built on Debian or Ubuntu"
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: {' '.join(map(str, command))} failed with exit code {error.returncode}") from None


def fetched(name: str, folder: Path) -> Package:
    """A package in the version that apt offers, which apt verifies by its signed index. What was fetched before is not fetched
    again."""
    download = ["apt-get", "download", "-qq", "--option", "APT::Sandbox::User=root"]
    words = run(*download, "--print-uris", name).decode().split()
    if len(words) < 2:
        raise SystemExit(f"error: apt offers no package {name}: run `apt-get update`")
    deb = folder / words[1]
    if not deb.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(*download, name, cwd=folder)
    control = run("dpkg-deb", "--field", deb).decode()
    fields = dict(line.split(": ", 1) for line in control.splitlines() if ": " in line and not line.startswith(" "))
    files, links = {}, {}
    with tarfile.open(fileobj=io.BytesIO(run("dpkg-deb", "--fsys-tarfile", deb))) as archive:
        for info in archive:
            path = posixpath.normpath(info.name)
            # Debian has merged /lib into /usr/lib; packages still have either.
            path = f"usr/{path}" if path.startswith("lib") else path
            if info.isreg():
                files[path] = archive.extractfile(info).read()  # type: ignore[union-attr]
            elif info.issym():
                links[path] = info.linkname
    return Package(fields, files, links, control)


def base(packages: dict[str, Package], architecture: str) -> Layer:
    """What programs need: libraries, certificates, users, and places for what is mounted."""
    triple, loader = ARCHITECTURES[architecture]
    layer = Layer({path: folder(owner) for path, owner in FOLDERS.items()})
    layer.entries["tmp"] = Entry(kind=tarfile.DIRTYPE, mode=0o1777)
    for link in ("lib", "lib64"):
        layer.entries[link] = Entry(kind=tarfile.SYMTYPE, mode=0o777, target=f"usr/{link}")
    for package, libraries in LIBRARIES.items():
        for library in libraries:
            layer.add(f"usr/lib/{triple}/{library}", packages[package].file(f"usr/lib/{triple}/{library}"), 0o755)
    layer.add(loader, packages["libc6"].file(f"usr/lib/{triple}/{posixpath.basename(loader)}"), 0o755)
    certificates = packages[CERTIFICATES]
    bundle = [data for path, data in sorted(certificates.files.items()) if path.endswith(".crt")]
    layer.add(
        "etc/ssl/certs/ca-certificates.crt", b"".join(one if one.endswith(b"\n") else one + b"\n" for one in bundle)
    )
    layer.add(
        "etc/passwd", f"root:x:0:0::/:/nonexistent\ntowline:x:{USER}:{USER}::/home/towline:/nonexistent\n".encode()
    )
    layer.add("etc/group", f"root:x:0:\ntowline:x:{USER}:\n".encode())
    layer.add("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    layer.add("etc/os-release", packages["base-files"].file("usr/lib/os-release"))
    for name, package in packages.items():
        layer.add(f"var/lib/dpkg/status.d/{name}", package.control.encode())
        if f"usr/share/doc/{name}/copyright" in package.files:
            layer.add(f"usr/share/doc/{name}/copyright", package.files[f"usr/share/doc/{name}/copyright"])
    return layer


def crates() -> list[dict[str, Any]]:
    """Crates that are linked into the program, with its usual features."""
    target = next(line[6:] for line in run("rustc", "-vV").decode().splitlines() if line.startswith("host: "))
    told = run("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target)
    metadata = json.loads(told)
    packages = {package["id"]: package for package in metadata["packages"]}
    needed = {node["id"]: [dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
              for node in metadata["resolve"]["nodes"]}  # fmt: skip
    root = next(
        package["id"] for package in metadata["packages"] if package["name"] == "towline" and package["source"] is None
    )
    linked: set[str] = set()
    left = [root]
    while left:
        one = left.pop()
        if one not in linked and not any("proc-macro" in built["kind"] for built in packages[one]["targets"]):
            linked.add(one)
            left.extend(needed[one])
    components = []
    for package in sorted((packages[one] for one in linked - {root}), key=lambda one: (one["name"], one["version"])):
        component = {
            "type": "library", "name": package["name"], "version": package["version"],
            "purl": f"pkg:cargo/{package['name']}@{package['version']}",
        }  # fmt: skip
        if package["license"]:
            component["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        components.append(component)
    return components


def bill_of_materials(version: str, packages: dict[str, Package], seconds: int) -> bytes:
    """CycloneDX of the image: the crates of the program, and Debian's packages."""
    debian = [
        {
            "type": "library", "name": name, "version": package.fields["Version"],
            "purl": f"pkg:deb/debian/{name}@{package.fields['Version']}?arch={package.fields['Architecture']}",
        }
        for name, package in sorted(packages.items())
    ]  # fmt: skip
    told = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {
            "timestamp": stamp(seconds),
            "component": {"type": "container", "name": "towline", "version": version,
                          "licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": debian + crates(),
    }  # fmt: skip
    return (json.dumps(told, indent=1, sort_keys=True) + "\n").encode()


def stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def packed(layer: bytes) -> bytes:
    # No time and no name of a file in the header: the same input gives the same bytes.
    return gzip.compress(layer, compresslevel=9, mtime=0)


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def configuration(version: str, revision: str, seconds: int) -> dict[str, Any]:
    """How the image is run, and what it says of itself."""
    return {
        "User": f"{USER}:{USER}",
        "WorkingDir": "/home/towline",
        "Entrypoint": ["/usr/bin/towline"],
        "Cmd": ["--help"],
        "Env": ["PATH=/usr/bin", "HOME=/home/towline", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
                "XDG_CACHE_HOME=/var/lib/towline", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
        "StopSignal": "SIGTERM",
        "Labels": {
            "org.opencontainers.image.title": "towline",
            "org.opencontainers.image.description": "A checkpoint-aware mover of data and state",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.revision": revision,
            "org.opencontainers.image.created": stamp(seconds),
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    }  # fmt: skip


def image(layers: list[bytes], architecture: str, config: dict[str, Any], seconds: int) -> dict[str, bytes]:
    """Files of an OCI layout with one image of these layers."""
    blobs = [packed(layer) for layer in layers]
    told = {
        "created": stamp(seconds), "architecture": architecture, "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        "history": [{"created": stamp(seconds), "created_by": "deploy/image/build.py"} for _ in layers],
    }  # fmt: skip
    encoded = json.dumps(told, sort_keys=True).encode()
    kind = "application/vnd.oci.image"

    def descriptor(media: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": media, "digest": digest(data), "size": len(data)}

    manifest = {
        "schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json",
        "config": descriptor(f"{kind}.config.v1+json", encoded),
        "layers": [descriptor(f"{kind}.layer.v1.tar+gzip", blob) for blob in blobs],
        "annotations": config["Labels"],
    }  # fmt: skip
    body = json.dumps(manifest, sort_keys=True).encode()
    entry = descriptor(f"{kind}.manifest.v1+json", body)
    entry["platform"] = {"architecture": architecture, "os": "linux"}
    entry["annotations"] = {"org.opencontainers.image.ref.name": config["Labels"]["org.opencontainers.image.version"]}
    index = {"schemaVersion": 2, "mediaType": f"{kind}.index.v1+json", "manifests": [entry]}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index, sort_keys=True).encode()}
    for blob in [*blobs, encoded, body]:
        files["blobs/sha256/" + digest(blob).removeprefix("sha256:")] = blob
    return files


def written(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--program", type=Path, required=True, help="the program, stripped")
    parser.add_argument("--out", type=Path, required=True, help="folder for the image")
    parser.add_argument("--largest", type=int, default=LARGEST, help="bytes that it may have at most, as it is pulled")
    args = parser.parse_args()
    architecture = run("dpkg", "--print-architecture").decode().strip()
    if architecture not in ARCHITECTURES:
        raise SystemExit(f"error: images are built for {' and '.join(ARCHITECTURES)}, not for {architecture}")
    if not args.program.is_file():
        raise SystemExit(f"error: there is no program at {args.program}: `make image` builds it")
    program = args.program.read_bytes()
    revision = run("git", "rev-parse", "HEAD").decode().strip()
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct").decode())
    version = run(args.program.resolve(), "--version").decode().split()[1]

    names = [*LIBRARIES, CERTIFICATES, "base-files"]
    packages = {name: fetched(name, args.out / "packages") for name in names}
    bill = bill_of_materials(version, packages, seconds)
    own = Layer()
    own.add("usr/bin/towline", program, 0o755)
    own.add("usr/share/doc/towline/LICENSE", (ROOT / "LICENSE").read_bytes())
    own.add("usr/share/doc/towline/sbom.cdx.json", bill)
    below = base(packages, architecture)
    # The program changes more often than what it needs: a layer of its own is all that an upgrade pulls.
    files = image(
        [below.tar(seconds), own.tar(seconds)], architecture, configuration(version, revision, seconds), seconds
    )
    size = sum(len(data) for path, data in files.items() if path.startswith("blobs/"))
    if size > args.largest:
        raise SystemExit(f"error: image is too large: expected at most {args.largest} bytes, got {size}")

    both = Layer({**own.entries, **below.entries})
    archive = Layer()
    for path, data in files.items():
        archive.add(path, data)
    written(args.out / "root.tar", both.tar(seconds))
    written(args.out / "sbom.cdx.json", bill)
    written(args.out / "towline.tar", archive.tar(seconds))
    manifest = json.loads(files["index.json"])["manifests"][0]["digest"]
    print(f"{args.out}/towline.tar: towline {version} for {architecture}, {size / 1e6:.1f} MB, {manifest}")


if __name__ == "__main__":
    sys.exit(main())
