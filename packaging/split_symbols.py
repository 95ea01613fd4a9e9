#!/usr/bin/env python3
"""Takes the symbols out of programs and wheels, and keeps them apart.

split_symbols.py --to DIR FILE...

Each FILE, an ELF program or a wheel, is replaced by a stripped one; what was taken out is DIR/NAME.debug, which gdb, perf and
addr2line read. The stripped file names it (.gnu_debuglink), and both carry the same build id. Needs objcopy, of binutils.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def split(program: Path, folder: Path) -> Path:
    """Strips `program` in place; the file in `folder` with what was taken out."""
    symbols = folder / f"{program.name}.debug"
    objcopy("--only-keep-debug", "--compress-debug-sections", program, symbols)
    os.chmod(symbols, 0o644)
    objcopy("--strip-all", f"--add-gnu-debuglink={symbols}", program)
    return symbols


def split_wheel(wheel: Path, folder: Path) -> list[Path]:
    """Does the same to each extension module in a wheel, and corrects its RECORD."""
    made = []
    replaced = wheel.with_name(wheel.name + ".part")
    with zipfile.ZipFile(wheel) as old, tempfile.TemporaryDirectory() as scratch:
        changed: dict[str, bytes] = {}
        for name in old.namelist():
            if name.endswith(".so"):
                module = Path(scratch, Path(name).name)
                module.write_bytes(old.read(name))
                made.append(split(module, folder))
                changed[name] = module.read_bytes()
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        changed[record] = recorded(old.read(record).decode(), changed).encode()
        with zipfile.ZipFile(replaced, "w", zipfile.ZIP_DEFLATED) as new:
            for told in old.infolist():
                new.writestr(told, changed.get(told.filename, old.read(told)), zipfile.ZIP_DEFLATED)
    replaced.replace(wheel)
    return made


def recorded(record: str, changed: dict[str, bytes]) -> str:
    """RECORD with the hashes and lengths of what changed
    (https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file)."""
    lines = []
    for line in record.splitlines():
        name = line.split(",")[0]
        if name in changed:
            digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
            line = f"{name},sha256={digest},{len(changed[name])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def objcopy(*said: str | Path) -> None:
    subprocess.run(["objcopy", *map(str, said)], check=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a program or a wheel; replaced")
    arguments.add_argument("--to", metavar="DIR", required=True, type=Path, help="the folder for the symbols")
    told = arguments.parse_args()
    told.to.mkdir(parents=True, exist_ok=True)
    for file in told.files:
        made = split_wheel(file, told.to) if file.suffix == ".whl" else [split(file, told.to)]
        for symbols in made:
            print(
                f"{file} ({file.stat().st_size >> 10} KiB): symbols in {symbols} ({symbols.stat().st_size >> 10} KiB)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
