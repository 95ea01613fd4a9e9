"""Makes the bytes, runs the programs, compares what came back."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass
class Sample:
    """One run of one program: wall seconds, CPU seconds and the largest anonymous memory seen, in bytes."""

    seconds: float
    cpu: float = 0.0
    anonymous: int = 0


class Failed(Exception):
    """A program did not do what it was asked to."""


def note(text):
    """Says how far the work is, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def parse_size(text):
    """`512M`, `2G`, `2GiB` or plain bytes."""
    text = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = {"K": KIB, "M": MIB, "G": GIB}.get(text[-1:], 1)
    return int(float(text.rstrip("KMG")) * unit)


def run(command, env, watch_memory=False):
    """Runs one program to its end; Failed, with the end of what it said, unless it exits 0."""
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        watch = Watch(child.pid) if watch_memory else None
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        peak = watch.stop() if watch else 0
        if child.returncode != 0:
            said.seek(0)
            tail = said.read().decode(errors="replace")[-2000:]
            raise Failed(f"{' '.join(map(str, command))}: exit {child.returncode}\n{tail}")
    return Sample(seconds, usage.ru_utime + usage.ru_stime, peak)


class Watch(threading.Thread):
    """Samples the anonymous memory of a process: what a budget can bound, without the page cache it maps."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.path, self.peak, self.over = Path(f"/proc/{pid}/smaps_rollup"), 0, threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(0.05):
            try:
                lines = self.path.read_text().splitlines()
            except OSError:
                continue
            kib = sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
            self.peak = max(self.peak, kib * KIB)

    def stop(self):
        self.over.set()
        self.join()
        return self.peak


def fresh(folder):
    """An empty folder at that path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def touch_memory(scratch, total):
    """Has `total` bytes of memory used and freed again, so that the run that follows gets pages the machine really has.

    In a virtual machine a page's first use costs a fault in the host, several times what the use itself does: without
    this it would be chance who pays. At most half of what is free is touched.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    piece, path = bytes(16 * MIB), scratch / "touched"
    with path.open("wb") as file:
        for _ in range(min(total, free // 2) // len(piece)):
            file.write(piece)
    path.unlink()


def median(samples, field="seconds"):
    return statistics.median(getattr(sample, field) for sample in samples)


def bf16(values):
    """fp32 rounded to the nearest bf16, as its bit patterns."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def safetensors(path, total, rng, quick):
    """One safetensors file of `total` bytes: three quarters bf16, one quarter fp32, in tensors of 16 MiB at most.

    Weights are random normal; `quick` writes random bits instead, for sizes where drawing normals takes minutes.
    """
    header, offset = {}, 0
    while offset < total:
        wide = len(header) % 4 == 3
        length = min(16 * MIB, total - offset) // 4 * 4 or 4
        shape = [length // (4 if wide else 2)]
        name = f"model.layers.{len(header)}.weight"
        header[name] = {"dtype": "F32" if wide else "BF16", "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in header.values():
            count, wide = tensor["shape"][0], tensor["dtype"] == "F32"
            if quick:
                file.write(rng.bytes(count * (4 if wide else 2)))
                continue
            values = rng.standard_normal(count, dtype=np.float32)
            file.write((values if wide else bf16(values)).tobytes())


def checkpoint(folder, total, shards=4, quick=False):
    """A folder of safetensors shards, made once."""
    marker = folder.with_name(f"{folder.name}.made")
    told = f"{total} {shards} {quick}"
    if not marker.exists() or marker.read_text() != told:
        rng = np.random.default_rng(1)
        fresh(folder)
        for at in range(shards):
            safetensors(folder / f"model-{at + 1:05}-of-{shards:05}.safetensors", total // shards, rng, quick)
        marker.write_text(told)
    return folder


def small_files(folder, count):
    """`count` files of 1 to 20 KiB of random bytes, 1,000 to a folder, made once."""
    marker = folder.with_name(f"{folder.name}.made")
    if not marker.exists() or marker.read_text() != str(count):
        rng = np.random.default_rng(2)
        fresh(folder)
        for at in range(count):
            if at % 1000 == 0:
                place = folder / f"{at // 1000:04}"
                place.mkdir()
            (place / f"sample-{at:06}.bin").write_bytes(rng.bytes(int(rng.integers(KIB, 20 * KIB + 1))))
        marker.write_text(str(count))
    return folder


def same(source, restored):
    """Failed, unless both trees hold the same names with the same bytes."""
    answer = subprocess.run(["diff", "-rq", source, restored], capture_output=True, text=True)
    if answer.returncode != 0:
        raise Failed(f"{restored} is not {source}:\n{answer.stdout[:1000]}{answer.stderr[:1000]}")


class Kept:
    """What was measured before and stays so while what it depends on (`told`) does: minutes of work by the peers."""

    def __init__(self, path, told):
        self.path, self.told = path, told
        found = json.loads(path.read_text()) if path.exists() else {}
        self.results = found.get("results", {}) if found.get("told") == told else {}

    def of(self, what, work):
        """The result under that name, or else what `work` gives; it must survive JSON."""
        if what in self.results:
            note(f"  {what}: as measured before ({self.path} has it)")
        else:
            self.results[what] = work()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"told": self.told, "results": self.results}, indent=1))
        return self.results[what]


def folder_bytes(folder):
    """Bytes and files under a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files), len(files)


def machine():
    """The machine in one line."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), os.uname().machine)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, Linux {os.uname().release}"
