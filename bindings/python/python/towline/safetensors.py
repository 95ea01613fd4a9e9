"""Drop-in `save_file`, `load_file` and `safe_open` of the safetensors package that also take files of saved trees:

    from towline.safetensors import load_file, safe_open, save_file

    save_file(tensors, "towline://run-7/best/model.safetensors", metadata={"format": "pt"})
    tensors = load_file("towline://run-7@latest/model.safetensors")

`towline://NAME/FILE` is the file FILE of the tree NAME, in the repository `repo` (a `towline.Repository` or its URL; by default
`$TOWLINE_REPO`). With `repo` the prefix `towline://` may be left out; with `name` the file name is FILE alone. All other file
names are local files, and are passed on to the safetensors package.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _header, _loading, _towline
from ._expansion import TensorLength, TreeTensors, check_expansion
from ._versions import is_current
from .errors import Conflict, Error, NotFound, UsageError
from .repository import Repository, opened, save_options
from .tensors import PACKED, Tensor, Tensors, no_type, read_request

if TYPE_CHECKING:
    import torch

if TYPE_CHECKING:
    _Base = Exception
else:
    try:
        from safetensors import SafetensorError as _Base
    except ImportError:
        _Base = Exception

__all__ = ["SafetensorError", "SavedFile", "load_file", "safe_open", "save_file"]

#: numpy's dtype names by safetensors' names. Some exist only if ml_dtypes is imported.
_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
#: Supported frameworks, by all names that the safetensors package accepts.
_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}


class SafetensorError(Error, _Base):
    """Invalid use of a safetensors file. If the safetensors package is installed, a subclass of its SafetensorError."""


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    repo: Repository | str | os.PathLike[str] | None = None,
    name: str | None = None,
    create: bool | None = None,
) -> None:
    """Saves tensors as a safetensors file, the only file of its tree; returns once it is durable. `create` is as for
    `towline.open`.

    Refuses the same tensors as `safetensors.torch.save_file`: those that share memory, are sparse or are not contiguous.
    """
    if _is_local(filename, repo, name):
        _real("safetensors.torch", filename).save_file(tensors, filename, metadata)
        return
    name, path = _place(os.fspath(filename), name)
    held = _checked(tensors)
    from . import _torch

    leaves = [(key, _word(key, tensor), list(tensor.shape), _torch.nbytes(tensor)) for key, tensor in held.items()]
    header, starts, _ = _towline.lay_out(leaves, metadata or {})
    in_order = sorted(zip(starts, held.values(), strict=True), key=lambda pair: pair[0])
    pieces: list[Any] = [header]
    pieces += [(tensor.data_ptr(), _torch.nbytes(tensor)) for _, tensor in in_order if _torch.nbytes(tensor)]
    repository = opened(repo, create=create, caller="save_file")
    _check_alone(repository, name, path)
    repository._engine.save_files([(path, pieces)], name, save_options())


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    repo: Repository | str | os.PathLike[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Returns all tensors of a safetensors file, on `device`; every byte is verified. `options` are passed on for local files."""
    if _is_local(filename, repo, name):
        tensors: dict[str, torch.Tensor] = _real("safetensors.torch", filename).load_file(filename, device, **options)
        return tensors
    with safe_open(filename, "pt", device, repo=repo, name=name) as file:
        return file.get_tensors()


def safe_open(
    filename: str | os.PathLike[str],
    framework: str,
    device: str | int | torch.device = "cpu",
    *,
    repo: Repository | str | os.PathLike[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> SavedFile:
    """Opens a safetensors file lazily: tensors are read when asked for, as torch (`"pt"`) or numpy (`"np"`) tensors. `options`
    are passed on for local files."""
    if _is_local(filename, repo, name):
        file: SavedFile = _real("safetensors", filename).safe_open(filename, framework, device, **options)
        return file
    if framework not in _FRAMEWORKS:
        raise SafetensorError(f"framework {framework} is invalid: saved files are opened as 'pt' or 'np'")
    if _FRAMEWORKS[framework] == "np" and device != "cpu":
        raise SafetensorError(f"device {device} is invalid: numpy's arrays are on the cpu")
    return SavedFile(*_found(opened(repo, create=False), os.fspath(filename), name), _FRAMEWORKS[framework], device)


class SavedFile:
    """A safetensors file of a saved tree, opened by `safe_open`. It stays as it was then, if the name is saved again."""

    def __init__(self, tensors: Tensors, path: str, framework: str, device: str | int | torch.device):
        self._engine, self._tree = tensors.repository._engine, tensors._snapshot
        self._name, self._path = tensors.name, path
        self._framework, self._device = framework, device
        self._held = tensors.of_file(path)
        self._header: dict[str, Any] | None = None
        #: Places of the tensors by the header, if the tree lists none of the file.
        self._places: dict[str, _header.Place] | None = None
        self._closed = False
        if not self._held:
            # The file was not cut by its tensors, or is empty, invalid or missing: the header tells which.
            self._places = self._read_places()
            self._held = {
                name: Tensor(tensors, name, path, place.dtype, place.shape) for name, place in self._places.items()
            }

    def __enter__(self) -> SavedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._closed = True

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        self._check()
        return sorted(self._held)

    def offset_keys(self) -> list[str]:
        """Names of the tensors, in the order of the file."""
        head = self._head()
        return sorted(self._held, key=lambda key: head[key]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        """Metadata of the file, if it has any."""
        return self._head().get("__metadata__")

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor."""
        return self._read([(self._tensor(name), None)])[0]

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors at once; returns them by name."""
        self._check()
        lengths = [TensorLength(name, self._path, self._bytes(tensor)) for name, tensor in self._held.items()]
        wanted = TreeTensors(self._name, lengths, lambda: self._tree)
        check_expansion(wanted, "read one after the other with `get_tensor`")
        staged = self._staged()
        if staged is not None:
            return {name: self._on_device(staged[name]) for name in self._held}
        return dict(zip(self._held, self._read([(tensor, None) for tensor in self._held.values()]), strict=True))

    def get_slice(self, name: str) -> Slice:
        """Returns a lazy tensor: indexing it reads only the elements asked for."""
        return Slice(self, self._tensor(name))

    def _staged(self) -> dict[str, torch.Tensor] | None:
        """The tensors in memory of this node's agent; None if it has no such memory, or torch lacks a type."""
        if self._framework != "pt" or self._places is not None:
            return None
        from . import _torch

        if any(tensor.dtype not in _torch.DTYPES for tensor in self._held.values()):
            return None
        staged = self._engine.stage(self._name, self._path)
        if staged is None or not is_current(self._engine, self._tree):
            # The name may have been saved anew since the file was opened.
            return None
        found = {name: tensor for (_, name), tensor in _loading.mapped(staged)}
        about = {name: (_torch.DTYPES[tensor.dtype], tensor.shape) for name, tensor in self._held.items()}
        return found if about == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} else None

    def _on_device(self, tensor: Any) -> Any:
        on_cpu = self._framework == "np" or str(self._device) == "cpu"
        return tensor if on_cpu else tensor.to(self._device)

    def _check(self) -> None:
        if self._closed:
            raise SafetensorError("File is closed")

    def _tensor(self, name: str) -> Tensor:
        self._check()
        try:
            return self._held[name]
        except KeyError:
            raise SafetensorError(f"File does not contain tensor {name}") from None

    def _head(self) -> dict[str, Any]:
        self._check()
        if self._header is None:
            try:
                self._header = json.loads(self._header_bytes(_header.length_of(self._tree, self._path)))
            except (ValueError, RecursionError):
                raise self._invalid("its header is not a JSON object") from None
        return self._header

    def _read_places(self) -> dict[str, _header.Place]:
        """Places of the tensors, by the header of the file."""
        length = _header.length_of(self._tree, self._path)
        header = self._header_bytes(length)
        try:
            self._header, places = _header.parsed(header, length)
        except _header.Malformed as reason:
            raise self._invalid(reason) from None
        return places

    def _header_bytes(self, length: int) -> bytes:
        try:
            return _header.read_header(self._engine, self._tree, self._path, length)
        except _header.Malformed as reason:
            raise self._invalid(reason) from None
        except _header.TooLarge as reason:
            help = "open the repository with a larger `memory`, if you trust whoever saved it"
            raise SafetensorError(f"{reason} ({help})") from None

    def _invalid(self, reason: object) -> SafetensorError:
        help = "it was saved like this, and a restore returns it so: write the file again, and save it"
        return SafetensorError(f"{self._path} of {self._name} is not a safetensors file: {reason} ({help})")

    def _read(self, wanted: list[tuple[Tensor, tuple[Sequence[int], Sequence[int]] | None]]) -> list[Any]:
        """Reads tensors, or boxes `(offsets, shape)` of them, at once."""
        if self._places is not None:
            return self._read_by(self._places, wanted)
        made, requests = [], []
        for tensor, window in wanted:
            one = self._empty(tensor, tensor.shape if window is None else window[1])
            made.append(one)
            if one.nbytes:
                requests.append(read_request(tensor.name, tensor.path, window, self._address(one), one.nbytes))
        if requests:
            self._tree.read_tensors(requests)
        return [self._on_device(one) for one in made]

    def _read_by(
        self,
        places: Mapping[str, _header.Place],
        wanted: list[tuple[Tensor, tuple[Sequence[int], Sequence[int]] | None]],
    ) -> list[Any]:
        """As `_read`, by places in the file."""
        made, ranges = [], []
        for tensor, window in wanted:
            run = _header.run_of(tensor.shape, window)
            one = self._empty(tensor, run.shape)
            made.append((one, run.box))
            if one.nbytes:
                ranges.append(_header.Range(*_header.bytes_of(places[tensor.name], run), self._address(one)))
        _header.read_ranges(self._tree, self._path, ranges)
        boxes = (one if box is None else self._copied(one[box]) for one, box in made)
        return [self._on_device(one) for one in boxes]

    def _copied(self, box: Any) -> Any:
        """A copy of a part, which does not keep the whole in memory."""
        if self._framework == "np":
            return box.copy()
        import torch

        return box.clone(memory_format=torch.contiguous_format)

    def _address(self, tensor: Any) -> int:
        address: int = tensor.data_ptr() if self._framework == "pt" else tensor.ctypes.data
        return address

    def _bytes(self, tensor: Tensor) -> int:
        """Bytes of the tensor that `_empty` makes."""
        if self._framework == "np":
            return math.prod(tensor.shape) * int(_numpy_dtype(tensor).itemsize)
        from . import _torch

        return _torch.length(tensor.dtype, tensor.shape)

    def _empty(self, tensor: Tensor, shape: Sequence[int]) -> Any:
        if self._framework == "np":
            import numpy

            return numpy.empty(tuple(shape), _numpy_dtype(tensor))
        from . import _torch

        if tensor.dtype not in _torch.DTYPES:
            raise SafetensorError(no_type(tensor.name, tensor.dtype))
        _torch.check_shape(tensor.name, tensor.dtype, shape)
        return _torch.empty(tensor.dtype, shape)


def _numpy_dtype(tensor: Tensor) -> Any:
    import numpy

    if tensor.dtype in PACKED:
        raise SafetensorError(no_type(tensor.name, tensor.dtype, "numpy"))
    return numpy.dtype(_NUMPY.get(tensor.dtype, tensor.dtype))


class Slice:
    """A lazy tensor, returned by `SavedFile.get_slice`."""

    def __init__(self, file: SavedFile, tensor: Tensor):
        self._file, self._tensor = file, tensor

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Dtype, by its safetensors name, such as "BF16"."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        self._file._check()
        window, index = _window(index, self._tensor.shape)
        return self._file._read([(self._tensor, window)])[0][index]


def _window(index: Any, shape: Sequence[int]) -> tuple[tuple[list[int], list[int]] | None, Any]:
    """Splits `index` into the box of the tensor to read, and the index to apply to that box. For an index with anything but
    integers and slices, or out of bounds, the box is the whole tensor, and the framework applies or refuses the index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    at = next((at for at, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + (at < len(parts)))
    if len(parts) != len(shape) or not parts:
        return None, index
    offsets, lengths = [], []
    left: list[slice | int] = []
    for part, length in zip(parts, shape, strict=True):
        if isinstance(part, slice) and (part.step is None or part.step > 0):
            chosen = range(*part.indices(length))
            offsets.append(chosen.start if chosen else 0)
            lengths.append(chosen[-1] - chosen.start + 1 if chosen else 0)
            left.append(slice(None, None, chosen.step))
        elif type(part) is int and -length <= part < length:
            offsets.append(part % length)
            lengths.append(1)
            left.append(0)
        else:
            return None, index
    return (offsets, lengths), tuple(left)


def _is_local(filename: Any, repo: Any, name: Any) -> bool:
    return repo is None and name is None and not os.fsdecode(filename).startswith("towline:/")


def _real(module: str, filename: Any) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{os.fspath(filename)} is a local file, which the safetensors package reads and writes: install it, "
            "or use towline://NAME/FILE"
        ) from error


def _bare(filename: str) -> str:
    # pathlib collapses two slashes into one.
    return filename.removeprefix("towline:").strip("/")


def _place(filename: str, name: str | None) -> tuple[str, str]:
    """Name to save as, and path of the file in its tree: the name ends with the first `step-N`, else it is the folder."""
    path = _bare(filename)
    if name is not None:
        return name, path
    folder, _, file = path.rpartition("/")
    if not folder:
        raise UsageError(f"{filename} names no tree to save as: say towline://NAME/{file or 'FILE'}")
    step = re.match(r"(?:[^/]+/)*?step-\d+(?=/)", path)
    return (step[0], path[step.end() + 1 :]) if step else (folder, file)


def _found(repository: Repository, filename: str, name: str | None) -> tuple[Tensors, str]:
    """The tree that holds a file, and the file's path in it. The name is the longest saved name that the URL begins with."""
    path = _bare(filename)
    if name is not None:
        return repository.tensors(name), path
    parts = path.split("/")
    for length in range(len(parts) - 1, 0, -1):
        try:
            return repository.tensors("/".join(parts[:length])), "/".join(parts[length:])
        except NotFound:
            # A choice, such as RUN@latest, is part of no longer name: the error says what the run lacks.
            if "@" in parts[length - 1]:
                raise
        except UsageError:
            continue
    raise NotFound(f"no such file: {filename}: it begins with no saved name of {repository.url} (towline://NAME/FILE)")


def _check_alone(repository: Repository, name: str, path: str) -> None:
    """Raises Conflict if the tree `name` holds other files: the save would replace the whole tree."""
    try:
        entries = repository.show(name).entries
    except NotFound:
        return
    others = [entry["path"] for entry in entries if entry["kind"] != "folder" and entry["path"] != path]
    if others:
        raise Conflict(
            f"{name} holds other files, which would be lost: {', '.join(others[:3])}{', ...' if others[3:] else ''} "
            "(give each file a name of its own, or write them to a folder and save that with Repository.save)"
        )


def _word(key: str, tensor: torch.Tensor) -> str:
    from . import _torch

    try:
        return _torch.DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise SafetensorError(
            f"Key `{key}` is {tensor.dtype}, which is not written here (write the file with the safetensors package, if that "
            "has the type, and save it with Repository.save)"
        ) from None


def _checked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the tensors on the CPU, as they are written. Raises what the safetensors package raises for invalid ones."""
    import torch

    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{key}` is invalid, expected torch.Tensor but received {type(tensor)}")
    sparse = [key for key, tensor in tensors.items() if tensor.layout is not torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support. You can make it a dense "
            "tensor before saving with `.to_dense()` but be aware this might make a much larger file than needed."
        )
    shared = _sharing(tensors)
    if shared:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when loading them "
            f"again: {shared}. A potential way to correctly save your model is to leave all but one of them out, and tie them "
            "again when loading. More information at https://huggingface.co/docs/safetensors/torch_shared_tensors"
        )
    for key, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise NotImplementedError(f"Key `{key}`: Cannot copy out of meta tensor; no data!")
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{key}` which is not allowed. It either means you are trying "
                "to save tensors which are reference of each other in which case it's recommended to save only the full "
                "tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to pack it before saving."
            )
    return {key: tensor.detach().cpu().resolve_conj().resolve_neg() for key, tensor in tensors.items()}


def _sharing(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Names of tensors that share memory, as groups."""
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    for key, tensor in tensors.items():
        if tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() and tensor.numel():
            start = tensor.storage_offset()
            last = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size = tensor.element_size()
            place = (tensor.device, tensor.untyped_storage().data_ptr())
            spans.setdefault(place, []).append((int(start * size), int((last + 1) * size), key))
    found: list[set[str]] = []
    for group in spans.values():
        end, together = -1, {""}
        for start, stop, key in sorted(group):
            if start < end:
                together.add(key)
            else:
                together = {key}
                found.append(together)
            end = max(end, stop)
    return [keys for keys in found if len(keys) > 1]
