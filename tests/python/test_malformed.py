"""Documents that no Towline wrote: an error of Towline each, within the limit of memory and in the time of a good one."""

import argparse
import collections
import contextlib
import copy
import datetime
import io
import json
import os
import pathlib
import pickle
import tracemalloc
import types

import numpy
import pytest
import torch
import towline
from towline import _documents, _torch, _trees, state
from towline._expansion import TensorLength, TreeTensors, check_expansion
from towline.dcp import StorageReader
from towline.dcp import metadata as dcp_metadata
from towline.fsspec import TowlineFileSystem
from towline.safetensors import load_file, safe_open

STRANGE = (None, 0, -1, 1 << 70, 1.5, "x", "U0", "O", True, [], [0], ["x"], {}, {"!": "set", "v": [[]]}, [[1, 2]])


def with_attribute(made):
    made._metadata = {"version": 1}
    return made


def with_self(made):
    vars(made)["self"] = 2
    return made


def saved():
    """A state with every kind of value."""
    grown = torch.nn.Parameter(torch.ones(2, 3))
    held = {
        "weights": torch.arange(6.0).reshape(2, 3),
        "view": torch.arange(6.0).reshape(2, 3).t(),
        "parameter": grown,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.ones(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.qint8
        ),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "array": numpy.arange(4.0),
        "number": numpy.float32(1.5),
        "words": numpy.array(["a", "bc"]),
        "list": [
            1,
            2.5,
            True,
            None,
            "text",
            float("nan"),
            1 << 80,
            3j,
            b"bytes",
            bytearray(b"more" * 300),
            b"long" * 300,
        ],
        "tuple": (1, (2, 3)),
        "set": {1, 2, 3},
        "frozen": {frozenset({1, 2}): "value", (1, 2): "pair", 7: "number"},
        "ordered": with_attribute(collections.OrderedDict(a=1)),
        "counter": collections.Counter("abca"),
        "default": collections.defaultdict(list, a=[1]),
        "deque": collections.deque([1, 2], maxlen=4),
        "path": pathlib.PurePosixPath("/a/b"),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "day": datetime.date(2026, 1, 2),
        "duration": datetime.timedelta(seconds=5),
        "names": types.SimpleNamespace(a=1),
        "arguments": with_self(argparse.Namespace(a=1)),
    }
    described = state.describe(held, False)
    tensors = {leaf.name: leaf.tensor for leaf in described.leaves}

    def read(wanted):
        for name, tensor in wanted:
            if tensor.numel():
                saved = tensors[name].contiguous().reshape(-1).view(torch.uint8)
                tensor.reshape(-1).view(torch.uint8).copy_(saved)

    return json.loads(described.document), {leaf.name: (leaf.word, leaf.shape) for leaf in described.leaves}, read


def places(node, path=()):
    """Paths of everything in a JSON document."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def changed(document, path, value):
    """A copy with `value` at `path`; without it, for Ellipsis."""
    made = copy.deepcopy(document)
    inside = made
    for key in path[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return made


def test_whatever_changes_in_a_document_of_a_state_is_an_error_of_towline_or_another_state():
    document, held, read = saved()
    state.restore(json.dumps(document).encode(), held, read)
    refused = 0
    for path in list(places(document))[1:]:
        for value in (*STRANGE, ...):
            try:
                state.restore(json.dumps(changed(document, path, value)).encode(), held, read)
            except towline.Error:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{path} = {value!r}") from error
    assert refused > 1000


def dcp_document():
    entry = {
        "shape": [4, 2],
        "properties": {
            "dtype": "float32",
            "layout": "strided",
            "memory_format": "preserve_format",
            "requires_grad": False,
        },
        "chunks": [{"offsets": [0, 0], "sizes": [4, 2], "file": "f", "tensor": "t"}],
    }
    return {
        "towline-dcp": 1,
        "torch": torch.__version__,
        "world_size": 1,
        "state": {"w": entry, "epoch": {"file": "b", "start": 0, "length": 9}},
        "planner": {"!": "dict", "v": [[1, {"!": "tuple", "v": ["a"]}]]},
    }


def test_attributes_come_back_and_none_hides_a_method():
    document, held, read = saved()
    restored = state.restore(json.dumps(document).encode(), held, read)
    assert restored["ordered"]._metadata == {"version": 1} and vars(restored["arguments"]) == {"a": 1, "self": 2}
    text = json.dumps(document)
    assert text.count('"_metadata"') == 1
    with pytest.raises(towline.errors.Damaged, match="attributes at state"):
        state.restore(text.replace('"_metadata"', '"items"').encode(), held, read)
    with pytest.raises(towline.errors.UnsupportedValue, match="hides a method"):
        hiding = collections.OrderedDict(a=1)
        hiding.items = 5
        state.describe({"hiding": hiding}, False)


def described(value):
    """A saved state with one value, as arguments of `state.restore`."""
    saved = state.describe({"value": value}, False)
    tensors = {leaf.name: leaf.tensor for leaf in saved.leaves}

    def read(wanted):
        for name, tensor in wanted:
            tensor.copy_(tensors[name])

    held = {leaf.name: (leaf.word, leaf.shape) for leaf in saved.leaves}
    document = saved.document if isinstance(saved.document, bytes) else saved.document.encode()
    return document, held, read


def test_indices_that_are_not_sorted_are_not_taken_for_sorted_ones():
    repeated = torch.sparse_coo_tensor([[1, 1, 0], [0, 0, 2]], torch.ones(3), (2, 3))
    document, held, read = described(repeated)
    assert not state.restore(document, held, read)["value"].is_coalesced()
    claimed = document.replace(b'"coalesced":false', b'"coalesced":true').replace(
        b'"coalesced": false', b'"coalesced": true'
    )
    assert claimed != document
    with pytest.raises(towline.errors.Damaged, match="unsorted indices"):
        state.restore(claimed, held, read)


@pytest.mark.parametrize("axis", [2, -1, True, "0"])
def test_an_axis_that_a_tensor_lacks_is_refused(axis):
    document, held, read = saved()
    (path,) = [path for path in places(document) if path and path[-1] == "axis"]
    with pytest.raises(towline.errors.Damaged, match="names axis"):
        state.restore(json.dumps(changed(document, path, axis)).encode(), held, read)


def test_a_path_longer_than_paths_can_be_is_refused():
    document, held, read = saved()
    long = json.dumps(document).replace('"/a/b"', json.dumps("a/" * 20_000))
    with pytest.raises(towline.errors.Damaged, match="a path of 40000 characters"):
        state.restore(long.encode(), held, read)


@pytest.mark.parametrize("zone", ["America", "a" * 5000, "../etc/passwd", "a\0b", ""])
def test_a_zone_that_is_none_is_an_error_of_towline(zone):
    node = {"!": "datetime", "v": "2026-01-02T00:00:00", "zone": zone}
    with pytest.raises(towline.errors.Unsupported, match="knows no time zone") as caught:
        state.restore(json.dumps({"towline": 1, "state": node}).encode(), {}, lambda _: None)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("word", ["U8", "F64", "C32"])
@pytest.mark.parametrize("shape", [(0, 1 << 63), (0, 1 << 62, 8), (0, (1 << 63) - 1), (0, 1 << 60)])
def test_a_shape_of_which_torch_makes_no_tensor_is_refused(tmp_path, word, shape):
    def restored():
        document = json.dumps({"towline": 1, "state": {"!": "tensor", "t": "a"}}).encode()
        return state.restore(document, {"a": (word, shape)}, lambda _: None)

    header = json.dumps({"a": {"dtype": word, "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header)
    repository = towline.open(tmp_path / "repository")
    repository.save(tmp_path / "f", "file")
    reads = []
    # The engine takes numbers of some length only: a file with others is one of bytes.
    if listed := repository.tensors("file"):
        reads = [lambda: repository.load("file")["a"], listed["a"].torch]
        if word != "C32":
            reads.append(lambda: load_file("f", repo=repository, name="file")["a"])
    try:
        made = torch.empty((*shape, 4) if word == "C32" else shape)
    except (RuntimeError, TypeError):
        with pytest.raises(towline.Damaged, match="a shape that is none"):
            restored()
        for read in reads:
            with pytest.raises(towline.UsageError, match="too large for torch"):
                read()
        return
    assert all(read().shape == made.shape for read in (restored, *reads))


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"])
def test_a_view_of_a_quantized_type_is_refused(dtype):
    node = {"!": "tensor", "t": "a", "dtype": dtype}
    for about in ({"view": [0, [2], [1]]}, {"shape": [2]}):
        document = json.dumps({"towline": 1, "state": {**node, **about}}).encode()
        for into in (None, torch.zeros(2)):
            with pytest.raises(towline.Damaged, match="is not quantized"):
                state.restore(document, {"a": ("U8", (64,))}, lambda _: None, into)


def test_whatever_changes_in_the_metadata_of_a_distributed_checkpoint_is_an_error_of_towline():
    document = dcp_document()
    dcp_metadata.decode(json.dumps(document).encode())
    for path in list(places(document))[1:]:
        for value in (*STRANGE, ...):
            try:
                dcp_metadata.decode(json.dumps(changed(document, path, value)).encode())
            except towline.Error:
                pass
            except BaseException as error:
                raise AssertionError(f"{path} = {value!r}") from error
    nested = json.dumps(document).encode().replace(b'"planner": {', b'"planner": ' + b"[" * 20_000 + b"{")
    for bad in (b"", b"[]", b"5", nested, nested + b"]" * 20_000):
        with pytest.raises(towline.Damaged):
            dcp_metadata.decode(bad)


NO_TEXT = (None, 0, 1.5, True, [], ["f"], {})
NO_NUMBER = (None, -1, 1 << 63, 1.5, "0", True, [], {})
NO_NUMBERS = (None, 0, "42", {}, [None], [4, -1], [4, 1 << 63], [4.0, 2], [4, True], [[4, 2]])
PART = ("state", "w", "chunks", 0)
TYPES = {
    "file of an object": (("state", "epoch", "file"), NO_TEXT),
    "start": (("state", "epoch", "start"), NO_NUMBER),
    "length": (("state", "epoch", "length"), NO_NUMBER),
    "file": ((*PART, "file"), NO_TEXT),
    "tensor": ((*PART, "tensor"), NO_TEXT),
    "dtype": ((*PART, "dtype"), NO_TEXT),
    "as_bytes": ((*PART, "as_bytes"), (None, 0, 1, "true", [])),
    "offsets": ((*PART, "offsets"), (*NO_NUMBERS, [], [0], [0, 0, 0])),
    "sizes": ((*PART, "sizes"), (*NO_NUMBERS, [], [4], [4, 2, 1])),
    "shape": (("state", "w", "shape"), NO_NUMBERS),
}


@pytest.mark.parametrize("what", TYPES)
def test_a_value_of_another_type_in_the_metadata_of_a_distributed_checkpoint_is_damaged(what):
    path, values = TYPES[what]
    document = dcp_document()
    for value in values:
        with pytest.raises(towline.Damaged):
            dcp_metadata.decode(json.dumps(changed(document, path, value)).encode())


PRIME = (1 << 61) - 1


@pytest.mark.parametrize("many", [[n * PRIME for n in range(100_000)], [[n * PRIME, 1] for n in range(100_000)]])
def test_keys_of_one_hash_are_refused_before_they_are_compared_with_each_other(many):
    keys = [{"!": "tuple", "v": one} if isinstance(one, list) else one for one in many]
    nodes = [
        {"!": "set", "v": keys},
        {"!": "dict", "v": [[key, 0] for key in keys]},
        {"!": "dict", "v": [[{"!": "frozenset", "v": keys}, 0]]},
        {"!": "Counter", "v": [[key, 1] for key in keys]},
    ]
    for node in nodes:
        with pytest.raises(towline.Damaged, match="same hash"):
            state.restore(json.dumps({"towline": 1, "state": node}).encode(), {}, lambda _: None)


def test_boxes_of_one_hash_are_refused():
    document = dcp_document()
    signs = [[PRIME * (n >> bit & 1) for bit in range(12)] for n in range(1 << 12)]
    document["state"]["w"]["chunks"] = [{"offsets": at, "sizes": [1] * 12, "file": "f", "tensor": "t"} for at in signs]
    with pytest.raises(towline.Damaged, match="same hash"):
        dcp_metadata.decode(json.dumps(document).encode())


def test_keys_of_one_hash_are_counted_over_the_documents_of_all_ranks():
    def planned(rank):
        return {**dcp_document(), "planner": {"!": "dict", "v": [[(rank * 200 + n) * PRIME, 0] for n in range(200)]}}

    def parts(rank, first):
        signs = [[PRIME * (rank * 200 + n >> bit & 1) for bit in range(12)] for n in range(200)]
        chunks = [{"offsets": at, "sizes": [1] * 12, "file": "f", "tensor": "t"} for at in signs]
        document = dcp_document()
        document["state"]["w"]["chunks"] = chunks
        return first if rank == 0 else document

    objects = {**dcp_document(), "state": {"w": {"file": "b", "start": 0, "length": 9}}}
    for documents, what in (
        (map(planned, range(4)), "keys of the planner's data"),
        ((parts(rank, dcp_document()) for rank in range(4)), "chunks of w"),
        # An object for the first rank, and a tensor for the others.
        ((parts(rank, objects) for rank in range(4)), "chunks of w"),
    ):
        with pytest.raises(towline.Damaged, match=f"more than 256 {what} .* the same hash"):
            dcp_metadata.merge(dcp_metadata.decode(json.dumps(one).encode()) for one in documents)


def test_of_an_item_that_several_ranks_have_the_first_one_counts():
    def document(rank):
        made = dcp_document()
        chunk = made["state"]["w"]["chunks"][0]
        made["state"]["w"]["chunks"] = [
            {**chunk, "file": str(rank)},
            {**chunk, "offsets": [rank + 4, 0], "file": str(rank)},
        ]
        made["planner"] = {"!": "dict", "v": [["a", rank], [rank, "own"]]}
        return json.dumps(made).encode()

    merged = dcp_metadata.merge(map(dcp_metadata.decode, map(document, (2, 0, 1))))
    assert [list(chunk.offsets) for chunk in merged.state_dict_metadata["w"].chunks] == [[0, 0], [6, 0], [4, 0], [5, 0]]
    assert {tuple(index.offset): where.path for index, where in merged.storage_data.items() if index.offset} == {
        (0, 0): "2",
        (6, 0): "2",
        (4, 0): "0",
        (5, 0): "1",
    }
    assert merged.planner_data == {"a": 2, 2: "own", 0: "own", 1: "own"}


@pytest.mark.parametrize("kind", ["state.json", "metadata.json"])
def test_a_document_of_more_objects_than_the_memory_holds_is_refused(tmp_path, kind):
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / kind).write_bytes(b'{"towline":1,"towline-dcp":1,"state":[' + b"[]," * 4_000_000 + b"0]}")
    repository = towline.open(tmp_path / "repository", memory="64M")
    repository.save(folder, "run/step-1")
    with pytest.raises(towline.Exhausted, match=f"{kind} of run/step-1 needs up to .* MiB of memory"):
        _documents.read_document(repository, "run/step-1", kind)


def documents_of_ranks(folder, ranks, entries):
    """Writes a document for each rank, with objects of its own."""
    folder.mkdir()
    for rank in range(ranks):
        held = {f"{rank}.{number}": {"file": "", "start": 0, "length": 0} for number in range(entries)}
        document = {"towline-dcp": 1, "torch": "2", "world_size": ranks, "state": held, "planner": None}
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(document, separators=(",", ":")))


def test_documents_of_ranks_share_one_limit_of_memory(tmp_path):
    documents_of_ranks(tmp_path / "step", 4, 30_000)
    repository = towline.open(tmp_path / "repository", memory="64M")
    repository.save(tmp_path / "step", "run/step-1")
    with pytest.raises(
        towline.Exhausted,
        match=r"rank-0000[0-3].json of run/step-1, with the documents before it, needs up to 7\d MiB",
    ):
        StorageReader(repository, "run/step-1").read_metadata(rank=3)
    larger = towline.open(tmp_path / "repository", memory="256M")
    read = StorageReader(larger, "run/step-1").read_metadata(rank=3)
    assert len(read.state_dict_metadata) == len(read.storage_data) == 120_000


def test_merged_metadata_takes_no_more_memory_than_is_counted_for_its_documents():
    document = dcp_document()
    entry = document["state"]["w"]
    parts = [{**entry["chunks"][0], "offsets": [part, 0]} for part in range(4)]
    tensors = {str(number): {**entry, "chunks": parts} for number in range(2000)}
    objects = {str(number): {"file": "", "start": 0, "length": 0} for number in range(8000)}
    for held in (tensors, objects):
        text = json.dumps({**document, "state": held}, separators=(",", ":")).encode()
        tracemalloc.start()
        merged = dcp_metadata.merge(map(dcp_metadata.decode, [text]))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(merged.storage_data) == 8000 and most <= _documents.memory_of(text)


def test_the_estimate_of_memory_is_not_below_what_objects_take():
    for text in ("[]", "{}", '{"a":0}', '{"a":0,"b":[{"c":"word"}]}', "[1,2.5,null]", '"word"', "123456"):
        document = f"[{','.join([text] * 20_000)}]".encode()
        assert held_by(json.loads(document)) <= _documents.memory_of(document), text
    wide = ('["' + "a" * 100_000 + '\U0001f600"]').encode()
    assert held_by(json.loads(wide)) <= _documents.memory_of(wide) + 256
    escaped = ('["' + "a" * 100_000 + '\\ud83d\\ude00"]').encode()
    assert held_by(json.loads(escaped)) <= _documents.memory_of(escaped) + 256


def held_by(value, seen=None):
    """Bytes of all objects in a value, each counted once."""
    import sys

    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sys.getsizeof(value) + sum(held_by(one, seen) for one in inside)


def test_a_pickle_of_metadata_counts_its_objects(tmp_path):
    from towline.dcp import folder

    held = io.BytesIO()
    pickle.dump({"a": [(1, 2), [], {}]}, held, protocol=2)
    few = _documents.memory_of(held.getvalue(), folder.MARKS)
    assert few < 4096 and _documents.memory_of(b"]0" * 1_000_000, folder.MARKS) > 64_000_000


def deep_tree(folder, entries):
    """Folders in each other, with many in the last: some kilobytes when saved, and 4 KB for each path."""
    folder.mkdir()
    above = os.open(folder, os.O_RDONLY)
    for _ in range(14):
        os.mkdir("x" * 250, dir_fd=above)
        below = os.open("x" * 250, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    for number in range(entries):
        os.mkdir(f"{number:06}", dir_fd=above)
    os.close(above)
    return folder


def test_a_list_that_memory_does_not_hold_is_refused(tmp_path):
    url = str(tmp_path / "repository")
    repository = towline.open(url, memory="64M")
    repository.save(deep_tree(tmp_path / "tree", 8000), "deep")
    with pytest.raises(towline.Error, match=r"report is too long for memory.*at most 16.0 MiB"):
        repository.show("deep")
    files = TowlineFileSystem(url, memory="64M")
    with pytest.raises(towline.Error, match=r"list of the tree is too long for memory.*at most 32.0 MiB"):
        files.find("deep")


@pytest.fixture
def views(tmp_path):
    """A repository with a torch file of 4 MiB that is named as 300 tensors, 1.2 GB in all: by itself, and as that of a state."""
    folder = tmp_path / "views"
    folder.mkdir()
    storage = torch.zeros(4 << 20, dtype=torch.uint8)
    torch.save([storage[start:] for start in range(300)], folder / "state.safetensors")
    tensors = [{"!": "tensor", "t": str(number)} for number in range(300)]
    (folder / "state.json").write_text(json.dumps({"towline": 1, "state": tensors}))
    repository = towline.open(tmp_path / "repository", memory="256M")
    repository.save(folder, "run/step-1")
    return repository


def test_a_file_of_the_same_bytes_as_many_tensors_is_refused_before_memory_is_allocated(views, monkeypatch):
    made = []
    monkeypatch.setattr(_torch, "empty", lambda *about: made.append(about))
    attempts = {
        "towline.load": lambda: views.load("run/step-1"),
        "boxes": lambda: views.load("run/step-1", tensors="*[0:4000000]"),
        "restore": lambda: towline.Checkpointer(views, "run").restore(),
        "load_file": lambda: load_file("state.safetensors", repo=views, name="run/step-1"),
    }
    for read in attempts.values():
        with pytest.raises(
            towline.Exhausted,
            match=r"tensors of state.safetensors of run/step-1 .* they take \d+ bytes.* at most 1\d{9} are",
        ):
            read()
    file = safe_open("state.safetensors", "np", repo=views, name="run/step-1")
    with pytest.raises(towline.Exhausted, match="get_tensor"):
        file.get_tensors()
    assert not made


def test_tensors_of_a_file_of_views_come_one_after_the_other(views):
    assert sum(tensor.numel() for _, tensor in views.stream("run/step-1", ahead="16M")) > 1_200_000_000
    assert views.load("run/step-1", tensors="1?")["12"].numel() == (4 << 20) - 12


GIB = 1 << 30


@pytest.mark.parametrize(
    ("tensors", "refused"),
    [
        # A tensor with two names, more of them than EXPANSION_MAX alone would allow; and three.
        ([("a", "w", 2 * GIB), ("a", "v", 2 * GIB)], False),
        ([("a", "w", 2 * GIB), ("a", "v", 2 * GIB), ("a", "u", 2 * GIB)], True),
        # Boxes of one tensor are as many as asked for.
        ([("a", "w", 2 * GIB)] * 9, False),
        # Files below a folder, each counted once.
        ([(".", "w", 7 * GIB)], False),
        ([(".", "w", 5 * GIB), ("a", "v", 3 * GIB)], True),
        ([("f", "w", 3 * GIB - 1), ("f/g", "v", 1)], False),
        ([("f", "w", 3 * GIB), ("f/g", "v", 1)], True),
        ([("absent", "w", GIB), ("other", "w", 1)], True),
    ],
)
def test_tensors_are_measured_by_the_files_that_hold_them(tensors, refused):
    entries = [("", "directory", 0), ("a", "file", 2 * GIB), ("f", "directory", 0), ("f/g", "directory", 0)]
    entries += [("f/g/h", "file", GIB), ("fg", "file", 0), ("f/link", "link", 5 * GIB)]
    tree = types.SimpleNamespace(entries=lambda: entries)
    lengths = [TensorLength(name, path, size) for path, name, size in tensors]
    wanted = TreeTensors("run/step-1", lengths, lambda: tree)
    with pytest.raises(towline.Exhausted) if refused else contextlib.nullcontext():
        check_expansion(wanted, "")


def test_trees_that_are_kept_open_take_no_more_memory_than_a_repository_has(tmp_path):
    url = str(tmp_path / "repository")
    repository = towline.open(url)
    repository.save(deep_tree(tmp_path / "tree", 3000), "tree-0")
    for number in range(1, 6):
        repository.copy("tree-0", f"tree-{number}")
    shared = _trees.shared_repository(url, {"memory": "64M"})
    for number in range(6):
        assert len(shared.tree(shared.find(f"tree-{number}")).entries) == 3014
        assert shared._kept() <= 64 << 20
    assert 1 <= len(shared._trees) < 6


@pytest.mark.parametrize("dtype", ["U0", "S0"])
def test_an_array_of_texts_without_a_size_takes_no_memory_before_it_is_refused(dtype, monkeypatch):
    document = json.dumps({"towline": 1, "state": {"!": "ndarray", "t": "a", "dtype": dtype, "shape": [1 << 43]}})
    made, empty = [], numpy.empty
    monkeypatch.setattr(numpy, "empty", lambda shape, dtype: made.append(shape) or empty(0, dtype))
    with pytest.raises(towline.Damaged, match="bytes by its type and shape"):
        state.restore(document.encode(), {"a": ("U8", (0,))}, lambda _: None)
    assert [shape for shape in made if shape] == []


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        ("(2000000000,)u1", 1),
        ("(2,2)u1", 1),
        ("(1,)u1", 1),
        ("(0,)u1", 0),
        ([["a", "(2000000000,)u1"]], 1),
        ([["a", "u1", [2000000000]]], 1),
        ("u1,(2000000000,)u1", 2),
        ({"names": ["a"], "formats": ["(2000000000,)u1"]}, 1),
        ({"names": ["a"], "formats": ["u1"], "itemsize": 1 << 33}, 1),
    ],
)
def test_an_array_whose_elements_are_arrays_takes_no_more_memory_than_is_stored(dtype, length, monkeypatch):
    array = {"!": "ndarray", "t": "a", "dtype": dtype, "shape": [1]}
    number = {"!": "numpy", "dtype": dtype, "v": "AQ=="}
    made, empty = [], numpy.empty
    monkeypatch.setattr(numpy, "empty", lambda shape, dtype: made.append(shape) or empty(shape, dtype))
    for node in (array, number):
        document = json.dumps({"towline": 1, "state": {"weights": node}}).encode()
        with pytest.raises(towline.Damaged):
            state.restore(document, {"a": ("U8", (length,))}, lambda _: None)
    assert [shape for shape in made if shape] == []


def test_an_array_of_structures_with_arrays_is_restored():
    array = numpy.zeros(2, [("number", "u1"), ("row", "<f4", (3,))])
    array["row"] = [[1, 2, 3], [4, 5, 6]]
    back = state.restore(*described(array))["value"]
    assert back.dtype == array.dtype and (back == array).all()


def in_each_other(levels, inner, begin, end):
    return "".join([begin] * levels) + inner + "".join([end] * levels)


@pytest.mark.parametrize(
    "node",
    [
        # Keys, which no path leads to.
        '{"!":"dict","v":[[' + in_each_other(320, "1", '{"!":"tuple","v":[', "]}") + ",0]]}",
        '{"!":"dict","v":[[' + in_each_other(700, "1", "[", "]") + ",0]]}",
        '{"!":"set","v":[' + in_each_other(320, "1", '{"!":"frozenset","v":[', "]}") + "]}",
        in_each_other(256, "1", '{"!":"tuple","v":[', "]}"),
        in_each_other(400, "null", '{"!":"sparse","parts":[', "]}"),
        '{"!":"ndarray","t":"a","shape":[0],"dtype":[["f",' + in_each_other(700, "1", "[", "]") + "]]}",
    ],
)
def test_a_document_that_is_nested_deeply_is_refused(node):
    document = ('{"towline":1,"state":' + node + "}").encode()
    frames = 0

    def refused(more):
        nonlocal frames
        # Callers have used some of the stack already.
        if more:
            refused(more - 1)
            return
        frames += 1
        with pytest.raises(towline.Error):
            state.restore(document, {"a": ("U8", (0,))}, lambda _: None)

    for more in (0, 100, 300):
        refused(more)
    assert frames == 3
