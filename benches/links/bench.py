"""Moving a checkpoint between two sites: Towline's agents, rsync, rclone, sendme, and bare transports.

BENCH_LINK_SIZE (1G), BENCH_LINK_RUNS (3), BENCH_LINK_LIMIT (240: seconds, after which a program's rate is what it got
to), BENCH_LINK_GANG (512M), BENCH_LINK_ONLY (loopback,wan300,wan1000,begin,step,half,gang,cold,estimates,staged),
BENCH_LINK_ESTIMATES (23: transfers). `make bench-peers` runs it as the section `links`, and benches/links/selftest.py says that
the links are what they are asked to be.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass

import numpy as np
import report
from measure import GIB, MIB, Failed, checkpoint, folder_bytes, fresh, median, note, parse_size, touch_memory

from . import movers
from . import world as worlds

SIZE = parse_size(os.environ.get("BENCH_LINK_SIZE", "1G"))
GANG = parse_size(os.environ.get("BENCH_LINK_GANG", "512M"))
RUNS = int(os.environ.get("BENCH_LINK_RUNS", "3"))
LIMIT = float(os.environ.get("BENCH_LINK_LIMIT", "240"))
WIDE = [
    movers.Towline,
    movers.TowlineQuic,
    movers.TowlineTcp,
    movers.Rsync,
    movers.Rclone,
    movers.Sendme,
    movers.Quinn,
    movers.Rustls,
]
PEERS = [movers.Towline, movers.Rsync, movers.Rclone, movers.Sendme]
CORES = [movers.TowlineQuic, movers.TowlineTcp, movers.Sendme, movers.Quinn, movers.Quinn4, movers.Rustls]
CORES += [movers.Rsync, movers.Rclone]


@dataclass
class Moved:
    """One transfer: wall seconds, CPU seconds of far and near, bytes that came down far's link, whether it came to its end."""

    seconds: float
    far_cpu: float = 0.0
    near_cpu: float = 0.0
    carried: int = 0
    whole: bool = True
    # What far said last, where that was JSON.
    told: dict | None = None


def present(candidates):
    """Those whose programs are here; says which are not."""
    found = [kind for kind in candidates if kind.path()]
    for kind in candidates:
        if kind not in found:
            note(f"  {kind.name}: not here, left out")
    return found


def carried(place, node="far"):
    """Bytes that have come down a node's link so far."""
    counts = place.counts()
    return counts[node]["down"]["bytes"] if counts else 0


def moved(place, mover, command, until=None, node="far"):
    """Runs what far runs, to its end, to the limit, or until `until()`: then it is ended as its program is."""
    touch_memory(mover.scratch, 2 * SIZE)
    near, far = mover.pids("near"), mover.pids("far")
    near_before, far_before, before = cpu(near), cpu(far), carried(place, node)
    with tempfile.TemporaryFile("w+") as told:
        began = time.monotonic()
        child = place.start(node, command, env=mover.env, out=told)
        whole = watched(child, began, until)
        if not whole:
            child.send_signal(mover.ends_by)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        place.running.remove(child)
        told.seek(0)
        text = told.read()
    if whole and child.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit {child.returncode}\n{text[-2000:]}")
    far_cpu = usage.ru_utime + usage.ru_stime + cpu(far) - far_before
    return Moved(seconds, far_cpu, cpu(near) - near_before, carried(place, node) - before, whole, last_json(text))


def last_json(text):
    """The last line, if it is a JSON object."""
    try:
        found = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def watched(child, began, until):
    """True once the program has ended; False if it is to be ended."""
    while True:
        # WNOWAIT leaves its CPU time to be asked for.
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        if time.monotonic() - began > LIMIT or (until and until()):
            return False
        time.sleep(0.005)


def cpu(pids):
    """CPU seconds of processes so far, their ended children included."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def rounds(place, scratch, source, kinds, samples, key):
    """Every program in alternation, each run with folders of its own; what came is compared with the source."""
    kinds = present(kinds)
    for at in range(RUNS):
        for kind in kinds[at % len(kinds) :] + kinds[: at % len(kinds)]:
            with_scratch = fresh(scratch / "scratch")
            mover = kind(place, with_scratch, source)
            try:
                mover.serve()
                sample = moved(place, mover, mover.command())
                if sample.whole:
                    mover.check()
            finally:
                mover.close()
            samples.setdefault((kind.name, key), []).append(sample)
            note(f"  {kind.name:22} {key:9} {described(sample, folder_bytes(source)[0])}")
            shutil.rmtree(with_scratch)
    return [kind.name for kind in kinds]


def described(sample, size):
    text = f"{sample.seconds:8.2f} s {sample.far_cpu:7.2f} + {sample.near_cpu:.2f} CPU s, {sample.carried / MIB:.0f} MiB carried"
    return text if sample.whole else f"{text}: not whole, {sample.carried / size:.2f} of it"


def rate(found, size):
    """Bytes a second, the median; of a run that was ended, what came with it."""
    if not found:
        return None
    return sorted((size if s.whole else s.carried) / s.seconds for s in found)[len(found) // 2]


def ratio(above, below):
    return above / below if above and below else None


def loopback(scratch, samples):
    """One core each side, no link."""
    source = checkpoint(scratch / "source", SIZE, quick=True)
    cores = sorted(os.sched_getaffinity(0))
    place = worlds.Loopback({"near": cores[0], "far": cores[-1]})
    with place:
        names = rounds(place, scratch, source, CORES, samples, "loopback")
    of = lambda name: rate(samples.get((name, "loopback")), SIZE)
    rows = []
    for name in names:
        found = samples[name, "loopback"]
        cells = [
            f"{of(name) / MIB:.0f}",
            *(f"{median(found, side) / (SIZE / GIB):.2f}" for side in ("near_cpu", "far_cpu")),
        ]
        rows.append(
            [
                name,
                spread(found),
                *cells,
                cell(ratio(of(name), of("bare quinn"))),
                cell(ratio(of(name), of("bare rustls"))),
            ]
        )
    head = ["", "seconds", "MiB/s", "sender, CPU s/GiB", "receiver, CPU s/GiB", "/ bare quinn", "/ bare rustls"]
    targets = [
        ("QUIC, rate / sendme", ratio(of("towline, QUIC"), of("sendme")), ">=", 0.8),
        ("QUIC, rate / bare quinn", ratio(of("towline, QUIC"), of("bare quinn")), ">=", 0.8),
        ("TCP, rate / bare rustls", ratio(of("towline, TCP"), of("bare rustls")), ">=", 0.7),
    ]
    what = f"{SIZE / GIB:g} GiB over loopback, one core each side"
    return report.section(what, report.table(head, rows), targets)


def wide(scratch, samples, key, bits, loss, bound):
    """Two sites, cold."""
    source = checkpoint(scratch / "source", SIZE, quick=True)
    with worlds.two_sites(f"{bits / 1e6:g}M", 0.05, loss) as place:
        names = rounds(place, scratch, source, WIDE, samples, key)
    of = lambda name: rate(samples.get((name, key)), SIZE)
    rows = []
    for name in names:
        found = samples[name, key]
        over = [f"{median(found, 'carried') / SIZE:.3f}" if all(s.whole for s in found) else ""]
        rows.append([name, spread(found), f"{of(name) * 8 / 1e6:.0f}", f"{of(name) * 8 / bits:.2f}", *over])
    head = ["", "seconds", "Mbit/s of content", "share of the link", "carried / content"]
    targets = [("share of the link", ratio(of("towline") and of("towline") * 8, bits), ">=", bound)]
    targets += [
        (f"rate / {name}", ratio(of("towline"), of(name)), ">=", 1.0) for name in ("rsync", "rclone", "sendme")
    ]
    what = f"{SIZE / GIB:g} GiB cold, {bits / 1e6:g} Mbit/s, 50 ms, {loss:.1%} loss each way ({congestion()})"
    return report.section(what, report.table(head, rows), targets)


def wan300(scratch, samples):
    """300 Mbit/s, 50 ms, 0.1 % loss, cold."""
    return wide(scratch, samples, "wan300", 300e6, 0.001, 0.9)


def wan1000(scratch, samples):
    """1 Gbit/s, 50 ms, 0.1 % loss, cold."""
    return wide(scratch, samples, "wan1000", 1e9, 0.001, 0.75)


def next_step(source, scratch):
    """The checkpoint after the source's: a tenth of each shard is new."""
    folder = scratch / f"next-{SIZE}"
    if not folder.exists():
        made = fresh(scratch / "making")
        rng = np.random.default_rng(3)
        for path in sorted(source.iterdir()):
            size = path.stat().st_size
            shutil.copyfile(path, made / path.name)
            with (made / path.name).open("r+b") as file:
                file.seek(size // 2)
                file.write(rng.bytes(size // 10))
            # Later by more than any program's idea of the same time.
            os.utime(made / path.name, (path.stat().st_mtime + 60,) * 2)
        made.rename(folder)
    return folder


def step(scratch, samples):
    """The next step of a run, where the last one is."""
    source = checkpoint(scratch / "source", SIZE, quick=True)
    after = next_step(source, scratch)
    rows, targets = [], []
    for kind in present([movers.Towline, movers.Rsync]):
        with worlds.two_sites("300M", 0.05, 0.001) as place:
            mover = kind(place, fresh(scratch / "scratch"), source)
            try:
                mover.serve()
                moved(place, mover, mover.command())
                new = mover.next(after)
                sample = moved(place, mover, mover.command())
                mover.check()
            finally:
                mover.close()
        samples[kind.name, "step"] = [sample]
        note(f"  {kind.name:22} step      {described(sample, SIZE)}; new {new / MIB:.1f} MiB; said {sample.told}")
        rows.append(
            [
                kind.name,
                f"{sample.seconds:.2f}",
                f"{sample.carried / MIB:.1f}",
                f"{new / MIB:.1f}",
                f"{sample.carried / new:.3f}",
            ]
        )
        if kind is movers.Towline:
            # Stored bytes, as the agent counts them: the link's count holds headers, acknowledgements and losses too.
            told = sample.told["tasks"][0]["progress"]["moved"]
            targets.append(("moved / newly stored bytes", told / new, "<=", 1.01))
    head = ["", "seconds", "carried, MiB", "newly stored, MiB", "carried / new"]
    return report.section(
        "The next step of a run, 300 Mbit/s, 50 ms, 0.1 % loss: a tenth of it new", report.table(head, rows), targets
    )


def begin(scratch, samples):
    """Small files to a site that holds nothing: connections and look-ups take more time than the bytes."""
    sizes, kinds = (2, 16, 128), present([movers.Towline, movers.Rsync, movers.Rclone])
    found = {}
    for size in sizes:
        source = checkpoint(scratch / f"begin-{size}", size * MIB, quick=True)
        for kind in kinds:
            runs = found[kind.name, size] = samples[kind.name, f"begin, {size} MiB"] = []
            for seed in range(1, RUNS + 1):
                with worlds.two_sites("300M", 0.05, 0.001, seed=seed) as place:
                    runs += transferred(place, kind, fresh(scratch / "scratch"), source)
            note(f"  {kind.name:22} {size:4} MiB  {described(runs[-1], size * MIB)}")
    rows = []
    for kind in kinds:
        cells = [kind.name]
        for size in sizes:
            seconds = median(found[kind.name, size], "seconds")
            cells += [f"{seconds:.2f}", f"{seconds - size * MIB * 8 / 300e6:.2f}"]
        rows.append(cells)
    head = [""]
    for size in sizes:
        head += [f"{size} MiB, s", "more than the line takes"]
    targets = []
    if movers.Rclone in kinds:
        for size in sizes:
            own, peers = (median(found[kind.name, size], "seconds") for kind in (movers.Towline, movers.Rclone))
            targets.append((f"{size} MiB: seconds / rclone", own / peers, "<=", 1.1))
    title = f"Small files to a cold site, 300 Mbit/s, 50 ms, 0.1 % loss ({congestion()})"
    return report.section(title, report.table(head, rows), targets)


def half(scratch, samples):
    """Interrupted at half: when the link has carried half of what it carries for a whole one, headers and losses included."""
    source = checkpoint(scratch / "source", SIZE, quick=True)
    rows, targets = [], []
    for kind in present(PEERS):
        with worlds.two_sites("300M", 0.05, 0.001) as place:
            # The same link as for a cold one: where that was measured, it need not be again.
            whole = samples.get((kind.name, "wan300"), [None])[-1]
            if whole is None:
                [whole] = transferred(place, kind, fresh(scratch / "scratch"), source)
            all_of_it = whole.carried if whole.whole else SIZE
            killed = lambda began=carried(place), most=all_of_it / 2: carried(place) - began > most
            first, rest = transferred(place, kind, fresh(scratch / "scratch"), source, killed)
        samples[kind.name, "half"] = [whole, first, rest]
        note(f"  {kind.name:22} half      {described(rest, SIZE)}; a whole one {whole.carried / MIB:.0f} MiB")
        share = rest.carried / all_of_it
        rows.append(
            [
                kind.name,
                f"{all_of_it / SIZE:.3f}" if whole.whole else "",
                f"{first.carried / all_of_it:.2f}",
                f"{share:.3f}" + ("" if rest.whole else ", incomplete"),
                f"{rest.seconds:.1f}",
            ]
        )
        if kind is movers.Towline:
            targets.append(("rest carried / whole transfer", share, "<=", 0.52))
    head = [
        "",
        "whole transfer carried / content",
        "carried when killed / whole transfer",
        "rest carried / whole transfer",
        "rest, seconds",
    ]
    return report.section("Killed at half, 300 Mbit/s, 50 ms, 0.1 % loss", report.table(head, rows), targets)


def transferred(place, kind, scratch, source, until=None):
    """One transfer; with `until`, that is killed then, and the rest."""
    mover = kind(place, scratch, source)
    try:
        mover.serve()
        samples = [moved(place, mover, mover.command(), until=until)]
        if until:
            mover.interrupted()
            samples.append(moved(place, mover, mover.again()))
        if samples[-1].whole:
            mover.check()
    finally:
        mover.close()
    return samples


def spread(found):
    text = report.spread(found)
    return text if all(sample.whole for sample in found) else f"ended at {text}"


def cell(number):
    return "" if number is None else f"{number:.2f}"


def congestion():
    """What the machine's TCP does by default: it is what the programs over TCP get."""
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        return f"TCP here: {file.read().strip()}"


def gang(scratch, samples):
    """A cold gang of eight behind one origin."""
    from . import gang as gangs

    sources = {
        gangs.FULL: checkpoint(scratch / "gang", GANG, quick=True),
        gangs.QUARTER: checkpoint(scratch / "gang-thin", GANG // 2, quick=True),
    }
    return gangs.section(sources, scratch, samples)


def cold(scratch, samples):
    """A step of a trained run at a site that holds nothing of it."""
    from . import cold as steps

    return steps.section(scratch, samples)


def estimates(scratch, samples):
    """What hints say of transfers, and what they take."""
    from . import estimates as hints

    return hints.section(scratch, samples)


def staged(scratch, samples):
    """Weights staged into memory at a site that holds nothing of them."""
    from . import staged as weights

    return weights.section(scratch, samples)


SCENARIOS = {"loopback": loopback, "wan300": wan300, "wan1000": wan1000, "begin": begin, "step": step, "half": half}
SCENARIOS |= {"gang": gang, "cold": cold, "estimates": estimates, "staged": staged}


def section(disk, folder):
    """The text of each scenario; the samples go as JSON beside the other results."""
    reason = worlds.possible()
    wanted = os.environ.get("BENCH_LINK_ONLY", ",".join(SCENARIOS)).split(",")
    if reason:
        note(f"  {reason}: loopback only")
        wanted = [name for name in wanted if name == "loopback"]
    scratch = folder / "links"
    scratch.mkdir(parents=True, exist_ok=True)
    samples, texts = {}, {}
    for name in wanted:
        note(f" {name}: {SCENARIOS[name].__doc__.splitlines()[0]}")
        try:
            texts[name] = SCENARIOS[name](scratch, samples)
        except (Failed, worlds.Broken, subprocess.SubprocessError) as error:
            note(f"  {name}: {error}")
    # The gang keeps pairs: seconds and bytes, by number of agents.
    kept = [
        {"program": program, "scenario": key, "gang": found}
        for (program, key), found in samples.items()
        if key.endswith("gang")
    ]
    kept += [
        {"program": program, "scenario": key, "estimates": found}
        for (program, key), found in samples.items()
        if key.startswith("estimates")
    ]
    kept += [
        {"program": program, "scenario": key, "runs": [asdict(s) for s in found]}
        for (program, key), found in samples.items()
        if not key.endswith("gang") and not key.startswith("estimates")
    ]
    disk.mkdir(parents=True, exist_ok=True)
    (disk / "links.json").write_text(json.dumps({"size": SIZE, "gang": GANG, "samples": kept}, indent=1))
    return texts
