"""The checkpoints that train.py writes: where they lie, which step is which, what changed between two."""

import json
import mmap
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import savers
import tools
from measure import Failed, folder_bytes, note

DATA = Path(os.environ.get("BENCH_RUNS_DATA", tools.PEERS / "runs")).resolve()
TRAIN_ARGS = os.environ.get("BENCH_TRAIN_ARGS", "").split()
APART = (1, 10, 20, 40)
PARTS = {"fp32 state": "state.safetensors", "bf16 weights": "model.safetensors", "state and weights": "."}


def part_of(step, part):
    """The path that is saved of a step: one of its files, or its folder."""
    return step / PARTS[part]


def plain_bytes(path):
    """Bytes of a file, or of the files of a folder."""
    return folder_bytes(path)[0] if path.is_dir() else path.stat().st_size


def safetensors_of(path):
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


@dataclass
class Steps:
    """The checkpoints on disk: folders by step, and the steps that are evenly spaced."""

    main: dict
    spaced: list
    lora: list

    @classmethod
    def there(cls):
        main = {int(step.name[5:]): step for step in sorted((DATA / "main").glob("step-*"))}
        spacing = json.loads((DATA / "made.json").read_text())["spacing"]
        spaced = [step for number, step in main.items() if (number - min(main)) % spacing == 0]
        return cls(main, spaced, sorted((DATA / "lora").glob("step-*")))

    def apart(self):
        """The key step's number, and those of the steps that follow it at the distances of the table."""
        key = min(self.main)
        return key, {distance: self.main[key + distance] for distance in APART}


def trained():
    """The checkpoints, made where they are missing."""
    note(f"  checkpoints in {DATA}")
    made = subprocess.run([savers.PYTHON, savers.HERE / "train.py", "--out", DATA, *TRAIN_ARGS], stdout=sys.stderr)
    if made.returncode != 0:
        raise Failed(f"train.py: exit {made.returncode}")
    return Steps.there()


def header_of(path):
    """What a safetensors file says of its tensors, by name."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def tensor_bytes(path):
    """The bytes of each tensor of a safetensors file, mapped."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 8 + int.from_bytes(view[:8], "little")
    offsets = {name: tensor["data_offsets"] for name, tensor in header_of(path).items()}
    return {name: view[at + first : at + end] for name, (first, end) in offsets.items()}


def changed_bytes(before, after):
    """Bytes of the tensors that are not what they were a step before."""
    old, new = (tensor_bytes(part_of(step, "fp32 state")) for step in (before, after))
    return sum(len(tensor) for name, tensor in new.items() if name not in old or old[name] != tensor)
