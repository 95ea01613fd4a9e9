"""Folders that frameworks write to may be open to others: what is planted there is neither followed nor saved."""

import json
import os

import pytest
from towline import _folders, errors


def _checkpoint(folder, text):
    folder.mkdir(parents=True)
    (folder / "model.bin").write_text(text)


def test_a_planted_link_in_the_own_folder_is_refused(repository, tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    _checkpoint(victim, "keep")
    _checkpoint(tmp_path / "saved", "saved")
    repository.save(tmp_path / "saved", "run/step-5")
    out.mkdir()
    (out / "_towline").symlink_to(victim)
    with pytest.raises(errors.Denied, match="is a link"):
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    (out / "_towline").unlink()
    (out / "checkpoint-5").symlink_to(victim)
    with pytest.raises(errors.Denied, match="is a link"):
        _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert (victim / "model.bin").read_text() == "keep" and os.listdir(victim) == ["model.bin"]
    (out / "checkpoint-5").unlink()
    _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert (out / "checkpoint-5" / "model.bin").read_text() == "saved"
    # Again: what differs becomes as it was saved.
    (out / "checkpoint-5" / "more").write_text("x")
    _folders.restore(repository, "run/step-5", str(out / "checkpoint-5"))
    assert os.listdir(out / "checkpoint-5") == ["model.bin"]
    assert os.stat(out / "_towline").st_mode & 0o777 == 0o700


def test_a_planted_step_is_not_saved(repository, tmp_path):
    secret, out = tmp_path / "secret", tmp_path / "out"
    _checkpoint(secret, "secret")
    waiting = out / "_towline" / "run"
    waiting.mkdir(parents=True)
    (waiting / "0-step-5.x").symlink_to(secret)
    (waiting / "0-step-5.x.json").write_text(json.dumps({"name": "models/production", "options": {}}))
    _folders.FolderSaver(repository, "run", "test").save_left_over(str(out))
    assert [one.name for one in repository.ls()] == []
    assert (secret / "model.bin").read_text() == "secret"
