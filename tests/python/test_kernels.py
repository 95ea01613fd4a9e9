"""The GPU kernels that are shipped: NVIDIA's assembler takes them for each generation, and they are of the source beside them."""

from __future__ import annotations

import hashlib
import subprocess
import sysconfig
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "src/staging/cuda/decoder"
# From Turing to Blackwell.
GENERATIONS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_kernels_assemble(tmp_path: Path, generation: str) -> None:
    """By the ptxas of triton, which comes with torch, and needs no GPU. Spilled registers would be slow."""
    ptxas = Path(sysconfig.get_path("purelib")) / "triton/backends/nvidia/bin/ptxas"
    command = [ptxas, f"-arch={generation}", "-v", FOLDER / "kernels.ptx", "-o", tmp_path / "kernels.cubin"]
    output = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert output.count("0 bytes spill stores") == 4, output


def test_the_kernels_are_those_of_their_source() -> None:
    digest = hashlib.sha256((FOLDER / "kernels.cu").read_bytes()).hexdigest()
    first, *rest = (FOLDER / "kernels.ptx").read_text().splitlines()
    assert first == f"// Compiled from kernels.cu (sha256 {digest}) by `make kernels`.", "run make kernels"
    # Drivers since R418 and GPUs since Turing take these.
    assert ".version 6.3" in rest and ".target sm_75" in rest
