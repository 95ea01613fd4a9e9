"""Trainings of Lightning whose checkpoints lie in several folders."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning.pytorch as pl  # noqa: E402
import towline  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from towline.lightning import TowlineCheckpointIO  # noqa: E402

from .spooling import far as far  # noqa: E402
from .test_lightning import Model, data, names  # noqa: E402


class Scored(Model):
    """Its best step is the second."""

    def training_step(self, batch, index):
        self.log("score", float(abs(self.global_step - 1)))
        return super().training_step(batch, index)


def fit(checkpoint_io, folder: Path, steps: int, periodic: dict, ckpt_path: str | None = None) -> list[ModelCheckpoint]:
    said = {"filename": "{step}", "every_n_train_steps": 1, "save_last": True}
    best = ModelCheckpoint(folder / "best", monitor="score", save_top_k=1, **said)
    callbacks = [best, ModelCheckpoint(folder / "periodic", **said, **periodic)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, plugins=[checkpoint_io], callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Scored(), data(), ckpt_path=ckpt_path)
    return callbacks


def steps_of(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): torch.load(path)["global_step"] for path in sorted(folder.glob("*/*.ckpt"))}


NEWEST = {"monitor": "step", "mode": "max", "save_top_k": 1}


@pytest.mark.parametrize("periodic", [{"save_top_k": -1}, NEWEST], ids=["all", "the newest"])
def test_checkpoints_of_two_folders_are_kept_apart(repository, tmp_path, periodic):
    """Also once a second fit goes on, in a new process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        callbacks = fit(TowlineCheckpointIO(repository, "run"), tmp_path, 5, periodic)
        best = callbacks[0].best_model_path
        kept = range(1, 6) if periodic["save_top_k"] == -1 else [5]
        expected = {"best/step=2.ckpt": 2, "best/last.ckpt": 5, "periodic/last.ckpt": 5}
        expected |= {f"periodic/step={step}.ckpt": step for step in kept}
        assert best == str(tmp_path / "best" / "step=2.ckpt") and steps_of(tmp_path) == expected
        assert len(names(repository)) == len(expected) and "run/step-2" in names(repository)
        fit(TowlineCheckpointIO(repository, "run"), tmp_path, 7, periodic, str(tmp_path / "periodic" / "last.ckpt"))
    assert steps_of(tmp_path)["best/step=2.ckpt"] == 2 and steps_of(tmp_path)["periodic/step=7.ckpt"] == 7
    assert len(names(repository)) == len(steps_of(tmp_path))


def test_two_folders_on_another_machine(repository, tmp_path):
    fit(TowlineCheckpointIO(repository, "run"), tmp_path / "one", 5, NEWEST)
    (tmp_path / "one").rename(tmp_path / "gone")
    checkpoint_io = TowlineCheckpointIO(repository, "run")
    for folder in ("best", "periodic"):
        checkpoint_io.checkout(tmp_path / "two" / folder)
    fit(checkpoint_io, tmp_path / "two", 7, NEWEST, str(tmp_path / "two" / "periodic" / "last.ckpt"))
    found = steps_of(tmp_path / "two")
    # Each folder was given the checkpoints of both.
    assert found["best/step=2.ckpt"] == found["periodic/step=2.ckpt"] == 2
    assert found["best/last.ckpt"] == found["periodic/last.ckpt"] == 5 and found["periodic/step=7.ckpt"] == 7


CHECKPOINT = {"global_step": 2, "pytorch-lightning_version": "2.6.0"}


def test_a_restarted_fit_saves_the_folders_in_another_order(repository, tmp_path):
    first = TowlineCheckpointIO(repository, "run")
    for folder in ("best", "periodic"):
        first.save_checkpoint({**CHECKPOINT, "folder": folder}, tmp_path / folder / "step=2.ckpt")
    first.teardown()
    before = names(repository)
    again = TowlineCheckpointIO(repository, "run")
    again.save_checkpoint({**CHECKPOINT, "folder": "again"}, tmp_path / "periodic" / "step=2.ckpt")
    again.teardown()
    assert names(repository) == before
    assert torch.load(tmp_path / "best" / "step=2.ckpt")["folder"] == "best"
    assert torch.load(tmp_path / "periodic" / "step=2.ckpt")["folder"] == "again"
    # Where no pointer file is left, the folder tells them apart.
    for folder in ("best", "periodic"):
        (tmp_path / folder / "step=2.ckpt").unlink()
    assert again.load_checkpoint(tmp_path / "best" / "step=2.ckpt")["folder"] == "best"
    assert again.load_checkpoint(tmp_path / "periodic" / "step=2.ckpt")["folder"] == "again"
    assert again.load_checkpoint(tmp_path / "elsewhere" / "periodic" / "step=2.ckpt")["folder"] == "again"


def test_folders_of_one_name(repository, tmp_path):
    checkpoint_io = TowlineCheckpointIO(repository, "run")
    places = [tmp_path / above / "checkpoints" / "last.ckpt" for above in ("a", "b", "c", "d")]
    for at, place in enumerate(places):
        checkpoint_io.save_checkpoint({**CHECKPOINT, "at": at}, place)
    checkpoint_io.teardown()
    assert [torch.load(place)["at"] for place in places] == [0, 1, 2, 3]
    assert {"run/last.ckpt", "run/checkpoints+2Flast.ckpt"} <= set(names(repository)) and len(names(repository)) == 4


def test_the_newest_of_the_folders_is_loaded_elsewhere(repository, tmp_path):
    """As of fits with a logger, each of which goes on from the one before, in a folder of its own."""
    places = [tmp_path / f"version_{at}" / "checkpoints" / "last.ckpt" for at in range(4)]
    for at, place in enumerate(places):
        checkpoint_io = TowlineCheckpointIO(repository, "run")
        if at:
            checkpoint_io.load_checkpoint(places[at - 1])
        checkpoint_io.save_checkpoint({**CHECKPOINT, "at": at}, place)
        checkpoint_io.teardown()
    reads = TowlineCheckpointIO(repository, "run")
    for folder in (tmp_path / "other" / "checkpoints", tmp_path / "other"):
        assert reads.load_checkpoint(folder / "last.ckpt")["at"] == 3
    assert reads.load_checkpoint("towline://run/last.ckpt")["at"] == 0
    for at, place in enumerate(places):
        place.unlink()
        assert reads.load_checkpoint(place)["at"] == at
    reads.teardown()


def test_an_outage_renames_no_file(far, tmp_path):
    first = TowlineCheckpointIO(far, "run")
    first.save_checkpoint({**CHECKPOINT, "at": 1}, tmp_path / "last.ckpt")
    first.teardown()
    again = TowlineCheckpointIO(far, "run")
    assert again.load_checkpoint(tmp_path / "last.ckpt")["at"] == 1
    show = far._engine.show

    def away(name, limit=None):
        raise towline.Unreachable("no answer")

    far._engine.show = away
    again.save_checkpoint({**CHECKPOINT, "at": 2}, tmp_path / "last.ckpt")
    far._engine.show = show
    again.teardown()
    assert names(far) == ["run/last.ckpt"] and torch.load(tmp_path / "last.ckpt")["at"] == 2


def test_a_step_stays_until_its_last_pointer_file_is_removed(repository, tmp_path):
    first = TowlineCheckpointIO(repository, "run")
    first.save_checkpoint(CHECKPOINT, tmp_path / "best" / "step=2.ckpt")
    first.teardown()
    again = TowlineCheckpointIO(repository, "run")
    again.checkout(tmp_path / "periodic")
    again.checkout(tmp_path / "third")
    for folder, left in (("periodic", ["run/step-2"]), ("best", ["run/step-2"]), ("third", [])):
        again.remove_checkpoint(tmp_path / folder / "step=2.ckpt")
        again.teardown()
        assert names(repository) == left and not (tmp_path / folder / "step=2.ckpt").exists()


def test_the_removal_of_a_file_whose_step_others_took_is_a_warning(repository, tmp_path):
    checkpoint_io = TowlineCheckpointIO(repository, "run")
    checkpoint_io.save_checkpoint(CHECKPOINT, tmp_path / "step=2.ckpt")
    checkpoint_io.teardown()
    labels = {"lightning.file": "step=2.ckpt", "lightning.folder": "/elsewhere"}
    with towline.Checkpointer(repository, "run") as other:
        other.restore()
        other._save_as("run/step-2", 2, {"other": True}, None, labels=labels)
    with pytest.warns(UserWarning, match="only the file is removed: .*step=2.ckpt is gone: run/step-2 was saved again"):
        checkpoint_io.remove_checkpoint(tmp_path / "step=2.ckpt")
        checkpoint_io.teardown()
    assert names(repository) == ["run/step-2"] and not (tmp_path / "step=2.ckpt").exists()
