"""Writes DIR/model.safetensors: bf16 weights of MIB mebibytes, with the exponents of a trained model and random mantissas.

weights.py DIR MIB"""

import json
import os
import random
import sys

TENSOR = 64 << 20


def main() -> None:
    folder, size = sys.argv[1], int(sys.argv[2]) << 20
    os.makedirs(folder)
    count = max(size // TENSOR, 1)
    each = min(TENSOR, size)
    tensors = {
        f"layers.{n}": {"dtype": "BF16", "shape": [each // 2], "data_offsets": [n * each, (n + 1) * each]}
        for n in range(count)
    }
    header = json.dumps(tensors).encode()
    # A normal distribution with a deviation of 0.02: the upper byte of each number has its sign and most of its exponent.
    draw = random.Random(1)
    upper = bytes((draw.getrandbits(1) << 7) | min(max(round(draw.gauss(60.2, 0.7)), 0), 127) for _ in range(1 << 20))
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(count):
            left = each
            while left:
                part = bytearray(os.urandom(min(left, 2 << 20)))
                part[1::2] = upper[: len(part) // 2]
                file.write(part)
                left -= len(part)


main()
