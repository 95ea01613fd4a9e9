"""`towline.safetensors` beside the package that it stands in for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
real = pytest.importorskip("safetensors")
real_torch = pytest.importorskip("safetensors.torch")

import towline  # noqa: E402
from towline.safetensors import SafetensorError, load_file, safe_open, save_file  # noqa: E402

ADDRESS = "towline://run-7/step-100/model.safetensors"
METADATA = {"format": "pt", "owner": "a b"}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    held = {
        "matrix": torch.randn(37, 20),
        "cube": torch.arange(4 * 5 * 6).reshape(4, 5, 6),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "half": torch.randn(9).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    if hasattr(torch, "float8_e4m3fn"):
        held["eight"] = torch.randn(8).to(torch.float8_e4m3fn)
    return held


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


@pytest.fixture(params=["local", "saved"])
def file(request, tmp_path, repository, monkeypatch) -> str:
    """A file of `tensors()`: a local one, which is left to safetensors, and one in the repository."""
    monkeypatch.setenv("TOWLINE_REPO", repository.url)
    address = str(tmp_path / "model.safetensors") if request.param == "local" else ADDRESS
    save_file(tensors(), address, metadata=METADATA)
    return address


def test_what_was_saved_is_loaded(file):
    loaded = load_file(file)
    assert loaded.keys() == tensors().keys()
    assert all(same(loaded[key], tensor) for key, tensor in tensors().items())


def test_an_open_file_tells_what_it_holds(file):
    with safe_open(file, framework="pt") as opened:
        assert opened.keys() == sorted(tensors())
        assert sorted(opened.offset_keys()) == opened.keys()
        assert opened.metadata() == METADATA
        assert same(opened.get_tensor("half"), tensors()["half"])
        assert opened.get_slice("cube").get_shape() == [4, 5, 6]
        assert opened.get_slice("half").get_dtype() == "BF16"
        assert opened.get_tensors().keys() == tensors().keys()
        with pytest.raises(real.SafetensorError, match="does not contain tensor nothing"):
            opened.get_tensor("nothing")
        with pytest.raises(real.SafetensorError, match="does not contain tensor nothing"):
            opened.get_slice("nothing")
    with pytest.raises(real.SafetensorError, match="closed"):
        opened.keys()


def test_numpy(file):
    with safe_open(file, framework="np") as opened:
        read = opened.get_tensor("cube")
        assert type(read).__name__ == "ndarray" and (read == tensors()["cube"].numpy()).all()
        assert (opened.get_slice("matrix")[2:5, 3] == tensors()["matrix"][2:5, 3].numpy()).all()
        with pytest.raises(TypeError):
            opened.get_tensor("half")


INDEXES = [
    slice(None), 1, -1, (slice(1, 3), slice(2, 4)), (..., 1), (1, ...), slice(2, 1), slice(-3, -1), slice(3, 900),
    (slice(None), slice(None, None, 2)), (slice(1, None, 3), 2), (0, 0), [0, 2], (slice(None), [1, 0]), None, ...,
    (slice(None), None, 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("name", ["matrix", "cube"])
def test_slices_are_those_of_torch(file, name, index):
    with safe_open(file, framework="pt") as opened:
        assert same(opened.get_slice(name)[index], tensors()[name][index])


@pytest.mark.parametrize("index", [99, (0, 0, 0, 0), -99])
def test_slices_out_of_bounds(file, index):
    with safe_open(file, framework="pt") as opened, pytest.raises(IndexError):
        opened.get_slice("cube")[index]


def test_a_slice_reads_no_more_than_its_rows(repository):
    save_file({"big": torch.arange(4 << 20, dtype=torch.int32).reshape(4096, 1024)}, ADDRESS, repo=repository)
    read = []
    engine = repository._engine

    class Counting:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def open_tree(self, name):
            return Counting(self.inner.open_tree(name))

        def read_tensors(self, requests):
            self.inner.read_tensors(requests)
            read.append(sum(request[-1] for request in requests))

    repository._engine = Counting(engine)
    with safe_open(ADDRESS, "pt", repo=repository) as opened:
        assert opened.get_slice("big")[7, 5:9].tolist() == [7 * 1024 + at for at in range(5, 9)]
    assert read == [16]
    del read[:]
    load_file(ADDRESS, repo=repository)
    assert read == [16 << 20]


REFUSED = {
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "not contiguous": lambda: {"a": torch.zeros(3, 4).t()},
    "shared": lambda: (lambda whole: {"a": whole, "b": whole[1:]})(torch.zeros(4)),
    "the same": lambda: (lambda whole: {"a": whole, "b": whole})(torch.zeros(4)),
    "crossed": lambda: (lambda whole: {"a": whole[:3], "b": whole[2:]})(torch.zeros(4)),
    "no tensor": lambda: {"a": 1},
    "no dict": lambda: [torch.zeros(3)],
    "meta": lambda: {"a": torch.zeros(3, device="meta")},
    "no text as a key": lambda: {1: torch.zeros(3)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_safetensors_refuses_is_refused(repository, tmp_path, what):
    held = REFUSED[what]()
    with pytest.raises(Exception) as expected:
        real_torch.save_file(held, tmp_path / "real.safetensors")
    with pytest.raises(expected.type) as got:
        save_file(held, ADDRESS, repo=repository)
    if what not in ("meta", "no text as a key"):
        assert str(got.value).split()[:6] == str(expected.value).split()[:6]
    assert repository.ls() == []


def test_parts_of_one_storage_that_do_not_overlap_are_kept(repository):
    whole = torch.arange(6.0)
    save_file({"a": whole[:3], "b": whole[3:]}, ADDRESS, repo=repository)
    assert load_file(ADDRESS, repo=repository)["b"].tolist() == [3, 4, 5]


def test_what_a_file_cannot_hold(repository):
    with pytest.raises(real.SafetensorError, match="complex128"):
        save_file({"a": torch.zeros(2, dtype=torch.complex128)}, ADDRESS, repo=repository)
    with pytest.raises(TypeError):
        save_file({"a": torch.zeros(2)}, ADDRESS, metadata={"a": 1}, repo=repository)


def test_conjugates_are_saved_as_they_read(repository):
    held = torch.randn(3, dtype=torch.complex64)
    save_file({"a": held.conj()}, ADDRESS, repo=repository)
    assert torch.equal(load_file(ADDRESS, repo=repository)["a"], held.conj())


def test_the_file_is_one_that_safetensors_reads(repository, tmp_path):
    save_file(tensors(), ADDRESS, metadata=METADATA, repo=repository)
    repository.restore("run-7/step-100", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    assert all(same(loaded, tensors()[key]) for key, loaded in real_torch.load_file(path).items())
    with real.safe_open(path, "pt") as opened, safe_open(ADDRESS, "pt", repo=repository) as saved:
        assert opened.metadata() == saved.metadata() == METADATA
        assert opened.offset_keys() == saved.offset_keys()


def test_files_that_others_saved(repository, tmp_path):
    (tmp_path / "tree" / "weights").mkdir(parents=True)
    real_torch.save_file(tensors(), tmp_path / "tree" / "weights" / "model.safetensors")
    real_torch.save_file({}, tmp_path / "tree" / "empty.safetensors")
    (tmp_path / "tree" / "notes.txt").write_text("not tensors at all")
    repository.save(tmp_path / "tree", "run-7/step-5")
    loaded = load_file("towline://run-7@latest/weights/model.safetensors", repo=repository)
    assert all(same(loaded[key], tensor) for key, tensor in tensors().items())
    with safe_open("weights/model.safetensors", "pt", repo=repository, name="run-7/step-5") as opened:
        assert opened.metadata() is None
    assert load_file("towline://run-7/step-5/empty.safetensors", repo=repository) == {}
    with pytest.raises(real.SafetensorError, match=r"notes\.txt of run-7/step-5 is not a safetensors file"):
        load_file("towline://run-7/step-5/notes.txt", repo=repository)


def test_the_longest_name_is_the_tree(repository):
    one, other = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    save_file(one, "b/model.safetensors", repo=repository, name="run")
    save_file(other, "towline://run/b/model.safetensors", repo=repository)
    assert load_file("towline://run/b/model.safetensors", repo=repository)["a"].tolist() == [1, 1]
    assert load_file("b/model.safetensors", repo=repository, name="run")["a"].tolist() == [0, 0]
    # pathlib takes a slash away.
    assert load_file(Path("towline://run/b/model.safetensors"), repo=repository)["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("address", "name", "path"),
    [
        ("towline://a/m.safetensors", "a", "m.safetensors"),
        ("towline://a/b/m.safetensors", "a/b", "m.safetensors"),
        ("towline://a/step-5/m.safetensors", "a/step-5", "m.safetensors"),
        ("towline://a/step-5/b/m.safetensors", "a/step-5", "b/m.safetensors"),
        ("towline://step-5/step-6/m.safetensors", "step-5", "step-6/m.safetensors"),
        ("towline://a/step-5x/m.safetensors", "a/step-5x", "m.safetensors"),
        ("towline://a/step-5", "a", "step-5"),
    ],
)
def test_where_a_file_is_saved(repository, address, name, path):
    save_file({"a": torch.zeros(2)}, address, repo=repository)
    assert [one.name for one in repository.ls()] == [name]
    assert [entry["path"] for entry in repository.show(name).entries if entry["kind"] == "file"] == [path]
    assert load_file(address, repo=repository)["a"].tolist() == [0, 0]


def test_a_file_is_saved_again_and_no_other_is_lost(repository):
    save_file({"a": torch.zeros(2)}, ADDRESS, repo=repository)
    save_file({"a": torch.ones(2)}, ADDRESS, repo=repository)
    with pytest.raises(towline.Conflict, match=r"model\.safetensors"):
        save_file({"a": torch.ones(2)}, "towline://run-7/step-100/other.safetensors", repo=repository)
    assert load_file(ADDRESS, repo=repository)["a"].tolist() == [1, 1]


def test_what_is_not_there(repository, tmp_path):
    save_file({"a": torch.zeros(2)}, ADDRESS, repo=repository)
    for address in ("towline://none/model.safetensors", "towline://run-7/step-100/none", "towline://run-7@latest/none"):
        with pytest.raises(FileNotFoundError):
            load_file(address, repo=repository)
    with pytest.raises(FileNotFoundError):
        load_file("towline://a/b", repo=str(tmp_path / "no-repository"))
    with pytest.raises(towline.UsageError, match="say towline://NAME/model"):
        save_file({"a": torch.zeros(2)}, "towline://model", repo=repository)
    with pytest.raises(SafetensorError, match="framework jax"):
        safe_open(ADDRESS, "jax", repo=repository)


def test_without_the_package(repository):
    """Saved files are read and written, local ones say what is missing."""
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import torch, towline.safetensors as st\n"
        f"st.save_file({{'a': torch.ones(2)}}, {ADDRESS!r}, repo={repository.url!r})\n"
        f"assert st.load_file({ADDRESS!r}, repo={repository.url!r})['a'].tolist() == [1, 1]\n"
        "try: st.load_file('local.safetensors')\n"
        "except ValueError as error: assert 'install it' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_choice_of_a_run_without_steps_says_so(repository):
    with pytest.raises(towline.NotFound, match="no such run `run-7`"):
        load_file("towline://run-7@latest/model.safetensors", repo=repository)
    with pytest.raises(towline.NotFound, match="begins with no saved name"):
        load_file("towline://run-7/model.safetensors", repo=repository)
