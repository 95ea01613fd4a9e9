"""Copies to a GPU by the engine, with a CUDA driver in software (tests/cuda/libcuda.rs). torch itself finds no GPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import towline
from towline import _cuda

ROOT = Path(__file__).parents[2]

#: Reads tensors to memory of the GPU by the engine, as `_loading` does, and copies them back.
CHILD = """
import ctypes, json, sys
from towline import _towline, open
from towline.tensors import read_request

cuda = ctypes.CDLL("libcuda.so.1")
name = _towline.cuda_name(0)
engine = open(sys.argv[1])._engine
tree = engine.open_tree("base")
wanted = json.loads(tree.choose_tensors())
# The context of this thread is that of the engine, as torch's would be.
context = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0

def allocated(length):
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(length)) == 0
    return address.value

def back(address, length):
    out = ctypes.create_string_buffer(length)
    assert cuda.cuMemcpyDtoH_v2(out, ctypes.c_uint64(address), ctypes.c_size_t(length)) == 0
    return out.raw

places = [allocated(one["bytes"]) for one in wanted]
requests = [
    read_request(one["name"], one["path"], None, place, one["bytes"]) for one, place in zip(wanted, places, strict=True)
]
tree.read_tensors(requests, None, (0, 0, sys.argv[2]))
found = {one["name"]: back(place, one["bytes"]).hex() for one, place in zip(wanted, places, strict=True)}

# And from host memory, as with tensors that an agent keeps.
bytes_ = bytes(range(256)) * 40_000
source = ctypes.create_string_buffer(bytes_, len(bytes_))
place = allocated(len(bytes_))
_towline.copy_to_cuda([(ctypes.addressof(source), place, len(bytes_))], (0, 0, sys.argv[2]))
assert back(place, len(bytes_)) == bytes_
print(json.dumps({"name": name, "found": found}))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    rustc = ["rustc", "--edition", "2024", "--crate-type", "cdylib", "-C", "opt-level=1", "-o", folder / "libcuda.so.1"]
    subprocess.run([*rustc, ROOT / "tests/cuda/libcuda.rs"], check=True)
    return folder


def saved(folder: Path) -> dict[str, torch.Tensor]:
    state = {"a": torch.randn(700, 1000), "b": torch.arange(9, dtype=torch.int16)}
    towline.safetensors.save_file(state, "model.safetensors", repo=str(folder), name="base")
    return state


def run(driver: Path, folder: Path, decode_on: str = "cpu", **knobs: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "TOWLINE_AGENT": "none", **knobs}
    line = [sys.executable, "-c", CHILD, str(folder), decode_on]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("decode_on", ["cpu", "gpu"])
def test_tensors_are_read_to_the_memory_of_a_gpu(driver: Path, tmp_path: Path, decode_on: str) -> None:
    state, log = saved(tmp_path / "repo"), tmp_path / "cuda.log"
    done = run(driver, tmp_path / "repo", decode_on, SOFT_CUDA_LOG=str(log))
    assert done.returncode == 0, done.stderr
    assert (json.loads(log.read_text())["launches"] > 0) == (decode_on == "gpu")
    report = json.loads(done.stdout)
    assert report["name"] == "Software GPU"
    assert report["found"] == {key: tensor.numpy().tobytes().hex() for key, tensor in state.items()}


def test_a_failing_copy_is_an_error(driver: Path, tmp_path: Path) -> None:
    saved(tmp_path / "repo")
    done = run(driver, tmp_path / "repo", SOFT_CUDA_FAIL="cuMemcpyHtoDAsync_v2:2:214")
    assert done.returncode == 1 and "CUDA_ERROR_ECC_UNCORRECTABLE (214)" in done.stderr, done.stderr


def test_decoding_elsewhere_is_an_error(driver: Path, tmp_path: Path) -> None:
    saved(tmp_path / "repo")
    done = run(driver, tmp_path / "repo", "tpu")
    assert "nothing decodes there at TOWLINE_DECODE_ON: expected cpu or gpu" in done.stderr, done.stderr


def test_a_default_device_of_torch_does_not_count(tmp_path: Path) -> None:
    state = saved(tmp_path / "repo")
    with torch.device("meta"):
        loaded = towline.load("base", repo=str(tmp_path / "repo"))
    assert torch.equal(loaded["a"], state["a"])


def test_without_a_driver_torch_decides(tmp_path: Path) -> None:
    state = saved(tmp_path / "repo")
    assert _cuda.gpu_of("cuda:0") is None and _cuda.gpu_of("cpu") is None and _cuda.gpu_of(None) is None
    loaded = towline.load("base", repo=str(tmp_path / "repo"), device="meta")
    assert loaded["a"].device.type == "meta" and loaded["a"].shape == state["a"].shape
    with pytest.raises((RuntimeError, AssertionError)):
        towline.load("base", repo=str(tmp_path / "repo"), device="cuda:0")


def test_the_check_on_a_gpu_says_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: benches/gpu/torch_check.py checks it")
    line = [sys.executable, ROOT / "benches/gpu/torch_check.py"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "nothing checked: torch finds no GPU\n"), done.stderr
