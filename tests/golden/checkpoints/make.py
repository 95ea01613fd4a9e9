"""Writes the checkpoints beside it, as torch and safetensors write them, and expected.json: what they hold.

    python3 -m venv venv && venv/bin/pip install torch==2.15.0 safetensors numpy blake3
    venv/bin/python tests/golden/checkpoints/make.py

The tensors' bytes are taken from torch, not from the files, so that a reader of the files can be wrong.
"""

import collections
import json
import os
import pathlib
import shutil

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from blake3 import blake3
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

HERE = pathlib.Path(__file__).parent
WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex32: "C32", torch.complex64: "C64", torch.complex128: "C128",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.qint8: "QI8", torch.quint8: "QU8", torch.qint32: "QI32",
}


def raw(tensor):
    """The elements in row-major order, as they lie in memory."""
    tensor = tensor.detach().contiguous()
    start = tensor.storage_offset() * tensor.element_size()
    return bytes(tensor.untyped_storage())[start:start + tensor.numel() * tensor.element_size()]


def about(name, tensor, **more):
    return {"name": name, "dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "blake3": blake3(raw(tensor)).hexdigest(), **more}


def noise(*shape, dtype=torch.float32):
    """Bytes of any kind as elements of any type: NaNs with payloads and negative zeros among them."""
    size = torch.zeros((), dtype=dtype).element_size()
    count = size * int(torch.Size(shape).numel())
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def save(name, value, tensors, **options):
    torch.save(value, HERE / name, **options)
    return {"file": name, "tensors": [about(key, tensor) for key, tensor in tensors.items()]}


def dtypes():
    tensors = {str(dtype).removeprefix("torch."): noise(3, 5, dtype=dtype) for dtype in WORDS if "Q" not in WORDS[dtype]}
    tensors["bool"] = torch.tensor([[True, False], [False, True]])
    tensors["scalar"] = torch.tensor(-0.0)
    tensors["empty"] = torch.zeros(0, 9, dtype=torch.float16)
    tensors["nan"] = torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    return save("dtypes.pt", tensors, tensors)


def views():
    """Tied, split, offset, overlapping, transposed, expanded; only what is row-major is listed."""
    base, fused = noise(6, 4), noise(9, 4, dtype=torch.bfloat16)
    listed = {
        "tied.a": base, "tied.b": base, "rows": base[2:5], "row": base[3], "one": base[1:2, :], "flat": base.view(-1),
        "nothing": base[6:], "fused.0": fused[:3], "fused.1": fused[3:6], "fused.2": fused[6:],
    }
    value = {
        "tied": {"a": base, "b": base}, "rows": base[2:5], "row": base[3], "one": base[1:2, :], "flat": base.view(-1),
        "nothing": base[6:], "fused": [fused[:3], fused[3:6], fused[6:]], "transposed": noise(5, 3).t(),
        "column": base[:, 1], "expanded": noise(1, 4).expand(3, 4), "last": noise(2, 3, 4).transpose(1, 2),
    }
    return save("views.pt", value, listed)


def training():
    """What a training loop saves: a model with tied weights, its optimizer, numbers and words."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head(model.norm(model.embed(torch.arange(7)))).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "loss": 0.5, "big": 1 << 80,
             "rng": torch.get_rng_state(), "args": {"name": "caf\u00e9", "betas": (0.9, 0.95), "seen": {1, 2}, "raw": b"\0"}}
    listed = {"model." + key: tensor for key, tensor in state["model"].items()}
    for key, moments in state["optimizer"]["state"].items():
        listed.update({f"optimizer.state.{key}.{name}": tensor for name, tensor in moments.items()})
    listed["rng"] = state["rng"]
    return save("training.bin", state, listed)


def objects():
    """Whole modules, parameters with attributes, quantised and sparse tensors, a tensor by itself within a list of lists."""
    parameter = torch.nn.Parameter(noise(2, 3))
    marked = torch.nn.Parameter(noise(3, 2))
    marked.note = {"mask": noise(4, dtype=torch.int16)}
    per_tensor = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8)
    per_channel = torch.quantize_per_channel(torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)
    sparse = torch.eye(3).to_sparse()
    linear = torch.nn.Linear(2, 2)
    value = collections.OrderedDict(
        p=parameter, marked=marked, q=per_tensor, c=per_channel, sparse=sparse, module=linear, deep=[[noise(2)]])
    listed = {
        "p": parameter, "marked": marked, "marked.note.mask": marked.note["mask"], "q": per_tensor, "c": per_channel,
        "c.1": per_channel.q_per_channel_scales(), "c.2": per_channel.q_per_channel_zero_points(),
        "sparse.1.0": sparse._indices(), "sparse.1.1": sparse._values(),
        "module._parameters.weight": linear.weight, "module._parameters.bias": linear.bias, "deep.0.0": value["deep"][0][0],
    }
    return save("objects.pth", value, listed, pickle_protocol=4)


def alone():
    tensor = noise(4, 3, dtype=torch.bfloat16)
    return save("alone.pt", tensor, {"tensor": tensor})


def legacy():
    """From before torch 1.6: no archive, hence plain bytes."""
    torch.save({"w": noise(3)}, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    return {"file": "legacy.pt", "tensors": None}


def safe():
    tensors = {"w": noise(3, 4, dtype=torch.bfloat16), "b": noise(3), "empty": torch.zeros(0, 2), "f8": noise(5, dtype=torch.float8_e4m3fn)}
    safetensors.torch.save_file(tensors, HERE / "model.safetensors", metadata={"format": "pt"})
    return {"file": "model.safetensors", "tensors": [about(key, tensor) for key, tensor in tensors.items()]}


def distributed_state():
    torch.manual_seed(2)
    return {
        "rows": noise(6, 4), "columns": noise(4, 6, dtype=torch.bfloat16), "uneven": noise(5, 3),
        "same": noise(3, dtype=torch.int64), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3),
    }


def rank_main(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = distributed_state()
    for name, dimension in (("rows", 0), ("columns", 1), ("uneven", 0)):
        state[name] = distribute_tensor(state[name], mesh, [Shard(dimension)])
    dcp.save({"model": state, "step": 7, "words": ["a", "b"]}, checkpoint_id=str(HERE / "dcp"))
    dist.destroy_process_group()


def distributed():
    shutil.rmtree(HERE / "dcp", ignore_errors=True)
    mp.spawn(rank_main, nprocs=2)
    parts = {"rows": (0, [0, 3, 6]), "columns": (1, [0, 3, 6]), "uneven": (0, [0, 3, 5])}
    tensors = []
    for name, whole in distributed_state().items():
        dimension, cuts = parts.get(name, (0, [0, None]))
        for start, end in zip(cuts, cuts[1:]):
            part = whole if end is None else whole.narrow(dimension, start, end - start)
            offsets = [0] * whole.dim()
            if name in parts:
                offsets[dimension] = start
            tensors.append(about("model." + name, part, whole=list(whole.shape), offsets=offsets))
    return {"file": "dcp", "tensors": tensors}


if __name__ == "__main__":
    torch.manual_seed(1)
    made = [dtypes(), views(), training(), objects(), alone(), legacy(), safe(), distributed()]
    (HERE / "expected.json").write_text(json.dumps(made, indent=1) + "\n")
