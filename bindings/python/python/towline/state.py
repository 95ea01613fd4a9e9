"""A training state as files: its tensors in one safetensors file, and everything else as JSON that says where they belong.

Nothing is pickled. What JSON has no word for is an object `{"!": WORD, ...}`:

    {"!": "tensor", "t": NAME}      a tensor of the file beside it; several may name one
    {"!": "tuple" | "set" | "frozenset" | "torch.Size", "v": [...]}
    {"!": "dict" | "OrderedDict" | "Counter", "v": [[key, value], ...], "a": {attributes}}
    {"!": "float" | "bytes" | "complex" | "torch.dtype" | "torch.device" | "numpy", "v": text}
    {"!": "ndarray" | "sparse" | "quantized", ...}
    {"!": "pickle", "v": base64}    only where the caller asked for it

So any tool that reads safetensors reads the tensors, and a step is stored as the difference to the step before it.
"""

from __future__ import annotations

import base64
import collections
import itertools
import json
import pickle as pickling
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch
from ._devices import gpus
from .errors import Damaged, Unsupported, UnsupportedValue, UsageError

#: The layout of the document, written with it.
VERSION = 1
#: Longer bytes are kept beside the tensors.
BYTES_INLINE = 4096

_DICTS = (dict, collections.OrderedDict, collections.Counter)
_SPARSE = {
    torch.sparse_coo: ("coo", ("_indices", "_values")),
    torch.sparse_csr: ("csr", ("crow_indices", "col_indices", "values")),
    torch.sparse_csc: ("csc", ("ccol_indices", "row_indices", "values")),
    torch.sparse_bsr: ("bsr", ("crow_indices", "col_indices", "values")),
    torch.sparse_bsc: ("bsc", ("ccol_indices", "row_indices", "values")),
}


@dataclass
class Leaf:
    """A tensor to be kept: its name in the file, its type and shape there, and what holds its elements."""

    name: str
    word: str
    shape: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def length(self) -> int:
        return _torch.nbytes(self.tensor)


@dataclass
class Described:
    """A state taken apart."""

    document: bytes
    leaves: list[Leaf]


def is_stateful(value: Any) -> bool:
    """Does it give and take its state, as modules, optimizers and schedulers do?"""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def describe(state: Any, pickle: bool = False, stateful: bool = True) -> Described:
    """Takes a state apart: nested dicts, lists and tuples of tensors, arrays and plain values, and, if `stateful`, objects
    with `state_dict`, of which that is kept.

    Raises UnsupportedValue, naming its path, for a value that cannot be kept; with `pickle` such values are pickled.
    """
    taking = _Taking(pickle, stateful)
    document = taking.value(state, ())
    taking.settle()
    text = json.dumps({"towline": VERSION, "state": document}, separators=(",", ":"), allow_nan=False)
    return Described(text.encode(), taking.leaves)


def shown(path: tuple[Any, ...]) -> str:
    """A path in a state, as it is written in Python."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Taking:
    """A state being taken apart."""

    def __init__(self, pickle: bool, stateful: bool):
        self.pickle, self.stateful = pickle, stateful
        self.leaves: list[Leaf] = []
        self._names: set[str] = set()
        self._open: set[int] = set()
        self._tensors: list[tuple[dict[str, Any], torch.Tensor, tuple[Any, ...]]] = []

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            finite = value - value == 0
            return value if finite else {"!": "float", "v": value.hex()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (list, tuple, set, frozenset, torch.Size, *_DICTS):
            return self._container(value, kind, path)
        plain = self._plain(value, kind, path)
        if plain is not None:
            return plain
        if self.stateful and is_stateful(value):
            return self.value(value.state_dict(), path)
        if self.pickle:
            return {"!": "pickle", "v": base64.b64encode(pickling.dumps(value)).decode()}
        raise self._refused(
            path, f"a {kind.__module__}.{kind.__qualname__}", "leave it out, or allow pickle=True for it"
        )

    def _refused(self, path: tuple[Any, ...], what: str, cure: str) -> UnsupportedValue:
        error = UnsupportedValue(f"{shown(path)} cannot be kept: it is {what} ({cure})")
        error.place, error.cure = shown(path), cure
        return error

    def _container(self, value: Any, kind: type, path: tuple[Any, ...]) -> Any:
        if id(value) in self._open:
            raise self._refused(path, "part of itself", "break the cycle")
        self._open.add(id(value))
        try:
            if kind is list:
                return [self.value(one, (*path, at)) for at, one in enumerate(value)]
            if kind is dict and all(type(key) is str for key in value) and "!" not in value:
                return {key: self.value(one, (*path, key)) for key, one in value.items()}
            if kind in _DICTS:
                pairs = [[self._key(key, path), self.value(one, (*path, key))] for key, one in value.items()]
                told = {"!": kind.__name__, "v": pairs}
                # A module's state dict carries the versions of its parts so.
                if getattr(value, "__dict__", None):
                    told["a"] = self.value(dict(value.__dict__), (*path, "__dict__"))
                return told
            word = "torch.Size" if kind is torch.Size else kind.__name__
            if kind in (set, frozenset):
                value = sorted(value, key=lambda one: (type(one).__name__, repr(one)))
            return {"!": word, "v": [self.value(one, (*path, at)) for at, one in enumerate(value)]}
        finally:
            self._open.discard(id(value))

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, torch.Tensor) or type(key) in (list, dict, set):
            raise self._refused((*path, key), "a key that is no plain value", "use text or numbers as keys")
        return self.value(key, (*path, key))

    def _plain(self, value: Any, kind: type, path: tuple[Any, ...]) -> dict[str, Any] | None:
        if kind in (bytes, bytearray):
            if len(value) <= BYTES_INLINE:
                return {"!": kind.__name__, "v": base64.b64encode(value).decode()}
            held = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return {"!": kind.__name__, "t": self._add(path, "U8", tuple(held.shape), held)}
        if kind is complex:
            return {"!": "complex", "v": [value.real.hex(), value.imag.hex()]}
        if kind is torch.dtype:
            return {"!": "torch.dtype", "v": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"!": "torch.device", "v": str(value)}
        if kind.__module__ == "numpy":
            return self._numpy(value, path)
        return None

    def _numpy(self, value: Any, path: tuple[Any, ...]) -> dict[str, Any] | None:
        import numpy

        if not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.hasobject:
            return None
        dtype = value.dtype.str if value.dtype.names is None else value.dtype.descr
        bytes_ = value.tobytes()
        if isinstance(value, numpy.generic):
            return {"!": "numpy", "dtype": dtype, "v": base64.b64encode(bytes_).decode()}
        held = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8) if bytes_ else torch.empty(0, dtype=torch.uint8)
        word = _NUMPY_WORDS.get(dtype, "U8") if isinstance(dtype, str) else "U8"
        shape = tuple(held.shape) if word == "U8" and dtype != "|u1" else value.shape
        name = self._add(path, word, shape, held)
        return {"!": "ndarray", "t": name, "dtype": dtype, "shape": list(value.shape)}

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        plain_types = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if type(tensor) not in plain_types:
            kind = type(tensor)
            cure = (
                "save sharded state with towline.dcp, or keep its local part"
                if "DTensor" in kind.__name__
                else ("turn it into plain tensors")
            )
            raise self._refused(path, f"a tensor of the kind {kind.__module__}.{kind.__qualname__}", cure)
        if tensor.device.type == "meta":
            raise self._refused(path, "a tensor on the meta device, which has no elements", "materialise it first")
        if tensor.is_quantized:
            return self._quantized(tensor, path)
        if tensor.layout in _SPARSE:
            return self._sparse(tensor, path)
        if tensor.layout is not torch.strided:
            raise self._refused(path, f"a tensor of the layout {tensor.layout}", "turn it into a dense one")
        node: dict[str, Any] = {"!": "tensor"}
        if isinstance(tensor, torch.nn.Parameter):
            node["parameter"] = True
        if tensor.requires_grad:
            node["grad"] = True
        self._tensors.append((node, tensor.detach().resolve_conj().resolve_neg(), path))
        return node

    def _sparse(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        word, parts = _SPARSE[tensor.layout]
        tensor = tensor.detach()
        held = [self._tensor(getattr(tensor, part)(), (*path, part)) for part in parts]
        told = {"!": "sparse", "layout": word, "parts": held, "shape": list(tensor.shape)}
        return {**told, "coalesced": tensor.is_coalesced()} if word == "coo" else told

    def _quantized(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        told: dict[str, Any] = {"!": "quantized", "dtype": str(tensor.dtype).removeprefix("torch.")}
        told["int"] = self._tensor(tensor.int_repr(), (*path, "int"))
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {**told, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        told["axis"] = tensor.q_per_channel_axis()
        told["scale"] = self._tensor(tensor.q_per_channel_scales(), (*path, "scales"))
        told["zero_point"] = self._tensor(tensor.q_per_channel_zero_points(), (*path, "zero_points"))
        return told

    def settle(self) -> None:
        """Names the tensors. Those that share memory are kept once, and share it again when they are restored."""
        sharing: dict[Any, list[int]] = {}
        for at, (_, tensor, _) in enumerate(self._tensors):
            address = tensor.untyped_storage().data_ptr()
            key = (tensor.device, address) if address and tensor.numel() else ("alone", at)
            sharing.setdefault(key, []).append(at)
        for group in sharing.values():
            self._settle_group([self._tensors[at] for at in group])

    def _settle_group(self, group: list[tuple[dict[str, Any], torch.Tensor, tuple[Any, ...]]]) -> None:
        views: dict[Any, list[tuple[dict[str, Any], torch.Tensor, tuple[Any, ...]]]] = {}
        for one in group:
            tensor = one[1]
            views.setdefault((tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype), []).append(one)
        if not _overlap([same[0][1] for same in views.values()]):
            for same in views.values():
                _, tensor, path = same[0]
                word, shape, held = _stored(tensor)
                name = self._add(path, word, shape, held)
                for node, _, _ in same:
                    node.update({"t": name} if word in _torch.BY_WORD and held.dtype == tensor.dtype else {
                        "t": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)
                    })  # fmt: skip
            return
        first = group[0][1]
        spans = [_span(tensor) for _, tensor, _ in group]
        start, end = min(span[0] for span in spans), max(span[1] for span in spans)
        storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        name = self._add((*group[0][2], "storage"), "U8", (end - start,), storage[start:end])
        for (node, tensor, _), span in zip(group, spans, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            view = [span[0] - start, list(tensor.shape), list(tensor.stride())]
            node.update({"t": name, "dtype": dtype, "view": view})

    def _add(self, path: tuple[Any, ...], word: str, shape: tuple[int, ...], tensor: torch.Tensor) -> str:
        wanted = ".".join(str(key) for key in path) or "state"
        name, again = wanted, 1
        while name in self._names or name == "__metadata__":
            again += 1
            name = f"{wanted}#{again}"
        self._names.add(name)
        self.leaves.append(Leaf(name, word, shape, tensor))
        return name


_NUMPY_WORDS = {
    "|b1": "BOOL", "|i1": "I8", "|u1": "U8", "<i2": "I16", "<u2": "U16", "<i4": "I32", "<u4": "U32",
    "<i8": "I64", "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64", "<c8": "C64",
}  # fmt: skip


def _stored(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], torch.Tensor]:
    """As what a tensor is stored: types that safetensors lacks are stored as bytes, with one more dimension."""
    word = _torch.WORDS.get(tensor.dtype)
    if word is not None:
        return word, tuple(tensor.shape), tensor
    held = tensor.contiguous()
    if held.dim() == 0:
        held = held.reshape(1)
    held = held.view(torch.uint8) if held.numel() else torch.empty(0, dtype=torch.uint8)
    return "U8", tuple(held.shape), held


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one after the last."""
    size = tensor.element_size()
    start = tensor.storage_offset()
    last = start + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (last + 1) * size


def _overlap(views: list[torch.Tensor]) -> bool:
    """Do any two of these views of one storage share bytes, or one view elements with itself?"""
    spans = sorted(_span(view) for view in views)
    crossed = any(before[1] > after[0] for before, after in itertools.pairwise(spans))
    twice = any(
        stride == 0 and length > 1 for view in views for length, stride in zip(view.shape, view.stride(), strict=True)
    )
    return crossed or twice


def restore(
    document: bytes,
    held: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[list[tuple[str, torch.Tensor]]], None],
    into: Any = None,
    map_location: str | torch.device | None = None,
    pickle: bool = False,
) -> Any:
    """Puts a state together: `held` tells the type and shape of each tensor of the file, `read` fills tensors by name.
    Tensors that are in `into` at the same place are filled there, and objects with `load_state_dict` there take theirs.

    Raises UsageError, naming its path, where a tensor of `into` has another type or shape, before anything is filled.
    """
    restoring = Restoring(document, held, into, map_location, pickle)
    read(list(restoring.leaves.items()))
    return restoring.state()


#: What is built by a method of its name.
_BUILT = (
    "OrderedDict", "Counter", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "ndarray", "numpy", "pickle",
    "quantized", "set", "sparse", "tensor", "torch.Size", "torch.device", "torch.dtype", "tuple",
)  # fmt: skip


class Restoring:
    """A state being put together, as `restore` does it: once `leaves` are filled, `state` gives it."""

    def __init__(
        self,
        document: bytes,
        held: Mapping[str, tuple[str, tuple[int, ...]]],
        into: Any = None,
        map_location: str | torch.device | None = None,
        pickle: bool = False,
    ):
        try:
            told = json.loads(document)
            version, node = told["towline"], told["state"]
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged("this is not the document of a state") from error
        if version != VERSION:
            raise Unsupported(
                f"the state was written in version {version}, this towline reads version {VERSION} (use a newer one)"
            )
        self.held, self.pickle = held, pickle
        self.device = None if map_location is None else torch.device(map_location)
        #: What is to be read, and then was.
        self.leaves: dict[str, torch.Tensor] = {}
        #: What a node's tensor of `into` is, by the node.
        self._targets: dict[int, torch.Tensor] = {}
        #: Targets whose memory is read into directly.
        self._direct: set[int] = set()
        self._node, self._into = node, into
        self.prepare(node, into, ())

    @property
    def gpus(self) -> set[torch.device]:
        """The GPUs that tensors of `into` are on."""
        return gpus(self._targets.values())

    def state(self) -> Any:
        """The state."""
        return self.value(self._node, self._into)

    def prepare(self, node: Any, into: Any, path: tuple[Any, ...]) -> None:
        """Finds what is wanted, and where it goes."""
        if isinstance(node, list):
            inside = into if isinstance(into, (list, tuple)) and len(into) == len(node) else [None] * len(node)
            for at, (one, other) in enumerate(zip(node, inside, strict=True)):
                self.prepare(one, other, (*path, at))
            return
        if not isinstance(node, dict):
            return
        into = into.state_dict() if is_stateful(into) else into
        word = node.get("!")
        if word is None or word in ("dict", "OrderedDict", "Counter"):
            pairs = node.items() if word is None else ((self.value(key), one) for key, one in node["v"])
            for key, one in pairs:
                self.prepare(one, into.get(key) if isinstance(into, Mapping) else None, (*path, key))
            self.prepare(node.get("a"), None, path) if word else None
        elif word in ("tuple", "set", "frozenset", "torch.Size"):
            self.prepare(node["v"], into if word == "tuple" else None, path)
        elif word == "tensor":
            self._prepare_tensor(node, into, path)
        elif word in ("sparse", "quantized"):
            for one in (*node.get("parts", ()), node.get("int"), node.get("scale"), node.get("zero_point")):
                self.prepare(one, None, path)
        elif "t" in node:
            self._want(node["t"])

    def _want(self, name: str, into: torch.Tensor | None = None) -> bool:
        """Notes that a leaf is wanted; whether it will be read straight into `into`."""
        if name in self.leaves:
            return False
        self.leaves[name] = _torch.empty(*self._about(name)) if into is None else into
        return into is not None

    def _about(self, name: str) -> tuple[str, tuple[int, ...]]:
        try:
            return self.held[name]
        except KeyError:
            raise Damaged(f"the document of a state names a tensor that its file lacks: {name}") from None

    def _prepare_tensor(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> None:
        if not isinstance(into, torch.Tensor) or type(into).__name__ == "DTensor" or into.device.type == "meta":
            self._want(node["t"])
            return
        word, shape = self._about(node["t"])
        dtype = _dtype(node["dtype"]) if "dtype" in node else _torch.BY_WORD[word]
        shape = node["view"][1] if "view" in node else node.get("shape", shape)
        if into.dtype != dtype or tuple(into.shape) != tuple(shape):
            error = UsageError(
                f"{shown(path)} does not fit: {dtype} {list(shape)} was saved, "
                f"and is to be restored into {into.dtype} {list(into.shape)}"
            )
            error.place = shown(path)
            raise error
        self._targets[id(node)] = into
        plain = "dtype" not in node and _torch.is_plain(into)
        if self._want(node["t"], into.detach() if plain else None):
            self._direct.add(id(node))

    def value(self, node: Any, into: Any = None) -> Any:
        if isinstance(node, list):
            inside = into if isinstance(into, (list, tuple)) and len(into) == len(node) else [None] * len(node)
            return [self.value(one, other) for one, other in zip(node, inside, strict=True)]
        if not isinstance(node, dict):
            return node
        if is_stateful(into):
            return self._stateful(node, into)
        word = node.get("!")
        if word is None:
            inside = into if isinstance(into, Mapping) else {}
            return {key: self.value(one, inside.get(key)) for key, one in node.items()}
        build = getattr(self, "_" + word.replace(".", "_")) if word in _BUILT else None
        if build is None:
            raise Unsupported(f"the state holds a {word!r}, which this towline does not know (use a newer one)")
        return build(node, into)

    def _stateful(self, node: dict[str, Any], into: Any) -> Any:
        into.load_state_dict(self.value(node, into.state_dict()))
        return into

    def _dict(self, node: dict[str, Any], into: Any) -> Any:
        inside = into if isinstance(into, Mapping) else {}
        pairs = ((self.value(key), one) for key, one in node["v"])
        return {key: self.value(one, inside.get(key)) for key, one in pairs}

    def _OrderedDict(self, node: dict[str, Any], into: Any) -> Any:
        made = collections.OrderedDict(self._dict(node, into))
        for name, value in self.value(node.get("a", {})).items():
            setattr(made, name, value)
        return made

    def _Counter(self, node: dict[str, Any], into: Any) -> Any:
        return collections.Counter(self._dict(node, None))

    def _tuple(self, node: dict[str, Any], into: Any) -> Any:
        return tuple(self.value(node["v"], into))

    def _set(self, node: dict[str, Any], into: Any) -> Any:
        return set(self.value(node["v"]))

    def _frozenset(self, node: dict[str, Any], into: Any) -> Any:
        return frozenset(self.value(node["v"]))

    def _torch_Size(self, node: dict[str, Any], into: Any) -> Any:
        return torch.Size(self.value(node["v"]))

    def _float(self, node: dict[str, Any], into: Any) -> Any:
        return float.fromhex(node["v"])

    def _complex(self, node: dict[str, Any], into: Any) -> Any:
        return complex(*map(float.fromhex, node["v"]))

    def _bytes(self, node: dict[str, Any], into: Any) -> Any:
        return base64.b64decode(node["v"]) if "v" in node else self.leaves[node["t"]].numpy().tobytes()

    def _bytearray(self, node: dict[str, Any], into: Any) -> Any:
        return bytearray(self._bytes(node, into))

    def _torch_dtype(self, node: dict[str, Any], into: Any) -> Any:
        return _dtype(node["v"])

    def _torch_device(self, node: dict[str, Any], into: Any) -> Any:
        return torch.device(node["v"])

    def _numpy(self, node: dict[str, Any], into: Any) -> Any:
        import numpy

        return numpy.frombuffer(base64.b64decode(node["v"]), _numpy_dtype(node["dtype"]))[0]

    def _ndarray(self, node: dict[str, Any], into: Any) -> Any:
        import numpy

        made = numpy.empty(node["shape"], _numpy_dtype(node["dtype"]))
        if made.size:
            made.reshape(-1).view(numpy.uint8)[:] = self.leaves[node["t"]].reshape(-1).view(torch.uint8).numpy()
        return made

    def _pickle(self, node: dict[str, Any], into: Any) -> Any:
        if not self.pickle:
            raise UsageError(
                "the state holds pickled values, which run code when they are read (allow it with pickle=True)"
            )
        return pickling.loads(base64.b64decode(node["v"]))

    def _sparse(self, node: dict[str, Any], into: Any) -> Any:
        parts, shape = [self.value(part) for part in node["parts"]], node["shape"]
        if node["layout"] == "coo":
            made = torch.sparse_coo_tensor(*parts, shape, check_invariants=True)
            return made._coalesced_(node["coalesced"])
        layout = {word: layout for layout, (word, _) in _SPARSE.items()}[node["layout"]]
        return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=True)

    def _quantized(self, node: dict[str, Any], into: Any) -> Any:
        held, scale, zero = (self.value(node[key]) for key in ("int", "scale", "zero_point"))
        if "axis" in node:
            return torch._make_per_channel_quantized_tensor(held, scale, zero, node["axis"])
        return torch._make_per_tensor_quantized_tensor(held, scale, zero)

    def _tensor(self, node: dict[str, Any], into: Any) -> Any:
        held = self.leaves[node["t"]]
        target = self._targets.get(id(node))
        if id(node) in self._direct:
            return target
        made = self._shaped(node, held)
        if target is not None:
            with torch.no_grad():
                target.copy_(made)
            return target
        if self.device is not None:
            made = made.to(self.device)
        if node.get("parameter"):
            return torch.nn.Parameter(made, requires_grad=node.get("grad", False))
        return made.requires_grad_() if node.get("grad") else made

    def _shaped(self, node: dict[str, Any], held: torch.Tensor) -> torch.Tensor:
        if "dtype" not in node:
            # Another tensor, the same memory, as it was.
            return held.detach()
        dtype = _dtype(node["dtype"])
        if "view" in node:
            start, shape, stride = node["view"]
            return torch.empty(0, dtype=dtype).set_(
                held.untyped_storage(), (held.storage_offset() + start) // dtype.itemsize, shape, stride
            )
        if held.numel() == 0:
            return torch.empty(node["shape"], dtype=dtype)
        return held.view(dtype).reshape(node["shape"])


def _numpy_dtype(told: Any) -> Any:
    """A type as numpy tells it; a structured one is a list of lists in JSON, where numpy wants tuples."""
    import numpy

    return numpy.dtype([tuple(field) for field in told] if isinstance(told, list) else told)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"this torch ({torch.__version__}) has no type {name!r}")
    return dtype
