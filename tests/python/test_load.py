"""`towline.load`: tensors by name, read here, or mapped from the memory of this node's agent."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import towline
from safetensors.torch import save_file
from towline import _loading, _shards
from towline.state import Restoring, describe

ROOT = Path(__file__).parents[2]
TOWLINE = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline"))


def tensors(seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(512, 1024, generator=generator),
        "layers.0.w": torch.randn(1 << 18, generator=generator).to(torch.bfloat16).view(512, 512),
        "layers.1.w": torch.randint(-9, 9, (3, 5, 7), generator=generator),
        "scale": torch.tensor(0.5),
        "nothing": torch.empty(0, 4),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


@pytest.fixture
def model(tmp_path: Path, repository: towline.Repository) -> dict[str, torch.Tensor]:
    """A model, saved as `models/m`."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    repository.save(folder, "models/m")
    return tensors()


@pytest.fixture(params=["64M", None])
def memory(
    request: pytest.FixtureRequest, tmp_path: Path, repository: towline.Repository, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str | None]:
    """Memory of this node's agent for tensors; None without an agent."""
    if request.param is None:
        yield None
        return
    with running(tmp_path, monkeypatch, request.param):
        yield request.param


class running:
    """An agent with memory for tensors."""

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str = "64M", settings: str | None = None
    ):
        if not TOWLINE.exists():
            pytest.skip(f"{TOWLINE} is not there: cargo build makes it")
        self.socket = tmp_path / "agent.sock"
        file = tmp_path / "agent.toml"
        file.write_text(
            settings
            or f'socket = "agent.sock"\nrepository = "{tmp_path}/repository"\nmemory = "512M"\n'
            f'[cache]\ndir = "cache"\ncapacity = "512M"\nfree_floor = "1M"\n[staging]\nmemory = "{memory}"\n'
        )
        self.log = tmp_path / "agent.log"
        with self.log.open("w") as log:
            command = [TOWLINE, "agent", "--config", file, "--json"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        monkeypatch.setenv("TOWLINE_AGENT", str(self.socket))

    def __enter__(self) -> running:
        assert b"listening" in self.process.stdout.readline(), self.log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def staged() -> list[dict]:
    listed = subprocess.run([TOWLINE, "stage", "--list", "--json"], check=True, capture_output=True).stdout
    return json.loads(listed)["trees"]


def test_all_tensors_come_by_name(repository: towline.Repository, model: dict, memory: str | None) -> None:
    for _ in range(2):
        loaded = towline.load("models/m", repo=repository)
        assert same(loaded, model)
    assert memory is None or [tree["users"] for tree in staged()] == [1]
    del loaded
    gc.collect()
    if memory is not None:
        until = time.monotonic() + 60
        while staged()[0]["users"]:
            assert time.monotonic() < until, "the agent still thinks that the tensors are used"


def test_tensors_with_slashes_in_their_names_are_among_all(
    repository: towline.Repository, tmp_path: Path, memory: str | None
) -> None:
    folder = tmp_path / "slashes"
    folder.mkdir()
    named = {"params/dense/kernel": torch.ones(2, 3), "step": torch.ones(1)}
    save_file(named, folder / "model.safetensors")
    repository.save(folder, "slashes")
    assert same(repository.load("slashes"), named)
    assert same(dict(repository.stream("slashes")), named)


def test_a_file_without_tensors_is_loaded_as_the_package_does(
    tmp_path: Path, repository: towline.Repository, memory: str | None
) -> None:
    (tmp_path / "tree").mkdir()
    save_file({}, tmp_path / "tree" / "model.safetensors")
    (tmp_path / "tree" / "config.json").write_text("{}")
    repository.save(tmp_path / "tree", "empty")
    for path in (None, "model.safetensors"):
        assert repository.load("empty", path=path) == {} == dict(repository.stream("empty", path=path))
    for path in ("config.json", "absent.safetensors"):
        with pytest.raises(towline.NotFound):
            repository.load("empty", path=path)
    with pytest.raises(towline.NotFound):
        repository.load("empty", tensors="w")


def test_some_tensors_and_boxes_are_chosen(repository: towline.Repository, model: dict, memory: str | None) -> None:
    loaded = repository.load("models/m", tensors=["layers.*", "embed[0:2, 8:]"], path="model.safetensors")
    assert loaded.keys() == {"layers.0.w", "layers.1.w", "embed"}
    assert torch.equal(loaded["embed"], model["embed"][0:2, 8:])
    assert same(repository.load("models/m", tensors="scale"), {"scale": model["scale"]})
    with pytest.raises(towline.NotFound):
        repository.load("models/m", tensors="none")
    with pytest.raises(towline.NotFound):
        repository.load("models/absent")


def test_writes_stay_with_the_process(repository: towline.Repository, model: dict, memory: str | None) -> None:
    first = repository.load("models/m")
    first["embed"].zero_()
    assert same(repository.load("models/m"), model)
    copied = pickle.loads(pickle.dumps(first["layers.0.w"]))
    assert torch.equal(copied, model["layers.0.w"])


def test_names_that_several_files_have_get_their_path(
    tmp_path: Path, repository: towline.Repository, memory: str | None
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in (1, 2):
        save_file(
            {"w": torch.full((4,), float(shard)), f"only.{shard}": torch.ones(2)}, folder / f"{shard}.safetensors"
        )
    repository.save(folder, "shards")
    loaded = repository.load("shards")
    assert set(loaded) == {"1.safetensors:w", "2.safetensors:w", "only.1", "only.2"}
    assert loaded["2.safetensors:w"].tolist() == [2.0] * 4
    with pytest.raises(towline.UsageError, match="two different boxes"):
        repository.load("shards", tensors=["only.1[0:1]", "only.1[1:2]"])


def empty_tensors(path: Path, names: list[str]) -> None:
    """Writes a safetensors file of tensors without elements."""
    header = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_two_tensors_of_one_key_are_both_named_however_many_others_there_are(
    tmp_path: Path, repository: towline.Repository
) -> None:
    folder = tmp_path / "planted"
    folder.mkdir()
    # A search among all keys for each key would take many minutes.
    empty_tensors(folder / "0", [f"{number:07}" for number in range(200_000)])
    for file, name in (("y", "x"), ("z", "x"), ("zz", "y:x")):
        empty_tensors(folder / file, [name])
    repository.save(folder, "planted")
    for load in (repository.load, lambda name: dict(repository.stream(name))):
        with pytest.raises(towline.UsageError, match=r"two tensors have the key 'y:x': 'x' of y and 'y:x' of zz"):
            load("planted")
    assert set(repository.load("planted", path="zz")) == {"y:x"}


def test_tensors_are_streamed_while_the_next_are_read(
    repository: towline.Repository, model: dict, memory: str | None
) -> None:
    for ahead in (1, "1M", 1 << 30):
        assert same(dict(repository.stream("models/m", ahead=ahead)), model)
    some = repository.stream("models/m", tensors="layers.*")
    assert next(some)[0].startswith("layers.")
    some.close()
    with pytest.raises(towline.NotFound):
        repository.stream("models/absent")
    with pytest.raises(towline.UsageError, match="ahead"):
        repository.stream("models/m", ahead=0)


def test_a_stream_keeps_its_tree_when_the_name_is_replaced(
    tmp_path: Path, repository: towline.Repository, memory: str | None
) -> None:
    for value in (1.0, 2.0):
        folder = tmp_path / f"v{value}"
        folder.mkdir()
        save_file({f"l{at}": torch.full((1 << 16,), value) for at in range(6)}, folder / "model.safetensors")
    repository.save(tmp_path / "v1.0", "m")
    streamed = repository.stream("m", ahead=1)
    first = next(streamed)
    repository.save(tmp_path / "v2.0", "m")
    assert {tensor[0].item() for _, tensor in [first, *streamed]} == {1.0}
    assert repository.load("m")["l0"][0].item() == 2.0


def test_tensors_of_another_shape_are_never_copied_into_those_that_are_there() -> None:
    into = {"w": torch.zeros(4), "v": torch.zeros(4)}
    described = describe({"w": torch.ones(4), "v": torch.ones(4)})
    restoring = Restoring(described.document, {"w": ("F32", (4,)), "v": ("F32", (4,))}, into)
    other = {"w": torch.ones(1000), "v": torch.ones(4, dtype=torch.float64)}
    assert restoring.use(other) == set() and restoring.use({"w": torch.ones(4)}) == {"w"}
    assert into["w"].tolist() == [1.0] * 4 and into["v"].tolist() == [0.0] * 4


def test_types_that_torch_lacks_are_refused_alike(
    tmp_path: Path, repository: towline.Repository, memory: str | None
) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [64, 64], "data_offsets": [0, 2048]}}).encode()
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2048))
    repository.save(tmp_path / "odd.safetensors", "odd")
    with pytest.raises(towline.UsageError, match=r"w is F4, numbers of less than a byte, .*float4_e2m1fn_x2.*restore"):
        repository.load("odd")


def test_a_checkpoint_is_restored_from_the_agents_memory(repository: towline.Repository, memory: str | None) -> None:
    saved = {"model": tensors(), "step": 3}
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, saved)
    checkpointer = towline.Checkpointer(repository, "run")
    restored = checkpointer.restore()
    assert same(restored["model"], saved["model"]) and restored["step"] == 3
    into = {"model": {key: torch.zeros_like(tensor) for key, tensor in saved["model"].items()}, "step": 0}
    before = {key: tensor.data_ptr() for key, tensor in into["model"].items()}
    checkpointer.restore(into=into)
    assert same(into["model"], saved["model"]) and into["step"] == 3
    assert {key: tensor.data_ptr() for key, tensor in into["model"].items()} == before
    assert memory is None or [tree["name"] for tree in staged()] == ["run/step-1"]


def test_load_file_maps_too(repository: towline.Repository, model: dict, memory: str | None) -> None:
    loaded = towline.safetensors.load_file("model.safetensors", repo=repository, name="models/m")
    assert same(loaded, model)
    assert memory is None or [tree["users"] for tree in staged()] == [1]


def test_processes_share_what_one_has_read(
    tmp_path: Path, repository: towline.Repository, model: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, monkeypatch, "64M"):
        program = (
            "import sys, torch, towline\n"
            f"loaded = towline.load('models/m', repo={repository.url!r})\n"
            "print(loaded['embed'].double().sum().item(), flush=True)\n"
            "sys.stdin.read()\n"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(3)
        ]
        sums = {float(process.stdout.readline()) for process in processes}
        assert sums == {model["embed"].double().sum().item()}
        assert [tree["users"] for tree in staged()] == [3]
        for process in processes:
            process.communicate()


def test_tensors_outlive_the_agent_and_one_that_has_no_room_is_done_without(
    tmp_path: Path, repository: towline.Repository, model: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, monkeypatch, "64M"):
        loaded = repository.load("models/m")
    assert same(loaded, model)
    assert same(repository.load("models/m"), model), "without an agent"
    with running(tmp_path, monkeypatch, "1M"):
        assert same(repository.load("models/m"), model)
        assert staged() == []


def test_a_forked_child_keeps_its_tensors(
    tmp_path: Path, repository: towline.Repository, model: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, monkeypatch, "64M"):
        loaded = repository.load("models/m")
        expected = model["embed"].numpy().tobytes()
        child = os.fork()
        if child == 0:
            # Without torch's own threads, which a child does not have.
            good = loaded["embed"].numpy().tobytes() == expected
            del loaded
            os._exit(0 if good else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert same(loaded, model)
        assert [tree["users"] for tree in staged()] == [1]


def test_the_page_about_staging_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/staging.md").read_text()
    blocks = {
        kind: re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for kind in ("toml", "python", "sh")
    }
    here = lambda text: text.replace("/srv/checkpoints", f"{tmp_path}/repository").replace("/var/cache", str(tmp_path))  # noqa: E731
    (settings,) = blocks["toml"]
    loading, streaming, _ = blocks["python"]
    repository = towline.open(tmp_path / "repository", create=True)
    weights = {"embed": torch.randn(256, 64), "layers.0": torch.randn(512, 1024)}
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model/model.safetensors")
    repository.save(tmp_path / "model", "models/base")
    with towline.Checkpointer(repository, "run-7") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1 << 19)})
    monkeypatch.setenv("TOWLINE_REPO", repository.url)
    model = torch.nn.ParameterDict(
        {name.replace(".", "_"): torch.zeros_like(tensor) for name, tensor in weights.items()}
    )
    named = {
        "model": SimpleNamespace(get_parameter=lambda name: model[name.replace(".", "_")]),
        "state": {"w": torch.zeros(1 << 19)},
    }
    with running(tmp_path, monkeypatch, settings='socket = "agent.sock"\n' + here(settings)):
        exec(here(loading), named)
        assert same(named["weights"], weights)
        assert same(named["some"], {**weights, "embed": weights["embed"][0:128]})
        assert named["state"]["w"].sum() == 1 << 19
        for command in blocks["sh"][0].splitlines():
            subprocess.run(
                command.replace("towline", str(TOWLINE), 1), shell=True, check=True, stdout=subprocess.DEVNULL
            )
    exec(here(streaming), named)
    assert torch.equal(model["layers_0"], weights["layers.0"])


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of two files with their index; returns its tensors."""
    folder.mkdir(parents=True)
    held = {f"layers.{number}": torch.arange(1000.0) + number for number in range(4)}
    files = {name: f"model-0000{1 + number // 2}-of-00002.safetensors" for number, name in enumerate(held)}
    for file in sorted(set(files.values())):
        save_file({name: held[name] for name in held if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return held


SECOND = "model-00002-of-00002.safetensors"
INCOMPLETE = {
    "truncated": (lambda file: os.truncate(file, 3000), "is not a safetensors file: its tensors take 8000 bytes, .* cut short"),
    "missing": (Path.unlink, "which is no file of the tree"),
    "another": (lambda file: save_file({"other": torch.ones(1)}, file), "which has no such tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", INCOMPLETE)
@pytest.mark.parametrize("folder", ["", "weights"])
def test_a_checkpoint_that_lacks_a_shard_is_never_loaded_in_part(
    tmp_path: Path, repository: towline.Repository, memory: str | None, what: str, folder: str
) -> None:
    held = sharded(tmp_path / "tree" / folder)
    spoil, reason = INCOMPLETE[what]
    spoil(tmp_path / "tree" / folder / SECOND)
    repository.save(tmp_path / "tree", "m")
    match = rf"index.json of m names 4 tensors, of which 2 are not there: the first is 'layers.2' of {folder}/?{SECOND}.*{reason}"
    for options in ({}, {"path": folder or None}):
        for load in (repository.load, repository.stream):
            with pytest.raises(towline.Damaged, match=match):
                load("m", **options)
    there = {name: held[name] for name in ("layers.0", "layers.1")}
    assert same(repository.load("m", path=f"{folder}/model-00001-of-00002.safetensors".strip("/")), there)
    assert same(dict(repository.stream("m", tensors=list(there))), there)


def merged(folder: Path, held: dict[str, torch.Tensor]) -> None:
    for file in folder.glob("model-*"):
        file.unlink()
    save_file(held, folder / "model.safetensors")


def linked(folder: Path, held: dict[str, torch.Tensor]) -> None:
    (folder / "blobs").mkdir()
    for file in list(folder.glob("model-*")):
        file.rename(folder / "blobs" / file.name)
        file.symlink_to(f"blobs/{file.name}")


WHOLE = {
    "as it is": lambda folder, held: None,
    "merged": merged,
    "links": linked,
    "no index": lambda folder, held: (folder / "other.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
    "no JSON": lambda folder, held: (folder / "other.safetensors.index.json").write_text("{"),
    "a file without tensors": lambda folder, held: save_file({}, folder / "empty.safetensors"),
}


@pytest.mark.parametrize("what", WHOLE)
def test_a_checkpoint_of_shards_is_loaded_whole(
    tmp_path: Path, repository: towline.Repository, memory: str | None, what: str
) -> None:
    held = sharded(tmp_path / "tree")
    WHOLE[what](tmp_path / "tree", held)
    repository.save(tmp_path / "tree", "m")
    assert same(repository.load("m"), held)
    assert same(dict(repository.stream("m")), held)


def test_a_file_whose_tensors_are_not_listed_is_never_left_out(
    tmp_path: Path, repository: towline.Repository, memory: str | None
) -> None:
    sharded(tmp_path / "tree")
    # More dimensions than a tree lists.
    save_file({"v": torch.ones([1] * 100)}, tmp_path / "tree" / "v.safetensors")
    repository.save(tmp_path / "tree", "m")
    for load in (repository.load, repository.stream):
        with pytest.raises(towline.NotFound, match=r"v.safetensors of m has 1 tensors, of which .* `--cut tensor`"):
            load("m")
    sharded(tmp_path / "other")
    command = [sys.executable, "-m", "towline", "save", tmp_path / "other", "n", "--repo", repository.url, "-q"]
    subprocess.run([*command, "--cut", "content"], check=True)
    with pytest.raises(
        towline.NotFound, match=r"index.json of n names 4 tensors, of which 4 are not there.*`--cut tensor`"
    ):
        repository.load("n")


def test_a_file_that_is_no_safetensors_file_is_never_left_out(
    tmp_path: Path, repository: towline.Repository, memory: str | None
) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "w.safetensors")
    (folder / "v.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    repository.save(folder, "m")
    for load in (repository.load, repository.stream):
        with pytest.raises(towline.Damaged, match=r"v.safetensors of m is not a safetensors file: its header has"):
            load("m")
    assert repository.load("m", path="w.safetensors").keys() == {"w"}
    (folder / "w.safetensors").unlink()
    repository.save(folder, "alone")
    with pytest.raises(towline.Damaged, match=r"v.safetensors of alone is not a safetensors file"):
        repository.load("alone")


def test_an_index_that_memory_does_not_hold_is_not_compared(
    tmp_path: Path, repository: towline.Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = sharded(tmp_path / "tree")
    (tmp_path / "tree" / SECOND).unlink()
    repository.save(tmp_path / "tree", "m")
    monkeypatch.setattr(_shards, "_INDEX_MAX", 100)
    assert repository.load("m").keys() == {"layers.0", "layers.1"} < held.keys()
    assert "model.safetensors.index.json of m is not compared" in caplog.text


def test_indexes_of_many_folders_are_compared_each_with_its_own(tmp_path: Path, repository: towline.Repository) -> None:
    folders = [sharded(tmp_path / "tree" / folder) for folder in ("", "checkpoint-5", "deep/er")]
    (tmp_path / "tree" / "checkpoint-5" / SECOND).unlink()
    repository.save(tmp_path / "tree", "m")
    with pytest.raises(
        towline.Damaged, match=rf"^checkpoint-5/model.*the first is 'layers.2' of checkpoint-5/{SECOND}"
    ):
        repository.load("m")
    for held, path in zip(folders[1:], ("checkpoint-5/model-00001-of-00002.safetensors", "deep"), strict=True):
        loaded = repository.load("m", path=path)
        assert loaded.items() and all(torch.equal(loaded[name], held[name]) for name in loaded)
    assert len(repository.load("m", path="deep/er/")) == 4


def test_staged_tensors_of_an_earlier_version_are_as_whole_as_it_was(
    tmp_path: Path, repository: towline.Repository
) -> None:
    earlier = [(("model.safetensors", "w"), torch.ones(1))]
    sharded(tmp_path / "tree")
    repository.save(tmp_path / "tree", "m")
    _loading._check_staged(repository._engine, "m", None, earlier)
    (tmp_path / "tree" / SECOND).unlink()
    repository.save(tmp_path / "tree", "m")
    with pytest.raises(towline.Damaged, match="of which 2 are not there"):
        _loading._check_staged(repository._engine, "m", None, earlier)


def test_staged_tensors_are_loaded_while_the_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        def open_tree(self, name: str) -> None:
            raise towline.Unreachable("store does not answer")

    _loading._check_staged(Away(), "m", None, [])  # type: ignore[arg-type]
    assert "m is loaded from the agent's memory without a search for missing tensors: store does not" in caplog.text
