"""torch.distributed.checkpoint with towline.dcp, in one process."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import pickle
import threading
import time
import warnings
import zipfile

import pytest
import towline

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import metadata as torch_metadata  # noqa: E402
from torch.distributed.checkpoint import state_dict_saver  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, WriteItemType  # noqa: E402
from towline.dcp import Stager, StorageReader, StorageWriter, folder, load, save  # noqa: E402
from towline.dcp.metadata import StorageInfo, decode, encode  # noqa: E402
from towline.dcp.stager import Region  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")

NAME = "run/step-1"


def a_state(seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tied = made(8, 8)
    return {
        "model": {
            "weight": made(33, 17),
            "half": made(9).bfloat16(),
            "tenth": made(6, 5).to(torch.float8_e4m3fn),
            "complex": made(6, 4).to(torch.complex128),
            "lonely": torch.tensor(1.5j, dtype=torch.complex128),
            "scalar": made(),
            "empty": torch.zeros(0, 4),
            "across": made(7, 5).t(),
            "every_other": made(20)[::2],
            "wide": made(1, 6).expand(5, 6),
            "mirrored": made(4).to(torch.complex64).conj(),
            "flags": made(12) > 0,
            "tied": tied,
            "tied_again": tied.detach(),
            "__metadata__": made(3),
        },
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, made(4)],
        "pair": (seed, made(3)),
        "step": seed,
    }


def zeroed(state: dict) -> dict:
    """Another state of the same kind, to load into."""

    def other(value):
        if isinstance(value, torch.Tensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, dict):
            return {key: other(one) for key, one in value.items()}
        return [other(one) for one in value] if isinstance(value, list) else None

    return other(state)


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and bool((one.resolve_conj() == other.resolve_conj()).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def loaded(repository: towline.Repository, like: dict, name: str = NAME) -> dict:
    into = zeroed(like)
    dcp.load(into, storage_reader=StorageReader(repository, name))
    return into


class Counting:
    """A repository's engine that counts its calls."""

    def __init__(self, engine):
        self._engine, self.calls = engine, []

    def __getattr__(self, name):
        call = getattr(self._engine, name)

        def counted(*said):
            self.calls.append((name, said))
            return call(*said)

        return counted


def test_a_state_comes_back(repository):
    state = a_state(3)
    metadata = dcp.save(
        state, storage_writer=StorageWriter(repository, NAME, metrics={"loss": 2.0}, labels={"by": "me"})
    )
    assert same(loaded(repository, state), state)
    assert metadata.state_dict_metadata["model.weight"].size == (33, 17)
    (step,) = repository.runs("run")[0].steps
    assert (step["metrics"], step["world_size"], step["framework"]) == ({"loss": 2.0}, 1, "pytorch")
    assert repository.show(NAME).labels == {"by": "me"}
    assert b"pickle" not in repository.read(NAME, "metadata.json")
    assert repository.verify(data=True)["damaged"] == []


def test_helpers_and_choices_of_a_step(repository, tmp_path):
    for step in (1, 2):
        save(a_state(step), repository, f"run/step-{step}")
    for name, step in (("run@latest", 2), ("run@upto=1", 1)):
        into = zeroed(a_state())
        load(into, str(tmp_path / "repository"), name)
        assert same(into, a_state(step))
    into = zeroed(a_state())
    dcp.load(into, checkpoint_id="run/step-1", storage_reader=StorageReader(repository, "run/step-2"))
    assert into["step"] == 1


def test_the_files_are_safetensors_that_tell_their_parts(repository, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    dcp.save({"w": torch.arange(6.0)}, storage_writer=StorageWriter(repository, NAME))
    repository.restore(NAME, tmp_path / "out")
    with safetensors.safe_open(tmp_path / "out" / "rank-00000.safetensors", "pt") as file:
        assert list(file.keys()) == ["w"] and file.get_tensor("w").tolist() == list(range(6))
        told = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    assert told == {"w": {"saved_offsets": [0], "fqn": "w", "shape": [6]}}


def test_reading_is_one_go_straight_into_the_tensors(repository):
    state = {**{f"w{at}": torch.randn(50, 8) for at in range(40)}, **{f"v{at}": at for at in range(40)}}
    dcp.save(state, storage_writer=StorageWriter(repository, NAME))
    into = {key: torch.zeros(50, 8) if key[0] == "w" else None for key in state}
    addresses = {into[key].data_ptr() for key in into if key[0] == "w"}
    repository._engine = counting = Counting(repository._engine)
    dcp.load(into, storage_reader=StorageReader(repository, NAME))
    assert same(into, state)
    reads = [said for name, said in counting.calls if name == "read_tensors"]
    assert len(reads) == 1 and {want[3] for want in reads[0][1]} == addresses
    # The metadata and the bytes, each once.
    assert [name for name, _ in counting.calls].count("cat") == 2


def test_only_what_is_asked_for_is_read(repository):
    dcp.save({"a": torch.arange(1 << 20), "b": torch.ones(1 << 20)}, storage_writer=StorageWriter(repository, NAME))
    into = {"b": torch.zeros(1 << 20)}
    repository._engine = counting = Counting(repository._engine)
    dcp.load(into, storage_reader=StorageReader(repository, NAME))
    assert bool((into["b"] == 1).all())
    assert [want[0] for name, said in counting.calls if name == "read_tensors" for want in said[1]] == ["b"]


def test_targets_of_other_kinds_are_filled(repository, monkeypatch):
    state = {"a": torch.randn(6, 4), "b": torch.randn(5), "c": torch.randn(3, 3)}
    dcp.save(state, storage_writer=StorageWriter(repository, NAME))
    into = {
        "a": torch.zeros(4, 6).t(),
        "b": torch.zeros(5, dtype=torch.float64),
        "c": torch.nn.Parameter(torch.zeros(3, 3)),
    }
    # Beside the targets there is room for one of them.
    monkeypatch.setattr(Counting, "memory", lambda self: 1, raising=False)
    repository._engine = counting = Counting(repository._engine)
    dcp.load(into, storage_reader=StorageReader(repository, NAME))
    assert torch.equal(into["a"], state["a"]) and torch.equal(into["b"], state["b"].double())
    assert torch.equal(into["c"], state["c"]) and into["c"].requires_grad
    assert [name for name, _ in counting.calls].count("read_tensors") == 3
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"b": torch.zeros(6)}, storage_reader=StorageReader(repository, NAME))


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(3).to_sparse(), "layout"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantised"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.ones(3).as_subclass(type("Odd", (torch.Tensor,), {})), r"kind .*\.Odd"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(repository, tensor, what):
    with pytest.raises(CheckpointException, match=rf"UnsupportedValue: odd\.one at \[0.* cannot be saved.*{what}"):
        dcp.save({"odd": {"one": tensor}, "fine": torch.ones(2)}, storage_writer=StorageWriter(repository, NAME))
    assert repository.ls() == []


def test_names_that_are_there_are_replaced_or_refused(repository):
    dcp.save(a_state(1), storage_writer=StorageWriter(repository, NAME))
    dcp.save(a_state(2), storage_writer=StorageWriter(repository, NAME))
    assert loaded(repository, a_state())["step"] == 2
    before = repository.show(NAME).manifest
    with pytest.raises(CheckpointException, match="is there already"):
        dcp.save(a_state(3), storage_writer=StorageWriter(repository, NAME, overwrite=False))
    assert repository.show(NAME).manifest == before
    dcp.save(a_state(3), checkpoint_id="run/step-3", storage_writer=StorageWriter(repository, NAME, overwrite=False))
    assert loaded(repository, a_state(), "run/step-3")["step"] == 3


def test_names(repository, tmp_path):
    assert all(map(StorageWriter.validate_checkpoint_id, ("a", "run-7/step-100", tmp_path.relative_to("/") / "x_1")))
    assert not any(
        map(StorageWriter.validate_checkpoint_id, ("", "/a", "a//b", "a/../b", "s3://a/b", "a@latest", "a b"))
    )
    assert StorageReader.validate_checkpoint_id("run@latest") and not StorageReader.validate_checkpoint_id(tmp_path)
    with pytest.raises(CheckpointException, match="no name to save as"):
        dcp.save(a_state(), storage_writer=StorageWriter(repository))
    with pytest.raises(CheckpointException, match=r"such as run-7/step-1000.*'/tmp/x'"):
        dcp.save(a_state(), checkpoint_id="/tmp/x", storage_writer=StorageWriter(repository))
    with pytest.raises(CheckpointException, match="not-there"):
        dcp.load(a_state(), checkpoint_id="not-there", storage_reader=StorageReader(repository))
    with pytest.raises(CheckpointException, match="was it saved by towline"):
        (tmp_path / "plain").mkdir()
        repository.save(tmp_path / "plain", "plain")
        dcp.load(a_state(), checkpoint_id="plain", storage_reader=StorageReader(repository))


def test_a_state_longer_than_a_batch_is_one_step(repository):
    state = {f"w{at}": torch.randn(100) for at in range(10)} | {"big": torch.randn(1000), "n": 7}
    dcp.save(state, storage_writer=StorageWriter(repository, NAME, batch=1000))
    files = [entry["path"] for entry in repository.show(NAME).entries if entry["path"].endswith(".safetensors")]
    assert 4 < len(files) <= 8
    assert len(repository.ls()) == 1 and same(loaded(repository, state), state)


@pytest.mark.parametrize("compression", ["auto", "if-faster", "predict", "off"])
def test_how_small_a_step_is_stored_can_be_said(repository, compression):
    state, writer = {"w": torch.zeros(1 << 18)}, StorageWriter(repository, NAME, compression=compression)
    dcp.save(state, storage_writer=writer)
    assert same(loaded(repository, {"w": torch.ones(1 << 18)}), state)
    if compression != "if-faster":
        assert (writer.report.stored_bytes < 1 << 18) is (compression in ("auto", "predict"))
    with pytest.raises(towline.UsageError, match="'predict' or 'off'"):
        StorageWriter(repository, NAME, compression="zstd")


def test_a_save_that_fails_is_not_seen_and_the_next_one_works(repository):
    class Failing(DefaultSavePlanner):
        def resolve_data(self, item):
            if item.index.fqn == "model.weight":
                raise OSError("the device is gone")
            return super().resolve_data(item)

    writer = StorageWriter(repository, NAME, batch=500)
    with pytest.raises(CheckpointException, match="the device is gone"):
        dcp.save(a_state(1), storage_writer=writer, planner=Failing())
    assert repository.ls() == []
    dcp.save(a_state(2), storage_writer=writer)
    assert same(loaded(repository, a_state()), a_state(2))


def test_plans_that_are_cached(repository):
    caching = {"planner": DefaultSavePlanner(enable_plan_caching=True)}
    for step in (1, 2, 3):
        dcp.save(a_state(step), storage_writer=StorageWriter(repository, NAME, batch=500), **caching)
        assert same(loaded(repository, a_state()), a_state(step))


def test_a_writer_as_older_torch_calls_it(repository):
    writer, planner, state = StorageWriter(repository), DefaultSavePlanner(), {"w": torch.arange(4.0), "n": 1}
    writer.reset("old")
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    assert repository.ls() == []
    writer.finish(metadata, [results])
    assert same(loaded(repository, state, "old"), state)


def test_a_step_that_moves_while_it_is_loaded(repository):
    dcp.save(a_state(1), storage_writer=StorageWriter(repository, NAME))

    class Slow(DefaultLoadPlanner):
        def finish_plan(self, plan):
            dcp.save(a_state(2), storage_writer=StorageWriter(repository, NAME))
            return super().finish_plan(plan)

    with pytest.raises(CheckpointException, match="saved anew"):
        dcp.load(zeroed(a_state()), storage_reader=StorageReader(repository, NAME), planner=Slow())
    with pytest.raises(towline.Conflict, match=r"run/step-1 \(aaaa\), run/step-2 \(bbbb\)"):
        StorageReader(repository).prepare_global_plan(
            [LoadPlan([], storage_data=("run/step-1", "aaaa")), LoadPlan([], storage_data=("run/step-2", "bbbb"))]
        )


def test_async_saves_what_was_there_and_reuses_its_memory(repository):
    writer, state = StorageWriter(repository), a_state(1)
    planner, places = DefaultSavePlanner(), set()
    for step in range(1, 6):
        kept = copy.deepcopy(state)
        # A planner of the caller's keeps what was staged.
        saved = dcp.async_save(state, checkpoint_id=f"run/step-{step}", storage_writer=writer, planner=planner)
        state["model"]["weight"].add_(1)
        state["model"]["tied"].mul_(2)
        state["groups"][0]["lr"] *= 2
        state["step"] += 1
        if step == 1:
            first = kept
        places.add(writer._stager._region._memory.data_ptr())
    saved.result()
    assert len(places) == 1
    assert same(loaded(repository, state, "run/step-5"), kept) and same(loaded(repository, state), first)


@pytest.mark.parametrize("batch", [1 << 30, 4000])
def test_what_is_staged_twice_waits_for_the_first(repository, batch):
    writer, begun, go = StorageWriter(repository, batch=batch), threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, item):
            if item.index.fqn == "w":
                begun.set()
                go.wait(30)
            return super().resolve_data(item)

    state = {"v": torch.ones(1000), "w": torch.ones(1000)}
    first = dcp.async_save(state, checkpoint_id="a", storage_writer=writer, planner=Slow())
    assert begun.wait(30)
    second = threading.Thread(target=writer.stage, args=({"v": torch.zeros(1000), "w": torch.zeros(1000)},))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the memory was given to the second while the first was not saved"
    go.set()
    first.result()
    second.join(10)
    assert not second.is_alive()
    assert bool((loaded(repository, {"w": torch.ones(1000)}, "a")["w"] == 1).all())


def metrics_of_steps(repository):
    return {step["step"]: step["metrics"] for step in repository.runs("run")[0].steps}


def test_each_step_has_the_metrics_that_were_set_before_it(repository):
    writer = StorageWriter(repository, metrics={"loss": 9.0})
    for step, loss in ((1, None), (2, 2.0), (3, 3.0)):
        if loss is not None:
            writer.metrics = {"loss": loss}
        dcp.save({"w": torch.ones(3)}, checkpoint_id=f"run/step-{step}", storage_writer=writer)
    assert metrics_of_steps(repository) == {1: {"loss": 9.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}
    with pytest.raises(towline.UsageError, match="finite"):
        writer.metrics = {"loss": float("nan")}
    save({"w": torch.ones(3)}, repository, "run/step-4", metrics={"loss": 4.0})
    assert metrics_of_steps(repository)[4] == {"loss": 4.0} and writer.metrics == {"loss": 3.0}


def test_an_async_save_that_fails_frees_what_was_staged(repository):
    class Broken(DefaultSavePlanner):
        def create_global_plan(self, plans):
            raise OSError("no plan")

    class Keeping(StorageWriter):
        def stage(self, state_dict):
            kept.append(super().stage(state_dict))
            return kept[-1]

    # Who holds on to what was staged does not hold up the next save.
    kept, failed = [], []
    writer = Keeping(repository)
    for name in ("a", "b", "c"):
        planner = None if name == "c" else Broken()
        failed.append(dcp.async_save({"w": torch.ones(9)}, checkpoint_id=name, storage_writer=writer, planner=planner))
        failed[-1].exception(timeout=120)
    assert [type(one.exception()).__name__ for one in failed] == ["CheckpointException"] * 2 + ["NoneType"]
    assert [one.name for one in repository.ls()] == ["c"]
    # Nobody saves this, and nobody holds it.
    writer.stage({"w": torch.ones(9)})
    kept.clear()
    gc.collect()
    assert not writer._stager._lease.in_use()
    writer.stage({"w": torch.ones(9)})


background = pytest.mark.skipif(
    not hasattr(state_dict_saver, "AsyncSaveResponse"), reason="this torch stages before async_save returns"
)


@pytest.fixture
def held(monkeypatch):
    """Staging waits before it copies, until this is released once for each copy."""
    go, fill = threading.Semaphore(0), Region.fill

    def slow(self, tensors, devices=None):
        if threading.current_thread().name.startswith("towline-stager"):
            assert go.acquire(timeout=30)
        return fill(self, tensors, devices)

    monkeypatch.setattr(Region, "fill", slow)
    yield go
    go.release(100)


def uploaded(response, timeout: float = 60) -> Metadata:
    return response.upload_completion.result(timeout)


@pytest.mark.parametrize("stage", ["blocking", pytest.param("background", marks=background)])
def test_a_save_in_progress_keeps_its_metrics(repository, stage):
    go = threading.Event()

    class Slow(DefaultSavePlanner):
        def create_local_plan(self):
            go.wait(30)
            return super().create_local_plan()

    writer = StorageWriter(repository, stage=stage)
    writer.metrics = {"loss": 1.0}
    first = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="run/step-1", storage_writer=writer, planner=Slow())
    if stage == "background":
        first.staging_completion.result(30)
    writer.metrics = {"loss": 2.0}
    assert pickle.loads(pickle.dumps(writer)).metrics == {"loss": 2.0}
    go.set()
    second = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="run/step-2", storage_writer=writer)
    for saved in (first, second):
        uploaded(saved) if stage == "background" else saved.result(60)
    assert metrics_of_steps(repository) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}


@background
@pytest.mark.parametrize("own", [True, False])
def test_staging_in_the_background(repository, held, own):
    stager = None if own else Stager("background")
    writer = StorageWriter(repository, stage="background" if own else "blocking")
    state, places = a_state(1), set()
    for step in range(1, 4):
        response = dcp.async_save(state, checkpoint_id=f"run/step-{step}", storage_writer=writer, async_stager=stager)
        # What is no tensor may change at once.
        state["groups"][0]["lr"] *= 2
        state["step"] += 1
        assert not response.staging_completion.done() and not response.upload_completion.done()
        kept = copy.deepcopy({**state, "step": step, "groups": [{**state["groups"][0]}, *state["groups"][1:]]})
        kept["groups"][0]["lr"] /= 2
        held.release()
        response.staging_completion.result(30)
        state["model"]["weight"].add_(1)
        state["model"]["tied"].mul_(2)
        uploaded(response)
        assert same(loaded(repository, state, f"run/step-{step}"), kept)
        places.add((stager or writer._stager)._region._memory.data_ptr())
    assert len(places) == 1, "the memory was not used again"
    (stager or writer).close()
    # It can be used again.
    held.release()
    uploaded(dcp.async_save(state, checkpoint_id="run/step-9", storage_writer=writer, async_stager=stager))
    assert same(loaded(repository, state, "run/step-9"), state)


@background
def test_a_save_that_comes_early_waits_in_the_background(repository):
    begun, go = threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, item):
            begun.set()
            go.wait(30)
            return super().resolve_data(item)

    writer, like = StorageWriter(repository, stage="background"), {"w": torch.zeros(1 << 16)}
    first = dcp.async_save({"w": torch.full((1 << 16,), 1.0)}, checkpoint_id="a", storage_writer=writer, planner=Slow())
    assert begun.wait(30) and first.staging_completion.result(30) is None
    then = [
        dcp.async_save({"w": torch.full((1 << 16,), value)}, checkpoint_id=name, storage_writer=writer)
        for name, value in (("b", 2.0), ("c", 3.0))
    ]
    time.sleep(0.2)
    assert not any(one.staging_completion.done() for one in then), "memory that was not saved was staged in"
    go.set()
    for one in (first, *then):
        uploaded(one)
    assert [float(loaded(repository, like, name)["w"].mean()) for name in "abc"] == [1.0, 2.0, 3.0]


@background
def test_staging_in_the_background_that_fails(repository, monkeypatch):
    writer, fill = StorageWriter(repository, stage="background"), Region.fill

    def full(self, tensors, devices=None):
        raise towline.Exhausted("no memory")

    monkeypatch.setattr(Region, "fill", full)
    failed = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="a", storage_writer=writer)
    with pytest.raises(towline.Exhausted, match="no memory"):
        uploaded(failed)
    with pytest.raises(towline.Exhausted):
        writer.synchronize_staging()
    monkeypatch.setattr(Region, "fill", fill)

    class Broken(DefaultSavePlanner):
        def create_global_plan(self, plans):
            raise OSError("no plan")

    with pytest.raises(CheckpointException, match="no plan"):
        uploaded(dcp.async_save({"w": torch.ones(9)}, checkpoint_id="b", storage_writer=writer, planner=Broken()))
    uploaded(dcp.async_save({"w": torch.ones(9)}, checkpoint_id="c", storage_writer=writer))
    assert [one.name for one in repository.ls()] == ["c"]
    with pytest.raises(towline.UsageError, match="'blocking' or 'background'"):
        StorageWriter(repository, stage="later")


@background
def test_a_writer_that_is_closed_while_it_stages(repository, held):
    writer = StorageWriter(repository, stage="background")
    response = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="a", storage_writer=writer)
    threading.Timer(0.2, held.release).start()
    writer.close()
    assert response.staging_completion.done()
    uploaded(response)
    assert [one.name for one in repository.ls()] == ["a"]


def test_a_stager_for_other_writers(tmp_path):
    stager, state = Stager(), {"w": torch.ones(1000), "n": 3}
    for at in range(3):
        writer = dcp.FileSystemWriter(tmp_path / str(at), single_file_per_rank=True)
        saved = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        state["w"].add_(1)
        saved.result()
    for at in range(3):
        into = {"w": torch.zeros(1000), "n": 0}
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / str(at)))
        assert float(into["w"].mean()) == at + 1


def test_what_is_pickled_of_a_staged_state_is_not_all_of_its_memory(repository):
    state = {"big": torch.zeros(1 << 18), "nested": {"pair": (torch.ones(2), 1), "small": torch.ones(3)}}
    writer, planner = StorageWriter(repository, NAME), DefaultSavePlanner(flatten_state_dict=False)
    dcp.async_save(state, storage_writer=writer, planner=planner).result()
    sizes = {entry["path"]: entry["bytes"] for entry in repository.show(NAME).entries}
    assert sizes["rank-00000.bytes"] < 10_000


def test_regions_grow_and_shrink():
    region, places = Region(), []
    for length in (1000, 2000, 1500, 1 << 22, 10):
        (copied,) = region.fill([torch.full((length,), length)])
        assert copied.is_contiguous() and bool((copied == length).all()) and region.holds(copied)
        places.append(region._memory.numel())
    assert places[1] == places[2] and places[4] < places[3]
    assert not region.holds(torch.ones(3))


def test_a_writer_travels(repository):
    writer = StorageWriter(repository, NAME, metrics={"loss": 1.0}, overwrite=False, attempt="a-1")
    other = pickle.loads(pickle.dumps(writer))
    assert (other.name, other.metrics, other.overwrite, other.attempt) == (NAME, {"loss": 1.0}, False, "a-1")
    dcp.save(a_state(), storage_writer=other)
    assert same(loaded(repository, a_state()), a_state())


def test_paths_in_metadata_do_not_grow_without_end():
    doubled = b"X\x01\x00\x00\x00a" + b"".join(b"q\x00" + b"0cpathlib\nPath\n" + b"h\x00h\x00\x86R" for _ in range(40))
    with pytest.raises(towline.Damaged, match="longer than 4096"):
        folder.decode(b"\x80\x02" + doubled + b".", ())
    with pytest.raises(towline.Damaged, match="not made of strings"):
        folder.decode(b"\x80\x02cpathlib\nPath\n" + b"K\x01\x85R.", ())


def shared(times: int) -> bytes:
    """Pickle of a tuple of two references to a tuple of two references, and so on: its hash takes 2**times steps."""
    return b"X\x01\x00\x00\x00aq\x07" + b"".join(b"0h\x07h\x07\x86q\x07" for _ in range(times))


#: Nested so deeply that its hash would overflow the stack.
DEEP = b"X\x01\x00\x00\x00a" + b"\x85" * 500_000
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
SIZE = b"ctorch\nSize\n"
FQN = b"X\x03\x00\x00\x00fqn"


@pytest.mark.parametrize(
    "made",
    [
        b"}%bK\x01s",
        b"}(%bK\x01u",
        b"(%bK\x01d",
        b"\x8f(%b\x90",
        b"(%b\x91",
        b"ccollections\nOrderedDict\n](%bK\x01eq\x02\x85\x85R",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n%b\x85R",
        b"ctorch.serialization\n_get_layout\n%b\x85R",
        b"}" + INDEX + b"%b\x85RK\x01s",
        # Changed after it was used as a key.
        b"}" + INDEX + b"X\x01\x00\x00\x00b\x85Rq\x02K\x01sh\x02}" + FQN + b"%bsb0h\x02K\x02s",
        # Integers of one hash: a table of them takes quadratic time.
        b"}K\x01K\x01s%b",
        b"}" + INDEX + b"X\x01\x00\x00\x00b" + SIZE + b"(" + b"K\x00" * 300 + b"t\x85R\x86RK\x01s%b",
    ],
)
@pytest.mark.parametrize("key", [shared(100), DEEP], ids=["shared", "deep"])
def test_what_takes_for_ever_to_hash_is_no_key_of_a_metadata_that_torch_wrote(made, key):
    with pytest.raises(towline.Damaged, match="cannot be read"):
        folder.decode(b"\x80\x02" + made.replace(b"%b", key) + b".", ())


def test_a_key_that_was_changed_since_and_paths_of_the_planner_are_looked_at_again():
    metadata = Metadata({}, None, {MetadataIndex("a"): 1})
    nested: tuple = ("a",)
    for _ in range(100):
        nested = (nested, nested)
    with pytest.raises(towline.Damaged, match="shares too many values"):
        folder.decode(pickle.dumps(dataclasses.replace(metadata, planner_data={"a": nested}, storage_data={})), ())
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(towline.Damaged, match="too deeply"):
        folder.decode(pickle.dumps(dataclasses.replace(metadata, planner_data={"a": deep}, storage_data={})), ())
    with pytest.raises(towline.Damaged, match="has a BytesStorageMetadata"):
        other = {"a": BytesStorageMetadata()}
        folder.decode(pickle.dumps(dataclasses.replace(metadata, planner_data=other, storage_data={})), ())
    (key,) = metadata.storage_data
    document = pickle.dumps(metadata)
    object.__setattr__(key, "fqn", 7)
    with pytest.raises(towline.Damaged, match="not one of a name and an offset"):
        folder.decode(pickle.dumps(metadata), ())
    with pytest.raises(towline.Damaged, match="cannot be read: 'a'"):
        folder.decode(document, ())


def test_a_path_of_long_parts_is_not_joined_first():
    part = b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\x000"
    document = b"\x80\x02" + part + b"cpathlib\nPath\n(" + b"h\x00" * (1 << 18) + b"tR."
    with pytest.raises(towline.Damaged, match="longer than 4096"):
        folder.decode(document, ())


def test_folders_that_torch_wrote(repository, tmp_path):
    state = a_state(4)
    del state["model"]["mirrored"]
    dcp.save(state, checkpoint_id=tmp_path / "folder")
    repository.save(tmp_path / "folder", NAME)
    assert same(loaded(repository, state), state)

    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Evil()))
    repository.save(tmp_path / "folder", "evil")
    with pytest.raises(CheckpointException, match=r"builtins\.print"):
        dcp.load(zeroed(state), storage_reader=StorageReader(repository, "evil"))


@pytest.mark.parametrize(
    ("target", "state"),
    [
        # A class, by its dictionary and by setattr; a function; an enumeration's member, which all share.
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"}X\x07\x00\x00\x00plantedK\x01s"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"N}X\x07\x00\x00\x00plantedK\x01s\x86"),
        (b"ctorch.serialization\n_get_layout\n", b"N}X\x07\x00\x00\x00plantedK\x01s\x86"),
        (
            b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R",
            b"}X\x07\x00\x00\x00plantedK\x01s",
        ),
    ],
)
def test_metadata_that_torch_wrote_sets_no_attribute_of_a_class(target, state):
    document = b"\x80\x02" + target + state + b"b."
    with pytest.raises(towline.errors.Unsupported, match="sets attributes of"):
        folder.decode(document, ())
    for shared in (torch_metadata.Metadata, torch.serialization._get_layout, torch_metadata._MEM_FORMAT_ENCODING(0)):
        assert not hasattr(shared, "planted")


class Made:
    """An object that counts how often it is unpickled."""

    calls = 0

    def __reduce__(self):
        return (_made, ())


def _made() -> str:
    Made.calls += 1
    return "made"


def test_an_object_that_only_a_pickle_makes_is_made_only_if_it_is_asked_for(repository):
    dcp.save({"object": Made(), "number": 5}, storage_writer=StorageWriter(repository, NAME))
    before = Made.calls
    into = {"object": None, "number": 0}
    with pytest.raises(CheckpointException, match="pickle=True"):
        dcp.load(into, storage_reader=StorageReader(repository, NAME))
    assert Made.calls == before
    dcp.load(into, storage_reader=StorageReader(repository, NAME, pickle=True))
    assert Made.calls > before and into == {"object": "made", "number": 5}


def test_an_object_with_a_storage_longer_than_its_record_is_refused(repository, tmp_path):
    dcp.save({"object": (1, 2)}, storage_writer=StorageWriter(repository, NAME))
    repository.restore(NAME, tmp_path / "step")
    made, planted = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.zeros(1 << 20)}, made)
    with zipfile.ZipFile(made) as found, zipfile.ZipFile(planted, "w") as written:
        for name in found.namelist():
            written.writestr(name, b"A" * 16 if name.endswith("data/0") else found.read(name))
    (held,) = (tmp_path / "step").glob("*.bytes")
    held.write_bytes(planted.getvalue())
    file = tmp_path / "step" / "metadata.json"
    document = json.loads(file.read_text())
    document["state"]["object"] |= {"start": 0, "length": len(planted.getvalue())}
    file.write_text(json.dumps(document))
    repository.save(tmp_path / "step", "planted")
    with pytest.raises(
        CheckpointException, match=r"an object at object that torch cannot load: .*storage of 4194304 bytes"
    ):
        dcp.load({"object": None}, storage_reader=StorageReader(repository, "planted"))


def some_metadata() -> tuple[Metadata, list]:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": {"b": torch.ones(2, 3)}, "l": [1, torch.ones(2)], "n": 1}, None, True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = []
    for item in plans[0].items:
        tensor = None if item.type == WriteItemType.BYTE_IO else item.index.fqn
        stored = StorageInfo("f", tensor, "float32") if tensor else StorageInfo("f", start=3, length=4)
        results.append(dcp.storage.WriteResult(item.index, 1, stored))
    return metadata, [results]


def test_metadata_comes_back_as_it_was():
    metadata, results = some_metadata()
    told = decode(encode(metadata, results, 1))
    assert told.state_dict_metadata == metadata.state_dict_metadata
    assert told.planner_data == metadata.planner_data and isinstance(told.planner_data["l.1"], tuple)
    assert told.storage_data == {result.index: result.storage_data for result in results[0]}


def test_metadata_that_json_cannot_hold_is_refused_by_name():
    for change, where in (
        ({"planner_data": {"a": object()}}, r"metadata\.planner_data\['a'\]"),
        ({"planner_data": {"a": torch.ones(2)}}, r"metadata\.planner_data cannot be saved"),
        ({"state_dict_metadata": {"x": type("Odd", (BytesStorageMetadata,), {})()}}, r"state_dict_metadata\['x'\]"),
    ):
        metadata, results = some_metadata()
        vars(metadata).update(change)
        with pytest.raises(towline.UnsupportedValue, match=where):
            encode(metadata, results, 1)
    metadata, results = some_metadata()
    with pytest.raises(towline.Error, match=r"names a\.b at \[0, 0\], which no rank has written"):
        encode(metadata, [[one for one in results[0] if one.index.fqn != "a.b"]], 1)
    odd = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])
    odd.properties.strides = ["no"]
    with pytest.raises(towline.UnsupportedValue, match=r"properties\.strides"):
        encode(Metadata({"x": odd}), [], 1)


def test_documents_that_are_not_metadata():
    metadata, results = some_metadata()
    document = json.loads(encode(metadata, results, 1))
    for bad in (b"", b"[]", b"{}", json.dumps({**document, "state": {"x": {}}}).encode()):
        with pytest.raises(towline.Damaged):
            decode(bad)
    with pytest.raises(towline.Unsupported, match="use a newer one"):
        decode(json.dumps({**document, "towline-dcp": 2}).encode())
    document["state"]["a.b"]["properties"]["dtype"] = "float7"
    with pytest.raises(towline.Unsupported, match="float7"):
        decode(json.dumps(document).encode())
    assert MetadataIndex("a.b", [0, 0]) in decode(encode(metadata, results, 1)).storage_data
