"""Trainings that begin anew in a run that has steps of another one: they replace none of them."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import towline
from towline import _folders

from .spooling import Far, linked


def manifests(repository) -> dict[str, str]:
    return {one.name: one.manifest for one in repository.ls()}


def began(repository, folder: Path, framework: str = "accelerate") -> _folders.FolderSaver:
    folder.mkdir(exist_ok=True)
    saver = _folders.FolderSaver(repository, "run", framework)
    saver.save_pending(str(folder))
    return saver


def save(saver: _folders.FolderSaver, folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)
        linked(folder, saver, step)
    saver.close()


def told(warned) -> list[str]:
    return [str(one.message) for one in warned if "did not resume" in str(one.message)]


@pytest.mark.parametrize("links", [True, False])
def test_folders_of_another_training_are_not_replaced(repository, tmp_path, monkeypatch, links):
    save(began(repository, tmp_path / "one"), tmp_path / "one", 5, 10)
    before = manifests(repository)
    if not links:
        monkeypatch.setattr(_folders.spool, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    anew = began(repository, tmp_path / "two")
    cure = r"run/step-5 was saved by another training, .*did not resume the run run.*call restore\(\).*towline rm --rec"
    with pytest.raises(towline.SaveConflict, match=cure) as caught:
        save(anew, tmp_path / "two", 5)
    assert caught.value.place == "run/step-5" and "restore()" in caught.value.help
    assert manifests(repository) == before
    # As the error says: once the training restored a step.
    anew.restored(anew.found("run/step-5", False))
    save(anew, tmp_path / "two", 10, 11)
    assert manifests(repository)["run/step-5"] == before["run/step-5"] and anew.steps() == [5, 10, 11]
    # It may replace its own steps, and save those that somebody removed.
    save(anew, tmp_path / "two", 11)
    third = began(repository, tmp_path / "three")
    repository.remove("run/step-11")
    with pytest.warns(UserWarning, match="did not resume: run/step-5, run/step-10. "):
        save(third, tmp_path / "three", 11, 11)
    assert third.steps() == [5, 10, 11]


def test_a_training_beside_another_is_warned_once(repository, tmp_path, caplog):
    save(began(repository, tmp_path / "one"), tmp_path / "one", *range(7))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        save(began(repository, tmp_path / "two"), tmp_path / "two", 12, 13)
    (text,) = told(warned)
    assert "run/step-0, run/step-1, run/step-2, run/step-3, run/step-4 and 2 more" in text and "another run" in text
    assert sum("did not resume" in one.getMessage() for one in caplog.records) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        third = began(repository, tmp_path / "three")
        third.restored(third.found("run/step-13", True))
        save(third, tmp_path / "three", 14)


def test_what_a_killed_process_left_is_its_own(repository, tmp_path):
    """Its links became durable with the next process, which begins from zero, and saves the same steps again."""
    killed = began(repository, tmp_path / "one")
    with pytest.MonkeyPatch.context() as away:
        away.setattr(killed._backlog, "_start", lambda: None)
        linked(tmp_path / "one", killed, 1)
    _folders._shutdown.forget(killed)
    killed._owner.release()
    again = began(repository, tmp_path / "one")
    assert again.steps() == [1]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        save(again, tmp_path / "one", 1)


@pytest.fixture
def trainer():
    pytest.importorskip("transformers")
    from . import test_transformers

    return test_transformers


def test_a_trainer_in_a_fresh_folder_replaces_no_step(repository, tmp_path, trainer):
    from towline.transformers import TowlineCallback

    trainer.trained(TowlineCallback(repository, "run-7"), tmp_path / "one", 4)
    before = manifests(repository)
    cure = (
        r"run-7/step-2 was saved by another training.*callback.restore_latest\(args.output_dir\) as resume_from_check"
    )
    for _ in range(2):
        # The second start does not take the folder of the first for one of the run.
        with pytest.raises(towline.SaveConflict, match=cure) as caught:
            trainer.trained(TowlineCallback(repository, "run-7"), tmp_path / "two", 4)
        aside = tmp_path / "two" / "dropped-checkpoint-2"
        assert f"its files are in {aside}" in str(caught.value) and (aside / "trainer_state.json").is_file()
        assert not (tmp_path / "two" / "checkpoint-2").exists() and manifests(repository) == before
    callback = TowlineCallback(repository, "run-7")
    folder = callback.restore_latest(tmp_path / "two")
    assert folder == str(tmp_path / "two" / "checkpoint-4")
    trainer.trained(callback, tmp_path / "two", 6, resume=folder)
    assert trainer.names(repository) == ["run-7/step-2", "run-7/step-4", "run-7/step-6"]
    assert {**manifests(repository), **before} == manifests(repository)


def test_a_trainer_beside_another_is_warned_once(repository, tmp_path, trainer):
    from towline.transformers import TowlineCallback

    trainer.trained(TowlineCallback(repository, "run-7"), tmp_path / "one", 4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.trained(TowlineCallback(repository, "run-7"), tmp_path / "two", 6, save_steps=3)
    (text,) = told(warned)
    assert "run-7/step-2, run-7/step-4. None of them" in text


@pytest.mark.parametrize("how", ["by Trainer alone", "from elsewhere", "anew", "a checkpoint that was not saved"])
def test_a_trainer_that_goes_on_by_itself_is_not_warned(repository, tmp_path, trainer, how):
    from towline.transformers import TowlineCallback

    one = tmp_path / "one"
    trainer.trained(TowlineCallback(repository, "run-7"), one, 4)
    folder, resume, steps = one, True, 6
    if how == "from elsewhere":
        repository.restore("run-7/step-4", tmp_path / "by hand")
        folder, resume = tmp_path / "two", str(tmp_path / "by hand")
    if how == "anew":
        # In its own folder, from zero.
        resume = None
    if how == "a checkpoint that was not saved":
        shutil.copytree(one / "checkpoint-4", tmp_path / "kept")
        trainer.trained(TowlineCallback(repository, "other"), one, 6, resume=True)
        shutil.rmtree(one / "checkpoint-4")
        shutil.rmtree(one / "checkpoint-2")
        steps = 8
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        trainer.trained(TowlineCallback(repository, "run-7"), folder, steps, resume=resume)
    assert trainer.names(repository)[-1] == f"run-7/step-{steps}" or how.endswith("not saved")
    assert f"run-7/step-{steps}" in manifests(repository)


def far_away(repository) -> towline.Repository:
    opened = towline.open(repository.url)
    opened._engine = Far(opened._engine)
    return opened


@pytest.mark.parametrize("stage", ["blocking", "background"])
def test_a_loop_that_restored_nothing_replaces_no_step(repository, tmp_path, stage):
    with towline.Checkpointer(repository, "run") as first:
        for step in (5, 10):
            first.save(step, {"who": "first"})
    before = manifests(repository)
    with towline.Checkpointer(repository, "run", stage=stage) as anew:
        cure = (
            r"run/step-5 was saved by another training, .*did not resume.*call restore\(\) before the first save; else"
        )
        with pytest.raises(towline.SaveConflict, match=cure):
            anew.save(5, {"who": "anew"})
        assert manifests(repository) == before
        with pytest.warns(UserWarning, match="did not resume: run/step-5, run/step-10. None"):
            anew.save(7, {"who": "anew"}).wait()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="towline")
            # Its own.
            anew.save(7, {"who": "anew"}).wait()
            # It goes back.
            anew.restore(5)
            anew.save(6, {"who": "anew"}).wait()
    assert towline.Checkpointer(repository, "run").steps() == [5, 6]


def test_a_loop_whose_steps_were_removed_saves_them_anew(repository):
    with towline.Checkpointer(repository, "run") as first:
        first.save(5, {"who": "first"})
    with towline.Checkpointer(repository, "run") as anew:
        repository.remove("run/step-5")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="towline")
            anew.save(5, {"who": "anew"}).wait()
            anew.save(5, {"who": "anew"}).wait()


def test_a_loop_whose_spool_had_the_step_replaces_it(repository, tmp_path):
    """The process before was killed when its step was only on this node's disk, and this one begins from zero."""
    killed = towline.Checkpointer(far_away(repository), "run", spool=tmp_path, close_retry=0)
    killed.repository._engine.away = True
    killed.save(1, {"who": "killed"}).wait("local")
    with pytest.raises(towline.SaveFailed, match="only on the disk"):
        killed.close()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        with towline.Checkpointer(far_away(repository), "run", spool=tmp_path) as again:
            assert again.steps() == [1]
            again.save(1, {"who": "again"}).wait()
            assert again.restore(1)["who"] == "again"


@pytest.mark.parametrize("what", ["restored", "saved"])
def test_what_another_checkpointer_of_the_process_did_does_not_count(repository, what):
    """As in a notebook, with a cell that evaluates and one that trains."""
    with towline.Checkpointer(repository, "run") as first:
        first.save(5, {"who": "first"})
    before = manifests(repository)
    if what == "restored":
        with towline.Checkpointer(repository, "run") as reads:
            reads.restore()
    with towline.Checkpointer(repository, "run") as anew:
        with pytest.raises(towline.SaveConflict, match="run/step-5 was saved by another training"):
            anew.save(5, {"who": "anew"})
        assert manifests(repository) == before
        # As the error says.
        anew.restore()
        anew.save(5, {"who": "anew"}).wait()
        assert anew.restore(5)["who"] == "anew"


@pytest.mark.parametrize("is_same", [True, False], ids=["one callback", "two callbacks"])
def test_a_second_trainer_of_a_process_replaces_no_step_of_the_first(repository, tmp_path, trainer, is_same):
    from towline.transformers import TowlineCallback

    first = TowlineCallback(repository, "run-7")
    trainer.trained(first, tmp_path / "one", 4)
    before = manifests(repository)
    second = first if is_same else TowlineCallback(repository, "run-7")
    with pytest.raises(towline.SaveConflict, match="run-7/step-2 was saved by another training"):
        trainer.trained(second, tmp_path / "two", 4)
    assert manifests(repository) == before
    # In its own folder it goes on as it likes.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="towline")
        trainer.trained(second, tmp_path / "one", 4)
    assert manifests(repository).keys() == before.keys()


def test_steps_of_a_training_do_not_count_as_those_of_the_next_one(repository, tmp_path):
    """They become durable only when the next one begins, in another folder."""
    repository._engine = Far(repository._engine)
    saver = _folders.FolderSaver(repository, "run", "transformers", close_retry=0)
    for folder in (tmp_path / "one", tmp_path / "two"):
        saver.begin(str(folder))
        saver.save_pending(str(folder))
        if folder == tmp_path / "one":
            repository._engine.away = True
            linked(folder, saver, 5)
            repository._engine.away = False
    with pytest.raises(towline.SaveConflict, match="run/step-5 was saved by another training"):
        linked(tmp_path / "two", saver, 5)
    saver.close()
