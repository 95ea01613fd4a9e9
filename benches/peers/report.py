"""Tables, ratios and targets, and the section of docs/benchmarks.md that holds them."""

import os
import re
import time

from measure import GIB, MIB, median

MARK = r"<!-- ([a-z0-9]+) -->\n"
BEGIN, END = "<!-- written by make bench-peers: begin -->", "<!-- written by make bench-peers: end -->"
HEADINGS = {"first": "first save", "again": "unchanged, re-read", "by_stat": "unchanged, by stat", "restore": "restore"}


def table(head, rows):
    """Markdown, padded so that it reads as text too."""
    widths = [max(len(str(row[at])) for row in [head, *rows]) for at in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    pad = lambda row: [str(row[0]).ljust(widths[0]), *(str(c).rjust(w) for c, w in zip(row[1:], widths[1:]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [pad(head), rule, *map(pad, rows)])


class Ratios:
    """How many times one program's median is another's; None where either did not run."""

    def __init__(self, samples):
        self.samples = samples

    def __call__(self, above, below, verb):
        over, under = self.seconds(above, verb), self.seconds(below, verb)
        return over / under if over is not None and under else None

    def seconds(self, name, verb):
        found = self.samples.get((name, verb))
        return median(found) if found else None


def cell(samples, name, verb, text):
    found = samples.get((name, verb))
    return text(found) if found else ""


def spread(found):
    """The median and, of several runs, the extremes."""
    times = [sample.seconds for sample in found]
    return f"{median(found):.2f}" + (f" ({min(times):.2f}-{max(times):.2f})" if len(times) > 1 else "")


def seconds_table(names, verbs, samples, size, stored):
    """Seconds of each verb, and what lies in the repository in the end."""
    head = ["seconds", *(HEADINGS[verb] for verb in verbs), "stored / input"]
    rows = [
        [
            name,
            *(cell(samples, name, verb, spread) for verb in verbs),
            f"{stored[name] / size:.3f}" if name in stored else "",
        ]
        for name in names
    ]
    return table(head, rows)


def cpu_table(names, samples, size):
    """Seconds and rate both ways, with the client's CPU seconds a GiB."""
    rows = []
    for name in names:
        row = [name]
        for verb in ("first", "restore"):
            row.append(cell(samples, name, verb, spread))
            row.append(cell(samples, name, verb, lambda found: f"{size / MIB / median(found):.0f}"))
            row.append(cell(samples, name, verb, lambda found: f"{median(found, 'cpu') / (size / GIB):.2f}"))
        rows.append(row)
    return table(["", "up, s", "MiB/s", "CPU s/GiB", "down, s", "MiB/s", "CPU s/GiB"], rows)


def objects_table(names, samples, objects):
    verbs = ("first", "by_stat", "restore")
    rows = [[name, *(cell(samples, name, verb, spread) for verb in verbs), f"{objects[name]:,}"] for name in names]
    return table(["seconds", *(HEADINGS[verb] for verb in verbs), "objects"], rows)


def section(what, body, targets):
    """One table with its targets: (what, measured or None, `>=` or `<=`, bound)."""
    lines = [f"### {what}", "", body]
    rows = []
    for name, measured, sign, bound in targets:
        if measured is None:
            continue
        met = measured >= bound if sign == ">=" else measured <= bound
        digits = f"{measured:.2f}" if bound >= 0.05 else f"{measured:.4f}"
        rows.append([name, f"{sign} {bound:g}", digits, "met" if met else "MISSED"])
    if rows:
        lines += ["", table(["target", "bound", "measured", ""], rows)]
    return "\n".join(lines) + "\n"


class Results:
    """The page's sections, the newest of each: one can be measured again, and the others stay as they are."""

    def __init__(self, page):
        self.page = page
        _, body, _ = self.parts()
        # What comes before the first mark tells the machine.
        pieces = re.split(MARK, body)
        self.texts = dict(zip(pieces[1::2], (text.strip("\n") + "\n" for text in pieces[2::2]), strict=True))

    def parts(self):
        """The page: before the sections, they, after them."""
        page = self.page.read_text() if self.page.exists() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
        before, _, rest = page.partition(BEGIN)
        body, _, after = rest.partition(END)
        return before, body, after

    def put(self, name, text):
        chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith("BENCH_")}
        words = " ".join(f"{key}={value}" for key, value in chosen.items())
        date = time.strftime("%Y-%m-%d")
        self.texts[name] = f"{text}\n{date}, `{f'{words} ' if words else ''}make bench-peers`\n"

    def write(self, machine, order):
        before, _, after = self.parts()
        # What has another name now is kept, at the end.
        names = [*order, *(name for name in self.texts if name not in order)]
        body = "\n".join(f"<!-- {name} -->\n{self.texts[name]}" for name in names if name in self.texts)
        self.page.write_text(f"{before}{BEGIN}\nOn {machine}.\n\n{body}{END}{after}")
