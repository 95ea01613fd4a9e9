"""Comparison of the keys of a state with those of the object that it is restored into."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ._tags import LISTS, NAMED, PAIRS, is_stateful, listed, shown
from .errors import Mismatch

#: Yields the pairs of a dict's node: key and child node. The second argument is the dict that it is restored into.
Pairs = Callable[[dict[str, Any], Mapping[Any, Any]], Iterator[tuple[Any, Any]]]


class Comparison:
    """Keys that only one side has, as in torch's load_state_dict."""

    def __init__(self, pairs: Pairs):
        self._pairs = pairs
        #: Paths in `into` that the state lacks.
        self.missing: list[str] = []
        #: Paths in the state that `into` lacks.
        self.unexpected: list[str] = []
        #: Those of the missing paths that have a value in the state, where `into` has a tensor.
        self._plain: list[str] = []
        #: True if a module would refuse an unexpected key.
        self._refused = False

    def value(self, node: Any, into: Any, path: tuple[Any, ...]) -> None:
        """Compares the keys of one node."""
        word = node.get("!") if isinstance(node, dict) else None
        is_list = isinstance(node, list) or word in LISTS
        is_dict = isinstance(node, dict) and (word is None or word in PAIRS)
        if isinstance(into, Mapping) and is_dict:
            there = dict(self._pairs(node, into)) if word is not None else node
            self.missing += [shown((*path, key)) for key in into if key not in there]
            self.unexpected += [shown((*path, key)) for key in there if key not in into]
        elif isinstance(into, (list, tuple, collections.deque)) and is_list:
            length = len(node if isinstance(node, list) else listed(node))
            self.missing += [shown((*path, at)) for at in range(length, len(into)) if _is_filled(into[at])]
            # Of a list, only the first surplus element is reported.
            self.unexpected += [shown((*path, len(into)))] if length > len(into) else []
        elif isinstance(into, torch.Tensor):
            if word not in ("tensor", "sparse", "quantized"):
                self.missing.append(shown(path))
                self._plain += [shown(path)] if node is not None else []
        elif _is_filled(into) and word not in NAMED:
            self.missing.append(shown(path))

    def module(self, node: Any, into: Any, path: tuple[Any, ...]) -> None:
        """As `value`, for an object with load_state_dict. Keys of a module are compared before any is filled, unless the module
        customizes how it loads them."""
        if node is None:
            self.missing.append(shown(path))
        is_dict = isinstance(node, dict) and node.get("!", "dict") in PAIRS
        if not is_dict or not isinstance(into, torch.nn.Module) or not _is_plain_module(into):
            return
        inside = into.state_dict()
        there = dict(self._pairs(node, {})) if "!" in node else node
        # Batch norms of old torch versions had no counts; load_state_dict does not need them.
        counts = ".num_batches_tracked"
        missing = [shown((*path, key)) for key in inside if key not in there and not f".{key}".endswith(counts)]
        unexpected = [shown((*path, key)) for key in there if key not in inside]
        self.missing += missing
        self.unexpected += unexpected
        self._refused = self._refused or bool(unexpected)

    def check(self) -> None:
        """Raises Mismatch if `into` has keys that the state lacks, or a module would refuse a key of the state."""
        if not (self.missing or self._refused):
            return
        faults = []
        lacking = [path for path in self.missing if path not in self._plain]
        if lacking:
            faults.append(f"it lacks {_some(lacking)}")
        if self._plain:
            faults.append(f"it holds no tensor, as `into` does, but a plain value at {_some(self._plain)}")
        if self.unexpected:
            faults.append(f"it holds {_some(self.unexpected)}, which `into` lacks")
        error = Mismatch(f"the state does not fit `into`: {'; '.join(faults)} (strict=False restores the rest)")
        error.missing_keys, error.unexpected_keys = self.missing, self.unexpected
        error.help = "strict=False restores the rest"
        raise error


def _is_filled(value: Any) -> bool:
    """True if a value is filled in place (a tensor, or an object with load_state_dict), or contains such a value."""
    if isinstance(value, (list, tuple, collections.deque)):
        return any(map(_is_filled, value))
    if isinstance(value, Mapping):
        return any(map(_is_filled, value.values()))
    return isinstance(value, torch.Tensor) or is_stateful(value)


def _is_plain_module(module: torch.nn.Module) -> bool:
    """True if no submodule customizes load_state_dict, so that a module accepts exactly the keys of its state_dict."""
    own = (torch.nn.Module._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict)
    return type(module).load_state_dict is torch.nn.Module.load_state_dict and all(
        type(one)._load_from_state_dict in own
        and not one._load_state_dict_pre_hooks
        and not one._load_state_dict_post_hooks
        for one in module.modules()
    )


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
