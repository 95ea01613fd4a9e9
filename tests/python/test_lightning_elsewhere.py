"""Trainings of Lightning on another machine: one that resumes the run, and one that begins anew although the run is there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import towline  # noqa: E402
from towline.lightning import TowlineCheckpointIO  # noqa: E402

from .spooling import Far  # noqa: E402
from .test_lightning import data, model, names, trainer  # noqa: E402

README = Path(__file__).parents[2] / "bindings" / "python" / "README.md"


def fit(repository, folder: Path, steps: int, ckpt_path: str | None = "last", **said):
    trained = model()
    checkpoint_io = TowlineCheckpointIO(repository, "lt")
    trainer(checkpoint_io, folder, steps, **said).fit(trained, data(), ckpt_path=ckpt_path)
    return trained


def manifests(repository) -> dict[str, str]:
    return {one.name: one.manifest for one in repository.ls()}


def test_the_example_of_the_readme_resumes_on_another_machine(tmp_path, monkeypatch):
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if ".checkout(" in block
    )
    trained = []
    for machine, steps in (("one", 3), ("two", 6)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        trained.append(model())
        said = {"model": trained[-1], "data": data(), "steps": steps}
        exec(example.replace("s3://bucket/experiments", str(tmp_path / "repository")), said)
    whole = model()
    trainer(TowlineCheckpointIO(tmp_path / "whole", "whole"), tmp_path / "whole-files", 6).fit(whole, data())
    # Lightning saves the end of an epoch before the scheduler's step.
    assert len(trained[1].losses) == 3 and trained[1].losses[:2] == whole.losses[3:5]


def test_a_training_that_begins_anew_replaces_no_checkpoint(repository, tmp_path):
    fit(repository, tmp_path / "one", 3, save_top_k=-1, save_last=True)
    before = manifests(repository)
    with pytest.raises(towline.SaveConflict, match=r"lt/step-1 was saved by another training.*checkout\('.*/two/check"):
        fit(repository, tmp_path / "two", 3, save_top_k=-1, save_last=True)
    assert manifests(repository) == before
    assert not list((tmp_path / "two" / "checkpoints").iterdir())
    # As the error says.
    TowlineCheckpointIO(repository, "lt").checkout(tmp_path / "two" / "checkpoints")
    second = fit(repository, tmp_path / "two", 5, save_top_k=-1, save_last=True)
    assert len(second.losses) == 2 and "lt/step-5" in names(repository)


def test_a_training_that_begins_anew_beside_others_warns_once(repository, tmp_path, caplog):
    fit(repository, tmp_path / "one", 2)
    checkpoint_io = TowlineCheckpointIO(repository, "lt")
    folder = tmp_path / "two"
    with pytest.warns(UserWarning) as told:
        for step in (7, 8):
            checkpoint_io.save_checkpoint({"global_step": step}, folder / f"step={step}.ckpt")
        # A file of that name stands for lt/step-2, which the folder's training has not saved.
        checkpoint_io.remove_checkpoint(folder / "epoch=0-step=2.ckpt")
        checkpoint_io.remove_checkpoint(folder / "step=7.ckpt")
        checkpoint_io.teardown()
    found = [str(one.message) for one in told if "did not resume" in str(one.message)]
    assert len(found) == 1 and "lt/step-2" in found[0] and f"checkout({str(folder)!r})" in found[0]
    assert "another run name" in found[0]
    assert sum("did not resume" in one.getMessage() for one in caplog.records if one.name == "towline") == 1
    assert any("lt/step-2 stays" in str(one.message) for one in told)
    assert names(repository) == ["lt/step-2", "lt/step-8"]


@pytest.mark.parametrize("how", ["the files are there", "loaded by its name"])
def test_a_training_that_goes_on_is_not_warned(repository, tmp_path, how):
    fit(repository, tmp_path / "one", 2, save_last=True)
    folder = tmp_path / ("one" if how == "the files are there" else "two")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        if how == "loaded by its name":
            fit(repository, folder, 4, str(folder / "checkpoints" / "epoch=0-step=2.ckpt"), save_last=True)
        else:
            fit(repository, folder, 4, save_last=True)
    assert "lt/step-4" in names(repository)


def test_a_second_fit_of_a_process_replaces_no_checkpoint_of_the_first(repository, tmp_path):
    """What the first resumed, or somebody loaded between them, is none of its business; its own folder is."""
    checkpoint_io = TowlineCheckpointIO(repository, "lt")
    trainer(checkpoint_io, tmp_path / "one", 2, save_top_k=-1).fit(model(), data())
    before = manifests(repository)
    checkpoint_io.load_checkpoint(tmp_path / "one" / "checkpoints" / "epoch=0-step=2.ckpt")
    checkpoint_io.teardown()
    with pytest.raises(towline.SaveConflict, match=r"lt/step-1 was saved by another training.*checkout\('.*/two/check"):
        trainer(checkpoint_io, tmp_path / "two", 2, save_top_k=-1).fit(model(), data())
    assert manifests(repository) == before
    checkpoint_io.teardown()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        trainer(checkpoint_io, tmp_path / "one", 4, save_top_k=-1).fit(model(), data())
    assert "lt/step-4" in names(repository)


def test_a_checkpoint_from_the_spool_is_replaced(repository, tmp_path):
    """The process before was killed when its first checkpoint was only on this node's disk: there is no file of it."""
    repository._engine = Far(repository._engine)
    killed = towline.Checkpointer(repository, "lt", close_retry=0)
    repository._engine.away = True
    labels = {"lightning.file": "step=1.ckpt", "lightning.folder": str(tmp_path)}
    killed._save_as("lt/step-1", 1, {"global_step": 1}, None, labels=labels).wait("local")
    with pytest.raises(towline.SaveFailed):
        killed.close()
    assert names(repository) == []
    repository._engine.away = False
    again = TowlineCheckpointIO(repository, "lt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        again.save_checkpoint({"global_step": 1, "again": True}, tmp_path / "step=1.ckpt")
        again.save_checkpoint({"global_step": 2}, tmp_path / "step=2.ckpt")
        again.teardown()
    assert again.load_checkpoint(tmp_path / "step=1.ckpt")["again"]
