"""What ships: the wheel, the crate, and the symbols kept apart from them. Nothing is built for it but a small library."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import towline

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

#: A debug build's; that of a release is far smaller.
WHEEL_MAX = 28 * MIB
#: What crates.io takes is 10 MiB (https://doc.rust-lang.org/cargo/reference/publishing.html).
CRATE_MAX = 2 * MIB


def sections(program: Path) -> set[str]:
    said = subprocess.run(
        ["readelf", "--section-headers", "--wide", program], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"\] (\.\S+)", said.stdout))


@pytest.fixture
def wheel() -> Path:
    """What tests/python/setup.sh built and installed last."""
    built = sorted((ROOT / "target/wheels").glob("*/towline-*.whl"), key=lambda path: path.stat().st_mtime)
    if not built:
        pytest.skip("no wheel in target/wheels: tests/python/setup.sh builds it")
    return built[-1]


def test_the_wheel_is_small_and_stripped(wheel, tmp_path):
    assert wheel.stat().st_size < WHEEL_MAX
    with zipfile.ZipFile(wheel) as opened:
        (module,) = [name for name in opened.namelist() if name.endswith(".so")]
        module = Path(opened.extract(module, tmp_path))
    found = sections(module)
    assert ".text" in found
    assert not {name for name in found if name.startswith((".debug", ".symtab"))}


def test_the_wheel_holds_the_package_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (points,) = [name for name in names if name.endswith("entry_points.txt")]
        points = opened.read(points).decode()
    assert "[console_scripts]\ntowline=towline.__main__:main" in points.replace(" = ", "=")
    source = ROOT / "bindings/python/python"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*.py*") if path.suffix in (".py", ".pyi")}
    assert wanted <= names
    packed = {name for name in names if ".dist-info/" not in name and not name.endswith((".so", "py.typed"))}
    assert packed == wanted, "nothing else is in it"


@pytest.fixture(scope="module")
def crate(tmp_path_factory) -> Path:
    """The crate as it would be published, without building it."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")
    folder = tmp_path_factory.mktemp("crate")
    command = ["cargo", "package", "-p", "towline", "--no-verify", "--allow-dirty", "--offline", "--target-dir", folder]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (made,) = (folder / "package").glob("towline-*.crate")
    return made


def test_the_crate_is_small_and_whole(crate, tmp_path):
    assert crate.stat().st_size < CRATE_MAX
    shutil.unpack_archive(crate, tmp_path, "gztar")
    (root,) = tmp_path.iterdir()
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert {"Cargo.toml", "Cargo.lock", "README.md", "LICENSE", "src/lib.rs", "src/main.rs"} <= there
    # Tools that are packages of their own stay out.
    packages = [manifest.parent for manifest in (ROOT / "benches").rglob("Cargo.toml")]
    for folder in ("src", "benches"):
        sources = (path for path in (ROOT / folder).rglob("*.rs") if not any(one in path.parents for one in packages))
        own = {str(path.relative_to(ROOT)) for path in sources}
        assert own <= there, "what its manifest names, or a module is, is in it"
    for source in (root / "src").rglob("*.rs"):
        for included in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', source.read_text()):
            assert (source.parent / included).exists(), f"{source} includes {included}, which is left out"
    # Whoever builds the crate needs none of this.
    out = (
        "tests",
        "bindings",
        "deploy",
        "packaging",
        "examples",
        ".ci",
        "target",
    )
    assert not {name for name in there if name.startswith(tuple(f"{one}/" for one in out))}


SOURCE = """
int exported(int x);
static __attribute__((noinline)) int hidden(int x) { return x * 3; }
int exported(int x) { return hidden(x) + 1; }
int main(void) { return exported(2) == 7 ? 0 : 1; }
"""


@pytest.fixture
def built(tmp_path) -> Path:
    """A program and an extension module with symbols, made by the C compiler that Rust needs too."""
    if shutil.which("objcopy") is None or shutil.which("cc") is None:
        pytest.skip("no binutils")
    (tmp_path / "x.c").write_text(SOURCE)
    for made, said in (("program", []), ("x.so", ["-shared", "-fPIC"])):
        flags = ["-g", "-O1", "-Wl,--build-id", *said]
        subprocess.run(["cc", *flags, "-o", tmp_path / made, tmp_path / "x.c"], check=True)
    return tmp_path


def split(*said: str | Path) -> None:
    subprocess.run([sys.executable, ROOT / "packaging/split_symbols.py", *said], check=True, capture_output=True)


def test_symbols_are_taken_out_and_kept(built):
    before = subprocess.run(["nm", built / "program"], capture_output=True, text=True, check=True).stdout
    address = re.search(r"^(\w+) t hidden", before, re.MULTILINE)[1]
    split("--to", built / "symbols", built / "program")
    assert subprocess.run([built / "program"], check=False).returncode == 0
    found = sections(built / "program")
    assert not {name for name in found if name.startswith((".debug", ".symtab"))} and ".gnu_debuglink" in found
    command = ["addr2line", "-f", "-e", built / "symbols/program.debug", address]
    where = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert where.splitlines()[0] == "hidden" and "x.c:3" in where
    # The debugger finds one by the other.
    ids = [
        subprocess.run(["readelf", "--notes", file], capture_output=True, text=True, check=True).stdout
        for file in (built / "program", built / "symbols/program.debug")
    ]
    assert re.search(r"Build ID: \w+", ids[0])[0] == re.search(r"Build ID: \w+", ids[1])[0]


def test_a_wheel_without_symbols_is_still_a_wheel(built):
    wheel = built / "x-1.0-py3-none-any.whl"
    library = (built / "x.so").read_bytes()
    record = f"x/x.so,sha256={digest(library)},{len(library)}\nx/__init__.py,sha256={digest(b'')},0\nx-1.0.dist-info/RECORD,,\n"
    metadata = "Metadata-Version: 2.1\nName: x\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("x/x.so", library)
        made.writestr("x/__init__.py", "")
        made.writestr("x-1.0.dist-info/METADATA", metadata)
        made.writestr(
            "x-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
        )
        made.writestr("x-1.0.dist-info/RECORD", record)
    split("--to", built / "symbols", wheel)
    with zipfile.ZipFile(wheel) as opened:
        stripped = opened.read("x/x.so")
        lines = opened.read("x-1.0.dist-info/RECORD").decode().splitlines()
        assert opened.read("x-1.0.dist-info/METADATA").decode() == metadata
    assert len(stripped) < len(library)
    assert lines == [f"x/x.so,sha256={digest(stripped)},{len(stripped)}", *record.splitlines()[1:]]
    assert (built / "symbols/x.so.debug").exists()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        built / "installed",
        wheel,
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert sections(built / "installed/x/x.so") == sections_of(stripped, built)


def sections_of(library: bytes, folder: Path) -> set[str]:
    (folder / "again.so").write_bytes(library)
    return sections(folder / "again.so")


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_integrations_are_there_after_the_import():
    pytest.importorskip("torch")
    code = "import sys, towline; assert 'torch' not in sys.modules; towline.dcp.StorageWriter"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_repository_names_open():
    with pytest.raises(TypeError, match=r"towline\.open"):
        towline.Repository("/nowhere")
