"""Conversion of a training state to files: one safetensors file with its tensors, and JSON with everything else.

Nothing is pickled. Values that JSON lacks are objects `{"!": TAG, ...}`:

    {"!": "tensor", "t": NAME}      a tensor of the safetensors file; several may refer to the same one
    {"!": "tuple" | "set" | "frozenset" | "torch.Size", "v": [...]}
    {"!": "deque", "v": [...], "maxlen": number}
    {"!": "dict" | "OrderedDict" | "Counter" | "defaultdict", "v": [[key, value], ...], "a": {attributes}, "factory": name}
    {"!": "Namespace" | "SimpleNamespace", "v": [[name, value], ...]}
    {"!": "float" | "int" | "bytes" | "complex" | "torch.dtype" | "torch.device" | "numpy", "v": text}
    {"!": "Path" | "PurePosixPath" | "datetime" | "date" | "time" | "timedelta" | ..., "v": text}
    {"!": "dataclass" | "namedtuple", "class": MODULE:NAME, "v": [[name, value], ...]}
    {"!": "Enum", "class": MODULE:NAME, "name": NAME, "v": flags}
    {"!": "ndarray" | "sparse" | "quantized", ...}
    {"!": "pickle", "v": base64}    only with pickle=True

Of a class only the name is stored; `towline.allow_classes` allows classes to be created by name. Dense strides of a tensor
("stride"), such as those of torch.channels_last, are restored; a tensor with gaps, such as `x[::2]`, is restored contiguous.

An expanded tensor is stored as a view ("view": first byte, shape, strides) of the memory that it expands. So every tool that
reads safetensors can read the tensors, and a step can be stored as differences to the step before it.
"""

from __future__ import annotations

import base64
import collections
import enum
import itertools
import json
import pickle as pickling
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import _classes, _torch
from ._expansion import EXPANSION_MAX
from ._restoring import Restoring, restore
from ._tags import (
    DEPTH_MAX,
    DICTS,
    FACTORIES,
    NAMESPACES,
    SPARSE,
    VERSION,
    Attribute,
    as_text,
    hides_method,
    is_gapless,
    is_stateful,
    shown,
)
from .errors import UnsupportedValue

__all__ = ["VERSION", "Described", "Leaf", "Restoring", "describe", "is_stateful", "restore", "shown"]

#: Longer bytes are stored in the safetensors file.
BYTES_INLINE = 4096
#: Longer integers are stored in hexadecimal: Python limits the number of decimal digits that it parses
#: (https://docs.python.org/3/library/stdtypes.html#integer-string-conversion-length-limitation).
_INT_BITS = 2048


@dataclass
class Leaf:
    """A tensor to be stored: its name, dtype and shape in the file, and the tensor with its elements."""

    name: str
    word: str
    shape: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def length(self) -> int:
        return _torch.nbytes(self.tensor)


@dataclass
class Described:
    """A state in serialized form: JSON document and tensors."""

    document: bytes
    leaves: list[Leaf]
    #: Paths of pickled values, and classes of objects that were not given to `allow_classes`.
    pickled: list[str]
    classes: list[str]


def describe(state: Any, pickle: bool = False, stateful: bool = True, classes: bool = True) -> Described:
    """Serializes a state: nested dicts, lists and tuples of tensors, arrays and plain values. With `stateful`, objects with
    `state_dict` are stored as the result of that; with `classes`, dataclasses, named tuples and enumerations are stored.

    Raises UnsupportedValue, with the path, for any other value; with `pickle` such values are pickled.
    """
    serializer = _Serializer(pickle, stateful, classes)
    try:
        document = serializer.value(state, ())
    except RecursionError:
        raise UnsupportedValue(
            "state cannot be saved: a state_dict in it holds itself, or is nested too deeply"
        ) from None
    serializer.add_tensors()
    text = json.dumps({"towline": VERSION, "state": document}, separators=(",", ":"), allow_nan=False)
    return Described(text.encode(), serializer.leaves, serializer.pickled, list(serializer.unknown))


class _Serializer:
    """Serializer of one state."""

    def __init__(self, pickle: bool, stateful: bool, classes: bool):
        self.pickle, self.stateful, self.classes = pickle, stateful, classes
        self.leaves: list[Leaf] = []
        self.pickled: list[str] = []
        self.unknown: dict[str, None] = {}
        self._names: set[str] = set()
        #: Bytes by which expanded tensors exceed what is stored of them.
        self._expanded = 0
        self._open: set[int] = set()
        self._tensors: list[tuple[dict[str, Any], torch.Tensor, tuple[Any, ...]]] = []

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if len(path) > DEPTH_MAX:
            raise self._refused(path, f"nested more than {DEPTH_MAX} levels deep", "flatten it")
        if kind is int and value.bit_length() > _INT_BITS:
            return {"!": "int", "v": hex(value)}
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            finite = value - value == 0
            return value if finite else {"!": "float", "v": value.hex()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (list, tuple, set, frozenset, torch.Size, collections.deque, *DICTS, *NAMESPACES.values()):
            return self._once(value, path, self._container)
        plain = self._plain(value, kind, path)
        if plain is not None:
            return plain
        if self.stateful and is_stateful(value):
            return self.value(value.state_dict(), path)
        if self.classes and _classes.kind(kind) is not None and not (self.pickle and _classes.unkept(value)):
            return self._once(value, path, self._of_class)
        if self.pickle:
            self.pickled.append(shown(path))
            return {"!": "pickle", "v": base64.b64encode(pickling.dumps(value)).decode()}
        raise self._refused(
            path, f"a {kind.__module__}.{kind.__qualname__}", "leave it out, or pass pickle=True to pickle it"
        )

    def _refused(self, path: tuple[Any, ...], what: str, help: str) -> UnsupportedValue:
        error = UnsupportedValue(f"{shown(path)} cannot be saved: it is {what} ({help})")
        error.place, error.help = shown(path), help
        return error

    def _once(self, value: Any, path: tuple[Any, ...], take: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
        """Serializes a container, and refuses cycles."""
        if id(value) in self._open:
            raise self._refused(path, "part of itself", "break the cycle")
        self._open.add(id(value))
        try:
            return take(value, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind is list:
            return [self.value(one, (*path, at)) for at, one in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and "!" not in value:
            return {key: self.value(one, (*path, key)) for key, one in value.items()}
        if kind in NAMESPACES.values():
            self._check_hidden(value, next((name for name in vars(value) if _classes.hides(kind, name)), None), path)
            return {"!": kind.__name__, "v": self._named(vars(value).items(), path)}
        if kind in DICTS:
            return self._dict(value, path)
        if kind in (set, frozenset):
            value = sorted(value, key=lambda one: (type(one).__name__, repr(one)))
        node: dict[str, Any] = {"!": "torch.Size" if kind is torch.Size else kind.__name__}
        node["v"] = [self.value(one, (*path, at)) for at, one in enumerate(value)]
        return {**node, "maxlen": value.maxlen} if kind is collections.deque else node

    def _dict(self, value: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        attributes = dict(getattr(value, "__dict__", None) or {})
        self._check_hidden(value, next((name for name in attributes if hides_method(type(value), name)), None), path)
        pairs = [[self._key(key, path), self.value(one, (*path, key))] for key, one in value.items()]
        node: dict[str, Any] = {"!": type(value).__name__, "v": pairs}
        # A module's state dict has the versions of its submodules as such an attribute.
        if attributes:
            node["a"] = self.value(attributes, (*path, "__dict__"))
        factory = getattr(value, "default_factory", None)
        if factory is not None:
            known = FACTORIES.get(getattr(factory, "__name__", "")) is factory
            # Of other factories only the name is stored, for error messages.
            node["factory"] = factory.__name__ if known else {"other": getattr(factory, "__qualname__", repr(factory))}
        return node

    def _check_hidden(self, value: Any, hiding: Any, path: tuple[Any, ...]) -> None:
        """Refuses an object of which the attribute `hiding`, if there is one, hides one of its class."""
        if hiding is not None:
            what = f"a {type(value).__name__} whose attribute {hiding!r} hides a method or attribute of its class"
            raise self._refused(path, what, "give the attribute another name")

    def _of_class(self, value: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        kind = type(value)
        if unkept := _classes.unkept(value):
            what = f"a {kind.__module__}.{kind.__qualname__} with attributes that cannot be restored: {', '.join(unkept[:5])}"
            raise self._refused(path, what, "make each a field of the class, or pass pickle=True to pickle the object")
        node: dict[str, Any] = {"!": _classes.kind(kind), "class": _classes.named(kind)}
        if not _classes.is_allowed(kind):
            self.unknown[node["class"]] = None
        if isinstance(value, enum.Enum):
            node["name"] = value.name
            # A combination of flags has no name.
            return {**node, "v": int(value.value)} if isinstance(value, enum.Flag) else node
        return {**node, "v": self._named(_classes.parts(value), path)}

    def _named(self, values: Iterable[tuple[str, Any]], path: tuple[Any, ...]) -> list[Any]:
        return [[name, self.value(one, (*path, Attribute(name)))] for name, one in values]

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, torch.Tensor) or type(key) in (list, dict, set):
            raise self._refused((*path, key), "a key that is no plain value", "use strings or numbers as keys")
        return self.value(key, (*path, key))

    def _plain(self, value: Any, kind: type, path: tuple[Any, ...]) -> dict[str, Any] | None:
        if kind in (bytes, bytearray):
            if len(value) <= BYTES_INLINE:
                return {"!": kind.__name__, "v": base64.b64encode(value).decode()}
            held = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return {"!": kind.__name__, "t": self._add(path, "U8", tuple(held.shape), held)}
        if kind is complex:
            return {"!": "complex", "v": [value.real.hex(), value.imag.hex()]}
        text = as_text(value)
        if text is not None:
            return text
        if kind is torch.dtype:
            return {"!": "torch.dtype", "v": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"!": "torch.device", "v": str(value)}
        if kind.__module__ == "numpy":
            return self._numpy(value, path)
        return None

    def _numpy(self, value: Any, path: tuple[Any, ...]) -> dict[str, Any] | None:
        import numpy

        # Other classes of arrays, such as numpy.matrix, would come back as plain ones.
        is_array = type(value) in (numpy.ndarray, numpy.memmap)
        if not (is_array or isinstance(value, numpy.generic)) or value.dtype.hasobject:
            return None
        dtype = _numpy_type(value.dtype)
        if dtype is None:
            return None
        bytes_ = value.tobytes()
        if isinstance(value, numpy.generic):
            return {"!": "numpy", "dtype": dtype, "v": base64.b64encode(bytes_).decode()}
        held = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8) if bytes_ else torch.empty(0, dtype=torch.uint8)
        word = _NUMPY_WORDS.get(dtype, "U8") if isinstance(dtype, str) else "U8"
        shape = tuple(held.shape) if word == "U8" and dtype != "|u1" else value.shape
        name = self._add(path, word, shape, held)
        return {"!": "ndarray", "t": name, "dtype": dtype, "shape": list(value.shape)}

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        if tensor.is_nested:
            raise self._refused(path, "a nested tensor", "save a list of its parts: list(tensor.unbind())")
        plain_types = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if type(tensor) not in plain_types:
            kind = type(tensor)
            help = (
                "save sharded state with towline.dcp, or save its local part"
                if "DTensor" in kind.__name__
                else ("turn it into plain tensors")
            )
            raise self._refused(path, f"a tensor of the kind {kind.__module__}.{kind.__qualname__}", help)
        if tensor.device.type == "meta":
            raise self._refused(path, "a tensor on the meta device, which has no elements", "materialise it first")
        if tensor.is_quantized:
            return self._quantized(tensor, path)
        if tensor.layout in SPARSE:
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
        word, parts = SPARSE[tensor.layout]
        tensor = tensor.detach()
        # Stored whole, even if the values are expanded: a sparse tensor is created of all of them.
        held = [self._tensor(getattr(tensor, part)().contiguous(), (*path, part)) for part in parts]
        node = {"!": "sparse", "layout": word, "parts": held, "shape": list(tensor.shape)}
        return {**node, "coalesced": tensor.is_coalesced()} if word == "coo" else node

    def _quantized(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        node: dict[str, Any] = {"!": "quantized", "dtype": str(tensor.dtype).removeprefix("torch.")}
        node["int"] = self._tensor(tensor.int_repr(), (*path, "int"))
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {**node, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        node["axis"] = tensor.q_per_channel_axis()
        node["scale"] = self._tensor(tensor.q_per_channel_scales(), (*path, "scales"))
        node["zero_point"] = self._tensor(tensor.q_per_channel_zero_points(), (*path, "zero_points"))
        return node

    def add_tensors(self) -> None:
        """Adds the tensors as leaves. Tensors that share memory are stored once, and share it again when they are restored."""
        sharing: dict[Any, list[int]] = {}
        for at, (_, tensor, _) in enumerate(self._tensors):
            address = tensor.untyped_storage().data_ptr()
            key = (tensor.device, address) if address and tensor.numel() else ("alone", at)
            sharing.setdefault(key, []).append(at)
        for group in sharing.values():
            self._add_group([self._tensors[at] for at in group])

    def _add_group(self, group: list[tuple[dict[str, Any], torch.Tensor, tuple[Any, ...]]]) -> None:
        views: dict[Any, list[tuple[dict[str, Any], torch.Tensor, tuple[Any, ...]]]] = {}
        for one in group:
            tensor = one[1]
            views.setdefault((tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype), []).append(one)
        if not _overlap([same[0][1] for same in views.values()]):
            for same in views.values():
                _, tensor, path = same[0]
                word, shape, held = _stored(tensor)
                name = self._add(path, word, shape, held)
                strides = {"stride": list(tensor.stride())} if _is_permuted(tensor) else {}
                for node, _, _ in same:
                    node.update(strides)
                    node.update({"t": name} if word in _torch.DTYPES and held.dtype == tensor.dtype else {
                        "t": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)
                    })  # fmt: skip
            return
        first = group[0][1]
        spans = [_span(tensor) for _, tensor, _ in group]
        start, end = min(span[0] for span in spans), max(span[1] for span in spans)
        storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        name = self._add((*group[0][2], "storage"), "U8", (end - start,), storage[start:end])
        for (node, tensor, path), span in zip(group, spans, strict=True):
            self._expanded += max(0, _torch.nbytes(tensor) - (end - start))
            if self._expanded > EXPANSION_MAX:
                help = "save it before it is expanded, or a contiguous copy: tensor.contiguous()"
                raise self._refused(path, f"an expanded tensor of {_torch.nbytes(tensor)} bytes", help)
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


def _numpy_type(dtype: Any) -> Any:
    """Description of a numpy dtype: its fields in lists, if it has any. None if that does not describe it, as its fields
    overlap or are not in order."""
    from numpy.lib import format

    if dtype.names is None:
        return dtype.str
    try:
        described = dtype.descr
    except ValueError:
        return None
    return described if format.descr_to_dtype(described) == dtype else None


_NUMPY_WORDS = {
    "|b1": "BOOL", "|i1": "I8", "|u1": "U8", "<i2": "I16", "<u2": "U16", "<i4": "I32", "<u4": "U32",
    "<i8": "I64", "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64", "<c8": "C64",
}  # fmt: skip


def _stored(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], torch.Tensor]:
    """Dtype, shape and data of a tensor as stored: dtypes that safetensors lacks are stored as bytes, with one more dimension."""
    word = _torch.DTYPE_NAMES.get(tensor.dtype)
    if word is not None:
        return word, tuple(tensor.shape), tensor
    held = tensor.contiguous()
    if held.dim() == 0:
        held = held.reshape(1)
    held = held.view(torch.uint8) if held.numel() else torch.empty(0, dtype=torch.uint8)
    return "U8", tuple(held.shape), held


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Range of bytes in its storage that a tensor uses."""
    size = tensor.element_size()
    start = tensor.storage_offset()
    last = start + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start * size), int((last + 1) * size)


def _is_permuted(tensor: torch.Tensor) -> bool:
    """True if the tensor has no gaps, but its dimensions are in another order in memory."""
    return not tensor.is_contiguous() and is_gapless(tensor.stride(), tensor.shape)


def _overlap(views: list[torch.Tensor]) -> bool:
    """True if two of these views of one storage overlap, or one overlaps itself."""
    spans = sorted(_span(view) for view in views)
    crossed = any(before[1] > after[0] for before, after in itertools.pairwise(spans))
    twice = any(
        stride == 0 and length > 1 for view in views for length, stride in zip(view.shape, view.stride(), strict=True)
    )
    return crossed or twice
