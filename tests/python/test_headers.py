"""Safetensors files whose tensors a tree does not list: they are read by their headers, and damaged ones are errors."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
real = pytest.importorskip("safetensors")
real_torch = pytest.importorskip("safetensors.torch")

import towline  # noqa: E402
from towline import _header  # noqa: E402
from towline.safetensors import SafetensorError, load_file, safe_open  # noqa: E402

METADATA = {"format": "pt", "owner": "a b"}
ADDRESS = "towline://m/model.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "matrix": torch.randn(37, 20),
        "cube": torch.arange(4 * 5 * 6).reshape(4, 5, 6),
        # Longer than what is read together, between short ones.
        "wide": torch.randn(700, 1000),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "half": torch.randn(9).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def save(repository: towline.Repository, path: Path, name: str, *options: str) -> None:
    command = [sys.executable, "-m", "towline", "save", path, name, "--repo", repository.url, "-q", *options]
    subprocess.run(command, check=True)


@pytest.fixture(params=["fixed", "content"])
def cut(request, tmp_path, repository) -> Path:
    """A local file of `tensors()`, saved without its tensors as the tree `m`."""
    (tmp_path / "tree").mkdir()
    path = tmp_path / "tree" / "model.safetensors"
    real_torch.save_file(tensors(), path, metadata=METADATA)
    save(repository, path.parent, "m", "--cut", request.param)
    assert len(repository.tensors("m")) == 0
    return path


def test_a_file_that_was_cut_otherwise_is_loaded(repository, cut):
    loaded = load_file(ADDRESS, repo=repository)
    assert loaded.keys() == tensors().keys()
    assert all(same(loaded[key], tensor) for key, tensor in tensors().items())


def test_a_file_that_was_cut_otherwise_is_opened(repository, cut):
    with safe_open(ADDRESS, "pt", repo=repository) as opened, real.safe_open(cut, "pt") as local:
        assert opened.keys() == sorted(local.keys())
        assert opened.offset_keys() == local.offset_keys()
        assert opened.metadata() == local.metadata() == METADATA
        assert opened.get_slice("half").get_dtype() == "BF16" and opened.get_slice("cube").get_shape() == [4, 5, 6]
        assert all(same(opened.get_tensor(key), local.get_tensor(key)) for key in local.keys())  # noqa: SIM118
        with pytest.raises(SafetensorError, match="does not contain tensor nothing"):
            opened.get_tensor("nothing")
        for index in (1, (..., 1), slice(2, 1), (slice(1, 3), slice(2, 4)), (3, slice(1, None, 2)), [0, 2], (2, 3)):
            for name in ("matrix", "cube", "wide"):
                assert same(opened.get_slice(name)[index], local.get_tensor(name)[index]), (name, index)
        box = opened.get_slice("wide")[5:9, 2:4]
        assert box.untyped_storage().nbytes() == box.nbytes
    with safe_open(ADDRESS, "np", repo=repository) as opened:
        assert (opened.get_tensor("cube") == tensors()["cube"].numpy()).all()
        assert (opened.get_slice("matrix")[2:5, 3:4] == tensors()["matrix"][2:5, 3:4].numpy()).all()


def test_a_slice_reads_its_rows_only(repository, cut):
    opened = safe_open(ADDRESS, "pt", repo=repository)
    tree, read = opened._tree, []

    class Counting:
        name, entries = tree.name, tree.entries

        def read(self, ranges):
            read.extend(end - start for _, start, end in ranges)
            return tree.read(ranges)

    opened._tree = Counting()
    assert same(opened.get_slice("wide")[7:9, 5], tensors()["wide"][7:9, 5])
    assert read == [2 * 1000 * 4]


def test_more_tensors_than_the_memory_of_the_save_are_loaded(tmp_path):
    held = {f"model.layers.{number}.mlp.experts.weight": torch.full((1,), float(number)) for number in range(30_000)}
    (tmp_path / "tree").mkdir()
    real_torch.save_file(held, tmp_path / "tree" / "model.safetensors")
    repository = towline.open(tmp_path / "repository", memory="64M")
    repository.save(tmp_path / "tree", "m")
    assert len(repository.tensors("m")) == 0
    loaded = load_file(ADDRESS, repo=repository)
    assert loaded.keys() == held.keys() and all(loaded[key].item() == one.item() for key, one in held.items())


def test_a_header_that_memory_does_not_hold_is_an_error(tmp_path):
    one = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(one % number for number in range(100_000)) + b"}"
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    repository = towline.open(tmp_path / "repository", memory="64M")
    repository.save(tmp_path / "tree", "m")
    with pytest.raises(real.SafetensorError, match=r"header of model.safetensors of m has .* 64 MiB .*larger `memory`"):
        load_file(ADDRESS, repo=repository)


def file_of(header: bytes | dict, data: bytes = b"\1" * 8, length: int | None = None) -> bytes:
    held = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(held) if length is None else length).to_bytes(8, "little") + held + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


DAMAGED = {
    "nothing": (b"", "it has 0 bytes"),
    "a text": (b"not tensors at all", "its header has .* bytes by its first 8"),
    "truncated": (file_of({"a": entry([4], 0, 16)}), "its tensors take 16 bytes, and 8 follow the header: it was cut short"),
    "truncated header": (file_of({}, length=100), "its header has 100 bytes by its first 8, and at most 10 were expected"),
    "header of 8 EiB": (file_of({}, length=1 << 63), "its header has"),
    "overlapping": (
        file_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\1" * 12),
        "tensor 'b' begins at byte 4, and that of 'a' ends at byte 8",
    ),
    "two in one place": (file_of({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}), "tensor 'b' begins at byte 0"),
    "reversed": (file_of({"a": entry([1], 8, 4)}), "tensor 'a' has data_offsets that are not a start and an end"),
    "three offsets": (file_of({"a": {**entry([2], 0, 8), "data_offsets": [0, 8, 9]}}), "tensor 'a' has data_offsets"),
    "twice": (
        file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'),
        "its header has the key 'a' twice",
    ),
    "a field twice": (
        file_of(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}'),
        "its header has the key 'dtype' twice",
    ),
    "another length": (file_of({"a": entry([3], 0, 8)}), r"tensor 'a' of F32 \[3\] takes 12 bytes, and .* span 8"),
    "half a byte": (file_of({"a": entry([3], 0, 1, "F4")}, b"\1"), "takes 1.5 bytes"),
    "too long a shape": (file_of({"a": entry([1 << 33, 1 << 33], 0, 0)}, b""), "a shape of more than"),
    "a negative shape": (file_of({"a": entry([-1, -2], 0, 8)}), "tensor 'a' has a shape that"),
    "a shape of reals": (file_of({"a": entry([2.0], 0, 8)}), "tensor 'a' has a shape that"),
    "not a number": (file_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'), "number NaN, which is not JSON"),
    "no type": (file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}), "tensor 'a' lacks its dtype"),
    "no object": (file_of(b"[]", b""), "not a JSON object"),
    "UTF-16": (file_of("{}".encode("utf-16"), b""), "not a JSON object"),
    "half a character": (file_of(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "not a JSON object"),
    "nested deeply": (file_of(b'{"a":' + b"[" * 100_000, b""), "not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_an_error_and_never_empty(tmp_path, repository, what):
    content, reason = DAMAGED[what]
    (tmp_path / "tree").mkdir()
    path = tmp_path / "tree" / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(real.SafetensorError):
        real_torch.load_file(path)
    repository.save(path.parent, "m")
    for read in (load_file, lambda address, repo: safe_open(address, "np", repo=repo)):
        with pytest.raises(
            SafetensorError,
            match=rf"model.safetensors of m is not a safetensors file: .*{reason}.*write the file again",
        ):
            read(ADDRESS, repo=repository)


UNCOVERED = {
    "between": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12),
    "before": ({"a": entry([1], 4, 8)}, 8),
    "after": ({"a": entry([1], 0, 4)}, 8),
}


@pytest.mark.parametrize("where", UNCOVERED)
def test_bytes_that_are_of_no_tensor_are_passed_over_where_a_tree_lists_the_tensors(tmp_path, repository, where):
    header, length = UNCOVERED[where]
    (tmp_path / "tree").mkdir()
    path = tmp_path / "tree" / "model.safetensors"
    path.write_bytes(file_of(header, bytes(range(length))))
    with pytest.raises(real.SafetensorError):
        real_torch.load_file(path)
    repository.save(path.parent, "m")
    loaded = load_file(ADDRESS, repo=repository)
    assert {name: bytes(one.view(torch.uint8).tolist()) for name, one in loaded.items()} == {
        name: bytes(range(*told["data_offsets"])) for name, told in header.items()
    }
    repository.restore("m", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == path.read_bytes()


def test_numbers_of_less_than_a_byte_are_named(tmp_path, repository):
    (tmp_path / "tree").mkdir()
    path = tmp_path / "tree" / "model.safetensors"
    path.write_bytes(file_of({"a": entry([2, 8], 0, 8, "F4")}))
    repository.save(path.parent, "m")
    told = "a is F4, numbers of less than a byte, of which torch has pairs as float4_e2m1fn_x2,.* restore its file"
    tensor = repository.tensors("m")["a"]
    for read in (tensor.torch, tensor.numpy, lambda: repository.load("m")):
        with pytest.raises(towline.UsageError, match=told):
            read()
    for framework in ("pt", "np"):
        with safe_open(ADDRESS, framework, repo=repository) as opened, pytest.raises(SafetensorError, match=told):
            opened.get_tensor("a")


ACCEPTED = {
    "nothing": {},
    "metadata alone": {"__metadata__": {"a": "b"}},
    "no metadata": {"__metadata__": None, "a": entry([2], 0, 8)},
    "empty ones between": {
        "b": entry([0], 0, 0),
        "a": entry([1], 0, 4),
        "c": entry([0, 5], 4, 4),
        "d": entry([], 4, 8),
    },
    "other fields": {"a": {**entry([2], 0, 8), "more": [1]}},
    "an empty shape before a long one": {"a": entry([0, 1 << 62], 0, 0), "b": entry([2], 0, 8)},
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_the_package_accepts_is_accepted(tmp_path, repository, what):
    header = ACCEPTED[what]
    (tmp_path / "tree").mkdir()
    path = tmp_path / "tree" / "model.safetensors"
    path.write_bytes(
        file_of(
            header,
            b"\1" * max((one["data_offsets"][1] for one in header.values() if one and "dtype" in one), default=0),
        )
    )
    save(repository, path.parent, "m", "--cut", "fixed")
    local, loaded = real_torch.load_file(path), load_file(ADDRESS, repo=repository)
    assert local.keys() == loaded.keys() and all(same(loaded[key], one) for key, one in local.items())


def test_a_run_holds_its_box():
    choose = random.Random(1)
    for shape in ((7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2, 5)):
        whole = numpy.arange(numpy.prod(shape)).reshape(shape)
        for _ in range(60):
            offsets = [choose.randrange(size + 1) for size in shape]
            lengths = [choose.randrange(size - start + 1) for start, size in zip(offsets, shape, strict=True)]
            run = _header.run_of(shape, (offsets, lengths))
            length = int(numpy.prod(run.shape))
            assert run.first + length <= whole.size or length == 0
            held = whole.reshape(-1)[run.first : run.first + length].reshape(run.shape)
            box = tuple(slice(start, start + size) for start, size in zip(offsets, lengths, strict=True))
            assert (held if run.box is None else held[run.box]).tolist() == whole[box].tolist()


def test_ranges_of_all_lengths_are_read_whole(tmp_path, repository):
    content = random.Random(2).randbytes(40 << 20)
    (tmp_path / "file").write_bytes(content)
    save(repository, tmp_path / "file", "m")
    tree = repository._engine.open_tree("m")
    cuts = [0, 1, 1, 9, 2 << 20, (2 << 20) + 5, 5 << 20, *range(6 << 20, 36 << 20, 700_001), 40 << 20]
    bounds = list(itertools.pairwise(cuts))[::-1]
    targets = [numpy.zeros(end - start, numpy.uint8) for start, end in bounds]
    [(path, *_)] = [one for one in tree.entries() if one[1] == "file"]
    wanted = zip(bounds, targets, strict=True)
    _header.read_ranges(tree, path, [_header.Range(*bound, one.ctypes.data) for bound, one in wanted if one.size])
    assert all(one.tobytes() == content[start:end] for (start, end), one in zip(bounds, targets, strict=True))
