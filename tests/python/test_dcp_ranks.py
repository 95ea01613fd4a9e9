"""torch.distributed.checkpoint with towline.dcp on several ranks: each step whole or not at all, loaded on any number."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import towline

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import state_dict_saver  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from towline.dcp import StorageReader, StorageWriter  # noqa: E402

from . import ranks  # noqa: E402

warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")

#: How states can be staged with this torch.
STAGES = ["blocking", *(["background"] if hasattr(state_dict_saver, "AsyncSaveResponse") else [])]

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_dcp.py"
README = Path(__file__).parents[2] / "bindings" / "python" / "README.md"


def a_state(seed: int) -> dict:
    """The same on all ranks, sharded in several ways; some of it unevenly, and some ranks have nothing of."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(seed)

    def made(placement: Shard | Replicate, *shape: int, dtype: torch.dtype = torch.float32) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=generator).to(dtype), mesh, [placement])

    return {
        "model": {
            "rows": made(Shard(0), 7, 6),
            "columns": made(Shard(1), 5, 9, dtype=torch.bfloat16),
            "bytes": made(Shard(1), 6, 4, dtype=torch.complex128),
            "one_row": made(Shard(0), 1, 3),
            "replicated": made(Replicate(), 4),
            "plain": torch.randn(3, 2, generator=generator),
        },
        "names": ["a", {"b": seed}],
        "step": seed,
    }


def whole(state: dict) -> dict[str, torch.Tensor]:
    held = state["model"].items()
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in held}


def check(url: str, name: str, seed: int) -> None:
    """What was saved as `name` is the state of this seed."""
    into, expected = a_state(seed + 1000), whole(a_state(seed))
    dcp.load(into, checkpoint_id=name, storage_reader=StorageReader(url))
    for tensor, found in whole(into).items():
        assert torch.equal(found, expected[tensor]), (name, tensor)
    assert into["step"] == seed and into["names"] == ["a", {"b": seed}], name


def save_in_every_way(rank: int, world_size: int, url: str) -> None:
    writer, group = StorageWriter(url), dist.new_group(backend="gloo")
    dcp.save(a_state(1), checkpoint_id="run/step-1", storage_writer=writer)
    check(url, "run/step-1", 1)
    # Anew under the same name.
    dcp.save(a_state(2), checkpoint_id="run/step-1", storage_writer=writer)
    check(url, "run/step-1", 2)
    for seed in (3, 4):
        state = a_state(seed)
        saved = dcp.async_save(state, checkpoint_id=f"run/step-{seed}", storage_writer=writer, process_group=group)
        state["model"]["rows"].to_local().zero_()
        saved.result()
        check(url, f"run/step-{seed}", seed)
    for seed in (5, 6, 7):
        # Another state under the same name each time, with plans that are those of the first.
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(a_state(seed), checkpoint_id="run/cached", storage_writer=StorageWriter(url), planner=planner)
        check(url, "run/cached", seed)
    state = a_state(8)
    if rank == 1:
        # The plan of one rank changes: that of the other is the cached one.
        state["more"] = torch.ones(5)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, checkpoint_id="run/cached", storage_writer=StorageWriter(url), planner=planner)
    check(url, "run/cached", 8)
    for seed in (9, 10):
        dcp.save(a_state(seed), checkpoint_id="run/alone", storage_writer=StorageWriter(url), use_collectives=False)
        check(url, "run/alone", seed)
    dcp.save(a_state(11), checkpoint_id="run/parts", storage_writer=StorageWriter(url, batch=64))
    check(url, "run/parts", 11)


def load_all(rank: int, world_size: int, url: str) -> None:
    for name, seed in (("run/step-1", 2), ("run/step-4", 4), ("run/cached", 8), ("run/alone", 10), ("run/parts", 11)):
        check(url, name, seed)
    check(url, "run@latest", 4)


def test_saved_by_two_and_loaded_by_one_and_three(tmp_path):
    url = str(tmp_path / "repository")
    repository = towline.open(url)
    assert ranks.run(2, tmp_path / "save", save_in_every_way, url) == [0, 0]
    for world_size in (1, 3):
        assert ranks.run(world_size, tmp_path / f"load-{world_size}", load_all, url) == [0] * world_size
    shown = repository.show("run/step-1")
    files = {entry["path"] for entry in shown["entries"] if entry["kind"] == "file"}
    assert {"metadata.json", "rank-00000.safetensors", "rank-00001.safetensors"} <= files
    # The parts are more than the ranks.
    assert {repository.show(name)["world_size"] for name in ("run/step-1", "run/parts", "run/alone")} == {2}
    names = list(repository.tensors("run/step-1"))
    assert "model.rows@0,0" in names and "model.rows@4,0" in names
    # What is on all ranks was saved by one.
    assert sum(name.endswith("model.replicated") for name in names) == 1
    assert repository.verify(data=True)["damaged"] == []


def save_shards(rank: int, world_size: int, url: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(1200.0).reshape(120, 10)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
    dcp.save(state, checkpoint_id="run-7/step-100", storage_writer=StorageWriter(url))


def test_shards_are_listed_one_by_one_and_reassembled_by_the_example_of_the_readme(tmp_path):
    url = str(tmp_path / "repository")
    towline.open(url)
    assert ranks.run(2, tmp_path / "ranks", save_shards, url) == [0, 0]
    whole = torch.arange(1200.0).reshape(120, 10)
    loaded = towline.load("run-7/step-100", repo=url)
    assert list(loaded) == ["w@0,0", "w@60,0"] and torch.equal(torch.cat(list(loaded.values())), whole)
    assert list(towline.open(url).tensors("run-7/step-100")) == list(loaded)
    (example,) = re.findall(r"```python\n(whole = .*?)```", README.read_text(), re.DOTALL)
    said = {"torch": torch, "dcp": dcp, "towline": towline}
    exec(example.replace("s3://bucket/experiments", url), said)
    assert torch.equal(said["whole"]["w"], whole)


def save_in_a_process(rank: int, world_size: int, url: str, stage: str) -> None:
    writer, saved = StorageWriter(url, stage=stage), None
    for seed in (1, 2, 3):
        if seed == 3:
            saved.result()  # The other process has read the state before: the next one is copied to where it can read it.
        state = a_state(seed)
        saved = dcp.async_save(
            state,
            checkpoint_id=f"run/step-{seed}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        if stage == "background":
            saved.staging_completion.result()
            saved = saved.upload_completion
        state["model"]["rows"].to_local().zero_()
        state["step"] = -1
        if seed == 3:
            assert writer._stager._region._memory.is_shared()
    saved.result()
    for seed in (1, 2, 3):
        check(url, f"run/step-{seed}", seed)


@pytest.mark.parametrize("stage", STAGES)
def test_async_saves_in_another_process(tmp_path, stage):
    assert ranks.run(2, tmp_path / "save", save_in_a_process, str(tmp_path / "repository"), stage) == [0, 0]


def save_while_training_goes_on(rank: int, world_size: int, url: str) -> None:
    writer = StorageWriter(url, stage="background")
    for seed in (1, 2, 3):
        state = a_state(seed)
        saved = dcp.async_save(state, checkpoint_id=f"run/step-{seed}", storage_writer=writer)
        saved.staging_completion.result()
        state["model"]["rows"].to_local().zero_()
        saved.upload_completion.result()
        check(url, f"run/step-{seed}", seed)


@pytest.mark.skipif("background" not in STAGES, reason="this torch stages before async_save returns")
def test_async_saves_that_are_staged_in_the_background(tmp_path):
    assert ranks.run(2, tmp_path / "save", save_while_training_goes_on, str(tmp_path / "repository")) == [0, 0]


class Failing(DefaultSavePlanner):
    """Fails on one rank, or kills it, when its data is to be written."""

    def __init__(self, how: str | None):
        super().__init__()
        self.how = how

    def resolve_data(self, item):
        if self.how == "kill" and "rows" in item.index.fqn:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raise":
            raise OSError("the disk of rank 1 is gone")
        return super().resolve_data(item)


def fail_and_save(rank: int, world_size: int, url: str) -> None:
    writer, planner = StorageWriter(url), Failing("raise" if rank == 1 else None)
    with pytest.raises(dcp.api.CheckpointException, match="the disk of rank 1 is gone"):
        dcp.save(a_state(1), checkpoint_id="run/step-1", storage_writer=writer, planner=planner)
    dist.barrier()
    assert towline.open(url).ls() == []
    dcp.save(a_state(2), checkpoint_id="run/step-1", storage_writer=writer)
    check(url, "run/step-1", 2)
    # The name keeps what it held.
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(a_state(3), checkpoint_id="run/step-1", storage_writer=writer, planner=planner)
    check(url, "run/step-1", 2)
    with pytest.raises(dcp.api.CheckpointException, match="is there already"):
        dcp.save(a_state(3), checkpoint_id="run/step-1", storage_writer=StorageWriter(url, overwrite=False))


def test_a_rank_that_fails(tmp_path):
    assert ranks.run(2, tmp_path / "save", fail_and_save, str(tmp_path / "repository")) == [0, 0]


def die_at_the_second(rank: int, world_size: int, url: str) -> None:
    dcp.save(a_state(1), checkpoint_id="run/step-1", storage_writer=StorageWriter(url))
    planner = Failing("kill" if rank == 1 else None)
    dcp.save(a_state(2), checkpoint_id="run/step-2", storage_writer=StorageWriter(url), planner=planner)


def save_the_second(rank: int, world_size: int, url: str) -> None:
    check(url, "run@latest", 1)
    dcp.save(a_state(3), checkpoint_id="run/step-2", storage_writer=StorageWriter(url))
    check(url, "run@latest", 3)


def test_a_rank_that_is_killed(tmp_path):
    url = str(tmp_path / "repository")
    first, second = ranks.run(2, tmp_path / "die", die_at_the_second, url)
    assert second == -signal.SIGKILL and first != 0
    assert [one.name for one in towline.open(url).ls()] == ["run/step-1"]
    assert ranks.run(2, tmp_path / "again", save_the_second, url) == [0, 0]


class Training:
    """The example on several ranks."""

    def __init__(self, folder: Path, world_size: int, repo: Path, steps: int):
        folder.mkdir()
        self.ranks = []
        command = [sys.executable, str(EXAMPLE), "--repo", str(repo), "--steps", str(steps), "--every", "2"]
        port = str(_free_port())
        for rank in range(world_size):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
            environment = os.environ | {key: str(value) for key, value in told.items()}
            environment |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            with (folder / f"rank-{rank}.log").open("w") as log:
                made = subprocess.Popen(
                    command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
                )
            self.ranks.append(made)
        self.folder, self.lines = folder, []

    def until(self, step: int | None) -> dict[int, str]:
        """The losses until the step has been told, or the end."""
        for line in self.ranks[0].stdout:
            self.lines.append(line)
            if step is not None and line.startswith(f"step {step} "):
                break
        return {int(at): loss for at, loss in re.findall(r"^step (\d+) (\S+)$", "".join(self.lines), re.MULTILINE)}

    def told(self, what: str) -> tuple[int, str]:
        """Which step it said that it is at or goes on from, and a digest of the parameters then."""
        step, digest = re.search(rf"^{what} (\d+) (\w+)$", "".join(self.lines), re.MULTILINE).groups()
        return int(step), digest

    def ended(self) -> bool:
        for number, rank in enumerate(self.ranks):
            code, log = rank.wait(120), (self.folder / f"rank-{number}.log").read_text()
            assert ranks.ended_well(code, log), f"rank {number} ended with {code}: {log}"
        return True

    def kill(self, first: int) -> None:
        """One rank now, the others a little later."""
        for rank in self.ranks[first:] + self.ranks[:first]:
            rank.kill()
            time.sleep(0.05)
        for rank in self.ranks:
            rank.wait()
            rank.stdout.close()


def _free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_the_example_is_killed_and_goes_on(tmp_path):
    steps, repository = 14, tmp_path / "repository"
    uninterrupted = Training(tmp_path / "whole", 2, tmp_path / "other", steps)
    losses = uninterrupted.until(None)
    assert uninterrupted.ended() and list(losses) == list(range(1, steps + 1))
    killed = Training(tmp_path / "killed", 2, repository, steps)
    first = killed.until(7)
    killed.kill(first=1)
    assert first == {step: losses[step] for step in range(1, 8)}
    steps_saved = [step.step for step in towline.open(repository).runs("demo")[0].steps]
    assert steps_saved[-1] in (4, 6)
    # On other numbers of ranks the parameters are the same.
    digests = set()
    for world_size in (1, 3):
        other = Training(tmp_path / f"on-{world_size}", world_size, repository, 1)
        other.until(None)
        assert other.ended()
        digests.add(other.told("from"))
    resumed = Training(tmp_path / "resumed", 2, repository, steps)
    second = resumed.until(None)
    assert resumed.ended()
    assert digests == {resumed.told("from")} and min(second) == steps_saved[-1] + 1
    assert second == {step: losses[step] for step in range(min(second), steps + 1)}
    assert resumed.told("at") == uninterrupted.told("at")
    assert towline.open(repository).verify(data=True)["damaged"] == []
