"""Figures of the page in headless Chromium, against a real agent: first paint, ten thousand transfers, what an open page costs.

make bench-page
"""

import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
os.environ.setdefault("TOWLINE_TEST_COMMAND", str(ROOT / "target/release/towline"))
sys.path.insert(0, str(ROOT / "tests"))

from python.browser import Page  # noqa: E402
from python.page_agents import MANY, Agents  # noqa: E402

OPENED = 9
SECONDS = 20
LONG_TASKS = """
window.long = [];
new PerformanceObserver((list) => long.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: "longtask" });
"""


def median(values):
    return sorted(values)[len(values) // 2]


def cpu(process):
    """Seconds that a process has computed (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_paint(page, url):
    """Milliseconds until something is drawn, and until what the agent says is."""
    page.open("about:blank")
    page.open(url)
    page.until("document.querySelector('table')")
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return page.run(paint)


def share(process, page):
    """Share of a core that the agent takes while the page is open."""
    before, begun = cpu(process), time.monotonic()
    time.sleep(SECONDS)
    page.run("0")
    return (cpu(process) - before) / (time.monotonic() - begun)


def main():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        agents = Agents(Path(folder), inventory="30s")
        url = f"http://127.0.0.1:{agents.http}/#token={agents.token()}"
        agent = agents.running["home"]
        try:
            with Page() as page:
                paints = [first_paint(page, url) for _ in range(OPENED)]
                print(
                    f"first contentful paint: {median(paints):.0f} ms (median of {OPENED}, most {max(paints):.0f} ms)"
                )
                for view in ("overview", "sites", "transfers"):
                    page.run(f"location.hash = '{view}'")
                    print(f"agent, with {view} open: {100 * share(agent, page):.1f} % of a core")
                page.open("about:blank")
                print(f"agent, with no page open: {100 * share(agent, page):.1f} % of a core")
                page.call("Page.addScriptToEvaluateOnNewDocument", source=MANY + LONG_TASKS)
                page.open(f"http://127.0.0.1:{agents.http}/#transfers")
                page.until("asked > 2")
                looks = page.run("long.length = 0, asked")
                time.sleep(SECONDS)
                looks, tasks = page.run("asked") - looks, page.run("long")
                busy = f"{median(tasks):.0f} ms (most {max(tasks):.0f} ms)" if tasks else "less than 50 ms"
                print(f"10,000 transfers: {looks} updates in {SECONDS} s, {busy} each")
        finally:
            agents.end()


if __name__ == "__main__":
    main()
