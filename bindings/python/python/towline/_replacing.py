"""Files of a step that StorageWriter or Checkpointer saved, which a DCP checkpoint that is written to the same folder replaces.
All readers prefer them to its `.metadata`, so that they would go on to read the old state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._trees import Tree

#: File that torch writes last, of all ranks or of one.
_METADATA = re.compile(r"(__[0-9]+)?\.metadata")
#: Documents of StorageWriter, in `dcp/metadata.py`, and the files that they refer to.
_DCP_DOCUMENT = re.compile(r"metadata\.json|rank-[0-9]{5}\.json")
_DCP_DATA = re.compile(r"rank-[0-9]{5}(\.[0-9]{5})?\.(safetensors|bytes)")
#: Files of Checkpointer, in the folder of the step or that of a rank, and the begin of its documents and those of StorageWriter.
_STATE, _TENSORS, _RANK = "state.json", "state.safetensors", re.compile(r"rank-[0-9]{5}")
_BEGIN = b'{"towline'


def replaced(tree: Callable[[], Tree | None], paths: Iterable[str], read: Callable[..., list[bytes]]) -> list[str]:
    """Files and folders of a tree that files written to `paths` replace."""
    split = (path.rpartition("/") for path in paths)
    folders = {folder for folder, _, file in split if _METADATA.fullmatch(file)}
    there = tree() if folders else None
    if there is None:
        return []
    return sorted(path for folder in folders for path in _in_folder(there, folder, read))


def _in_folder(tree: Tree, folder: str, read: Callable[..., list[bytes]]) -> set[str]:
    below = {path.rpartition("/")[2]: path for path in tree.children.get(folder, ())}
    ranks = [path for file, path in below.items() if _RANK.fullmatch(file)]
    documents = [path for file, path in below.items() if _DCP_DOCUMENT.fullmatch(file) or file == _STATE]
    documents += [f"{rank}/{_STATE}" for rank in ranks]
    documents = [path for path in documents if path in tree.entries and tree.entries[path].kind == "file"]
    begins = read(tree, [(path, 0, min(len(_BEGIN), tree.entries[path].size)) for path in documents])
    found = {path for path, begin in zip(documents, begins, strict=True) if begin == _BEGIN}
    if any(_DCP_DOCUMENT.fullmatch(path.rpartition("/")[2]) for path in found):
        found |= {path for file, path in below.items() if _DCP_DATA.fullmatch(file)}
    tensors = {path.removesuffix(_STATE) + _TENSORS for path in found if path.rpartition("/")[2] == _STATE}
    found |= tensors & tree.entries.keys()
    for rank in ranks:
        within = set(tree.children.get(rank, ()))
        if within and within <= found:
            found = (found - within) | {rank}
    return found
