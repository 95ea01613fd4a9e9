"""A loader of vLLM, for weights in a repository: `load_format="towline"` (docs/staging.md).

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. The loader has the interface of vLLM
0.32: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/base_loader.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .repository import opened

if TYPE_CHECKING:
    import torch

#: Keys of `model_loader_extra_config`: the saved name, which must be given; the repository, by default as for `towline.open`; a
#: file or folder in the tree; and bytes to read ahead.
_KEYS = ("name", "repo", "path", "ahead")


def register() -> None:
    """Registers the loader with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class TowlineModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Loads weights from a repository. The configuration and the tokenizer are those of `model`, a local folder."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._options = _options(load_config.model_loader_extra_config or {})

        def download_model(self, model_config: Any) -> None:
            """Does nothing: weights are read when they are loaded."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Loads the weights into `model` while the next ones are read."""
            loaded = model.load_weights(self._weights())
            # As vLLM's own loader: a quantized model may have parameters that no checkpoint has.
            if loaded is not None and model_config.quantization is None:
                missing = {name for name, _ in model.named_parameters()} - loaded
                if missing:
                    some = ", ".join(sorted(missing)[:8])
                    raise UsageError(f"{self._options['name']} lacks {len(missing)} weights of the model: {some}")

        def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            options = dict(self._options)
            return opened(options.pop("repo", None), create=False).stream(**options)

    register_model_loader("towline")(TowlineModelLoader)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(given) - set(_KEYS)
    if unknown or "name" not in given:
        fault = f"unknown keys {sorted(unknown)}" if unknown else "no name"
        raise UsageError(f"model_loader_extra_config for load_format towline has {fault}: it takes {', '.join(_KEYS)}")
    return dict(given)
