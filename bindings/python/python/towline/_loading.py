"""Loading of tensors: mapped from the memory of this node's agent where it keeps them, else read."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from . import _cuda, _progress
from ._expansion import TensorLength, TreeTensors, check_expansion
from ._shards import check_complete
from .errors import Damaged, NotFound, Unreachable, UsageError
from .tensors import no_type, read_request

if TYPE_CHECKING:
    import torch

    from ._towline import Repository as Engine
    from ._towline import StagedTensors, Tree

    #: Path and name of a tensor, and the tensor.
    Found = tuple[tuple[str, str], torch.Tensor]
    Device = str | int | torch.device | None

Item = TypeVar("Item")

_logger = logging.getLogger("towline")

#: Minimum bytes of a state for which the agent is asked: fewer are read in the time of the request.
STAGED_MIN = 1 << 20


def load(
    engine: Engine,
    name: str,
    path: str | None,
    selectors: list[str],
    device: Device,
    progress: _progress.Progress,
) -> dict[str, torch.Tensor]:
    """Loads tensors of a tree by name."""
    gpu = _cuda.gpu_of(device)
    with _progress.counting(progress, name) as counters:
        staged = engine.stage(name, path, selectors, counters)
        if staged is not None:
            held = mapped(staged)
            keys = _keys([place for place, _ in held])
            if not selectors:
                _check_staged(engine, name, path, held)
            found = _on_device(held, device, gpu)
        else:
            chosen = _chosen(engine, name, path, selectors)
            keys = chosen.keys()
            chosen.check_expansion()
            found = chosen.read(chosen.tensors, device, gpu, counters)
    return {key: tensor for key, (_, tensor) in zip(keys, found, strict=True)}


def stream(
    engine: Engine,
    name: str,
    path: str | None,
    selectors: list[str],
    device: Device,
    ahead: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors of a tree by name while the next ones are read, in groups of `ahead` bytes."""
    gpu = _cuda.gpu_of(device)
    staged = engine.stage(name, path, selectors)
    if staged is not None:
        found = mapped(staged)
        keys = _keys([place for place, _ in found])
        if not selectors:
            _check_staged(engine, name, path, found)
        return _moved(found, iter(keys), device, gpu, ahead)
    chosen = _chosen(engine, name, path, selectors)
    return _read_ahead(chosen, iter(chosen.keys()), device, gpu, ahead)


def _moved(
    found: list[Found], keys: Iterator[str], device: Device, gpu: _cuda.Gpu | None, ahead: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Moves tensors in host memory to `device`: to a GPU in groups, else one by one."""
    from . import _torch

    for group in _groups(found, 0 if gpu is None else ahead, lambda one: _torch.nbytes(one[1])):
        moved = _on_device(group, device, gpu)
        while moved:
            yield next(keys), moved.pop(0)[1]


def _read_ahead(
    chosen: _Chosen, keys: Iterator[str], device: Device, gpu: _cuda.Gpu | None, ahead: int
) -> Iterator[tuple[str, torch.Tensor]]:
    groups = _groups(chosen.tensors, ahead, lambda one: int(one["bytes"]))
    reader = ThreadPoolExecutor(1, "towline-load")
    try:
        coming = reader.submit(chosen.read, next(groups, []), device, gpu)
        while found := coming.result():
            coming = reader.submit(chosen.read, next(groups, []), device, gpu)
            while found:
                # The consumer alone holds what it gets: memory is free once it is done with it.
                yield next(keys), found.pop(0)[1]
    finally:
        # An interrupt must not wait for a store that hangs.
        reader.shutdown(wait=False, cancel_futures=True)


def _on_device(found: list[Found], device: Device, gpu: _cuda.Gpu | None) -> list[Found]:
    """Moves tensors in host memory to `device`."""
    if device is None or str(device) == "cpu":
        return found
    places, tensors = [place for place, _ in found], [tensor for _, tensor in found]
    moved = [tensor.to(device) for tensor in tensors] if gpu is None else _cuda.copied(tensors, gpu)
    return list(zip(places, moved, strict=True))


def _groups(items: Iterable[Item], size: int, bytes_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items of at most `size` bytes together, or one that is longer."""
    group: list[Item] = []
    length = 0
    for item in items:
        if group and length + bytes_of(item) > size:
            yield group
            group, length = [], 0
        group.append(item)
        length += bytes_of(item)
    if group:
        yield group


def mapped(staged: StagedTensors) -> list[Found]:
    """Tensors over the agent's memory, each with its path and name. Writes to them are private to this process."""
    from . import _torch

    found = []
    for name, path, dtype, shape, address, length in staged.tensors():
        _check_type(name, dtype, shape, length)
        found.append(((path, name), _torch.view(_torch.over(address, length, staged), dtype, shape)))
    return found


def _check_staged(engine: Engine, name: str, path: str | None, held: list[Found]) -> None:
    """Raises if the tensors in memory of the agent, all of a tree or of `path` in it, are not all that there are."""
    try:
        tree = engine.open_tree(name)
    except Unreachable as error:
        # The agent has the tensors, whether the store answers or not.
        _logger.warning("%s is loaded from the agent's memory without a search for missing tensors: %s", name, error)
        return
    try:
        check_complete(engine, tree, path, [place for place, _ in held])
    except (Damaged, NotFound):
        # The name may have been saved anew since the agent read it: what counts is the tree by itself.
        check_complete(engine, tree, path, _places(_listed(tree, path, [])))


def _chosen(engine: Engine, name: str, path: str | None, selectors: list[str]) -> _Chosen:
    """Tensors of a tree that `selectors` select; all, if there are none. Raises if not all can be read then."""
    tree = engine.open_tree(name)
    # An agent takes a folder with a slash at its end, too.
    path = None if path is None else path.strip("/") or None
    if selectors:
        return _Chosen(tree, _listed(tree, path, selectors))
    try:
        tensors = _listed(tree, path, [])
    except NotFound:
        # Says what is wrong with the files, if one should have tensors.
        if check_complete(engine, tree, path, []):
            return _Chosen(tree, [])
        raise
    check_complete(engine, tree, path, _places(tensors))
    return _Chosen(tree, tensors)


def _listed(tree: Tree, path: str | None, selectors: list[str]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(tree.choose_tensors(path, selectors))
    return listed


def _places(tensors: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["path"], one["name"]) for one in tensors]


class _Chosen:
    """Tensors of a tree that are read by this process. The tree stays the same if its name is replaced."""

    def __init__(self, tree: Tree, tensors: list[dict[str, Any]]):
        self._tree, self.tensors = tree, tensors

    def check_expansion(self) -> None:
        """Raises Exhausted if the tensors are far longer than their files."""
        lengths = [TensorLength(one["name"], one["path"], one["bytes"]) for one in self.tensors]
        help = "choose fewer `tensors` at a time, or read one after the other with `stream`"
        check_expansion(TreeTensors(self._tree.name, lengths, lambda: self._tree), help)

    def keys(self) -> list[str]:
        """Keys of the tensors, in their order."""
        return _keys(_places(self.tensors))

    def read(
        self, tensors: list[dict[str, Any]], device: Device, gpu: _cuda.Gpu | None, counters: Any = None
    ) -> list[Found]:
        """Reads some of the tensors to `device`; returns each with its path and name."""
        from . import _torch

        for one in tensors:
            _check_type(one["name"], one["dtype"], one["shape"], one["bytes"])
        place = None if gpu is None else f"cuda:{gpu.number}"
        with contextlib.nullcontext() if gpu is None else gpu.allocating():
            made = [_torch.empty(one["dtype"], one["shape"], place) for one in tensors]
        found, requests = [], []
        for one, tensor in zip(tensors, made, strict=True):
            window = None if one["shape"] == one["whole"] else (one["offsets"], one["shape"])
            if one["bytes"]:
                requests.append(read_request(one["name"], one["path"], window, tensor.data_ptr(), one["bytes"]))
            found.append(((one["path"], one["name"]), tensor))
        if requests:
            self._tree.read_tensors(requests, counters, None if gpu is None else gpu.target)
        return found if gpu is not None else _on_device(found, device, None)


def _check_type(name: str, dtype: str, shape: Sequence[int], length: int) -> None:
    """Raises UsageError if no tensor of torch has elements of that type, or that shape."""
    from . import _torch

    _torch.check_shape(name, dtype, shape)
    if _torch.length(dtype, shape) != length:
        raise UsageError(no_type(name, dtype))


def _keys(places: Iterable[tuple[str, str]]) -> list[str]:
    """Keys of tensors `(path, name)`: the name, or `PATH:NAME` if several have it. Raises UsageError if two have one key."""
    places = list(places)
    counts = collections.Counter(name for _, name in places)
    held: dict[str, tuple[str, str]] = {}
    for path, name in places:
        key = name if counts[name] == 1 else f"{path}:{name}"
        if key in held:
            raise _same_key(key, held[key], (path, name))
        held[key] = path, name
    return list(held)


def _same_key(key: str, one: tuple[str, str], other: tuple[str, str]) -> UsageError:
    """Error of two tensors `(path, name)`, or two boxes of one, with the same key."""
    if one == other:
        return UsageError(f"{key} is asked for as two different boxes: load them one after the other")
    (path, name), (other_path, other_name) = one, other
    return UsageError(
        f"two tensors have the key {key!r}: {name!r} of {path} and {other_name!r} of {other_path} (load one file at a time: "
        "`path` chooses it)"
    )
