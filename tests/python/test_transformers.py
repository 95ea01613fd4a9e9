"""Checkpoints of Hugging Face's Trainer in a repository."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import towline  # noqa: E402
from towline.transformers import TowlineCallback  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from .spooling import Far  # noqa: E402


class Model(torch.nn.Module):
    """What Trainer asks of a model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))

    def forward(self, rows, labels=None):
        return {"loss": (self.layers(rows).squeeze(-1) - labels).square().mean()}


def data() -> list[dict]:
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    return [{"rows": row, "labels": row.sum()} for row in rows]


def trained(callback, folder: Path, steps: int, resume=None, **said) -> Trainer:
    said = {"save_steps": 2, "logging_steps": 1, **said}
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, report_to=[], seed=5,
        disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant", **said,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=args, train_dataset=data(), eval_dataset=data(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]


def names(repository) -> list[str]:
    return [one.name for one in sorted(repository.ls(), key=lambda one: int(one.name.rpartition("-")[2]))]


def tree(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_each_checkpoint_is_a_step(repository, tmp_path):
    trainer = trained(TowlineCallback(repository, "run-7"), tmp_path / "out", 6, eval_strategy="steps", eval_steps=3)
    assert names(repository) == ["run-7/step-2", "run-7/step-4", "run-7/step-6"]
    told = {logged["step"]: logged["loss"] for logged in trainer.state.log_history if "loss" in logged}
    for step in (2, 4, 6):
        shown = repository.show(f"run-7/step-{step}")
        assert shown["metrics"]["loss"] == told[step] and shown["framework"] == "transformers"
        assert ("eval_loss" in shown["metrics"]) == (step == 6)
        repository.restore(f"run-7/step-{step}", tmp_path / f"back-{step}")
        assert tree(tmp_path / f"back-{step}") == tree(tmp_path / "out" / f"checkpoint-{step}")
    assert not list((tmp_path / "out" / "_towline").rglob("*.json"))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_resumed_training_goes_on_as_if_uninterrupted(repository, tmp_path, elsewhere):
    whole = trained(TowlineCallback(repository, "whole"), tmp_path / "whole", 9)
    trained(TowlineCallback(repository, "run-7"), tmp_path / "out", 5)
    # A checkpoint that Trainer was killed over, newer than what is saved.
    (tmp_path / "out" / "checkpoint-7").mkdir()
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    folder = tmp_path / "elsewhere" if elsewhere else tmp_path / "out"
    callback = TowlineCallback(repository, "run-7")
    assert callback.restore_latest(folder) == str(folder / "checkpoint-5")
    resumed = trained(callback, folder, 9, resume=True)
    assert losses(resumed) == losses(whole)
    assert all(map(torch.equal, resumed.model.state_dict().values(), whole.model.state_dict().values()))
    assert names(repository)[-1] in ("run-7/step-9", "whole/step-9")


def test_nothing_to_resume_from(repository, tmp_path, caplog):
    assert TowlineCallback(repository, "run-7").restore_latest(tmp_path / "out") is None
    (tmp_path / "out" / "checkpoint-3").mkdir()
    assert TowlineCallback(repository, "run-7").restore_latest(tmp_path / "out") is None
    assert (tmp_path / "out" / "incomplete-checkpoint-3").is_dir()
    assert "out/checkpoint-3 lacks its trainer_state.json, and so is incomplete" in caplog.text


def test_a_newer_local_checkpoint_comes_first(repository, tmp_path):
    callback = TowlineCallback(repository, "run-7")
    trained(callback, tmp_path / "out", 4)
    repository.remove("run-7/step-4")
    before = tree(tmp_path / "out" / "checkpoint-4")
    assert callback.restore_latest(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-4")
    assert tree(tmp_path / "out" / "checkpoint-4") == before


def test_a_damaged_local_checkpoint_is_put_right(repository, tmp_path):
    callback = TowlineCallback(repository, "run-7")
    trained(callback, tmp_path / "out", 4)
    folder = tmp_path / "out" / "checkpoint-4"
    before = tree(folder)
    (folder / "optimizer.pt").write_bytes(b"half")
    (folder / "extra").write_bytes(b"not saved")
    callback.restore_latest(tmp_path / "out")
    assert tree(folder) == before


class Slow:
    """An engine whose saves wait until they may begin, or fail."""

    def __init__(self, engine, begin):
        self._engine, self._begin = engine, begin

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def begin_save(self, *wanted):
        self._begin()
        return self._engine.begin_save(*wanted)


def slow(repository, begin) -> towline.Repository:
    other = towline.open(repository.url)
    other._engine = Slow(other._engine, begin)
    return other


def test_a_checkpoint_that_trainer_takes_away_is_saved_all_the_same(repository, tmp_path):
    """`save_total_limit` deletes a checkpoint while it is being saved."""
    out = tmp_path / "out"
    late = slow(repository, lambda: time.sleep(1.0))
    trained(TowlineCallback(late, "run-7"), out, 6, save_steps=1, save_total_limit=1)
    assert names(repository) == [f"run-7/step-{step}" for step in range(1, 7)]
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-6"]
    repository.restore("run-7/step-5", tmp_path / "back")
    assert "trainer_state.json" in tree(tmp_path / "back")


def test_where_files_cannot_be_linked_the_save_is_waited_for(repository, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    trained(TowlineCallback(repository, "run-7"), tmp_path / "out", 4, save_steps=1, save_total_limit=1)
    assert names(repository) == [f"run-7/step-{step}" for step in range(1, 5)]
    assert not [path for path in (tmp_path / "out" / "_towline").rglob("*") if path.is_file() and path.name != "lock"]


def test_local_checkpoints_go_once_they_are_durable(repository, tmp_path):
    out = tmp_path / "out"
    said = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    callback = TowlineCallback(repository, "run-7", remove_local=True)
    trainer = trained(callback, out, 5, **said, metric_for_best_model="loss")
    best = trainer.state.best_global_step
    kept = {f"checkpoint-{step}" for step in (best, 5)}
    assert {path.name for path in out.glob("checkpoint-*")} == kept
    assert len(names(repository)) == 5
    # Where they are missing, Trainer would forget the best.
    shutil.rmtree(out)
    TowlineCallback(repository, "run-7").restore_latest(out)
    assert {path.name for path in out.glob("checkpoint-*")} == kept


def test_steps_are_expired(repository, tmp_path):
    trained(TowlineCallback(repository, "run-7", keep_last=2), tmp_path / "out", 6, save_steps=1)
    assert names(repository) == ["run-7/step-5", "run-7/step-6"]


def test_how_small_checkpoints_are_stored_can_be_said(repository, tmp_path):
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-1" / "zeros").write_bytes(bytes(1 << 20))
    saver = TowlineCallback(repository, "run-7", compression="off")._saver
    saver.save(str(tmp_path / "out" / "checkpoint-1"), 1, None, str(tmp_path / "out")).wait()
    saver.close()
    assert repository.show("run-7/step-1").stored_bytes >= 1 << 20
    with pytest.raises(towline.UsageError, match="'predict' or 'off'"):
        TowlineCallback(repository, "run-7", compression="fast")


def test_a_save_that_failed_is_raised(repository, tmp_path):
    def refuse():
        raise towline.Denied("no")

    with pytest.raises(towline.SaveFailed, match="step-2"):
        trained(TowlineCallback(slow(repository, refuse), "run-7"), tmp_path / "out", 8)
    with pytest.raises(towline.SaveFailed, match="step-2"):
        trained(TowlineCallback(slow(repository, refuse), "run-7"), tmp_path / "end", 2)
    assert names(repository) == []
    # What was not saved is saved by the next process.
    callback = TowlineCallback(repository, "run-7")
    assert callback.restore_latest(tmp_path / "end") == str(tmp_path / "end" / "checkpoint-2")
    assert names(repository) == ["run-7/step-2"]


def test_a_step_that_another_process_saves_first_is_a_conflict(repository, tmp_path):
    """F10: "Two saves of one NAME: the one that commits second finds that the name has moved"."""
    (tmp_path / "other").write_text("other")

    def begin():
        repository.save(tmp_path / "other", "run-7/step-2")
        raise towline.Conflict("name moved since this save began")

    told = r"run-7/step-2 was saved by another process.*own run name.*`towline rm run-7/step-2`"
    with pytest.raises(towline.SaveConflict, match=told):
        trained(TowlineCallback(slow(repository, begin), "run-7"), tmp_path / "out", 2)
    assert repository.read("run-7/step-2", "other") == b"other"
    assert (tmp_path / "out" / "checkpoint-2").is_dir() and not list((tmp_path / "out/_towline").rglob("*.json"))


@pytest.mark.parametrize("links", [True, False])
def test_a_step_that_another_process_saves_later_is_not_replaced(repository, tmp_path, monkeypatch, links):
    (tmp_path / "other").write_text("other")

    class Beside(TowlineCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 5:
                repository.save(tmp_path / "other", "run-7/step-6")

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    out = tmp_path / "out"
    trained(TowlineCallback(repository, "run-7"), out, 4)
    callback = Beside(repository, "run-7")
    with pytest.raises(towline.SaveConflict, match="run-7/step-6 was saved by another process since"):
        trained(callback, out, 8, callback.restore_latest(out))
    assert repository.read("run-7/step-6", "other") == b"other"
    # A training that begins from zero where the run has been saved replaces the steps that it found.
    before = repository.show("run-7/step-4").manifest
    trained(TowlineCallback(repository, "run-7"), out, 4, weight_decay=0.5)
    assert repository.show("run-7/step-4").manifest != before


def test_a_store_that_does_not_answer_does_not_stop_the_training(repository, tmp_path):
    def unreachable():
        raise towline.Unreachable("no answer")

    callback = TowlineCallback(slow(repository, unreachable), "run-7", close_retry=0)
    told = "run-7/step-2, run-7/step-4, run-7/step-6: not durable yet, only on .*out/_towline.* no answer .*start the training"
    with pytest.raises(towline.SaveFailed, match=told):
        trained(callback, tmp_path / "out", 6, save_total_limit=1)
    assert names(repository) == []
    # They would count as later than it.
    with pytest.raises(towline.SaveFailed, match="run-7/step-6: not durable yet"):
        callback._saver.save(str(tmp_path / "out" / "checkpoint-6"), 7, None, str(tmp_path / "out"))
    trained(TowlineCallback(repository, "run-7"), tmp_path / "out", 8)
    assert names(repository) == ["run-7/step-2", "run-7/step-4", "run-7/step-6", "run-7/step-8"]


def test_the_end_retries_until_the_store_answers(repository, tmp_path, monkeypatch):
    from towline import _backlog

    monkeypatch.setattr(_backlog, "_PAUSE", 0.01)
    tries = []

    def answer_late():
        tries.append(1)
        if len(tries) < 10:
            raise towline.Unreachable("no answer")

    trained(TowlineCallback(slow(repository, answer_late), "run-7"), tmp_path / "out", 4)
    assert names(repository) == ["run-7/step-2", "run-7/step-4"] and len(tries) == 11


def test_a_store_that_answers_again_gets_all(repository, tmp_path):
    answers = iter([False, True])

    def once():
        if not next(answers, True):
            raise towline.Unreachable("no answer")

    callback = TowlineCallback(slow(repository, once), "run-7")
    trained(callback, tmp_path / "out", 4)
    assert names(repository)[-1:] == ["run-7/step-4"] or os.listdir(tmp_path / "out" / "_towline" / "run-7")
    callback.restore_latest(tmp_path / "out")
    assert names(repository) == ["run-7/step-2", "run-7/step-4"]


def test_local_checkpoints_of_an_abandoned_branch_are_not_resumed(repository, tmp_path):
    """Trainer resumes the highest one in the folder, and here this is none that others have."""
    far, out, other = towline.open(repository.url), tmp_path / "out", tmp_path / "other"
    far._engine = Far(far._engine)
    first = TowlineCallback(far, "run-7", close_retry=0)
    trained(first, out, 2)
    resume = first.restore_latest(out)
    far._engine.away = True
    with pytest.raises(towline.SaveFailed, match="run-7/step-4, run-7/step-6: not durable yet"):
        trained(first, out, 6, resume)
    second = TowlineCallback(repository, "run-7")
    trained(second, other, 4, second.restore_latest(other))
    back = TowlineCallback(repository, "run-7")
    with pytest.warns(
        UserWarning, match="run-7/step-4, run-7/step-6: only on .* dropped: another process has continued"
    ):
        resume = back.restore_latest(out)
    assert resume == str(out / "checkpoint-4") and tree(resume) == tree(other / "checkpoint-4")
    assert sorted(path.name for path in out.glob("*checkpoint-*")) == [
        "checkpoint-2", "checkpoint-4", "dropped-checkpoint-4", "dropped-checkpoint-6"
    ]  # fmt: skip
    assert names(repository) == ["run-7/step-2", "run-7/step-4"]


def test_links_that_come_and_go_do_not_spoil_a_save(repository, tmp_path):
    """Removing another link to a file changes its inode: that is not a change of what is saved."""
    import threading

    from towline import _folders, _private, spool

    run = tmp_path / "run"
    large = run / "0-step-1.x" / "large"
    large.parent.mkdir(parents=True)
    large.write_bytes(os.urandom(64 << 20))
    over = threading.Event()

    def come_and_go() -> None:
        other = tmp_path / "other"
        for _ in range(40):
            os.link(large, other)
            other.unlink()
            if over.wait(0.01):
                return

    kept = spool.SpooledStep(_private.given(str(run)), large.parent.name)
    (run / kept.record).write_text(json.dumps({"name": "run/step-1", "options": {"metrics": {}}}))
    thread = threading.Thread(target=come_and_go)
    thread.start()
    report = _folders._save_linked(repository, kept)
    over.set()
    thread.join()
    assert report.logical_bytes == 64 << 20 and spool.pending(kept.run, "run", 0) == []


def test_no_repository_is_created_if_it_is_not_to_be(tmp_path):
    with pytest.raises(towline.NotFound, match="no repository"):
        TowlineCallback(tmp_path / "missing", "run-7", create=False)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (
            towline.Conflict,
            "file changed while the tree was being saved",
            "run/step-1 was not saved: {} .its files stay in .*/_towline/",
        ),
        # It is retried until `close` gives up.
        (
            towline.Busy,
            "others commit faster than this writer",
            "run/step-1: not durable yet, .* did not take all steps: {} ",
        ),
    ],
)
def test_a_folder_that_conflicts_stays_for_the_next_process(repository, tmp_path, monkeypatch, kind, error, message):
    from towline import _folders

    def conflict():
        raise kind(error)

    monkeypatch.setattr(_folders, "_PAUSE", 0)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "weights").write_bytes(b"1")
    saver = _folders.FolderSaver(slow(repository, conflict), "run", "test", close_retry=0.5)
    saver.save(str(tmp_path / "checkpoint-1"), 1, None, str(tmp_path))
    with pytest.raises(towline.SaveFailed, match=message.format(error)):
        saver.close()
    _folders.FolderSaver(repository, "run", "test").save_pending(str(tmp_path))
    assert names(repository) == ["run/step-1"]
