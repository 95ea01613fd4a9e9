"""Parts of tensors out of a trained model's checkpoints: what Towline reads for them.

The steps are those of the runs section (runs.py). Each part that is restored is compared with the step's own file.
"""

import json
import shutil
import subprocess

import report
import savers
from measure import Failed, fresh, note
from runs import TARGETED, begin, growth
from steps import header_of, part_of, tensor_bytes, trained

ONE = "exp_avg_sq.h.3.mlp.up.weight"  # of 118 tensors


def eighth(length):
    """The fourth of eight parts, as --shard makes them."""
    share = -(-length // 8)
    return min(3 * share, length), min(4 * share, length)


def half(length):
    """What is left without a quarter at either end."""
    return length // 4, length - length // 4


def asked(shapes):
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
        ("one tensor of many", ["--tensor", ONE], {ONE: whole(shapes[ONE])}),
    ]


def selector(name, box):
    return f"{name}[{','.join(f'{start}:{end}' for start, end in box)}]"


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


def rows_of(saver, room, source, number, what):
    """What is read of one saved step, by what is asked for."""
    shapes = {name: tensor["shape"] for name, tensor in header_of(source).items()}
    (entry,) = (entry for entry in answer(saver, "show", f"bench/step-{number}")["entries"] if entry.get("tensors"))
    stored = {tensor["name"]: tensor["stored_bytes"] for tensor in entry["tensors"]}
    rows = []
    for asks, words, boxes in asked(shapes):
        out = fresh(room / "out") / "tensors.safetensors"
        done = answer(saver, "restore", f"bench/step-{number}", out, *words)
        compare(source, out, boxes)
        whole = {name: elements([(0, length) for length in shapes[name]]) for name in boxes}
        own = sum(stored[name] * elements(box) / whole[name] for name, box in boxes.items())
        plain, read = done["bytes"], done["fetched_bytes"]
        sizes = (f"{size / 1e6:.2f}" for size in (plain, own, read))
        rows.append([f"{what}: {asks}", *sizes, f"{read / own:.2f}", f"{read / plain:.2f}", done["chunks"]])
    return rows


def section(room):
    """The whole section, in `room`."""
    if not savers.PYTHON.exists() or not savers.Towline.path():
        note("  the environment with torch, or towline itself, is not there (benches/peers/setup.sh)")
        return None
    steps = trained()
    key, after = steps.apart()
    room = fresh(room / "boxes")
    saver, rows = begin(savers.Towline, room / "kept"), []
    for what, number, step in (("key step", key, steps.main[key]), (f"+{TARGETED}", key + TARGETED, after[TARGETED])):
        source = part_of(step, "fp32 state")
        growth(saver, source, number)
        rows += rows_of(saver, room, source, number, what)
    shutil.rmtree(room)
    head = ["fp32 state, MB", "wanted, plain", "stored", "read", "read / stored", "read / plain", "chunks"]
    what = f"Parts of tensors of a trained GPT, as a key step and as differences to one {TARGETED} steps before"
    return report.section(what, report.table(head, rows), [])
