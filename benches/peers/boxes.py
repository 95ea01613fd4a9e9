"""Parts of tensors out of a trained model's checkpoints: what Towline reads for them.

The steps are those of the runs section (runs.py); as their matrices are small, so that most of what is read for an eighth of
one are the edges of chunks, also two made up steps of a model as wide as those that are sharded. Each part that is restored
is compared with the step's own file.
"""

import json
import shutil
import subprocess

import numpy as np

import report
import savers
from measure import Failed, fresh, note
from runs import TARGETED, begin, growth
from steps import header_of, part_of, tensor_bytes, trained

WIDE = [4096, 4096]
ONE = {"trained": "exp_avg_sq.h.3.mlp.up.weight", "wide": "layers.2.weight"}
PIECE = 256 << 10  # elements of a chunk, at most: whole rows, a power of two of them


def eighth(length):
    """The fourth of eight parts, as --shard makes them."""
    share = -(-length // 8)
    return min(3 * share, length), min(4 * share, length)


def half(length):
    """What is left without a quarter at either end."""
    return length // 4, length - length // 4


def asked(shapes, one):
    """What is asked for: a name, the selectors, and the box of each tensor that they want."""
    flat = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    whole = lambda shape: [(0, length) for length in shape]
    boxes = lambda some, box: {name: box(shape) for name, shape in some.items()}
    rows = boxes(shapes, lambda shape: [eighth(shape[0]), *whole(shape[1:])] if shape else [])
    columns = boxes(flat, lambda shape: [(0, shape[0]), eighth(shape[1])])
    inner = boxes(flat, lambda shape: [half(length) for length in shape])
    each = lambda found: [word for name, box in found.items() for word in ("--tensor", selector(name, box))]
    return [
        ("1/8 of every tensor, rows", ["--tensor", "*", "--shard", "3/8"], rows),
        ("1/8 of every matrix, columns", each(columns), columns),
        ("the inner quarter of every matrix", each(inner), inner),
        ("one tensor of many", ["--tensor", one], {one: whole(shapes[one])}),
    ]


def selector(name, box):
    return f"{name}[{','.join(f'{start}:{end}' for start, end in box)}]"


def edged(box, shape):
    """The box, widened to the chunks that hold it."""
    if len(shape) < 2:
        return [(0, length) for length in shape]
    rows = 1 << (PIECE // shape[1]).bit_length() - 1
    (start, end), across = box[0], (0, shape[1])
    return [(start // rows * rows, min(-(-end // rows) * rows, shape[0])) if start < end else (0, 0), across]


def wide_steps(folder):
    """Two steps of a model that nobody trained: normal weights, of which the second has moved by a thousandth."""
    rng, paths = np.random.default_rng(1), []
    weights = [rng.standard_normal(WIDE, dtype=np.float32) for _ in range(4)]
    size = weights[0].nbytes
    places = {f"layers.{at}.weight": [at * size, (at + 1) * size] for at in range(len(weights))}
    header = {name: {"dtype": "F32", "shape": WIDE, "data_offsets": place} for name, place in places.items()}
    text = json.dumps(header).encode()
    for step in range(2):
        paths.append(folder / f"{step}.safetensors")
        with paths[-1].open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for weight in weights:
                file.write(weight.tobytes())
                weight *= 1 + rng.standard_normal(WIDE, dtype=np.float32) / 1000
    return paths


def elements(box):
    count = 1
    for start, end in box:
        count *= end - start
    return count


def cut(view, shape, box, width):
    """The bytes of a box of at most two dimensions, in row-major order."""
    (top, bottom), (left, right) = ([(0, 1), (0, 1)] + box)[-2:]
    across = shape[-1] if shape else 1
    return b"".join(view[(row * across + left) * width : (row * across + right) * width] for row in range(top, bottom))


def answer(saver, *words):
    done = subprocess.run(saver.command(*words), env=saver.env, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"towline {words[0]}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def compare(source, out, boxes):
    """The restored file holds these boxes of the source, bit for bit."""
    header, wholes, found = header_of(source), tensor_bytes(source), tensor_bytes(out)
    if found.keys() != boxes.keys():
        raise Failed(f"{out}: other tensors than were asked for")
    for name, box in boxes.items():
        width = 8 if header[name]["dtype"] == "I64" else 4
        if cut(wholes[name], header[name]["shape"], box, width) != found[name]:
            raise Failed(f"{out}: {name} is not what was saved")


def rows_of(saver, scratch, source, number, what, one):
    """What is read of one saved step, by what is asked for; of each read, its ratio to the stored bytes of its box."""
    shapes = {name: tensor["shape"] for name, tensor in header_of(source).items()}
    (entry,) = (entry for entry in answer(saver, "show", f"bench/step-{number}")["entries"] if entry.get("tensors"))
    stored = {tensor["name"]: tensor["stored_bytes"] for tensor in entry["tensors"]}
    rows, over = [], []
    for asks, words, boxes in asked(shapes, one):
        out = fresh(scratch / "out") / "tensors.safetensors"
        done = answer(saver, "restore", f"bench/step-{number}", out, *words)
        compare(source, out, boxes)
        whole = {name: elements([(0, length) for length in shapes[name]]) for name in boxes}
        part = lambda box_of: sum(stored[name] * elements(box_of(name)) / whole[name] for name in boxes)
        own, chunks = part(boxes.get), part(lambda name: edged(boxes[name], shapes[name]))
        plain, read = done["bytes"], done["fetched_bytes"]
        over.append(read / own)
        sizes = (f"{size / 1e6:.2f}" for size in (plain, own, chunks, read))
        ratios = (f"{read / size:.2f}" for size in (chunks, own, plain))
        rows.append([f"{what}: {asks}", *sizes, *ratios])
    return rows, over


def section(scratch):
    """The whole section, in `scratch`."""
    if not savers.PYTHON.exists() or not savers.Towline.path():
        note("  the environment with torch, or towline itself, is not there (benches/peers/setup.sh)")
        return None
    steps = trained()
    key, after = steps.apart()
    scratch = fresh(scratch / "boxes")
    files = {
        "trained": [part_of(step, "fp32 state") for step in (steps.main[key], after[TARGETED])],
        "wide": wide_steps(scratch),
    }
    rows, over = [], {}
    for kind, (first, second) in files.items():
        saver = begin(savers.Towline, scratch / kind)
        for number, source, how in ((1, first, "alone"), (2, second, "difference")):
            growth(saver, source, number)
            found, over[kind, how] = rows_of(saver, scratch, source, number, f"{kind}, {how}", ONE[kind])
            rows += found
    shutil.rmtree(scratch)
    head = ["fp32, MB", "requested, plain", "stored", "its chunks", "read", "read / chunks", "/ stored", "/ plain"]
    targets = [("1/8 of every tensor, rows, 4096 wide: read / stored", over["wide", "alone"][0], "<=", 1.05)]
    what = f"Parts of tensors: of a trained GPT (384 wide, {TARGETED} steps apart) and of a synthetic one (4096 wide)"
    return report.section(what, report.table(head, rows), targets)
