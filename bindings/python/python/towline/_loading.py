"""Loading of tensors: mapped from the memory of this node's agent where it keeps them, else read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _progress
from .errors import UsageError

if TYPE_CHECKING:
    import torch

    from ._towline import Repository as Engine
    from ._towline import StagedTensors

#: Minimum bytes for which the agent is asked: fewer are read in the time of the request.
STAGED_MIN = 1 << 20


def load(
    engine: Engine,
    name: str,
    path: str | None,
    selectors: list[str],
    device: str | int | torch.device | None,
    progress: _progress.Progress,
) -> dict[str, torch.Tensor]:
    """Loads tensors of a tree by name."""
    with _progress.counting(progress, name) as counters:
        staged = engine.stage(name, path, selectors, counters)
        found = mapped(staged) if staged is not None else _read(engine, name, path, selectors, counters)
    keys = _keys([place for place, _ in found])
    if device is None or str(device) == "cpu":
        return {key: tensor for key, (_, tensor) in zip(keys, found, strict=True)}
    return {key: tensor.to(device) for key, (_, tensor) in zip(keys, found, strict=True)}


def mapped(staged: StagedTensors) -> list[tuple[tuple[str, str], torch.Tensor]]:
    """Tensors over the agent's memory, each with its path and name. Writes to them are private to this process."""
    from . import _torch

    return [
        ((path, name), _torch.view(_torch.over(address, length, staged), dtype, shape))
        for name, path, dtype, shape, address, length in staged.tensors()
    ]


def _read(
    engine: Engine, name: str, path: str | None, selectors: list[str], counters: Any
) -> list[tuple[tuple[str, str], torch.Tensor]]:
    from . import _torch
    from .tensors import read_request

    # The same tree for both calls, even if a selector such as RUN@latest changes its meaning.
    name = engine.resolve(name)
    found, requests = [], []
    for one in json.loads(engine.choose_tensors(name, path, selectors)):
        tensor = _torch.empty(one["dtype"], one["shape"])
        window = None if one["shape"] == one["whole"] else (one["offsets"], one["shape"])
        if _torch.nbytes(tensor) != one["bytes"]:
            raise UsageError(f"{one['name']} is {one['dtype']}, for which torch has no type: restore its file instead")
        if one["bytes"]:
            requests.append(read_request(one["name"], one["path"], window, tensor.data_ptr(), one["bytes"]))
        found.append(((one["path"], one["name"]), tensor))
    if requests:
        engine.read_tensors(name, requests, counters)
    return found


def _keys(places: Iterable[tuple[str, str]]) -> list[str]:
    """Keys of tensors `(path, name)`: the name, or `PATH:NAME` if several have it."""
    places = list(places)
    seen: dict[str, int] = {}
    for _, name in places:
        seen[name] = seen.get(name, 0) + 1
    keys = [name if seen[name] == 1 else f"{path}:{name}" for path, name in places]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"{twice} is asked for as two different boxes: load them one after the other")
    return keys
