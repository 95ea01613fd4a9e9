"""Towline against its peers: same bytes, same machine, alternating runs, medians. `make bench-peers` runs it.

BENCH_SIZE (2G), BENCH_RUNS (3), BENCH_FILES (100000), BENCH_BIG (20G; 0 leaves it out), BENCH_DIR (/dev/shm),
BENCH_DISK (target/bench-peers, for what is larger than memory), BENCH_ONLY (local,s3,small,memory,runs,boxes,python,
sharded,weights,links,index),
BENCH_RUNS_DATA (.peers/runs, the checkpoints of the runs section), BENCH_TRAIN_ARGS (to train.py, which makes them),
TOWLINE and FLOOR (programs), BENCH_TOWLINE_ARGS, BENCH_S3_CONCURRENCY (16).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import boxes as parts_of_tensors
import loops
import report
import runs as trained_runs
import tools
from measure import GIB, MIB, Failed, checkpoint, folder_bytes, fresh, machine, note, parse_size, run, same
from measure import small_files, touch_memory

RUNS = int(os.environ.get("BENCH_RUNS", "3"))
SIZE = parse_size(os.environ.get("BENCH_SIZE", "2G"))
BIG = parse_size(os.environ.get("BENCH_BIG", "20G"))
FILES = int(os.environ.get("BENCH_FILES", "100000"))
SCRATCH = Path(os.environ.get("BENCH_DIR", "/dev/shm")) / "towline-bench"
DISK = Path(os.environ.get("BENCH_DISK", tools.ROOT / "target/bench-peers")).resolve()
VERBS = ("first", "again", "by_stat", "restore")


def present(candidates):
    """The tools that are on this machine; says which are not."""
    found = [tool for tool in candidates if tool.path()]
    for tool in candidates:
        if tool not in found:
            note(f"  {tool.name}: not here, left out")
    return found


def one_round(tool, source, samples, verbs=VERBS):
    """Every verb of one tool once, in its order; the restored bytes are compared."""
    size = folder_bytes(source)[0]
    for verb in verbs:
        command = getattr(tool, verb)
        if command is None:
            continue
        if verb in ("first", "restore"):
            touch_memory(SCRATCH, size)
        if verb != "restore":
            sample = run(command(source), tool.env)
        else:
            out = fresh(tool.scratch / "out")
            sample = run(command(source, out), tool.env)
            same(source, tool.restored(source, out))
            shutil.rmtree(out)
        samples.setdefault((tool.name, verb), []).append(sample)
        note(f"  {tool.name:14} {verb:8} {sample.seconds:8.2f} s  {sample.cpu:7.2f} CPU s")


def rounds(candidates, each):
    """Calls `each(tool, run)` in alternation: each run starts with another tool."""
    found = present(candidates)
    for at in range(RUNS):
        for tool in found[at % len(found) :] + found[: at % len(found)]:
            each(tool, at)
    return [tool.name for tool in found]


def local():
    """A checkpoint on one machine: first save, again with every byte read, again by stat, restore."""
    # On disk: files in memory are always read again.
    source, samples, stored = checkpoint(DISK / "checkpoint", SIZE), {}, {}

    def each(kind, _):
        tool = kind(fresh(SCRATCH / "scratch"))
        if tool.init():
            run(tool.init(), tool.env)
        one_round(tool, source, samples)
        if Path(tool.repo).exists():
            stored[tool.name] = folder_bytes(Path(tool.repo))[0]

    names = rounds(tools.LOCAL, each)
    rate = report.Ratios(samples)
    floor = tools.Floor.name
    targets = [
        ("first save, speed / restic", rate("restic", "towline", "first"), ">=", 2.5),
        ("first save, speed / rustic", rate("rustic", "towline", "first"), ">=", 2.5),
        ("first save, time / BLAKE3 + write", rate("towline", floor, "first"), "<=", 1.3),
        ("unchanged, re-read, speed / restic", rate("restic", "towline", "again"), ">=", 6.0),
        ("unchanged, re-read, time / BLAKE3 + read", rate("towline", floor, "again"), "<=", 1.3),
        ("unchanged, by stat, seconds", rate.seconds("towline", "by_stat"), "<=", 0.1),
        ("restore, speed / cp", rate("cp", "towline", "restore"), ">=", 0.8),
        ("restore, speed / restic", rate("restic", "towline", "restore"), ">=", 3.0),
    ]
    what = f"{SIZE / GIB:g} GiB of safetensors (4 shards), compression off, from the page cache to memory (tmpfs)"
    return report.section(what, report.seconds_table(names, VERBS, samples, SIZE, stored), targets)


def s3():
    """The same checkpoint to and from Ceph, with the client's CPU."""
    keys = ceph_keys()
    if keys is None:
        return None
    tools.S3.store_env = keys
    cleaner = tools.S5cmd(fresh(SCRATCH / "scratch"), "none")
    subprocess.run(cleaner.command("mb", f"s3://{tools.S3.bucket}"), env=cleaner.env, capture_output=True)
    source, samples = checkpoint(SCRATCH / "checkpoint", SIZE), {}

    def each(kind, at):
        tool = kind(fresh(SCRATCH / "scratch"), at)
        if tool.init():
            run(tool.init(), tool.env)
        one_round(tool, source, samples, ("first", "restore"))
        subprocess.run(tool_clean(cleaner, tool), env=cleaner.env, capture_output=True)

    names = rounds(tools.STORES, each)
    rate = report.Ratios(samples)
    targets = [
        ("up, speed / s5cmd", rate("s5cmd", "towline", "first"), ">=", 0.9),
        ("down, speed / s5cmd", rate("s5cmd", "towline", "restore"), ">=", 0.9),
    ]
    what = f"{SIZE / GIB:g} GiB of safetensors to and from Ceph RGW on loopback, {tools.S3.lanes} requests at a time"
    return report.section(what, report.cpu_table(names, samples, SIZE), targets)


def tool_clean(cleaner, tool):
    return cleaner.command("rm", f"s3://{tool.prefix}/*")


def ceph_keys():
    """The address and keys that tests/servers wrote; None where there is no server."""
    written = Path(os.environ.get("TOWLINE_TEST_CEPH", tools.ROOT / "target/servers/ceph.env"))
    if not written.exists():
        note(f"  no Ceph: {written} is missing (tests/servers/servers.sh start)")
        return None
    keys = dict(re.findall(r"(\w+)=[\"']?([^\s\"']+)", written.read_text()))
    endpoint = keys.get("AWS_ENDPOINT_URL") or keys.get("S3_ENDPOINT") or keys.get("ENDPOINT")
    if not endpoint:
        raise Failed(f"{written}: no AWS_ENDPOINT_URL or S3_ENDPOINT in it")
    return {"AWS_REGION": "us-east-1", **keys, "AWS_ENDPOINT_URL": endpoint}


def small():
    """Many small files."""
    source, samples, objects = small_files(DISK / "small", FILES), {}, {}
    total = folder_bytes(source)[0]

    def each(kind, _):
        tool = kind(fresh(SCRATCH / "scratch"))
        if tool.init():
            run(tool.init(), tool.env)
        one_round(tool, source, samples, ("first", "by_stat", "restore"))
        objects[tool.name] = folder_bytes(Path(tool.repo))[1]

    names = rounds(tools.REPOSITORIES, each)
    rate = report.Ratios(samples)
    targets = [
        ("save, speed / restic", rate("restic", "towline", "first"), ">=", 2.0),
        ("restore, speed / restic", rate("restic", "towline", "restore"), ">=", 2.0),
        ("objects written", objects.get("towline"), "<=", 200),
        ("by stat, seconds", rate.seconds("towline", "by_stat"), "<=", 0.1 + 10e-6 * FILES),
    ]
    what = f"{FILES:,} files of 1 to 20 KiB ({total / GIB:.2f} GiB), from the page cache to memory (tmpfs)"
    return report.section(what, report.objects_table(names, samples, objects), targets)


def memory():
    """Peak anonymous memory under `--memory 256M`, on a checkpoint larger than memory."""
    if BIG == 0 or not tools.Towline.path():
        return None
    DISK.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(DISK).free
    if free < 3.2 * BIG:
        note(f"  {DISK}: {free / GIB:.0f} GiB free, {3.2 * BIG / GIB:.0f} wanted; a smaller BENCH_BIG fits")
        return None
    source = checkpoint(DISK / "big", BIG, shards=8, quick=True)
    tool = tools.Towline(fresh(DISK / "scratch"))
    run(tool.init(), tool.env)
    bound = ["--memory", "256M"]
    saved = run(tool.first(source) + bound, tool.env, watch_memory=True)
    out = fresh(tool.scratch / "out")
    restored = run(tool.restore(source, out) + bound, tool.env, watch_memory=True)
    same(source, out)
    shutil.rmtree(tool.scratch)
    shutil.rmtree(source)
    rows = [
        [verb, f"{s.seconds:.1f}", f"{s.cpu:.1f}", f"{s.anonymous / MIB:.0f}"]
        for verb, s in (("save", saved), ("restore", restored))
    ]
    targets = [
        ("save, peak MiB", saved.anonymous / MIB, "<=", 256 + 64),
        ("restore, peak MiB", restored.anonymous / MIB, "<=", 256 + 64),
    ]
    table = report.table(["verb", "seconds", "CPU s", "peak anonymous MiB"], rows)
    return report.section(f"{BIG / GIB:g} GiB on disk under `--memory 256M`", table, targets)


def links():
    """Between sites: agents, rsync, rclone, sendme, over links of set rate, delay and loss."""
    sys.path.append(str(tools.ROOT / "benches"))
    from links import bench as between_sites

    return between_sites.section(DISK, SCRATCH)


def index():
    """The repository of ten million chunks: a bench of the crate itself, quoted."""
    if not (tools.ROOT / "benches/index.rs").exists():
        note("  benches/index.rs is not there")
        return None
    done = subprocess.run(["cargo", "bench", "--quiet", "--bench", "index"], cwd=tools.ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"cargo bench --bench index: exit {done.returncode}\n{done.stderr[-2000:]}")
    return report.section("10 million chunks (`cargo bench --bench index`)", f"```text\n{done.stdout.strip()}\n```", [])


def runs():
    """A training run's checkpoints: stored bytes by program, restores out of a run, codec speeds."""
    return trained_runs.section(DISK, present)


def boxes():
    """Parts of tensors: what is read for them."""
    return parts_of_tensors.section(DISK)


def python():
    """Saving and restoring from a training loop, beside torch's own ways."""
    return loops.section(DISK, RUNS)


def sharded():
    """Distributed checkpoints, beside torch's own writers and readers."""
    return loops.sharded(DISK, RUNS)


def weights():
    """Loading weights, beside other loaders."""
    return loops.weights(DISK, RUNS)


SECTIONS = {
    "local": local,
    "small": small,
    "s3": s3,
    "memory": memory,
    "runs": runs,
    "boxes": boxes,
    "python": python,
    "sharded": sharded,
    "weights": weights,
    "links": links,
    "index": index,
}


# What is measured, and stands on the page, by itself.
PARTS = {"links": ["loopback", "wan300", "wan1000", "begin", "step", "half", "gang", "cold", "estimates", "staged"]}


def main():
    wanted = os.environ.get("BENCH_ONLY", ",".join(SECTIONS)).split(",")
    failed = False
    results = report.Results(tools.ROOT / "docs/benchmarks.md")
    for name in wanted:
        note(f"{name}: {SECTIONS[name].__doc__.splitlines()[0]}")
        try:
            text = SECTIONS[name]()
        except Failed as error:
            note(f"  {error}")
            failed = True
            continue
        parts = text if isinstance(text, dict) else {name: text}
        for part, text in parts.items():
            if text:
                print(f"\n{text}")
                results.put(part, text)
    results.write(machine(), [part for name in SECTIONS for part in PARTS.get(name, [name])])
    shutil.rmtree(SCRATCH, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
