"""Restoring of states from files, in place where possible. The JSON document is described in state.py."""

from __future__ import annotations

import base64
import collections
import inspect
import math
import pickle as pickling
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import _classes, _torch, _towline
from ._comparing import Comparison
from ._devices import gpus
from ._documents import distinct, parsed
from ._expansion import EXPANSION_MAX
from ._tags import (
    DEPTH_MAX,
    DICTS,
    FACTORIES,
    LISTS,
    NAMED,
    NAMESPACES,
    PAIRS,
    PLAIN,
    SPARSE,
    VERSION,
    Attribute,
    from_text,
    hides_method,
    is_gapless,
    is_stateful,
    listed,
    shown,
)
from ._texts import check_texts
from .errors import Damaged, Error, Mismatch, Unsupported, UsageError

#: Tags of values that a method of the same name builds.
_BUILT = (
    "Counter", "Enum", "OrderedDict", "bytearray", "bytes", "complex", "dataclass", "defaultdict", "deque", "dict", "float",
    "frozenset", "int", "namedtuple", "ndarray", "numpy", "pickle", "quantized", "set", "sparse", "tensor", "torch.Size",
    "torch.device", "torch.dtype", "tuple",
)  # fmt: skip
#: Tags whose values are built without code of the caller: an error is one of the document.
_CLOSED = frozenset(_BUILT) - {
    "Counter",
    "OrderedDict",
    "dataclass",
    "defaultdict",
    "dict",
    "namedtuple",
    "pickle",
    "tuple",
}
#: Types of quantized tensors. torch makes views of these types, but fails where it uses them.
_QUANTIZED = {
    getattr(torch, name) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
}
#: What a document that is not as described raises where it is read.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def restore(
    document: bytes,
    held: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[list[tuple[str, torch.Tensor]]], None],
    into: Any = None,
    map_location: str | torch.device | None = None,
    pickle: bool = False,
    *,
    strict: bool = True,
    cast: bool = False,
) -> Any:
    """Restores a state. `held` has the dtype and shape of each tensor in the file; `read` fills tensors by name. Tensors in
    `into` are filled in place, objects in `into` with `load_state_dict` load their state, and dicts are updated.

    Raises Mismatch, with the paths, before anything is filled: if a tensor in `into` has another shape, or, without `cast`,
    another dtype; and, if `strict`, if `into` has keys that the state lacks.
    """
    restoring = Restoring(document, held, into, map_location, pickle, strict=strict, cast=cast)
    read(list(restoring.leaves.items()))
    return restoring.state()


class Restoring:
    """Restores a state in two phases: the caller fills `leaves`, and `state` then returns the result. See `restore`."""

    def __init__(
        self,
        document: bytes,
        held: Mapping[str, tuple[str, tuple[int, ...]]],
        into: Any = None,
        map_location: str | torch.device | None = None,
        pickle: bool = False,
        *,
        strict: bool = True,
        cast: bool = False,
    ):
        root = parsed(document, "the document of a state")
        try:
            version, node = root["towline"], root["state"]
        except (TypeError, LookupError) as error:
            raise Damaged("this is not the document of a state") from error
        if version != VERSION:
            raise Unsupported(
                f"the state was written in version {version}, this towline reads version {VERSION} (use a newer one)"
            )
        self.held, self.pickle, self.strict, self.cast = held, pickle, strict, cast
        self.device = None if map_location is None else torch.device(map_location)
        #: Tensors of the file to be filled, by name.
        self.leaves: dict[str, torch.Tensor] = {}
        self._compared = Comparison(self._pairs)
        #: Tensor of `into` for each node, by id of the node.
        self._targets: dict[int, torch.Tensor] = {}
        #: Nodes that are read directly into the memory of their target, and the names of these leaves.
        self._direct: set[int] = set()
        self._lent: set[str] = set()
        #: Bytes values by leaf; several nodes may refer to one.
        self._bytes_of: dict[str, bytes] = {}
        #: Tensors with their saved strides, by leaf.
        self._laid_out: dict[str, torch.Tensor] = {}
        #: Leaves on `device`.
        self._moved: dict[str, torch.Tensor] = {}
        #: Bytes of copies that were made of leaves, and by which views exceed them; and bytes of all leaves.
        self._copied, self._stored = 0, 0
        self._node, self._into = node, into
        try:
            self.prepare(node, into, (), into is not None)
        except RecursionError as error:
            raise _too_deep() from error
        self._stored = sum(map(_torch.nbytes, self.leaves.values()))
        if strict:
            self._compared.check()

    @property
    def missing(self) -> list[str]:
        """Paths in `into` that the state lacks, as in torch's load_state_dict."""
        return self._compared.missing

    @property
    def unexpected(self) -> list[str]:
        """Paths in the state that `into` lacks."""
        return self._compared.unexpected

    def use(self, ready: Mapping[str, torch.Tensor]) -> set[str]:
        """Takes leaves that are in memory already, and returns their names; others remain to be read. Those of `into` are
        copied."""
        taken, copies = set(), []
        for name in self.leaves.keys() & ready.keys():
            leaf, source = self.leaves[name], ready[name]
            # The step may have been replaced since its tensors were listed.
            if leaf.dtype != source.dtype or leaf.shape != source.shape:
                continue
            taken.add(name)
            if name in self._lent:
                copies.append((leaf.data_ptr(), source.data_ptr(), _torch.nbytes(source)))
            else:
                self.leaves[name] = source
        _towline.copy(copies)
        return taken

    @property
    def gpus(self) -> set[torch.device]:
        """GPUs of the tensors in `into`."""
        return gpus(self._targets.values())

    def state(self) -> Any:
        """Returns the restored state, once `leaves` are filled, and updates the dicts in `into`."""
        try:
            state = self.value(self._node, self._into, ())
        except RecursionError as error:
            raise _too_deep() from error
        _update(self._into, state)
        return state

    # -- Phase 1: plan  ---------------------------------------------------------------------------------------------------

    def prepare(self, node: Any, into: Any, path: tuple[Any, ...], compared: bool) -> None:
        """Finds the leaves to read and their targets in `into`; if `compared`, also missing and unexpected keys."""
        if len(path) > 2 * DEPTH_MAX:
            raise _too_deep()
        if is_stateful(into):
            # Its load_state_dict decides which keys it needs.
            self._compared.module(node, into, path)
            into, compared = into.state_dict(), False
        if compared:
            self._compared.value(node, into, path)
        word = node.get("!") if isinstance(node, dict) else None
        if word == "tensor":
            try:
                self._prepare_tensor(node, into, path)
            except Error:
                raise
            except _MALFORMED as error:
                raise _malformed(path, error) from error
        elif word in ("sparse", "quantized"):
            parts = node.get("parts", ())
            for one in (*(parts if isinstance(parts, list) else ()), *map(node.get, ("int", "scale", "zero_point"))):
                self.prepare(one, None, path, False)
        elif word is not None and "t" in node:
            self._want(node["t"])
        else:
            for key, one, other in self._parts(node, into):
                self.prepare(one, other, (*path, key), compared)

    def _parts(self, node: Any, into: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yields the children of a node: key or position, child node, and the value of `into` there."""
        word = node.get("!") if isinstance(node, dict) else None
        if isinstance(node, list) or word in LISTS:
            inside = into if isinstance(into, (list, tuple, collections.deque)) else ()
            for at, one in enumerate(node if isinstance(node, list) else listed(node)):
                yield at, one, inside[at] if at < len(inside) else None
        elif word in NAMED:
            there = vars(into) if type(into) in NAMESPACES.values() else dict(_classes.parts(into))
            for name, one in listed(node, pairs=True):
                yield Attribute(name), one, there.get(str(name))
        elif isinstance(node, dict) and (word is None or word in PAIRS):
            mapping = into if isinstance(into, Mapping) and word != "Counter" else {}
            for key, one in node.items() if word is None else self._pairs(node, mapping):
                yield key, one, mapping.get(key)
            if "a" in node and word is not None:
                yield "__dict__", node["a"], None

    def _pairs(self, node: dict[str, Any], inside: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
        pairs = listed(node, pairs=True)
        try:
            keys = distinct((self._key(key, inside) for key, _ in pairs), "a dict")
        except TypeError as error:
            raise Damaged(f"the document of a state has a key that cannot be one: {error}") from error
        return zip(keys, (one for _, one in pairs), strict=True)

    def _key(self, node: Any, inside: Mapping[Any, Any]) -> Any:
        like = None
        if isinstance(node, dict) and "class" in node:
            like = next((other for other in inside if _classes.kind(type(other)) == node.get("!")), None)
        return self.value(node, like)

    def _want(self, name: str, into: torch.Tensor | None = None) -> bool:
        """Adds a leaf to read; returns True if it is read directly into `into`."""
        if not isinstance(name, str):
            raise Damaged(f"the document of a state names a tensor by {name!r}")
        if name in self.leaves:
            return False
        self.leaves[name] = _torch.empty(*self._about(name)) if into is None else into
        return into is not None

    def _about(self, name: str) -> tuple[str, tuple[int, ...]]:
        try:
            word, shape = self.held[name]
        except KeyError:
            raise Damaged(f"the document of a state names a tensor that its file lacks: {name}") from None
        if not _torch.is_shape(word, shape):
            raise Damaged(f"the file of a state has a tensor of a shape that is none: {name}, {word} {list(shape)}")
        return word, shape

    def _prepare_tensor(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> None:
        if not isinstance(into, torch.Tensor) or type(into).__name__ == "DTensor" or into.device.type == "meta":
            self._want(node["t"])
            return
        word, shape = self._about(node["t"])
        dtype = _plain_dtype(node["dtype"]) if "dtype" in node else _torch.DTYPES[word]
        shape = node["view"][1] if "view" in node else node.get("shape", shape)
        castable = _are_castable(dtype, into.dtype)
        if tuple(into.shape) != tuple(shape) or not (into.dtype == dtype or (self.cast and castable)):
            help = "give it the saved shape and dtype, or leave it out of `into`"
            if tuple(into.shape) == tuple(shape) and castable:
                help = f"cast=True converts it to {into.dtype}"
            error = Mismatch(
                f"{shown(path)} does not fit: {dtype} {list(shape)} was saved, "
                f"but `into` has {into.dtype} {list(into.shape)} ({help})"
            )
            error.place, error.help = shown(path), help
            raise error
        if any(size > 1 and stride == 0 for size, stride in zip(into.shape, _strides(into), strict=True)):
            help = "give it memory of its own: Tensor.contiguous()"
            error = Mismatch(f"{shown(path)} is an expanded tensor in `into`, which cannot be filled ({help})")
            error.place, error.help = shown(path), help
            raise error
        self._targets[id(node)] = into
        plain = "dtype" not in node and into.dtype == dtype and _torch.is_plain(into)
        if self._want(node["t"], into.detach() if plain else None):
            self._direct.add(id(node))
            self._lent.add(node["t"])

    # -- Phase 2: build  --------------------------------------------------------------------------------------------------

    def value(self, node: Any, into: Any = None, path: tuple[Any, ...] = ()) -> Any:
        """Value of a node; its leaves must be filled."""
        if is_stateful(into) and node is not None:
            return self._stateful(node, into, path)
        if isinstance(node, list):
            return self._values(node, into, path)
        if not isinstance(node, dict):
            return node
        word = node.get("!")
        if word is None:
            return {key: self.value(one, other, (*path, key)) for key, one, other in self._parts(node, into)}
        if word in PLAIN:
            try:
                return from_text(node)
            except Error:
                raise
            except _MALFORMED as error:
                raise _malformed(path, error) from error
        if isinstance(word, str) and word in NAMESPACES:
            return _classes.namespace(NAMESPACES[word], self._named(node, into, path), shown(path))
        build = getattr(self, "_" + word.replace(".", "_")) if word in _BUILT else None
        if build is None:
            raise Unsupported(f"the state holds a {word!r}, which this towline does not know (use a newer one)")
        if word not in _CLOSED:
            return build(node, into, path)
        try:
            return build(node, into, path)
        except Error:
            raise
        except _MALFORMED as error:
            raise _malformed(path, error) from error

    def _values(self, node: Any, into: Any, path: tuple[Any, ...]) -> list[Any]:
        return [self.value(one, other, (*path, at)) for at, one, other in self._parts(node, into)]

    def _stateful(self, node: Any, into: Any, path: tuple[Any, ...]) -> Any:
        state = self.value(node, into.state_dict(), path)
        lax = not self.strict and "strict" in inspect.signature(into.load_state_dict).parameters
        try:
            into.load_state_dict(state, **({"strict": False} if lax else {}))
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            mismatch = Mismatch(f"{shown(path)} does not take the saved state: {error}")
            mismatch.place = shown(path)
            raise mismatch from error
        return into

    def _dict(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
        inside = into if isinstance(into, Mapping) else {}
        return {key: self.value(one, inside.get(key), (*path, key)) for key, one in self._pairs(node, inside)}

    def _OrderedDict(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return self._with_attributes(collections.OrderedDict(self._dict(node, into, path)), node, path)

    def _Counter(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return self._with_attributes(collections.Counter(self._dict(node, None, path)), node, path)

    def _with_attributes(self, made: Any, node: dict[str, Any], path: tuple[Any, ...]) -> Any:
        attributes = self.value(node.get("a", {}), None, (*path, "__dict__"))
        if not isinstance(attributes, dict) or any(hides_method(type(made), name) for name in attributes):
            raise Damaged(f"the document of a state has attributes at {shown(path)} that no {node['!']} has")
        vars(made).update(attributes)
        return made

    def _defaultdict(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        factory = node.get("factory")
        if isinstance(factory, dict):
            if not isinstance(into, collections.defaultdict):
                raise self._unknown(
                    path, f"a defaultdict of {factory.get('other')}", "pass a defaultdict with this factory in `into`"
                )
            made = into.default_factory
        elif factory is not None and str(factory) not in FACTORIES:
            raise Unsupported(f"the state holds a defaultdict of {factory!r}, which this towline does not know")
        else:
            made = None if factory is None else FACTORIES[str(factory)]
        return collections.defaultdict(made, self._dict(node, into, path))

    def _tuple(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return tuple(self._values(node, into, path))

    def _deque(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return collections.deque(self._values(node, into, path), node.get("maxlen"))

    def _set(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return set(distinct(self._values(node, None, path), shown(path)))

    def _frozenset(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return frozenset(distinct(self._values(node, None, path), shown(path)))

    def _torch_Size(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return torch.Size(self._values(node, None, path))

    def _named(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        return {str(name): self.value(one, other, (*path, name)) for name, one, other in self._parts(node, into)}

    def _of_class(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        cls = self._class(node, into, path)
        try:
            return _classes.made(cls, self._named(node, into, path), shown(path), self.pickle)
        except ValueError as error:
            raise self._unknown(path, f"a {node['class']} that does not fit the class: {error}", None) from error

    _dataclass = _namedtuple = _of_class

    def _Enum(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        cls = self._class(node, into, path)
        try:
            return _classes.member(cls, node["name"], node.get("v"))
        except ValueError as error:
            raise self._unknown(path, f"a {node['class']} that the class lacks: {error}", None) from error

    def _class(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> type:
        if not isinstance(node.get("class"), str):
            raise Damaged(f"the document of a state has a {node['!']} without its class at {shown(path)}")
        cls = _classes.find(node["class"], node["!"], into, self.pickle)
        if cls is None:
            own = node["class"].rpartition(".")[2].rpartition(":")[2]
            help = f"pass an object of the class in `into`, or call towline.allow_classes({own}) first"
            raise self._unknown(path, f"a {node['class']}, whose class is not allowed", help)
        return cls

    def _unknown(self, path: tuple[Any, ...], what: str, help: str | None) -> UsageError:
        error = Mismatch(f"{shown(path)} holds {what}" + (f" ({help})" if help else ""))
        error.place, error.help = shown(path), help
        return error

    def _int(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return int(node["v"], 16)

    def _float(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return float.fromhex(node["v"])

    def _complex(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return complex(*map(float.fromhex, node["v"]))

    def _bytes(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        if "v" in node:
            return base64.b64decode(node["v"])
        leaf = node["t"]
        if leaf not in self._bytes_of:
            self._bytes_of[leaf] = self.leaves[leaf].numpy().tobytes()
        return self._bytes_of[leaf]

    def _bytearray(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        held = self._bytes(node, into, path)
        self._count(len(held), path)
        return bytearray(held)

    def _torch_dtype(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        return _dtype(node["v"])

    def _torch_device(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        try:
            return torch.device(str(node["v"]))
        except RuntimeError as error:
            raise _malformed(path, error) from error

    def _numpy(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        import numpy

        dtype, content = _numpy_dtype(node["dtype"]), base64.b64decode(node["v"])
        # numpy gives an empty text the bytes of one character, and reads none back.
        made = numpy.frombuffer(content, dtype) if dtype.itemsize else numpy.zeros(1, dtype)
        check_texts(made, shown(path))
        return made[0]

    def _ndarray(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        import numpy

        dtype, shape, leaf = _numpy_dtype(node["dtype"]), node["shape"], self.leaves[node["t"]]
        # The element size of the array that is made: numpy makes one character of a text of none.
        size = numpy.empty(0, dtype).itemsize * math.prod(shape)
        # Checked before memory is allocated for a size in the document.
        if size != leaf.numel() * leaf.element_size():
            raise Damaged(f"{shown(path)} has {size} bytes by its type and shape, and another number is stored")
        self._count(size, path)
        made = numpy.empty(shape, dtype)
        # An assignment to more elements would repeat the stored ones.
        if made.nbytes != size:
            raise Damaged(f"{shown(path)} takes {made.nbytes} bytes as an array, and {size} are stored")
        if made.size:
            made.reshape(-1).view(numpy.uint8)[:] = leaf.reshape(-1).view(torch.uint8).numpy()
            check_texts(made, shown(path))
        return made

    def _pickle(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        if not self.pickle:
            error = UsageError(
                f"{shown(path)} is pickled, and can run code when it is loaded (pass pickle=True if you trust whoever "
                "saved it)"
            )
            error.place = shown(path)
            raise error
        return pickling.loads(base64.b64decode(node["v"]))

    def _sparse(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        parts, shape = [self.value(part, None, path) for part in node["parts"]], node["shape"]
        try:
            if node["layout"] == "coo":
                indices, values = parts
                made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
                if node["coalesced"] and not _is_sorted(indices):
                    raise Damaged(f"the document of a state takes unsorted indices for sorted ones at {shown(path)}")
                return made._coalesced_(node["coalesced"])
            layout = {word: layout for layout, (word, _) in SPARSE.items()}[node["layout"]]
            compressed, plain, values = parts
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, layout=layout, check_invariants=True
            )
        except RuntimeError as error:
            raise _malformed(path, error) from error

    def _quantized(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        held, scale, zero = (self.value(node[key], None, path) for key in ("int", "scale", "zero_point"))
        self._count(_torch.nbytes(held), path)
        try:
            if "axis" in node:
                axis = node["axis"]
                if type(axis) is not int or not 0 <= axis < held.dim():
                    raise Damaged(f"the document of a state names axis {axis!r} of {held.dim()} at {shown(path)}")
                if not tuple(scale.shape) == tuple(zero.shape) == (held.shape[axis],):
                    raise Damaged(f"the document of a state has a number of scales that does not fit at {shown(path)}")
                return torch._make_per_channel_quantized_tensor(held, scale, zero, node["axis"])
            return torch._make_per_tensor_quantized_tensor(held, scale, zero)
        except RuntimeError as error:
            raise _malformed(path, error) from error

    def _tensor(self, node: dict[str, Any], into: Any, path: tuple[Any, ...]) -> Any:
        target = self._targets.get(id(node))
        if id(node) in self._direct:
            return target
        made = self._shaped(node, self.leaves[node["t"]] if target is not None else self._on_device(node["t"]), path)
        if target is not None:
            # It has the shape of the saved tensor: an expanded one takes no other memory.
            with torch.no_grad():
                target.copy_(made)
            return target
        # Views of a leaf share it. What uses an expanded one may allocate all of its elements.
        self._count(max(0, _torch.nbytes(made) - _torch.nbytes(self.leaves[node["t"]])), path)
        if "stride" in node and node["t"] not in self._lent:
            made = self._with_strides(node, made)
        if node.get("grad") and not (made.is_floating_point() or made.is_complex()):
            raise Damaged(f"the document of a state has a gradient of {made.dtype} at {shown(path)}")
        if node.get("parameter"):
            return torch.nn.Parameter(made, requires_grad=node.get("grad", False))
        return made.requires_grad_() if node.get("grad") else made

    def _count(self, size: int, path: tuple[Any, ...]) -> None:
        """Counts `size` bytes of a copy. Raises Damaged if there are more than a state that was saved can have: each leaf is
        copied at most twice, and views exceed leaves by at most EXPANSION_MAX."""
        self._copied += size
        if self._copied > 2 * self._stored + EXPANSION_MAX:
            error = Damaged(
                f"the document of a state describes more bytes than its file can have: {self._copied} up to {shown(path)}, and "
                f"{self._stored} are stored"
            )
            error.place = shown(path)
            raise error

    def _on_device(self, name: str) -> torch.Tensor:
        """A leaf on the device of `map_location`; tensors that shared its memory when they were saved share it there, too."""
        if self.device is None:
            return self.leaves[name]
        if name not in self._moved:
            self._moved[name] = self.leaves[name].to(self.device)
        return self._moved[name]

    def _with_strides(self, node: dict[str, Any], made: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor with its saved strides; nodes of one leaf share it."""
        if node["t"] not in self._laid_out:
            if not is_gapless(node["stride"], made.shape):
                raise Damaged("the document of a state names strides that leave gaps")
            there = torch.empty_strided(made.shape, node["stride"], dtype=made.dtype, device=made.device)
            self._laid_out[node["t"]] = there.copy_(made)
        return self._laid_out[node["t"]].detach()

    def _shaped(self, node: dict[str, Any], held: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        try:
            return self._view(node, held)
        except Unsupported:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise Damaged(f"the document of a state describes no tensor at {shown(path)}: {error}") from error

    def _view(self, node: dict[str, Any], held: torch.Tensor) -> torch.Tensor:
        """View of a leaf: never more memory than that."""
        if "dtype" not in node:
            # Nodes of one leaf share its memory, as they did when saved.
            return held.detach()
        dtype = _plain_dtype(node["dtype"])
        if "view" in node:
            start, shape, stride = node["view"]
            if "stride" in node or not _lies_within(start, shape, stride, dtype.itemsize, held.nbytes):
                raise Damaged("the document of a state names a view beyond the memory of its tensor")
            # In a tensor of `into` the leaf need not be at the start of the storage.
            offset, rest = divmod(held.storage_offset() * held.element_size() + start, dtype.itemsize)
            if rest:
                raise Damaged("the document of a state names a view that begins within an element")
            return torch.empty(0, dtype=dtype, device=held.device).set_(held.untyped_storage(), offset, shape, stride)
        if held.numel() == 0:
            if 0 not in node["shape"]:
                raise Damaged("the document of a state names an empty tensor that is not empty")
            return torch.empty(node["shape"], dtype=dtype, device=held.device)
        return held.view(dtype).reshape(node["shape"])


def _malformed(path: tuple[Any, ...], error: Exception) -> Damaged:
    damaged = Damaged(f"the document of a state is malformed at {shown(path)}: {error!r}")
    damaged.place = shown(path)
    return damaged


def _too_deep() -> Damaged:
    return Damaged("the document of a state is nested too deeply")


def _update(into: Any, state: Any) -> None:
    """Updates dicts in `into`, and dicts in these, as torch.distributed.checkpoint.load does."""
    if type(into) not in DICTS or not isinstance(state, Mapping):
        return
    for key, value in state.items():
        inside = into.get(key)
        if type(inside) in DICTS and isinstance(value, Mapping):
            _update(inside, value)
        else:
            into[key] = value


def _lies_within(start: int, shape: list[int], stride: list[int], itemsize: int, nbytes: int) -> bool:
    """True if a view stays within `nbytes` of memory. `start` is in bytes, `stride` in elements."""
    if not all(type(number) is int for number in (start, *shape, *stride)):
        return False
    if len(shape) != len(stride) or min([start, *shape, *stride]) < 0:
        return False
    if 0 in shape:
        return start <= nbytes
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return start + (last + 1) * itemsize <= nbytes


def _is_sorted(indices: torch.Tensor) -> bool:
    """True if the columns of `indices` increase, as those of a coalesced tensor do."""
    if indices.shape[1] < 2:
        return True
    before, after = indices[:, :-1], indices[:, 1:]
    differs = before != after
    # The first row in which two columns differ decides; columns that do not differ are repeated.
    first = differs.to(torch.uint8).argmax(dim=0, keepdim=True)
    return bool(differs.any(dim=0).all() and (before.gather(0, first) < after.gather(0, first)).all())


def _are_castable(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """True if both are floating-point dtypes, or both complex ones."""
    both = (saved, wanted)
    return all(one.is_floating_point for one in both) or all(one.is_complex for one in both)


def _numpy_dtype(description: Any) -> Any:
    """numpy dtype from its description. Raises Damaged for the type of a subarray, such as `(3,)u1`: no array has it, as numpy
    appends its shape to that of the array."""
    from numpy.lib import format

    dtype = format.descr_to_dtype(_fields(description) if isinstance(description, list) else description)
    if dtype.subdtype is not None:
        raise Damaged(
            f"the document of a state has an array of the type {str(description)[:60]!r}, one of arrays: towline saves none"
        )
    return dtype


def _fields(description: list[Any]) -> list[tuple[Any, ...]]:
    """Fields of a structured dtype, with the tuples that numpy requires: a field, its title and name, and its shape are lists in
    JSON. The type of a field may be a list of fields itself."""
    return [
        (
            tuple(name) if isinstance(name, list) else name,
            _fields(kind) if isinstance(kind, list) else kind,
            *(tuple(shape) for shape in rest),
        )
        for name, kind, *rest in description
    ]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor; those of one without any are 1."""
    return tuple(tensor.stride()) if tensor.layout == torch.strided else (1,) * tensor.dim()


def _plain_dtype(name: str) -> torch.dtype:
    """Dtype of a tensor that is not quantized."""
    dtype = _dtype(name)
    if dtype in _QUANTIZED:
        raise Damaged(
            f"the document of a state has a tensor of the type {name!r} that is not quantized: towline saves none"
        )
    return dtype


def _dtype(name: str) -> torch.dtype:
    dtype = _torch.dtype_named(name)
    if dtype is None:
        raise Unsupported(f"this torch ({torch.__version__}) has no type {name!r}")
    return dtype
