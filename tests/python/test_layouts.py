"""The simulation of layouts: docs/benchmarks.md has what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_in_the_documents_are_what_is_calculated():
    printed = subprocess.run([sys.executable, ROOT / "benches/layouts.py"], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() in (ROOT / "docs/benchmarks.md").read_text()


def test_a_larger_step_costs_in_proportion():
    def last(gb):
        run = [sys.executable, ROOT / "benches/layouts.py", "--step", str(gb)]
        lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
        return [float(line.split("|")[-2]) for line in lines if line.startswith("| each step alone")]

    assert all(abs(large / small - 10) < 0.01 for small, large in zip(last(100), last(1000), strict=True))
