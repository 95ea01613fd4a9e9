"""Checkpoints of Lightning's Trainer in a repository."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import uuid
import warnings
import zipfile
from pathlib import Path, PurePosixPath

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning.pytorch as pl  # noqa: E402
import towline  # noqa: E402
import towline.lightning  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from towline import _pointer_files  # noqa: E402
from towline.lightning import TowlineCheckpointIO, load_pointer_file  # noqa: E402

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    """A small model whose losses are noted; its data are those of the step."""

    def __init__(self, width: int = 4, extra: object = None):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
        self.losses: list[str] = []

    def training_step(self, batch, _):
        torch.manual_seed(self.global_step)
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item().hex())
        self.log("val/loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]


def trainer(checkpoint_io, folder: Path, steps: int, **said) -> pl.Trainer:
    checkpoints = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1, **said)
    return pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, plugins=[checkpoint_io], callbacks=[checkpoints], logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip


class Batches:
    """The same twelve rows again and again, by four; it goes on where it was, as Lightning asks of data in mid-epoch."""

    def __init__(self):
        self.rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
        self.at = 0

    def __iter__(self):
        for at in range(self.at % 3, 3):
            self.at += 1
            yield self.rows[at * 4 : at * 4 + 4]

    def __len__(self):
        return 3

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def data() -> Batches:
    return Batches()


def model(**said) -> Model:
    torch.manual_seed(1)
    return Model(**said)


def names(repository) -> list[str]:
    return sorted(one.name for one in repository.ls())


@pytest.fixture
def checkpoint_io(repository) -> TowlineCheckpointIO:
    return TowlineCheckpointIO(repository, "run-7")


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_top_k_and_last(repository, checkpoint_io, tmp_path):
    one = trainer(checkpoint_io, tmp_path, 6, monitor="val/loss", save_top_k=2, save_last=True)
    trained = model()
    one.fit(trained, data())
    best = one.checkpoint_callback.best_k_models
    steps = sorted(int(path.rpartition("=")[2].removesuffix(".ckpt")) for path in best)
    assert len(steps) == 2
    assert names(repository) == ["run-7/last.ckpt", *(f"run-7/step-{step}" for step in steps)]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == sorted([*map(os.path.basename, best), "last.ckpt"])
    # The best is found by the metric that the callback watched.
    least = min(best, key=best.get)
    chosen = repository._engine.resolve("run-7@min=val.loss")
    assert chosen == f"run-7/step-{least.rpartition('=')[2].removesuffix('.ckpt')}"
    losses = [float.fromhex(loss) for loss in trained.losses]
    assert repository.show(chosen).metrics["val.loss"] == min(losses)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_resumed_fit_goes_on_as_if_uninterrupted(repository, tmp_path, package):
    other = pytest.importorskip(package)
    whole = model()
    trainer(TowlineCheckpointIO(repository, "whole"), tmp_path / "whole", 8).fit(whole, data())
    if package != "lightning.pytorch":
        # Accepted as a plugin there, too.
        other.Trainer(accelerator="cpu", plugins=[TowlineCheckpointIO(repository, "run-7")], logger=False)
    first = model()
    trainer(TowlineCheckpointIO(repository, "run-7"), tmp_path, 5, save_last=True).fit(first, data())
    second = model(width=4)
    again = trainer(TowlineCheckpointIO(repository, "run-7"), tmp_path, 8, save_last=True)
    again.fit(second, data(), ckpt_path="last")
    assert first.losses + second.losses == whole.losses
    assert all(map(torch.equal, second.state_dict().values(), whole.state_dict().values()))


def test_on_another_machine(repository, checkpoint_io, tmp_path):
    """No pointer files are there: a checkpoint is found by its file's name, and the last one once they were checked out."""
    whole, first, second, third = (model() for _ in range(4))
    trainer(TowlineCheckpointIO(repository, "whole"), tmp_path / "whole", 8).fit(whole, data())
    trainer(checkpoint_io, tmp_path / "here", 5, save_last=True).fit(first, data())
    there = trainer(TowlineCheckpointIO(repository, "run-7"), tmp_path / "there", 8)
    there.fit(second, data(), ckpt_path=tmp_path / "there" / "checkpoints" / "epoch=1-step=5.ckpt")
    assert second.losses == whole.losses[5:]
    assert TowlineCheckpointIO(repository, "none").checkout(tmp_path / "none") == []
    fresh = TowlineCheckpointIO(repository, "run-7")
    folder = tmp_path / "third" / "checkpoints"
    assert folder / "last.ckpt" in map(Path, fresh.checkout(folder))
    assert fresh.checkout(folder) == []
    trainer(fresh, tmp_path / "third", 8, save_last=True).fit(third, data(), ckpt_path="last")
    assert third.losses == whole.losses[5:]


def test_links_to_the_last(repository, checkpoint_io, tmp_path):
    one = trainer(checkpoint_io, tmp_path, 3, save_last="link")
    one.fit(model(), data())
    assert os.path.islink(tmp_path / "checkpoints" / "last.ckpt")
    assert names(repository) == ["run-7/step-3"]
    assert checkpoint_io.load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 3
    checkpoint_io.remove_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    checkpoint_io.teardown()
    assert names(repository) == ["run-7/step-3"]


def test_what_lightning_keeps_comes_back(repository, checkpoint_io, tmp_path):
    one = trainer(checkpoint_io, tmp_path, 3, monitor="val/loss", save_top_k=-1)
    kept = {}
    original = checkpoint_io.save_checkpoint
    checkpoint_io.save_checkpoint = lambda checkpoint, path, **_: (
        kept.update({path: checkpoint}),
        original(checkpoint, path),
    )
    one.fit(model(), data())
    del checkpoint_io.save_checkpoint
    path = next(path for path in kept if "step=3" in path)
    assert b'"pickle"' not in repository.read("run-7/step-3", "state.json")
    assert same(checkpoint_io.load_checkpoint(path, weights_only=True), kept[path])
    loaded = Model.load_from_checkpoint(checkpoint_io.open(path, weights_only=True))
    assert loaded.hparams.width == 4
    assert same(dict(loaded.state_dict()), dict(kept[path]["state_dict"]))


def test_objects_are_loaded_only_where_they_are_trusted(repository, tmp_path):
    checkpoint_io = TowlineCheckpointIO(repository, "run-7")
    extra = {"path": PurePosixPath("a/b"), "module": torch.nn.Linear(2, 2)}
    with pytest.warns(UserWarning, match=r"\['extra'\]\['module'\] of run-7/step-1 is pickled.*weights_only=False"):
        trainer(checkpoint_io, tmp_path, 1).fit(model(extra=extra), data())
    path = tmp_path / "checkpoints" / "epoch=0-step=1.ckpt"
    for weights_only in (None, True):
        with pytest.raises(towline.UsageError, match="weights_only=False"):
            checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    back = checkpoint_io.load_checkpoint(path, weights_only=False)["hyper_parameters"]["extra"]
    assert back["path"] == extra["path"] and torch.equal(back["module"].weight, extra["module"].weight)
    trusting = TowlineCheckpointIO(repository, "run-7", weights_only=False)
    assert trusting.load_checkpoint(path)["hyper_parameters"]["extra"]["path"] == extra["path"]
    strict = TowlineCheckpointIO(repository, "other", pickle=False)
    with pytest.raises(towline.UnsupportedValue, match=r"\['hyper_parameters'\]\['extra'\]\['module'\]"):
        trainer(strict, tmp_path / "strict", 1).fit(model(extra=extra), data())


CHECKPOINT = {"global_step": 10, "pytorch-lightning_version": "2.6.0", "state_dict": {"a": torch.ones(2)}}


def saved(checkpoint_io, path, **said) -> str:
    """What a checkpoint that is saved as the file at `path` is called."""
    before = {one.name: one.manifest for one in checkpoint_io.repository.ls()}
    checkpoint_io.save_checkpoint({**CHECKPOINT, **said}, path)
    checkpoint_io.teardown()
    after = {one.name: one.manifest for one in checkpoint_io.repository.ls()}
    (name,) = (name for name in after if before.get(name) != after[name])
    return name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("epoch=0-step=10.ckpt", "run-7/step-10"),
        ("step=00010.ckpt", "run-7/step-10"),
        ("epoch=0-step=10-val_loss=0.25.ckpt", "run-7/step-10"),
        ("model-step_10.ckpt", "run-7/step-10"),
        ("last.ckpt", "run-7/last.ckpt"),
        ("last-v1.ckpt", "run-7/last-v1.ckpt"),
        ("epoch=3.ckpt", "run-7/epoch=3.ckpt"),
        ("footstep=3.ckpt", "run-7/footstep=3.ckpt"),
        ("a b+c\u00e9.ckpt", "run-7/a+20b+2Bc+C3+A9.ckpt"),
        ("hpc_ckpt_1.ckpt", "run-7/hpc_ckpt_1.ckpt"),
    ],
)
def test_names_of_files(checkpoint_io, tmp_path, file, name):
    path = str(tmp_path / "checkpoints" / file)
    assert saved(checkpoint_io, path) == name
    os.unlink(path)
    assert checkpoint_io.load_checkpoint(path)["global_step"] == 10
    assert checkpoint_io.checkout(tmp_path / "checkpoints") == [path]


def test_files_of_one_step_are_kept_apart(repository, checkpoint_io, tmp_path):
    files = {"epoch=0-step=10.ckpt": 1, "best-step=10.ckpt": 2, "step-10": 3, "epoch=0-step=10-v1.ckpt": 4}
    # The names are given while nothing of it is durable, too.
    for file, epoch in files.items():
        checkpoint_io.save_checkpoint({**CHECKPOINT, "epoch": epoch}, tmp_path / file)
    checkpoint_io.teardown()
    assert len(names(repository)) == 4
    for stand_ins in (True, False):
        for file, epoch in files.items():
            assert checkpoint_io.load_checkpoint(tmp_path / file)["epoch"] == epoch
            if stand_ins:
                (tmp_path / file).unlink()
    checkpoint_io.remove_checkpoint(tmp_path / "best-step=10.ckpt")
    checkpoint_io.teardown()
    assert checkpoint_io.load_checkpoint(tmp_path / "epoch=0-step=10.ckpt")["epoch"] == 1
    with pytest.raises(FileNotFoundError):
        checkpoint_io.load_checkpoint(tmp_path / "best-step=10.ckpt")


def test_a_file_that_was_saved_again_elsewhere_is_not_mistaken(checkpoint_io, tmp_path):
    saved(checkpoint_io, tmp_path / "one" / "last.ckpt", epoch=1)
    # As on another machine.
    (tmp_path / "one").rename(tmp_path / "away")
    assert checkpoint_io.load_checkpoint(tmp_path / "away" / "last.ckpt")["epoch"] == 1
    saved(checkpoint_io, tmp_path / "two" / "last.ckpt", epoch=2)
    assert checkpoint_io.load_checkpoint(tmp_path / "two" / "last.ckpt")["epoch"] == 2
    with pytest.raises(
        towline.Conflict, match=r"saved again.*`towline history run-7/.*`towline undelete run-7/last\.ckpt "
    ):
        checkpoint_io.load_checkpoint(tmp_path / "away" / "last.ckpt")
    (first,) = checkpoint_io.repository.history("run-7/last.ckpt").kept
    checkpoint_io.repository.undelete("run-7/last.ckpt", version=first.version, to="run-7/first.ckpt")
    assert towline.load("run-7/first.ckpt", repo=checkpoint_io.repository)["state_dict.a"].sum() == 2


def test_addresses(repository, checkpoint_io):
    assert saved(checkpoint_io, "towline://other/epoch=0-step=10.ckpt") == "other/epoch=0-step=10.ckpt"
    assert checkpoint_io.load_checkpoint("towline://other/epoch=0-step=10.ckpt")["global_step"] == 10
    checkpoint_io.remove_checkpoint("towline://other/epoch=0-step=10.ckpt")
    checkpoint_io.teardown()
    assert names(repository) == [] and not os.path.exists("towline:")


def test_how_small_checkpoints_are_stored_can_be_said(repository, tmp_path):
    checkpoint_io = pickle.loads(pickle.dumps(TowlineCheckpointIO(repository, "run-7", compression="off")))
    checkpoint_io.save_checkpoint({**CHECKPOINT, "zeros": torch.zeros(1 << 18)}, tmp_path / "step=1.ckpt")
    checkpoint_io.teardown()
    assert repository.show("run-7/step-1").stored_bytes > 1 << 20


def test_a_planted_stand_in_removes_no_other_name(repository, checkpoint_io, tmp_path):
    (tmp_path / "tree").write_text("production")
    repository.save(tmp_path / "tree", "prod/best")
    saved(checkpoint_io, tmp_path / "step=1.ckpt")
    record = _pointer_files.read(str(tmp_path / "step=1.ckpt"))
    assert record["name"] == "run-7/step-1"
    _pointer_files.write(str(tmp_path / "step=1.ckpt"), {**record, "name": "prod/best", "file": ""}, load_pointer_file)
    with pytest.warns(UserWarning, match="stands for prod/best, which stays"):
        checkpoint_io.remove_checkpoint(tmp_path / "step=1.ckpt")
        checkpoint_io.teardown()
    assert "prod/best" in names(repository) and not (tmp_path / "step=1.ckpt").exists()


def test_planted_files_beside_a_stand_in_are_neither_followed_nor_unpacked(tmp_path, monkeypatch):
    """S9: "A link that they put in the place of [...] Towline's own files there [...] is not followed"."""
    record = dict.fromkeys(("repository", "name", "file", "folder", "url"), "x")
    path = str(tmp_path / "last.ckpt")
    (tmp_path / "victim").write_bytes(b"precious")
    for number in (os.getpid(), 1):
        (tmp_path / f"last.ckpt.{number}.part").symlink_to(tmp_path / "victim")
    _pointer_files.write(path, record, load_pointer_file, "2026-11-24T00:00:00Z")
    assert (tmp_path / "victim").read_bytes() == b"precious" and not os.path.islink(path)
    assert _pointer_files.read(path) == record and os.stat(path).st_mtime == 1795478400
    # A link at the very name that is chosen is refused, and nothing is left.
    fixed = uuid.UUID(int=7)
    monkeypatch.setattr(uuid, "uuid4", lambda: fixed)
    (tmp_path / f".{fixed.hex}.part").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        _pointer_files.write(path, record, load_pointer_file)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    # A small file that stands for much is none.
    for how in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", how) as archive:
            archive.writestr("archive/towline.json", json.dumps(record) + " " * (64 << 20))
        assert os.path.getsize(tmp_path / "bomb.ckpt") < 1 << 20
        assert _pointer_files.read(str(tmp_path / "bomb.ckpt")) is None
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert _pointer_files.read(str(tmp_path / "pipe.ckpt")) is None, "nobody waits for a pipe"


def test_ordinary_files_are_left_to_lightning(checkpoint_io, tmp_path):
    torch.save({"global_step": 4, "state_dict": {}}, tmp_path / "old.ckpt")
    assert checkpoint_io.load_checkpoint(tmp_path / "old.ckpt") == {"global_step": 4, "state_dict": {}}
    checkpoint_io.remove_checkpoint(tmp_path / "old.ckpt")
    assert not (tmp_path / "old.ckpt").exists()
    with pytest.raises(FileNotFoundError, match="none that was saved as such a file"):
        checkpoint_io.load_checkpoint(tmp_path / "old.ckpt")


def test_nothing_is_removed_for_a_save_that_failed(repository, checkpoint_io, tmp_path):
    saved(checkpoint_io, tmp_path / "step=1.ckpt")
    checkpointer, _ = checkpoint_io._saving()

    class Failing:
        def __getattr__(self, name):
            return getattr(repository._engine, name)

        def begin_save_files(self, *_):
            raise towline.Denied("no")

    checkpointer.repository = towline.open(repository.url)
    checkpointer.repository._engine = Failing()
    checkpoint_io.save_checkpoint(CHECKPOINT, tmp_path / "step=2.ckpt")
    checkpoint_io.remove_checkpoint(tmp_path / "step=1.ckpt")
    with pytest.raises(towline.SaveFailed, match="step-2"):
        checkpoint_io.teardown()
    assert names(repository) == ["run-7/step-1"]
    assert (tmp_path / "step=1.ckpt").exists() and not (tmp_path / "step=2.ckpt").exists()


def test_what_no_trainer_wrote_is_durable_at_once(repository, checkpoint_io, tmp_path):
    checkpoint_io.save_checkpoint({"layer.weight": torch.ones(3)}, tmp_path / ".temp.ckpt")
    assert names(repository) == ["run-7/.temp.ckpt"] and (tmp_path / ".temp.ckpt").exists()


def test_locations(checkpoint_io, tmp_path):
    saved(checkpoint_io, tmp_path / "step=1.ckpt")
    for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cuda:1"}, lambda storage, _: storage):
        back = checkpoint_io.load_checkpoint(tmp_path / "step=1.ckpt", map_location=location)
        assert back["state_dict"]["a"].device.type == "cpu"
    back = checkpoint_io.load_checkpoint(tmp_path / "step=1.ckpt", map_location="meta")
    assert back["state_dict"]["a"].device.type == "meta"


def test_it_goes_to_other_processes(checkpoint_io, tmp_path):
    saved(checkpoint_io, tmp_path / "step=1.ckpt")
    again = pickle.loads(pickle.dumps(checkpoint_io))
    assert again.load_checkpoint(tmp_path / "step=1.ckpt")["global_step"] == 10
    with pytest.raises(TypeError):
        again.save_checkpoint(CHECKPOINT, tmp_path / "step=1.ckpt", storage_options={})


def test_a_stand_in_of_another_repository_is_told(checkpoint_io, tmp_path):
    saved(checkpoint_io, tmp_path / "step=1.ckpt")
    other = TowlineCheckpointIO(tmp_path / "other", "run-7")
    with pytest.raises(towline.UsageError, match="another repository"):
        other.load_checkpoint(tmp_path / "step=1.ckpt")


def fitted(checkpoint_io, folder: Path, **said) -> tuple[Model, str]:
    """A trained model, and the file that its best checkpoint is said to be."""
    one = trainer(checkpoint_io, folder, 4, monitor="val/loss", save_top_k=1)
    trained = model(**said)
    one.fit(trained, data())
    return trained, one.checkpoint_callback.best_model_path


def check_loaded(loaded: Model, checkpoint_io, path: str) -> None:
    kept = checkpoint_io.load_checkpoint(path)["state_dict"]
    assert loaded.hparams.width == 6 and same(dict(loaded.state_dict()), dict(kept))


def test_the_best_model_is_loaded_as_any_other(checkpoint_io, tmp_path):
    _, best = fitted(checkpoint_io, tmp_path, width=6)
    assert os.path.getsize(best) < 8192, "it is no copy"
    for said in ({}, {"weights_only": True}, {"weights_only": False}, {"map_location": "cpu"}):
        check_loaded(Model.load_from_checkpoint(best, **said), checkpoint_io, best)
    check_loaded(Model.load_from_checkpoint(best, map_location=lambda storage, _: storage), checkpoint_io, best)
    assert torch.load(best)["global_step"] == checkpoint_io.load_checkpoint(best)["global_step"]
    assert torch.load(best, mmap=True)["state_dict"].keys() == torch.load(best)["state_dict"].keys()
    assert next(iter(torch.load(best, map_location="meta")["state_dict"].values())).device.type == "meta"
    assert "optimizer_states" in torch.load(best, weights_only=False)


LOADS = """
    import sys, torch
    {first}
    try:
        print(sorted(torch.load(sys.argv[1], weights_only=sys.argv[2] == "yes")))
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
"""


def in_another_process(first: str, path: str, weights_only: bool = True) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = textwrap.dedent(LOADS.format(first=first))
    command = [sys.executable, "-c", script, path, "yes" if weights_only else "no"]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def test_the_best_model_is_loaded_in_another_process(checkpoint_io, tmp_path):
    _, best = fitted(checkpoint_io, tmp_path)
    assert "state_dict" in in_another_process("import towline.lightning", best)
    assert "state_dict" in in_another_process("", best, weights_only=False)
    told = in_another_process("", best)
    assert told.startswith("UnpicklingError") and "towline.lightning.load_pointer_file" in told


def test_a_file_that_is_not_trusted_opens_no_store_elsewhere(repository, tmp_path, monkeypatch):
    told = {
        "repository": "another",
        "name": "run/step-1",
        "file": "a.ckpt",
        "folder": "/x",
        "url": "s3://bucket/of-others",
    }
    path, opened = str(tmp_path / "a.ckpt"), []

    def opening(url, **_):
        opened.append(url)
        raise towline.Denied("no")

    monkeypatch.setattr(towline.lightning, "open_repository", opening)
    towline.lightning._pointer_files.write(path, told, towline.lightning.load_pointer_file)
    with pytest.raises(
        towline.UsageError, match=r"call towline\.lightning\.TowlineCheckpointIO\('s3://bucket/of-others'"
    ):
        torch.load(path)
    assert opened == []
    with pytest.raises(towline.Denied):
        torch.load(path, weights_only=False)
    assert opened == ["s3://bucket/of-others"]
    # One that says nothing that can be read is told, too.
    towline.lightning._pointer_files.write(path, {"name": "x"}, towline.lightning.load_pointer_file)
    for load in (torch.load, TowlineCheckpointIO(repository, "run").load_checkpoint):
        with pytest.raises(towline.UsageError, match="was not written by towline"):
            load(path)


def test_a_checkpoint_that_is_gone_is_told_by_its_pointer(repository, checkpoint_io, tmp_path):
    path = tmp_path / "step=1.ckpt"
    saved(checkpoint_io, path)
    repository.remove("run-7/step-1")
    with pytest.raises(towline.NotFound, match="run-7/step-1"):
        torch.load(path)
    saved(checkpoint_io, tmp_path / "other" / "step=1.ckpt")
    with pytest.raises(towline.Conflict, match="saved again"):
        torch.load(path)


def test_pickled_values_are_loaded_by_torch_only_where_they_are_trusted(checkpoint_io, tmp_path):
    _, best = fitted(checkpoint_io, tmp_path, width=6, extra=torch.nn.Linear(2, 2))
    with pytest.raises(towline.UsageError, match="weights_only=False"):
        Model.load_from_checkpoint(best)
    loaded = Model.load_from_checkpoint(best, weights_only=False)
    assert isinstance(loaded.hparams.extra, torch.nn.Linear)


@pytest.mark.parametrize(
    "file",
    [
        "../home/.bash_profile",
        "/etc/x.ckpt",
        "a/b.ckpt",
        "..",
        ".",
        "a\0b",
        "a\0.ckpt",
        ".bashrc",
        "x" * 251 + ".ckpt",
        "\u00e9" * 126 + ".ckpt",
    ],
)
def test_a_stored_name_leads_nowhere_else(repository, checkpoint_io, tmp_path, file):
    (tmp_path / "tree").write_text("x")
    folder = tmp_path / "home" / "checkpoints"
    repository.save(tmp_path / "tree", "run-7/step-1", labels={"lightning.file": file, "lightning.folder": "x"})
    saved(checkpoint_io, tmp_path / "step=2.ckpt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match="run-7/step-1 is left out"):
        assert checkpoint_io.checkout(folder) == [str(folder / "step=2.ckpt")]
    assert set(tmp_path.rglob("*")) - set(before) - set((tmp_path / "repository").rglob("*")) - set(
        (tmp_path / "cache").rglob("*")
    ) == {tmp_path / "home", folder, folder / "step=2.ckpt"}


def test_a_stored_name_that_cannot_be_written_keeps_no_other_checkpoint_out(repository, checkpoint_io, tmp_path):
    (tmp_path / "tree").write_text("x")
    longest = "\u00e9" * 125 + ".ckpt"
    for number, file in enumerate(["a" * 300, "refused.ckpt", longest]):
        labels = {"lightning.file": file, "lightning.folder": "x"}
        repository.save(tmp_path / "tree", f"run-7/step-{number}", labels=labels)
    saved(checkpoint_io, tmp_path / "step=7.ckpt")
    folder, real = tmp_path / "checkpoints", os.replace

    def replace(source, target):
        if target.endswith("refused.ckpt"):
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), target)
        real(source, target)

    with pytest.MonkeyPatch.context() as patched, pytest.warns(UserWarning, match="is left out") as warned:
        patched.setattr(os, "replace", replace)
        assert checkpoint_io.checkout(folder) == [str(folder / longest), str(folder / "step=7.ckpt")]
    assert sorted(os.listdir(folder)) == sorted([longest, "step=7.ckpt"])
    told = [str(one.message) for one in warned]
    assert any("run-7/step-0 is left out" in text and "at most 255 bytes" in text for text in told)
    assert any("run-7/step-1 is left out" in text and "cannot be written" in text for text in told)


@dataclasses.dataclass
class Settings:
    depth: int = 1


@pytest.mark.parametrize("extra", [Path("a/b"), argparse.Namespace(lr=0.1, where=PurePosixPath("x"), n=[1, (2,)])])
def test_hyper_parameters_resume_as_they_were_saved(repository, tmp_path, extra):
    whole, first, second = (model(extra=extra) for _ in range(3))
    trainer(TowlineCheckpointIO(repository, "whole"), tmp_path / "whole", 6).fit(whole, data())
    trainer(TowlineCheckpointIO(repository, "run-7"), tmp_path, 3, save_last=True).fit(first, data())
    again = trainer(TowlineCheckpointIO(repository, "run-7"), tmp_path, 6, save_last=True)
    again.fit(second, data(), ckpt_path="last")
    assert first.losses + second.losses == whole.losses
    assert Model.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt").hparams.extra == extra


def test_hyper_parameters_of_a_class_say_what_to_do(checkpoint_io, tmp_path):
    with pytest.warns(UserWarning, match="holds objects of .*Settings: call towline.allow_classes"):
        _, best = fitted(checkpoint_io, tmp_path, width=6, extra=Settings(3))
    with pytest.raises(towline.UsageError, match=r"\['extra'\] holds .*Settings.*allow_classes\(Settings\)"):
        Model.load_from_checkpoint(best)
    towline.allow_classes(Settings)
    try:
        assert Model.load_from_checkpoint(best).hparams.extra == Settings(3)
    finally:
        towline._classes._allowed.clear()


def test_no_repository_is_created_if_it_is_not_to_be(tmp_path):
    with pytest.raises(towline.NotFound, match="no repository"):
        TowlineCheckpointIO(tmp_path / "missing", "run-7", create=False)
