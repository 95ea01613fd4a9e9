"""Prints what the demo saved, moved and restored, from the notes it left."""

import json
import sys
from pathlib import Path


def notes(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def size(count):
    return f"{count / 1e6:,.1f} MB"


def table(head, rows):
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    print()


KINDS = {"base": "frozen base", "head": "weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


def kinds(shown):
    """What each kind of tensor of a step takes, and how it is stored."""
    sums = {kind: [0, 0, set()] for kind in KINDS.values()}
    for tensor in (tensor for entry in shown["entries"] for tensor in entry.get("tensors", [])):
        plain, stored, codecs = sums[KINDS[tensor["name"].split(".")[0]]]
        codecs |= set(tensor["codec"].split("+"))
        sums[KINDS[tensor["name"].split(".")[0]]] = [plain + tensor["bytes"], stored + tensor["stored_bytes"], codecs]
    return [[kind, size(plain), size(stored), f"{plain / stored:.2f}x", ", ".join(sorted(codecs))]
            for kind, (plain, stored, codecs) in sums.items()]


def main():
    work = Path(sys.argv[1])
    saves = notes(work / "node1/saves.jsonl") + notes(work / "node2/saves.jsonl")
    print("Saved (training changes every weight of the head, which is stored as what changed; the frozen base is stored once):")
    fields = ("logical_bytes", "new_bytes", "stored_bytes")
    rows = [[s["name"], *(size(s[field]) for field in fields), f"{s['seconds']:.2f}"] for s in saves]
    total = [size(sum(s[field] for s in saves)) for field in fields]
    rows.append(["all", *total, f"{sum(s['seconds'] for s in saves):.2f}"])
    table(["name", "logical", "new", "stored", "seconds"], rows)

    shown = json.loads((work / "show.json").read_text())
    print(f"How {shown['name']} is stored, {shown['behind']} saves after the step that its differences are to:")
    table(["tensors", "plain", "stored", "ratio", "as"], kinds(shown))

    print("Synced to the second repository (its folder's growth), beside a plain copy of each checkpoint:")
    rows = []
    for sync in notes(work / "syncs.jsonl"):
        moved = [s for s in saves if sync["from"] <= s["step"] <= sync["to"]]
        names = ", ".join(s["name"] for s in moved)
        plain = size(sum(s["logical_bytes"] for s in moved))
        rows.append([names, size(sync["moved_bytes"]), plain, f"{sync['seconds']:.2f}"])
    table(["name", "moved", "plain copy", "seconds"], rows)

    hint = json.loads((work / "committed.json").read_text())
    stored, alone = (json.loads((work / f"{name}.json").read_text()) for name in ("stored", "alone"))
    print(f"Committed {hint['inputs'][0]} in the cloud, which held nothing of it; in {hint['commitment']['seconds']:.2f} s:")
    sizes = [stored["bytes"], stored["stored_bytes"] + stored["base_bytes"], alone["stored_bytes"]]
    sizes.append(hint["commitment"]["moved_bytes"])
    table(["plain", "stored, with what it differs from", "stored alone", "moved"], [[size(count) for count in sizes]])
    restored = json.loads((work / "restore.json").read_text())
    print(
        f"Restored {restored['name']} there: {size(restored['bytes'])} in {restored['seconds']:.2f} s "
        f"({size(restored['fetched_bytes'])} from the agent's cache), every byte checked."
    )


if __name__ == "__main__":
    main()
