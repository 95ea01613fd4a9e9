"""ZipNN and zstd-1 on the tensors of safetensors files, one thread each; run by .peers/venv-runs, answers in JSON.

    codecs.py sizes FILE...         bytes of each file by ZipNN, tensor by tensor as the library is meant to be used
    codecs.py xor BASE FILE...      the same with ZipNN's own difference: the xor with BASE's tensor of that name
    codecs.py speeds STATE WEIGHTS  GB of plain bytes a CPU second, in and out, and plain / stored, by kind of tensor
"""

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")  # torch.jit's deprecations, as ZipNN is imported

import torch  # noqa: E402
import zstandard  # noqa: E402
from safetensors import safe_open  # noqa: E402
from zipnn import ZipNN  # noqa: E402

ZIPNN_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PIECE = 256 << 10  # elements that zstd sees at a time: what Towline cuts tensors into
ROUNDS = 5
LARGE = 64 << 10  # elements of a tensor whose speed is worth a look
GB = 1e9


def tensors(path):
    with safe_open(path, "pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def header_bytes(path):
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def plain(tensor):
    return bytearray(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def zipnn(tensor, **more):
    return ZipNN(input_format="torch", bytearray_dtype=ZIPNN_NAMES[tensor.dtype], threads=1, **more)


def size(tensor):
    """Bytes that ZipNN makes of a tensor; its plain bytes where that is less or it does not know the type."""
    raw = tensor.numel() * tensor.element_size()
    if tensor.dtype not in ZIPNN_NAMES or tensor.dim() == 0:
        return raw
    return min(raw, len(zipnn(tensor).compress(tensor.clone())))


def xor_size(tensor, base):
    """The same of its xor with `base`, unless the tensor alone is less."""
    if tensor.dtype not in ZIPNN_NAMES or tensor.dim() == 0:
        return size(tensor)
    codec = ZipNN(bytearray_dtype=ZIPNN_NAMES[tensor.dtype], threads=1, delta_compressed_type="byte")
    return min(size(tensor), len(codec.compress(plain(tensor), delta_second_data=plain(base))))


def sizes(paths):
    """Stored bytes by file, and the CPU seconds of them all."""
    began = time.process_time()
    stored = {path: header_bytes(path) + sum(size(tensor) for _, tensor in tensors(path)) for path in paths}
    return {"stored": stored, "cpu": time.process_time() - began}


def xor(base, paths):
    """Stored bytes by file, each a difference to `base`."""
    key = dict(tensors(base))
    size_of = lambda path: sum(xor_size(tensor, key[name]) for name, tensor in tensors(path))
    return {path: header_bytes(path) + size_of(path) for path in paths}


def best(work, inputs):
    """The least CPU seconds of some rounds over all inputs, and the last round's results."""
    times = []
    for _ in range(ROUNDS):
        given = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]  # ZipNN may change its input
        began = time.process_time()
        made = [work(one) for one in given]
        times.append(time.process_time() - began)
    return min(times), made


def round_trip(compress, decompress, inputs, raw, equal):
    """Rates both ways and the ratio; what comes back is compared."""
    into, packed = best(compress, inputs)
    out, back = best(decompress, packed)
    assert all(equal(one, other) for one, other in zip(inputs, back)), "what came back differs"
    return {"in": raw / into / GB, "out": raw / out / GB, "ratio": raw / sum(map(len, packed))}


def speeds(state, weights):
    kinds = {
        "weights fp32": (state, "model."),
        "exp_avg fp32": (state, "exp_avg."),
        "exp_avg_sq fp32": (state, "exp_avg_sq."),
        "weights bf16": (weights, ""),
    }
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    rows = {}
    for kind, (path, prefix) in kinds.items():
        found = [tensor for name, tensor in tensors(path) if name.startswith(prefix) and tensor.numel() >= LARGE]
        raw = sum(tensor.numel() * tensor.element_size() for tensor in found)
        step = PIECE * found[0].element_size()
        pieces = [whole[at : at + step] for whole in map(bytes, map(plain, found)) for at in range(0, len(whole), step)]
        codec = zipnn(found[0])
        rows[kind] = {
            "zipnn": round_trip(codec.compress, codec.decompress, found, raw, torch.equal),
            "zstd-1": round_trip(compressor.compress, decompressor.decompress, pieces, raw, bytes.__eq__),
        }
    return rows


def main():
    torch.set_num_threads(1)
    verb, *paths = sys.argv[1:]
    verbs = {"sizes": lambda: sizes(paths), "xor": lambda: xor(paths[0], paths[1:]), "speeds": lambda: speeds(*paths)}
    print(json.dumps(verbs[verb]()))


if __name__ == "__main__":
    main()
