"""Reading of a saved state: its JSON document, and the tensors in its safetensors file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _progress, _torch
from . import state as states
from ._expansion import TensorLength, TreeTensors, check_expansion
from ._loading import STAGED_MIN, mapped
from ._versions import is_current
from .errors import NotFound
from .repository import Repository

if TYPE_CHECKING:
    import torch

    from ._towline import Tree

#: Files of a saved state.
TENSORS, DOCUMENT = "state.safetensors", "state.json"
_DOCUMENTS = re.compile(r"(rank-[0-9]{5}/)?state\.json")
#: Files that torch's DCP and `towline.dcp.StorageWriter` write last.
_DCP = {".metadata", "metadata.json"}


class Reading(NamedTuple):
    """Options for reading a state: see `Checkpointer.restore`."""

    into: Any = None
    map_location: str | torch.device | None = None
    pickle: bool = False
    strict: bool = True
    cast: bool = False
    progress: _progress.Progress = None


class Read(NamedTuple):
    """A state that was read: bytes of its tensors, the GPUs that they were copied to, and the missing and unexpected keys."""

    state: Any
    bytes: int
    gpus: set[torch.device]
    missing: list[str]
    unexpected: list[str]


def read_state(
    repository: Repository,
    tree: Tree,
    path: str,
    document: bytes,
    how: Reading,
) -> Read:
    """Reads a state from its JSON document and its safetensors file, `path` in `tree`: all of one version."""
    engine, name = repository._engine, tree.name
    tensors = _tensors(tree, path)
    lengths = [TensorLength(tensor["name"], path, tensor["bytes"]) for tensor in tensors]
    check_expansion(TreeTensors(name, lengths, lambda: tree), "towline saved no such state: restore another step")
    held = {tensor["name"]: (tensor["dtype"], tuple(tensor["shape"])) for tensor in tensors}

    restoring = states.Restoring(
        document, held, how.into, how.map_location, how.pickle, strict=how.strict, cast=how.cast
    )
    length = sum(tensor["bytes"] for tensor in tensors)
    with _progress.counting(how.progress, name) as counters:
        staged = engine.stage(name, path, [], counters) if length >= STAGED_MIN else None
        if staged is not None and not is_current(engine, tree):
            # The agent may have another version.
            staged = None
        ready = {} if staged is None else {key: tensor for (_, key), tensor in mapped(staged)}
        taken = restoring.use(ready)
        leaves = [(key, tensor) for key, tensor in restoring.leaves.items() if key not in taken]
        wants = [(key, path, None, tensor.data_ptr(), _torch.nbytes(tensor)) for key, tensor in leaves]
        wants = [want for want in wants if want[-1]]
        if wants:
            tree.read_tensors(wants, counters)
    return Read(restoring.state(), length, restoring.gpus, restoring.missing, restoring.unexpected)


def _tensors(tree: Tree, path: str) -> list[dict[str, Any]]:
    """Tensors of the file `path`; none, if it has none."""
    try:
        # A single star takes no name with a slash.
        found = json.loads(tree.choose_tensors(path, ["**"]))
    except NotFound:
        return []
    return [tensor for tensor in found if tensor["path"] == path]


def saved_otherwise(repository: Repository, name: str) -> NotFound | None:
    """Error for a step that no Checkpointer saved, with what reads it; None if one did."""
    tree = repository.show(name)
    paths = {entry.path for entry in tree.entries}
    if any(_DOCUMENTS.fullmatch(path) for path in paths):
        return None
    by = "" if tree.framework is None else f", but as a checkpoint of {tree.framework}"
    if "watch.entry" in tree.labels:
        by += f", from {tree.labels['watch.entry']} of a folder that `towline watch` watched"
    reads = f"`towline.load({name!r})` reads its tensors"
    if paths & _DCP:
        reads = "`dcp.load` with towline.dcp.StorageReader loads its state"
    help = f"`towline restore {name} DIR` restores its files, and {reads}"
    error = NotFound(f"{name} was not saved by a Checkpointer{by} ({help})")
    error.place, error.help = name, help
    return error
