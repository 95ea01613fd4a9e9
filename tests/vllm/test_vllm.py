"""The loader of vLLM, through vLLM's own registry and a model class of its own, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import towline
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.plugins import load_general_plugins

#: What a loader asks of a model's configuration.
CONFIG = SimpleNamespace(model="/models/base", quantization=None)


class Model(torch.nn.Module):
    """A model that loads its weights as vLLM's do: by AutoWeightsLoader."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def load_weights(self, weights) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> towline.Repository:
    """A repository with the weights of `Model`, in two files."""
    monkeypatch.setenv("TOWLINE_AGENT", "none")
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "cache"))
    weights = {name: torch.randn(tensor.shape) for name, tensor in Model().state_dict().items()}
    folder = tmp_path / "model"
    folder.mkdir()
    for at in range(2):
        save_file({name: weights[name] for name in sorted(weights)[at::2]}, folder / f"model-{at}.safetensors")
    repository = towline.open(tmp_path / "repository", create=True)
    repository.save(folder, "models/base")
    repository.weights = weights
    return repository


def loader(**extra: object) -> BaseModelLoader:
    load_general_plugins()
    return get_model_loader(LoadConfig(load_format="towline", model_loader_extra_config=extra))


def test_vllm_finds_the_loader() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["towline"] == "towline.vllm:register"
    assert isinstance(loader(name="models/base"), BaseModelLoader)


@pytest.mark.parametrize("ahead", ["1M", 1])
def test_a_model_gets_its_weights(repository: towline.Repository, ahead: str | int) -> None:
    model = Model()
    towlines = loader(name="models/base", repo=repository.url, ahead=ahead)
    towlines.download_model(CONFIG)
    towlines.load_weights(model, CONFIG)
    assert all(torch.equal(tensor, repository.weights[name]) for name, tensor in model.state_dict().items())


def test_weights_that_are_missing_are_named(repository: towline.Repository) -> None:
    part = loader(name="models/base", repo=repository.url, path="model-0.safetensors")
    with pytest.raises(towline.UsageError, match="models/base lacks 3 weights of the model"):
        part.load_weights(Model(), CONFIG)
    with pytest.raises(towline.NotFound):
        loader(name="models/absent", repo=repository.url).load_weights(Model(), CONFIG)


def test_wrong_options_are_refused() -> None:
    for extra in ({}, {"name": "a", "concurrency": 3}):
        with pytest.raises(towline.UsageError, match="it takes name, repo, path, ahead"):
            loader(**extra)


def test_registering_needs_no_torch_or_vllm_until_it_is_called() -> None:
    text = "import sys, towline.vllm; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True)
