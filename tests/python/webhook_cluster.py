"""A cluster of one machine for tests of the webhook: an API server, the webhook, an agent of the node, and pods as processes."""

from __future__ import annotations

import base64
import contextlib
import copy
import http.client
import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

from .chart import MINIMAL, ROOT, objects, one
from .waiting import free_ports, until

BUILT = Path(os.environ.get("TOWLINE_TEST_COMMAND", ROOT / "target/debug/towline"))
GOLDEN = Path(__file__).parent / "golden"
PATIENCE = 60.0
REQUIRED = "TOWLINE_TEST_REQUIRE_SERVERS" in os.environ

POLICY = """
version = 1
repository = "{repository}"

[[site]]
name = "home"
jurisdiction = "DE"

[[site]]
name = "archive"
jurisdiction = "DE"
repositories = "{repository}"

[[site]]
name = "cloud"
jurisdiction = "US"

[[spiffe]]
id = "spiffe://home/ns/ml/sa/trainer"
agent = "home/trainer"

[[spiffe]]
id = "spiffe://home/ns/cloud/**"
agent = "cloud/pod"

[[rule]]
verdict = "allow"
why = "everything that residency permits"
"""

VALUES = MINIMAL | {
    "settings": {"memory": "512M"},
    "webhook": {
        "enabled": True,
        "allow": [
            {"namespaces": "ml", "accounts": "trainer", "names": ["run-7/*", "new/*", "models/**", "data/**"]},
            {"namespaces": "cloud", "names": "**"},
        ],
        "authoritySecret": "towline-ca",
        "sidecar": {"image": "registry.example.com/towline:1", "cache": "64M", "env": {"AWS_REGION": "eu-west-1"}},
    },
}

SITES = """
[[site]]
name = "home"

[[site]]
name = "archive"
repositories = "{repository}"

[[site]]
name = "cloud"

[[link]]
from = "archive"
to = "cloud"
rate = "64kbit"
price = {{ unit = "GB", usd = "0.09" }}
"""

NODE = """
repository = "{folder}/repository"
socket = "{folder}/node.sock"
memory = "512M"
identity = "{folder}/node"
listen = "127.0.0.1:{node}"
http = "127.0.0.1:0"

[cache]
dir = "{folder}/node-cache"
capacity = "64M"
free_floor = 0
inventory = 0

[[allow]]
agents = "home/trainer"
names = ["models/**", "run-7/*"]
"""

TRAINING = {
    "name": "training",
    "image": "registry.example.com/training:1",
    "command": ["python", "train.py", "--output", "/ckpt"],
}

TRAIN = """
import pathlib, sys

output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
done = max((int(folder.name.split("-")[1]) for folder in output.glob("checkpoint-*")), default=0)
print("went on from", done)
folder = output / f"checkpoint-{done + 1}"
folder.mkdir()
(folder / "weights.bin").write_bytes(bytes([done + 1]) * 50_000)
(folder / "trainer_state.json").write_text('{"global_step": %d}' % (done + 1))
"""


class ApiServer(http.server.ThreadingHTTPServer):
    """Reviews tokens as the API server does, for whoever shows the reviewer's token."""

    def __init__(self, folder: Path):
        super().__init__(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "api/tls.crt", folder / "api/tls.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        #: Tokens, with their users and audiences.
        self.tokens: dict[str, tuple[str, list[str]]] = {}
        self.reviewer = "reviewer"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (asked["apiVersion"], asked["kind"]) == ("authentication.k8s.io/v1", "TokenReview")
        if self.path != "/apis/authentication.k8s.io/v1/tokenreviews":
            self.send_error(404)
            return
        if self.headers["authorization"] != f"Bearer {self.server.reviewer}":
            self.send_error(403)
            return
        user, audiences = self.server.tokens.get(asked["spec"]["token"], ("", []))
        shared = [audience for audience in asked["spec"]["audiences"] if audience in audiences]
        status = {"authenticated": bool(shared), "user": {"username": user} if shared else {}, "audiences": shared}
        answer = json.dumps(asked | {"status": status}).encode()
        self.send_response(201)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


class Cluster:
    """A repository with names, an agent with the webhook, and an API server that reviews tokens."""

    def __init__(self, folder: Path):
        self.folder, self.running, self.source = folder, [], "127.0.0.1"
        self.port, self.node = free_ports(2)
        self.environment = os.environ | {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "xdg"),
            "TOWLINE_REPO": str(folder / "repository"),
            "TOWLINE_AGENT": "none",
        }
        self.towline("identity", "init", "--authority", folder / "authority")
        for agent, to in (("home/webhook", "webhook"), ("home/api", "api"), ("home/node", "node")):
            self.towline(
                *(
                    "identity",
                    "issue",
                    agent,
                    "--to",
                    folder / to,
                    "--authority",
                    folder / "authority",
                    "--dns",
                    "localhost",
                )
            )
        shutil.copytree(folder / "webhook", folder / "config/towline/identity")
        self.towline("identity", "issue-policy", "--to", folder / "key", "--authority", folder / "authority")
        self.id = json.loads(self.towline("init", "--json"))["id"]
        (folder / "tree").mkdir()
        (folder / "tree/weights.bin").write_bytes(os.urandom(1 << 20))
        (folder / "policy.toml").write_text(POLICY.format(repository=self.id))
        self.towline("policy", "sign", folder / "policy.toml", "--key", folder / "key")
        self.towline("policy", "set", folder / "policy.toml")
        for name in ("models/base", "data/v3", "run-7/step-4", "other/secret"):
            self.towline("save", folder / "tree", name)
        (folder / "tree/clinic").write_bytes(b"of patients")
        for name in ("data/clinic", "clinic/step-1"):
            self.towline("save", folder / "tree", name, "--label", "residency=DE")
        (folder / "sites.toml").write_text(SITES.format(repository=self.id))
        self.api = ApiServer(folder)
        (folder / "account").mkdir()
        (folder / "account/token").write_text(f"{self.api.reviewer}\n")
        shutil.copy(folder / "api/ca.crt", folder / "account/ca.crt")
        self.client = ssl.create_default_context(cafile=str(folder / "webhook/ca.crt"))
        (folder / "webhook.toml").write_text(self.rendered())
        self.start(folder / "webhook.toml")

    def rendered(self) -> str:
        """The settings of the webhook by the chart, with places of this machine."""
        values = VALUES | {"advisor": {"enabled": True, "sites": (self.folder / "sites.toml").read_text()}}
        values["gates"] = {"enabled": True, "holders": ["home/node"]}
        text = one(objects(values), "ConfigMap", "towline-webhook")["data"]["agent.toml"]
        for there, here in (
            ('repositories = ["s3://models/team"]', f'repositories = ["{self.folder}/repository"]'),
            ("[webhook]", '[webhook]\nrepository = "s3://models/team"'),
            ("issuer = {", f'issuer = {{ account = "{self.folder}/account",'),
            ("https://towline-webhook.towline.svc:443", f"https://localhost:{self.port}"),
            ("towline-local.towline.svc.cluster.local:7171", f"127.0.0.1:{self.node}"),
            ("[::]:7171", "127.0.0.1:0"),
            ("[::]:9443", f"127.0.0.1:{self.port}"),
            ("towline-agents.towline.svc.cluster.local:7171", f"127.0.0.1:{self.node}"),
            ("/run/towline/agent/agent.sock", f"{self.folder}/webhook.sock"),
            ("/var/lib/towline/cache", f"{self.folder}/webhook-cache"),
            ("/etc/towline/identity", f"{self.folder}/webhook"),
            ("/etc/towline/webhook", f"{self.folder}/webhook"),
            ("/etc/towline/authority", f"{self.folder}/authority"),
        ):
            assert there in text, there
            text = text.replace(there, here)
        return text

    def towline(self, *words: str | Path, agent: Path | str = "none") -> str:
        environment = self.environment | {"TOWLINE_AGENT": str(agent)}
        run = subprocess.run([BUILT, *words], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def start(self, settings: Path) -> subprocess.Popen:
        environment = self.environment | {
            "KUBERNETES_SERVICE_HOST": "localhost",
            "KUBERNETES_SERVICE_PORT": str(self.api.server_port),
        }
        log = settings.with_suffix(".log").open("a")
        agent = subprocess.Popen([BUILT, "agent", "--config", settings], env=environment, stdout=log, stderr=log)
        self.running.append(agent)

        def listens() -> bool:
            assert agent.poll() is None, settings.with_suffix(".log").read_text()
            return "listening at" in settings.with_suffix(".log").read_text()

        until("the agent listens", listens, PATIENCE)
        return agent

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(
            "localhost", self.port, context=self.client, timeout=30, source_address=(self.source, 0)
        )
        with contextlib.closing(connection):
            # Too long a body is answered before it is sent whole.
            with contextlib.suppress(ssl.SSLEOFError, ConnectionError):
                connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def bind(self, source: str) -> None:
        """Sends what follows from another address of this machine."""
        self.source = source

    def review(self, pod: dict[str, Any], namespace: str = "ml", **changed: Any) -> dict[str, Any]:
        """The response to the API server's question about a pod that is created."""
        request = {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": namespace,
            "operation": "CREATE",
            "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
            "object": pod,
            "oldObject": None,
            "dryRun": False,
        }
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request | changed}
        status, answer = self.post("/mutate", json.dumps(review).encode(), {"content-type": "application/json"})
        assert status == 200, answer
        told = json.loads(answer)
        assert (told["apiVersion"], told["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert told["response"]["uid"] == request["uid"]
        return told["response"]

    def admitted(self, pod: dict[str, Any], namespace: str = "ml") -> dict[str, Any]:
        """The pod as it is created."""
        response = self.review(pod, namespace)
        assert response["allowed"], response
        return patched(pod, response)

    def figure(self, sample: str) -> int:
        """A sample of the webhook's metrics."""
        get = ["curl", "-sSf", "--unix-socket", self.folder / "webhook.sock", "http://localhost/metrics"]
        text = subprocess.run(get, capture_output=True, text=True, check=True).stdout
        return int(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{sample} ")))

    def refused(self, pod: dict[str, Any], namespace: str = "ml") -> str:
        response = self.review(pod, namespace)
        assert not response["allowed"] and "patch" not in response, response
        assert response["status"]["code"] in (403, 422)
        return response["status"]["message"]

    def end(self) -> None:
        for agent in self.running:
            agent.send_signal(signal.SIGTERM)
        for agent in self.running:
            agent.wait(PATIENCE)
        self.api.shutdown()


def patched(pod: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """`pod` with the JSON patch of `response`, which only adds: https://datatracker.ietf.org/doc/html/rfc6902."""
    pod = copy.deepcopy(pod)
    if "patch" not in response:
        return pod
    assert response["patchType"] == "JSONPatch"
    for operation in json.loads(base64.b64decode(response["patch"])):
        assert operation["op"] == "add"
        *above, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = pod
        for part in above:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        else:
            place[last] = operation["value"]
    return pod


def pod_of(annotations: dict[str, str], spec: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    """A pod as a job creates it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "training-",
            "annotations": {f"towline.dev/{name}": text for name, text in annotations.items()},
        },
        "spec": {
            "serviceAccountName": "trainer",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 60,
            "securityContext": {
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                TRAINING
                | {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
                | training
            ],
        }
        | (spec or {}),
    }
