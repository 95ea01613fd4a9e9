"""Agents as the chart runs them, without a cluster: they find each other, real Prometheus reads them as the ServiceMonitor says,
and the alerts and every query of the dashboard hold what they promise."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import waiting
from .chart import CHART, FULL, MINIMAL, ROOT, SITES, objects, one, pods
from .waiting import free_ports

BUILT = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline"))
DASHBOARD = json.loads((CHART / "dashboards/towline.json").read_text())
PATIENCE = 60.0
# `make test` sets this: what it installs and builds must be there then.
REQUIRED = "TOWLINE_TEST_REQUIRE_SERVERS" in os.environ

pytestmark = [
    pytest.mark.skipif(not REQUIRED and not BUILT.exists(), reason=f"{BUILT} is not there: cargo build makes it"),
    pytest.mark.skipif(
        not REQUIRED and shutil.which("promtool") is None,
        reason="Prometheus is not installed: tests/servers/setup.sh",
    ),
]

#: For each alert: series, one value a minute, for which it fires in the end, and some for which it does not.
ALERTS = {
    "TowlineDown": ("up", "0x70", "1x70"),
    "TowlineAbsent": (None, "", "1x70"),
    "TowlineNotReady": ("towline_ready", "0x70", "1x70"),
    "TowlineSavesFail": ('towline_task_retries_total{kind="watch"}', "0+1x70", "7x70"),
    "TowlineCheckpointSetAside": ("towline_handoff_set_aside", "2x70", "0x70"),
    "TowlineProblem": ("towline_problems", "1x70", "0x70"),
    "TowlineCertificateExpires": ("towline_certificate_expiry_time_seconds", "80000x70", "100000x70"),
    "TowlineCorruptChunks": ("towline_chunk_corrupt_total", "0x30 1x40", "3x70"),
    "TowlineCacheDamaged": ("towline_cache_damaged_total", "0x30 1x40", "3x70"),
    "TowlineCacheFull": ("towline_cache_refusals_total", "0+1x70", "3x70"),
    "TowlinePeersDown": ('towline_peers{state="down"}', "2x70", "0x70"),
}


def expressions() -> list[str]:
    """Queries of the dashboard, with its variables as they are for all agents."""
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 30
    return [expr.replace("$__rate_interval", "1m").replace("$instance", ".*") for expr in targets]


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_queries_and_alerts_name_metrics_of_the_agents():
    source = (ROOT / "src/metrics.rs").read_text()
    known = set(re.findall(r'"((?:towline|process)_[a-z_]+)"', source))
    histograms = {
        f"{name}_{suffix}" for name in re.findall(r'Histogram "(\w+)"', source) for suffix in ("bucket", "count")
    }
    asked = expressions() + [rule["expr"] for rule in alerts().values()]
    named = {name for expr in asked for name in re.findall(r"\b(?:towline|process)_[a-z_]+", expr)}
    assert named <= known | histograms and len(named) > 30


def labelled(series: str) -> str:
    """The series of one agent."""
    name, _, labels = series.partition("{")
    return f'{name}{{job="towline", instance="a:7171"{", " + labels if labels else "}"}'


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_when_it_should_and_only_then(alert, tmp_path):
    series, bad, good = ALERTS[alert]
    others = {"series": 'up{job="other", instance="b:1"}', "values": "1x70"}
    up = {"series": labelled('towline_peers{state="up"}'), "values": "0x70"}

    def case(values: str, fires: bool) -> dict[str, Any]:
        rule = alerts()[alert]
        told = rule["annotations"]["summary"].replace("{{ $labels.instance }}", "a:7171").replace("{{ $value }}", "2")
        own = labelled(series) if series else 'up{job="towline"}'
        labels = dict(re.findall(r'(\w+)="([^"]*)"', own)) | rule["labels"]
        expected = {"exp_labels": labels, "exp_annotations": rule["annotations"] | {"summary": told}}
        return {
            "interval": "1m",
            "input_series": [{"series": own, "values": values}, up] if values else [others],
            "alert_rule_test": [{"alertname": alert, "eval_time": "65m", "exp_alerts": [expected] if fires else []}],
        }

    document = {"rule_files": [str(CHART / "alerts.yaml")], "tests": [case(bad, True), case(good, False)]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    run = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_is_tried_and_in_the_documents():
    assert alerts().keys() == ALERTS.keys()
    text = (ROOT / "docs/deploy.md").read_text()
    for alert in alerts():
        assert f"`{alert}`" in text, alert


def until(what: str, found: Callable[[], Any]) -> Any:
    return waiting.until(what, found, PATIENCE)


class Site:
    """The agents of a release, as processes on ports of this machine, and the authority of their certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, []
        self.environment = os.environ | {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_CACHE_HOME": str(folder / "xdg"),
            "TOWLINE_REPO": str(folder / "repository"),
            "TOWLINE_AGENT": "none",
        }
        values = MINIMAL | {
            "repositories": [str(folder / "repository")],
            "settings": {"memory": "512M", "cache": {"free_floor": "0"}},
            "nodes": {"cache": {"capacity": "256M"}},
            "gateways": [{"name": "gateway", "address": "127.0.0.1:1", "cache": {"capacity": "256M"}}],
            "advisor": {"enabled": True, "sites": SITES.replace("s3://models/team", str(folder / "repository"))}
            | {"callers": "home/scheduler"},
            "monitoring": FULL["monitoring"],
        }
        self.objects = objects(values)
        #: What makes each pod.
        self.makers = {
            "towline-nodes-2x7qk": "towline-nodes",
            "towline-nodes-9w4tz": "towline-nodes",
            "towline-gateway-0": "towline-gateway",
            "towline-advisor-5d8f-8kzlm": "towline-advisor",
        }
        ports = free_ports(len(self.makers))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(self.makers, ports, strict=True)}

    def begin(self) -> None:
        self.towline("init", self.folder / "repository")
        self.towline("identity", "init")
        for name, maker in self.makers.items():
            self.start(name, maker)
        for name in self.makers:
            until(f"{name} is ready", lambda name=name: self.ready(name))

    def towline(self, *words: object, agent: str | None = None) -> str:
        socket = {"TOWLINE_AGENT": str(self.folder / agent / "run/agent/agent.sock")} if agent else {}
        run = subprocess.run(
            [BUILT, *map(str, words)], env=self.environment | socket, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, (words, run.stderr)
        return run.stdout

    def issue(self, uri: str) -> Path:
        """A certificate as cert-manager would make it for this URI."""
        identity = uri.removeprefix("towline://")
        folder = self.folder / "identities" / identity.replace("/", "-")
        if not folder.exists():
            self.towline("identity", "issue", identity, "--to", folder)
        return folder

    def start(self, name: str, maker: str) -> None:
        pod, folder = pods(self.objects)[maker]["spec"], self.folder / name
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        wanted = volumes["identity"]["csi"]["volumeAttributes"]["csi.cert-manager.io/uri-sans"]
        (agent,) = pod["containers"]
        places = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
        for volume in places:
            (folder / volume).mkdir(parents=True)
        config = one(self.objects, "ConfigMap", volumes["settings"]["configMap"]["name"])["data"]
        others = json.dumps([address for other, address in self.addresses.items() if other != name])
        for file, text in config.items():
            text = text.replace("[::]:7171", self.addresses[name]).replace("127.0.0.1:1", self.addresses[name])
            text = re.sub(r"^dns = .*", f"addresses = {others}", text, flags=re.MULTILINE)
            for volume, place in places.items():
                text = text.replace(f'"{place}', f'"{folder / volume}')
            (folder / "settings" / file).write_text(text)
        (folder / "identity").rmdir()
        (folder / "identity").symlink_to(self.issue(wanted.replace("${POD_NAME}", name)))
        words = [word.replace("/etc/towline/settings", str(folder / "settings")) for word in agent["args"]]
        state = {"STATE_DIRECTORY": str(folder / "cache/state"), "XDG_CACHE_HOME": str(folder / "cache/index")}
        log = (folder / "log").open("w")
        process = subprocess.Popen([BUILT, *words], env=self.environment | state, stdout=log, stderr=log)
        self.running.append((name, process))
        self.probe = agent["readinessProbe"]["exec"]["command"][1:]

    def ready(self, name: str) -> bool:
        for started, process in self.running:
            assert process.poll() is None, (started, (self.folder / started / "log").read_text())
        socket = self.folder / name / "run/agent/agent.sock"
        command = [BUILT, *self.probe]
        environment = self.environment | {"TOWLINE_AGENT": str(socket)}
        return subprocess.run(command, env=environment, capture_output=True).returncode == 0

    def ask(self, name: str, identity: Path, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """A request to the port for agents, as any program makes it that checks the name of the server."""
        context = ssl.create_default_context(cafile=identity / "ca.crt")
        context.load_cert_chain(identity / "tls.crt", identity / "tls.key")
        context.set_alpn_protocols(["http/1.1"])
        host, port = self.addresses[name].split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.sock = context.wrap_socket(socket.create_connection((host, int(port))), server_hostname="towline")
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def end(self) -> None:
        for _, process in self.running:
            process.send_signal(signal.SIGTERM)
        for name, process in self.running:
            assert process.wait(60) == 0, (self.folder / name / "log").read_text()

    def kill(self) -> None:
        for _, process in self.running:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # A socket's path is short.
    made = Site(Path(tempfile.mkdtemp(prefix="site-", dir="/tmp")))
    try:
        made.begin()
        yield made
        made.end()
    finally:
        made.kill()


def test_nodes_fetch_from_the_gateway_what_it_has(site, tmp_path):
    (tmp_path / "weights").write_bytes(os.urandom(8 << 20))
    site.towline("save", tmp_path / "weights", "models/base")
    site.towline("warm", "models/base", "--wait", agent="towline-gateway-0")

    node = "towline-nodes-2x7qk"
    until("a link to the gateway", lambda: "home/gateway" in site.towline("top", agent=node))
    # A folder is as near as another agent: it is asked for by name.
    report = site.towline("warm", "models/base", "--wait", "--from", "home", "--json", agent=node)
    (task,) = json.loads(report)["tasks"]
    assert task["report"]["sources"]["site"] >= 8 << 20 and task["report"]["missing"] == 0, task


def test_the_advisor_answers_its_callers_alone(site):
    request = {"apiVersion": "towline.dev/v1", "inputs": [{"ref": "models/base"}]}
    until("a name", lambda: "models/base" in site.towline("ls"))
    caller, stranger = site.issue("towline://home/scheduler"), site.issue("towline://home/stranger")
    status, text = site.ask("towline-advisor-5d8f-8kzlm", caller, "POST", "/v1/hints?wait=10s", request)
    assert status == 200, text
    assert sorted(hint["site"] for hint in json.loads(text)["candidates"]) == ["cloud", "home"]
    assert site.ask("towline-advisor-5d8f-8kzlm", stranger, "POST", "/v1/hints", request)[0] == 403


def test_metrics_are_for_the_scraper_and_it_reads_nothing_else(site):
    (uri,) = one(site.objects, "Certificate", "towline-scraper")["spec"]["uris"]
    scraper, other = site.issue(uri), site.issue("towline://home/other")
    for name in site.addresses:
        status, text = site.ask(name, scraper, "GET", "/metrics")
        assert status == 200 and "\ntowline_ready 1\n" in text
        status, text = site.ask(name, other, "GET", "/metrics")
        assert status == 403 and 'scrapers = ["home/other"]' in json.loads(text)["error"]["help"].replace('\\"', '"')
        assert site.ask(name, scraper, "GET", "/health")[0] == 403
        assert site.ask(name, scraper, "POST", "/v1/warm", {"name": "models/base"})[0] == 403


def test_prometheus_takes_the_configuration_of_the_documents(site, tmp_path):
    (block,) = re.findall(r"^```yaml prometheus\n(.*?)^```", (ROOT / "docs/operations.md").read_text(), re.M | re.S)
    file = tmp_path / "prometheus.yaml"
    file.write_text(block.replace("./prometheus", str(site.issue("towline://monitoring/prometheus"))))
    run = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (job,) = yaml.safe_load(block)["scrape_configs"]
    (endpoint,) = one(site.objects, "ServiceMonitor", "towline")["spec"]["endpoints"]
    assert job["tls_config"]["server_name"] == endpoint["tlsConfig"]["serverName"]
    assert job["job_name"] == endpoint["relabelings"][0]["replacement"]


@pytest.fixture(scope="module")
def prometheus(site) -> Iterator[Callable[[str, dict[str, str]], Any]]:
    """Prometheus, which reads the site as the ServiceMonitor says: a function that asks its API."""
    (endpoint,) = one(site.objects, "ServiceMonitor", "towline")["spec"]["endpoints"]
    (uri,) = one(site.objects, "Certificate", endpoint["tlsConfig"]["keySecret"]["name"])["spec"]["uris"]
    folder, own = site.folder / "prometheus", site.issue(uri)
    folder.mkdir()
    tls, keys = endpoint["tlsConfig"], {}
    for field, file in [("ca", tls["ca"]["secret"]), ("cert", tls["cert"]["secret"]), ("key", tls["keySecret"])]:
        keys[f"{field}_file"] = str(own / file["key"])
    job = {
        "job_name": endpoint["relabelings"][0]["replacement"],
        "scheme": endpoint["scheme"],
        "metrics_path": endpoint["path"],
        "tls_config": {"server_name": tls["serverName"], **keys},
        "static_configs": [{"targets": list(site.addresses.values())}],
    }
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(CHART / "alerts.yaml")],
                "scrape_configs": [job],
            }
        )
    )
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=log,
    )

    def ask(path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                # It is starting.
                return None
            pytest.fail(f"{path} {parameters}: {error.read().decode()}")
        except OSError:
            assert process.poll() is None, (folder / "log").read_text()
            return None

    yield ask
    process.terminate()
    process.wait(30)


def test_prometheus_reads_every_agent_and_the_alerts_are_quiet(site, prometheus):
    def up() -> bool:
        found = prometheus("query", query='up{job="towline"}') or {"result": []}
        return [it["value"][1] for it in found["result"]] == ["1"] * len(site.addresses)

    until("each agent is read", up)
    # Prometheus evaluates rules every second here.
    (group,) = until(
        "alerts are evaluated",
        lambda: [it for it in prometheus("rules")["groups"] if all(rule["health"] == "ok" for rule in it["rules"])],
    )
    assert len(group["rules"]) == len(ALERTS)
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_every_query_of_the_dashboard_has_an_answer(site, prometheus):
    # Known only where it happened: quotas of tenants, handoffs.
    may_be_empty = ("tenant", "towline_handoff_bytes")

    def unanswered() -> list[str]:
        found = [(expr, prometheus("query", query=expr)) for expr in expressions()]
        return [
            expr for expr, answer in found if not any(rare in expr for rare in may_be_empty) and not answer["result"]
        ]

    until("answers to all", lambda: not unanswered())
