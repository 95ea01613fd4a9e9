"""Packages that come to the file system `towline://` with an address: pandas, pyarrow, datasets, torch, and caches of fsspec."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import towline

from .file_system import fs as fs
from .file_system import fsspec, names, noise
from .file_system import url as url
from .ranks import leave

SPAWN = multiprocessing.get_context("spawn")


def test_pandas(fs: Any):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"n": range(50_000), "text": [f"row {n}" for n in range(50_000)]})
    frame.to_csv("towline://tables/a.csv", index=False)
    assert pd.read_csv("towline://tables/a.csv").equals(frame)
    pytest.importorskip("pyarrow")
    frame.to_parquet("towline://tables/a.parquet")
    assert pd.read_parquet("towline://tables/a.parquet").equals(frame)
    assert pd.read_parquet("towline://tables/a.parquet", columns=["n"])["n"].sum() == frame["n"].sum()
    assert names(fs) == ["tables"]


def test_pandas_with_options(tmp_path: Path):
    pd = pytest.importorskip("pandas")
    options = {"repo": str(tmp_path / "elsewhere")}
    frame = pd.DataFrame({"n": [1, 2, 3]})
    frame.to_csv("towline://t/a.csv", index=False, storage_options=options)
    assert pd.read_csv("towline://t/a.csv", storage_options=options).equals(frame)


def test_pyarrow_datasets(fs: Any):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    table = pa.table({"n": list(range(9000)), "p": [n % 3 for n in range(9000)]})
    ds.write_dataset(
        table, "big/table", format="parquet", partitioning=["p"], partitioning_flavor="hive", filesystem=fs
    )
    assert names(fs) == ["big/table"]
    read = ds.dataset("big/table", filesystem=fs, format="parquet", partitioning="hive")
    assert read.to_table(filter=ds.field("p") == 1).num_rows == 3000
    assert read.to_table().sort_by("n").column("n").to_pylist() == list(range(9000))
    pq.write_table(table, "big/one.parquet", filesystem=fs)
    assert pq.read_table("big/one.parquet", filesystem=fs).equals(table)


def test_datasets(fs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"n": list(range(1000)), "text": [str(n) for n in range(1000)]})
    data.save_to_disk("towline://sets/train", num_shards=3)
    assert names(fs) == ["sets/train"]
    assert datasets.load_from_disk("towline://sets/train")["n"][:] == data["n"][:]
    both = datasets.DatasetDict(a=data, b=data.select(range(10)))
    both.save_to_disk("towline://sets/both")
    assert len(datasets.load_from_disk("towline://sets/both")["b"]) == 10 and "sets/both" in names(fs)


# torch.distributed.checkpoint


def state(torch: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tensors = {f"layer.{n}": torch.randn(64 + n, 1000) for n in range(12)}
    return {
        "model": tensors,
        "optimizer": {"big": torch.randn(2_000_000), "step": torch.tensor(float(seed))},
        "n": seed,
    }


def zeros(torch: Any, like: Any) -> Any:
    if isinstance(like, dict):
        return {key: zeros(torch, value) for key, value in like.items()}
    return torch.zeros_like(like) if isinstance(like, torch.Tensor) else 0


def same(torch: Any, a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(torch, a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_dcp_saves_and_loads_with_no_code(fs: Any):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    for step in (100, 200):
        dcp.save(state(torch, step), checkpoint_id=f"towline://run-7/step-{step}", no_dist=True)
    assert names(fs) == ["run-7/step-100", "run-7/step-200"]
    assert fs.ls("run-7/step-100", detail=False) == ["run-7/step-100/.metadata", "run-7/step-100/__0_0.distcp"]
    for address, step in (("run-7/step-100", 100), ("run-7@latest", 200)):
        into = zeros(torch, state(torch, step))
        dcp.load(into, checkpoint_id=f"towline://{address}", no_dist=True)
        assert same(torch, into, state(torch, step))
    # Saved once more in its place, and in several files by threads.
    writer = dcp.FsspecWriter("towline://run-7/step-200", thread_count=4)
    dcp.save(state(torch, 3), storage_writer=writer, no_dist=True)
    into = zeros(torch, state(torch, 3))
    dcp.load(into, storage_reader=dcp.FsspecReader("towline://run-7/step-200"), no_dist=True)
    assert same(torch, into, state(torch, 3))


def _save_by_writer(torch: Any, repository: Any, value: int) -> None:
    import torch.distributed.checkpoint as dcp
    from towline.dcp import StorageWriter

    dcp.save(state(torch, value), storage_writer=StorageWriter(repository, "run/step-1"), no_dist=True)


def _save_by_checkpointer(torch: Any, repository: Any, value: int) -> None:
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, state(torch, value)).wait()


def _save_by_ranks(torch: Any, repository: Any, value: int) -> None:
    checkpointers = [towline.Checkpointer(repository, "run", rank=r, world_size=2, attempt="1") for r in range(2)]
    for handle in [one.save(1, state(torch, value)) for one in checkpointers]:
        handle.wait()
    for one in checkpointers:
        one.close()


@pytest.mark.parametrize("save", [_save_by_writer, _save_by_checkpointer, _save_by_ranks])
def test_dcp_by_address_replaces_a_step_of_another_kind(fs: Any, save: Any):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from towline.dcp import StorageReader

    repository = towline.open()
    save(torch, repository, 1)
    old = {entry.path for entry in repository.show("run/step-1").entries}
    fs.pipe("run/step-1/notes/metadata.json", b"{}")
    dcp.save(state(torch, 2), checkpoint_id="towline://run/step-1", no_dist=True)
    there = {entry.path for entry in repository.show("run/step-1").entries}
    assert there == {".", ".metadata", "__0_0.distcp", "notes", "notes/metadata.json"}
    into = zeros(torch, state(torch, 2))
    dcp.load(into, storage_reader=StorageReader(repository, "run/step-1"), no_dist=True)
    assert same(torch, into, state(torch, 2))
    undeleted = repository.undelete("run/step-1", to="before").name
    assert old <= {entry.path for entry in repository.show(undeleted).entries}
    if save is _save_by_checkpointer:
        # It did not resume this step.
        with pytest.raises(towline.SaveConflict):
            save(torch, repository, 3)
        return
    # A save of the other kind replaces the whole tree.
    save(torch, repository, 3)
    assert {entry.path for entry in repository.show("run/step-1").entries} == old


def _train(rank: int, ranks: int, folder: str, url: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(TOWLINE_REPO=url, XDG_CACHE_HOME=f"{folder}/cache-{rank}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(5)
        whole = torch.randn(1001, 500)
        sharded = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "own": {f"{rank}": torch.full((10,), float(rank))}}
        if ranks == 2:
            dcp.save(sharded, checkpoint_id="towline://gang/step-1")
            future = dcp.async_save(sharded, checkpoint_id="towline://gang/step-2")
            future.result()
        for step in (1, 2):
            into = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])}
            dcp.load(into, checkpoint_id=f"towline://gang/step-{step}")
            assert torch.equal(into["w"].full_tensor(), whole)
    finally:
        dist.destroy_process_group()
    leave()


def test_dcp_with_two_ranks_and_one(fs: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fs.shared.repository.ls()
    for ranks in (2, 1):
        workers = [SPAWN.Process(target=_train, args=(rank, ranks, str(tmp_path), url)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(240)
            assert worker.exitcode == 0
    assert names(fs) == ["gang/step-1", "gang/step-2"]
    for step in (1, 2):
        files = [path.rpartition("/")[2] for path in fs.ls(f"gang/step-{step}", detail=False)]
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_what_is_looked_in_is_found_with_folders(fs: Any, tmp_path: Path):
    for path in ("run/a", "run/b/c"):
        fs.pipe(f"towline://{path}", b"x")
    folder, memory = tmp_path / "local", fsspec.filesystem("memory")
    for path in ("run/a", "run/b/c"):
        memory.pipe(f"/{path}", b"x")
    found = fs.find("towline://run", withdirs=True, detail=True)
    assert {path: told["type"] for path, told in found.items()} == {
        path.lstrip("/"): told["type"] for path, told in memory.find("/run", withdirs=True, detail=True).items()
    }
    assert fs.find("run/b", withdirs=True) == ["run/b", "run/b/c"] and fs.find("run/b") == ["run/b/c"]
    assert fs.find("run/a", withdirs=True) == ["run/a"] and fs.find("run/none", withdirs=True) == []
    # A flat folder, as rsync copies one.
    fs.pipe({f"flat/{number}": bytes([number]) for number in range(3)})
    generic = pytest.importorskip("fsspec.generic")
    generic.rsync("towline://flat", f"file://{folder}", fs=generic.GenericFileSystem(default_method="current"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {str(at): bytes([at]) for at in range(3)}


@pytest.mark.parametrize("protocol", ["blockcache", "filecache", "simplecache"])
def test_caches_of_fsspec(fs: Any, tmp_path: Path, protocol: str):
    data = noise(5, 9 << 20)
    fs.pipe("towline://tree/file", data)
    address, options = f"{protocol}::towline://tree/file", {protocol: {"cache_storage": str(tmp_path / "kept")}}
    for _ in range(2):
        with fsspec.open(address, **options) as file:
            file.seek(5 << 20)
            assert file.read(100) == data[5 << 20 :][:100]
            file.seek(10)
            assert file.read(3 << 20) == data[10:][: 3 << 20] and file.read(2) == data[10 + (3 << 20) :][:2]
            buffer = bytearray(1000)
            file.seek(len(data) - 500)
            assert file.readinto(buffer) == 500 and buffer[:500] == data[-500:] and file.read() == b""
    with fsspec.open(address, **options) as file:
        assert file.read() == data


def test_a_blockcache_reads_a_block_once(fs: Any, tmp_path: Path):
    fs.pipe("towline://tree/file", noise(6, 9 << 20))
    cached = fsspec.filesystem("blockcache", fs=fs, cache_storage=str(tmp_path / "kept"))
    cached.cat_file("tree/file", 1 << 20, 2 << 20)
    read: list[Any] = []
    fs.shared.read = lambda *asked: read.append(asked) or type(fs.shared).read(fs.shared, *asked)
    with cached.open("tree/file") as file:
        file.seek(1 << 20)
        file.read(100)
        assert read == []
        file.seek(7 << 20)
        file.read(100)
        assert len(read) == 1
