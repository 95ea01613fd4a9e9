"""Metadata of a distributed checkpoint, converted from torch to JSON and back.

    {"towline-dcp": 1, "torch": "2.15.0", "world_size": 2,
     "state": {"model.weight": {"shape": [8, 4], "properties": {"dtype": "float32", ...},
                                "chunks": [{"offsets": [0, 0], "sizes": [4, 4],
                                            "file": "rank-00000.safetensors", "tensor": "model.weight@0,0"}, ...]},
               "epoch": {"file": "rank-00000.bytes", "start": 0, "length": 1087}},
     "planner": ...}

Nothing is pickled. Other content of torch's metadata is refused with its path.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from .. import _torch
from .. import state as states
from .._documents import SAME_HASH_MAX, distinct, parsed
from ..errors import Damaged, Error, NotFound, Unsupported, UnsupportedValue
from ..repository import Repository

Kind = TypeVar("Kind")

#: Version of the document's layout, stored in it.
VERSION = 1
#: Path of the document for all ranks.
METADATA = "metadata.json"

_MARK = "towline-dcp"
#: Fields of torch's Metadata that are converted, or that belong to its storage.
_KEPT = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}


@dataclasses.dataclass(frozen=True)
class StorageInfo:
    """Location of an item of a plan: a tensor in a file, or a byte range of a file."""

    path: str
    tensor: str | None = None
    #: Dtype of the saved tensor, by torch's name.
    dtype: str | None = None
    #: True if the file stores it as bytes, because safetensors has no such dtype.
    as_bytes: bool = False
    start: int = 0
    length: int = 0
    #: Offsets of this item in the tensor that is read by this name; not 0 if the name joins several parts.
    origin: tuple[int, ...] | None = None


def manifest_of(repository: Repository, name: str) -> str | None:
    """Current manifest of `name`; None if there is no such name."""
    try:
        return next((one.manifest for one in repository.ls(name) if one.name == name), None)
    except NotFound:
        return None


def rank_metadata(rank: int) -> str:
    """Path of a rank's own document, used when ranks save without collectives."""
    return f"rank-{rank:05}.json"


def is_in_safetensors(dtype: torch.dtype) -> bool:
    """True if safetensors has this dtype. Others are stored as bytes."""
    return dtype in _torch.DTYPE_NAMES


def as_bytes(dtype: torch.dtype, box: Iterable[int]) -> tuple[int, ...]:
    """Shape or offsets of a box, in a tensor that is stored as bytes."""
    box = tuple(box)
    return (*box[:-1], box[-1] * dtype.itemsize) if box else (dtype.itemsize,)


def dtype_named(name: str) -> torch.dtype:
    """Dtype of torch by its name."""
    dtype = _torch.dtype_named(name)
    if dtype is None:
        raise Unsupported(
            f"the checkpoint holds tensors of the type {name}, which this torch ({torch.__version__}) lacks"
        )
    return dtype


def encode(metadata: Metadata, results: Iterable[Iterable[WriteResult]], world_size: int) -> bytes:
    """JSON document for `metadata`; `results` give the location of each item."""
    for field in dataclasses.fields(metadata):
        if field.name not in _KEPT and getattr(metadata, field.name) is not None:
            raise _refused(f"metadata.{field.name}", "a field that this towline does not know")
    stored = {result.index: result.storage_data for rank in results for result in rank}
    entries = {fqn: _entry(fqn, held, stored) for fqn, held in metadata.state_dict_metadata.items()}
    node = {
        _MARK: VERSION,
        "torch": torch.__version__,
        "world_size": world_size,
        "state": entries,
        "planner": _planner_data(metadata.planner_data),
    }
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def decode(document: bytes) -> Metadata:
    """Metadata from a JSON document, with a `StorageInfo` for each item as its storage data."""
    node = parsed(document, "the metadata of a distributed checkpoint")
    try:
        version = node[_MARK]
    except (TypeError, LookupError) as error:
        raise Damaged("this is not the metadata of a distributed checkpoint") from error
    if version != VERSION:
        raise Unsupported(
            f"the checkpoint was saved in version {version}, this towline reads {VERSION} (use a newer one)"
        )
    held: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, StorageInfo] = {}
    try:
        for fqn, entry in node["state"].items():
            held[fqn] = _read_entry(fqn, entry, stored)
        planner = json.dumps({"towline": states.VERSION, "state": node["planner"]}).encode()
    except Error:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"the metadata of a distributed checkpoint is malformed: {error!r}") from error
    planner_data = states.restore(planner, {}, lambda _: None)
    return Metadata(held, planner_data, stored, StorageMeta())


class _Hashes:
    """Hashes of the keys of dicts that grow with each document."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, key: Hashable) -> None:
        """Counts a new key. Raises Damaged if too many have its hash: to look each of them up would take very long."""
        self._counts[hash(key)] += 1
        if self._counts[hash(key)] > SAME_HASH_MAX:
            shown = f"chunks of {key.fqn}" if isinstance(key, MetadataIndex) else "keys of the planner's data"
            raise Damaged(
                f"more than {SAME_HASH_MAX} {shown} in the documents of the ranks have the same hash: no such document was saved "
                "by towline"
            )


def merge(documents: Iterable[Metadata]) -> Metadata:
    """Merges the metadata of ranks that saved without collectives. For an item that several have, the first one counts."""
    whole = Metadata({}, None, {}, StorageMeta())
    hashes = _Hashes()
    for metadata in documents:
        for fqn, held in metadata.state_dict_metadata.items():
            there = whole.state_dict_metadata.setdefault(fqn, held)
            if there is held or isinstance(there, BytesStorageMetadata) or isinstance(held, BytesStorageMetadata):
                continue
            there.chunks.extend(
                chunk for chunk in held.chunks if MetadataIndex(fqn, chunk.offsets) not in whole.storage_data
            )
        _add_new(whole.storage_data, metadata.storage_data, hashes)
        if isinstance(metadata.planner_data, Mapping):
            whole.planner_data = whole.planner_data or {}
            _add_new(whole.planner_data, metadata.planner_data, hashes)
    return whole


def _add_new(there: dict[Any, Any], more: Mapping[Any, Any], hashes: _Hashes) -> None:
    """Adds the items of `more` whose keys are new."""
    for key, value in more.items():
        if key not in there:
            hashes.add(key)
            there[key] = value


def _refused(where: str, what: str) -> UnsupportedValue:
    error = UnsupportedValue(
        f"{where} cannot be saved without pickle: it is {what} (leave it out, or convert it to plain values)"
    )
    error.place = where
    return error


def _entry(fqn: str, held: Any, stored: Mapping[MetadataIndex, StorageInfo]) -> dict[str, Any]:
    if type(held) is BytesStorageMetadata:
        where = _where(stored, MetadataIndex(fqn))
        return {"file": where.path, "start": where.start, "length": where.length}
    if type(held) is not TensorStorageMetadata:
        raise _refused(f"metadata.state_dict_metadata[{fqn!r}]", f"a {type(held).__name__}")
    properties = _properties(fqn, held.properties)
    chunks = []
    for chunk in held.chunks:
        where = _where(stored, MetadataIndex(fqn, chunk.offsets))
        node: dict[str, Any] = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
        node |= {"file": where.path, "tensor": where.tensor}
        if where.dtype != properties["dtype"]:
            node["dtype"] = where.dtype
        if where.as_bytes:
            node["as_bytes"] = True
        chunks.append(node)
    return {"shape": list(held.size), "properties": properties, "chunks": chunks}


def _where(stored: Mapping[MetadataIndex, StorageInfo], index: MetadataIndex) -> StorageInfo:
    try:
        return stored[index]
    except KeyError:
        part = "" if index.offset is None else f" at {list(index.offset)}"
        raise Error(f"the planner's metadata names {index.fqn}{part}, which no rank has written") from None


def _properties(fqn: str, properties: TensorProperties) -> dict[str, Any]:
    node: dict[str, Any] = {}
    for field in dataclasses.fields(properties):
        value = getattr(properties, field.name, None)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            node[field.name] = str(value).removeprefix("torch.")
        elif value is None or isinstance(value, bool):
            node[field.name] = value
        elif isinstance(value, tuple) and all(type(one) is int for one in value):
            node[field.name] = list(value)
        else:
            raise _refused(
                f"metadata.state_dict_metadata[{fqn!r}].properties.{field.name}", f"a {type(value).__name__}"
            )
    return node


def _read_properties(node: Mapping[str, Any]) -> TensorProperties:
    # Another version of torch may have other fields: unknown ones are ignored.
    known = {field.name for field in dataclasses.fields(TensorProperties)}
    values: dict[str, Any] = {"dtype": dtype_named(node["dtype"])}
    for name, value in node.items():
        if name in known and name != "dtype":
            if name in ("layout", "memory_format"):
                value = vars(torch)[value]
            values[name] = tuple(value) if isinstance(value, list) else value
    return TensorProperties(**values)


def _read_entry(
    fqn: str, entry: Mapping[str, Any], stored: dict[MetadataIndex, StorageInfo]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if "chunks" not in entry:
        start, length = _numbers(fqn, [entry["start"], entry["length"]])
        stored[MetadataIndex(fqn)] = StorageInfo(_of_type(fqn, entry["file"], str), start=start, length=length)
        return BytesStorageMetadata()
    chunks = []
    shape = torch.Size(_numbers(fqn, entry["shape"]))
    offsets = distinct((torch.Size(_numbers(fqn, node["offsets"])) for node in entry["chunks"]), fqn)
    for node, offset in zip(entry["chunks"], offsets, strict=True):
        chunk = ChunkStorageMetadata(offset, torch.Size(_numbers(fqn, node["sizes"])))
        if len(chunk.sizes) != len(offset):
            raise Damaged(f"{fqn} has a part with {len(offset)} offsets and {len(chunk.sizes)} sizes in the metadata")
        dtype = _of_type(fqn, node.get("dtype", entry["properties"]["dtype"]), str)
        stored[MetadataIndex(fqn, offset)] = StorageInfo(
            _of_type(fqn, node["file"], str),
            _of_type(fqn, node["tensor"], str),
            dtype,
            _of_type(fqn, node.get("as_bytes", False), bool),
        )
        chunks.append(chunk)
    return TensorStorageMetadata(_read_properties(entry["properties"]), shape, chunks)


def _of_type(fqn: str, value: Any, kind: type[Kind]) -> Kind:
    """`value`, which has the type `kind`; raises Damaged for another one."""
    if type(value) is not kind:
        raise Damaged(f"{fqn} has {str(value)[:60]!r} in the metadata, expected a {kind.__name__}")
    return value


def _numbers(fqn: str, values: Any) -> list[int]:
    """A list of numbers of 63 bits, as torch takes them; raises Damaged for anything else."""
    for value in _of_type(fqn, values, list):
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise Damaged(f"{fqn} has {str(value)[:60]!r} in the metadata, expected an integer from 0 to 2**63 - 1")
    return list(values)


def _planner_data(value: Any) -> Any:
    try:
        described = states.describe(value, classes=False)
    except UnsupportedValue as error:
        where = (error.place or "state").replace("state", "metadata.planner_data", 1)
        raise _refused(where, "no plain value") from error
    if described.leaves:
        raise _refused("metadata.planner_data", "something with tensors in it")
    return json.loads(described.document)["state"]
