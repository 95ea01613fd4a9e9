"""`towline.hint`: what a scheduler in Python asks this node's agent."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

import pytest
import towline

DOCUMENT = Path(__file__).parents[2] / "docs/placement.md"
TOWLINE = Path(sys.executable).with_name("towline")

SITES = """
[[site]]
name = "home"
repositories = "{place}"
[[site]]
name = "burst"
[[link]]
from = "home"
to = "burst"
rate = "1Gbit"
price = {{ unit = "GB", usd = "0.09" }}
"""


@pytest.fixture
def home(tmp_path: Path, repository: towline.Repository, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an agent of the site `home`, which has a sites file and a cache."""
    (tmp_path / "file").write_bytes(os.urandom(3 << 20))
    repository.save(tmp_path / "file", "run-7/step-1")
    place = (tmp_path / "repository").resolve()
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    for words in (["init"], ["issue", "home/a", "--to", str(tmp_path / "tls")]):
        subprocess.run([TOWLINE, "identity", *words, "--json"], env=environment, stdout=subprocess.DEVNULL, check=True)
    (tmp_path / "sites.toml").write_text(SITES.format(place=place))
    (tmp_path / "agent.toml").write_text(
        f'repository = "{place}"\nsocket = "agent.sock"\nidentity = "tls"\nmemory = "256M"\n'
        '[cache]\ndir = "cache"\ncapacity = "64M"\nfree_floor = "0"\ninventory = "100ms"\n'
        '[advisor]\nsites = "sites.toml"\n'
    )
    command = [TOWLINE, "agent", "--config", tmp_path / "agent.toml", "--json"]
    agent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert b"listening" in agent.stdout.readline()
    monkeypatch.setenv("TOWLINE_AGENT", str(tmp_path / "agent.sock"))
    yield tmp_path
    agent.terminate()
    assert agent.wait(60) == 0


def test_the_best_site_is_told_and_committed(home: Path) -> None:
    hint = towline.hint("run-7@latest", gpus=8, objective="cost", runtime="1h", max_time=timedelta(hours=1))
    assert hint.inputs == ["run-7/step-1"] and hint.complete, hint
    best = hint.best
    assert (best.site, best.rank, best.is_allowed) == ("home", 1, True)
    burst = hint.candidates[1]
    assert (burst.site, burst.bytes["missing"]) == ("burst", best.bytes["missing"])
    assert burst.usd_micro["egress"] == round(burst.bytes["missing"] * 0.09 / 1000)
    with hint.commit(lease="2h") as held:
        held.wait("1m")
        assert (held.at, held.missing_bytes(), held.bytes) == ("home/a", 0, best.bytes["missing"])
        (record,) = home.rglob("commitments/*.json")
        assert json.loads(record.read_text())["job"]["started"] is True
        held.renew(3600)
        pins = json.loads(subprocess.run([TOWLINE, "pins", "--json"], stdout=subprocess.PIPE, check=True).stdout)
        assert [pin["reason"] for pin in pins["pins"]] == [f"hint {hint.hint_id}"]
    pins = json.loads(subprocess.run([TOWLINE, "pins", "--json"], stdout=subprocess.PIPE, check=True).stdout)
    assert pins["pins"] == []


def test_errors_say_what_is_wrong(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(towline.NotFound, match="no such name"):
        towline.hint("run-7/step-9")
    with pytest.raises(towline.NotFound, match="the sites file does not describe the site"):
        towline.hint("run-7@latest", at=["moon"])
    with pytest.raises(towline.UsageError, match="runtime"):
        towline.hint("run-7@latest", runtime="soon")
    with pytest.raises(towline.UsageError, match="quantile"):
        towline.hint("run-7@latest", quantile=0.7)
    with pytest.raises(towline.Error):
        towline.hint("run-7@latest", at=["burst"]).commit()
    with pytest.raises(AttributeError, match="no field 'cost'"):
        towline.hint("run-7@latest").best.cost  # noqa: B018
    monkeypatch.setenv("TOWLINE_AGENT", str(home / "absent.sock"))
    with pytest.raises(towline.Unreachable):
        towline.hint("run-7@latest")


def test_the_documented_lines_run(home: Path) -> None:
    (lines,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    shown = io.StringIO()
    with redirect_stdout(shown):
        exec(compile(lines, DOCUMENT, "exec"), {})
    assert [line.split()[:3] for line in shown.getvalue().splitlines()] == [
        ["1", "home", "allow"],
        ["2", "burst", "allow"],
    ]
