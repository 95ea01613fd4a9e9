"""Repositories and lazy tensors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import towline
from towline import _folders


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "notes.txt").write_text("notes")
    torch.manual_seed(1)
    tensors = {
        "w": torch.randn(512, 300),
        "b": torch.randn(300).to(torch.bfloat16),
        "n": torch.tensor(7),
        "e": torch.empty(0, 4),
    }
    save_file(tensors, tree / "model.safetensors")
    torch.save(tensors, tree / "model.pt")
    return tree


def test_files_come_back_as_they_were(repository, tree, tmp_path):
    report = repository.save(tree, "set/one", labels={"from": "test"}, metrics={"loss": 0.5})
    assert report.files == 3
    assert repository.restore("set/one", tmp_path / "back").files == 3
    for path in tree.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "back" / "notes.txt").write_text("other")
    with pytest.raises(towline.Conflict):
        repository.restore("set/one", tmp_path / "back")
    repository.restore("set/one", tmp_path / "back", overwrite=True)
    repository.restore("set/one", tmp_path / "part", "notes.txt")
    assert (tmp_path / "part").read_text() == "notes"


def test_names_are_listed_copied_and_removed(repository, tree):
    repository.save(tree, "set/one")
    repository.copy("set/one", "set/two")
    assert [one.name for one in repository.ls("set")] == ["set/one", "set/two"]
    repository.remove("set/one")
    assert [one.name for one in repository.ls()] == ["set/two"]
    assert repository.verify("set/two", data=True).damaged == []
    assert repository.show("set/two").name == "set/two"


def test_what_was_removed_or_replaced_is_taken_back(repository, tree):
    for text in ("one", "two"):
        (tree / "notes.txt").write_text(text)
        report = repository.save(tree, "best", metrics={"loss": float(len(text))})
    assert report.replaced.kept
    repository.remove("best")
    history = repository.history("best")
    assert history.present is None and [kept.taken.by for kept in history.kept] == ["removed", "replaced"]
    assert history.kept[0].metrics == {"loss": 3.0} and history.kept[0].until
    assert repository.undelete("best").was == history.kept[0].version
    assert repository.read("best", "notes.txt") == b"two"
    with pytest.raises(towline.Conflict):
        repository.undelete("best")
    back = repository.undelete("best", version=history.kept[1].version, replace=True)
    assert back.replaced.kept and repository.read("best", "notes.txt") == b"one"
    repository.undelete("best", to="two")
    assert repository.read("two", "notes.txt") == b"two"
    repository.remove("two")
    assert repository.collect(grace=0).kept_values == 1
    assert repository.collect(grace=0, keep_removed="0").forgotten_values == 1
    repository.remove("best", now=True)
    with pytest.raises(towline.NotFound):
        repository.undelete("best")


def test_runs_and_retention(repository, tree):
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        (tree / "notes.txt").write_text(str(step))
        repository.save(tree, f"run/step-{step}", metrics={"loss": loss})
    (run,) = repository.runs("run")
    assert [step.step for step in run.steps] == [0, 1, 2]
    assert repository.read("run@min=loss", "notes.txt") == b"1"
    repository.expire("run", keep_last=1, dry_run=True)
    assert len(repository.ls("run")) == 3
    repository.expire("run", keep_last=1, keep_min=["loss"])
    assert [one.name for one in repository.ls("run")] == ["run/step-1", "run/step-2"]
    repository.expire("run", keep_last=1, keep_removed=True)
    repository.undelete("run/step-1")
    with pytest.raises(towline.NotFound):
        repository.undelete("run/step-0")


def test_a_settled_step_is_read_without_others(repository):
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    with towline.Checkpointer(repository, "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": weights + step * 1e-4}).wait()
    settled = repository.settle("run@latest")
    assert settled.name == "run/step-2" and settled.chunks > 0 and settled.stored_bytes > 0
    assert settled.read_bytes[1] < settled.read_bytes[0]
    again = repository.settle("run/step-2")
    assert again.chunks == 0 and again.read_bytes == [settled.read_bytes[1]] * 2
    repository.remove("run/step-1", now=True)
    assert torch.equal(repository.load("run/step-2")["w"], weights + 2e-4)


def test_tensors_are_read_when_asked_for(repository, tree):
    repository.save(tree / "model.safetensors", "model")
    tensors = repository.tensors("model")
    assert sorted(tensors) == ["b", "e", "n", "w"] and len(tensors) == 4 and "w" in tensors
    want = torch.load(tree / "model.pt")
    w = tensors["w"]
    assert (w.shape, w.dtype) == ((512, 300), "F32") and "512" in repr(w)
    for key, tensor in want.items():
        assert torch.equal(tensors[key].torch(), tensor), key
    for index in (slice(0, 8), (slice(None), slice(-5, None)), 3, (-1, slice(7, 9)), (..., 0), (2, 3)):
        assert torch.equal(w[index].torch(), want["w"][index]), index
        assert numpy.array_equal(w[index].numpy(), want["w"][index].numpy()), index
    assert numpy.array_equal(numpy.asarray(w), want["w"].numpy())
    assert torch.equal(torch.from_dlpack(w), want["w"])
    assert tensors["b"].numpy().dtype == numpy.uint16
    assert tensors["n"].numpy() == 7 and tensors["e"].torch().shape == (0, 4)


def test_wrong_indices_are_told(repository, tree):
    repository.save(tree / "model.safetensors", "model")
    w = repository.tensors("model")["w"]
    for wrong, error in ((512, IndexError), ((0, 0, 0), IndexError), (slice(0, 8, 2), towline.UsageError)):
        with pytest.raises(error):
            w[wrong]
    with pytest.raises(towline.UsageError):
        w[0:4][0:2]
    for error in (KeyError, FileNotFoundError):
        with pytest.raises(error, match="no such tensor in model: x"):
            repository.tensors("model")["x"]
    assert repository.tensors("model").get("x") is None


def test_a_name_in_several_files_is_told_apart(repository, tree):
    repository.save(tree, "both")
    tensors = repository.tensors("both")
    assert "model.pt:w" in tensors and "model.safetensors:w" in tensors
    assert torch.equal(tensors["model.pt:w"].torch(), tensors["model.safetensors:w"].torch())


def test_a_key_that_two_tensors_have_is_an_error_that_names_both(repository, tmp_path):
    from safetensors.torch import save_file
    from towline.safetensors import load_file

    folder = tmp_path / "colons"
    folder.mkdir()
    first, second, third = (torch.full((2,), float(value)) for value in range(3))
    save_file({"w": first}, folder / "f")
    save_file({"w": second, "f:w": third}, folder / "g")
    repository.save(folder, "colons")
    tensors = repository.tensors("colons")
    assert set(tensors) == {"f:w", "g:w"} and torch.equal(tensors["g:w"].torch(), second)
    for read in (lambda: tensors["f:w"], lambda: list(tensors.values()), lambda: tensors.get("f:w")):
        with pytest.raises(towline.UsageError, match="have the key 'f:w': 'w' of f and 'f:w' of g"):
            read()
    assert torch.equal(tensors.of_file("f")["w"].torch(), first)
    assert torch.equal(tensors.of_file("g")["f:w"].torch(), third) and tensors.of_file("h") == {}
    whole = load_file("towline://colons/g", repo=repository)
    assert torch.equal(whole["f:w"], third) and torch.equal(whole["w"], second)


@pytest.mark.parametrize(("text", "mebibytes"), [("0.25G", 256), ("256MiB", 256), ("134217728", 128), ("128 m", 128)])
def test_memory_is_a_size_as_on_the_command_line(tmp_path, text, mebibytes):
    assert towline.open(tmp_path / "r", memory=text)._engine.memory() == mebibytes << 20


def test_errors_are_pythons_too(repository, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        repository.restore("nothing", tmp_path / "x")
    assert caught.value.kind == "not-found" and isinstance(caught.value, towline.Error)
    with pytest.raises(ValueError, match="memory"):
        towline.open(tmp_path / "r", memory="much")
    with pytest.raises(towline.UsageError, match="512M or 512MiB"):
        towline.open(tmp_path / "r", memory="512MB")
    with pytest.raises(towline.NotFound):
        towline.open(tmp_path / "none", create=False)
    with pytest.raises(towline.UsageError):
        repository.save(tmp_path, "no name", metrics={})
    with pytest.raises(towline.UsageError):
        repository.save(tmp_path, "name", metrics={"loss": float("nan")})


@pytest.mark.skipif(os.getuid() == 0, reason="root may do anything")
def test_a_repository_that_may_not_be_written_is_denied(repository, tree, tmp_path):
    (tmp_path / "repository").chmod(0o500)
    with pytest.raises(PermissionError):
        repository.save(tree, "name")


def test_damage_is_told(repository, tree, tmp_path):
    repository.save(tree, "set")
    for pack in (tmp_path / "repository" / "pack").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    with pytest.raises(towline.Damaged):
        repository.restore("set", tmp_path / "back")
    with pytest.raises(towline.Damaged):
        [tensor.torch() for tensor in repository.tensors("set").values()]


def test_the_default_repository(tmp_path, monkeypatch):
    assert towline.open().url == str(tmp_path / "data" / "towline" / "repository")
    monkeypatch.setenv("TOWLINE_REPO", str(tmp_path / "told"))
    assert towline.open().url == str(tmp_path / "told")


def test_importing_towline_does_not_import_torch():
    script = "import sys, towline; towline.open; print('torch' in sys.modules, 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "False False\n"


def test_free_threading_is_refused_by_the_wheels_tag():
    assert Path(towline._towline.__file__).name == "_towline.abi3.so"


def test_a_restore_that_empties_a_folder_is_asked_for_by_name(repository, tmp_path):
    (tmp_path / "empty").mkdir()
    repository.save(tmp_path / "empty", "empty")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_bytes(b"x" * 100)
    with pytest.raises(towline.Conflict, match="may_empty=True"):
        repository.restore("empty", tmp_path / "out", delete=True)
    planned = repository.restore("empty", tmp_path / "out", delete=True, may_empty=True, dry_run=True)
    assert planned["removed"]["bytes"] == 100 and (tmp_path / "out" / "precious").exists()
    repository.restore("empty", tmp_path / "out", delete=True, may_empty=True)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_repository_that_is_created_is_told_once(tmp_path, caplog):
    for _ in range(2):
        towline.open(tmp_path / "new")
    assert [one.getMessage() for one in caplog.records if one.name == "towline"] == [
        f"created the repository {tmp_path}/new: there was none"
    ]


def test_a_repository_that_is_gone_is_not_created_again(tmp_path):
    """Its disk may not be mounted: a training would begin anew, below the mount point."""
    where, away = tmp_path / "disk" / "repository", tmp_path / "away"
    with towline.Checkpointer(where, "run") as first:
        first.save(1, {"a": 1})
    (tmp_path / "disk").rename(away)
    (tmp_path / "disk").mkdir()
    calls = {
        f"towline.open('{where}'": towline.open,
        "towline.Checkpointer(...": lambda there: towline.Checkpointer(there, "run"),
        "TowlineCallback(...": lambda there: _folders.FolderSaver(there, "run", "transformers"),
        "AccelerateCheckpointer(...": lambda there: _folders.FolderSaver(there, "run", "accelerate"),
    }
    for call, again in calls.items():
        told = rf"was here, and is gone.*not mounted.*; {re.escape(call)}, create=True\) makes a new"
        with pytest.raises(towline.NotFound, match=told) as caught:
            again(where)
        assert f"{call}, create=True)" in caught.value.help
    assert not where.exists()
    (tmp_path / "disk").rmdir()
    away.rename(tmp_path / "disk")
    assert towline.Checkpointer(where, "run").restore() == {"a": 1}
    (tmp_path / "disk").rename(away)
    assert towline.Checkpointer(where, "run", create=True).restore() is None


def test_nothing_creates_a_repository_if_it_is_not_to(tmp_path):
    pytest.importorskip("torch")
    from towline.dcp import StorageReader, StorageWriter
    from towline.safetensors import save_file

    missing = tmp_path / "missing"
    attempts = [
        lambda: towline.open(missing, create=False),
        lambda: towline.Checkpointer(missing, "run", create=False),
        lambda: StorageWriter(missing, create=False),
        lambda: StorageReader(missing),
        lambda: save_file({}, "towline://a/b", repo=missing, create=False),
    ]
    for attempt in attempts:
        with pytest.raises(towline.NotFound, match="no repository"):
            attempt()
    assert not missing.exists()


def test_damage_heals_as_verify_says(repository, tmp_path):
    whole, out = os.urandom(1 << 20), tmp_path / "out"
    (tmp_path / "file").write_bytes(whole)
    repository.save(tmp_path / "file", "name")
    (pack,) = (path for path in (tmp_path / "repository" / "pack").rglob("*") if path.is_file())
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    assert "repair again" in " ".join(towline.Repository.verify.__doc__.split())
    first = repository.verify(data=True, repair=True)
    assert first.damaged and first.left
    repository.save(tmp_path / "file", "another")
    second = repository.verify(data=True, repair=True)
    assert second.left == [] and repository.verify(data=True).damaged == []
    repository.restore("name", out)
    assert out.read_bytes() == whole
