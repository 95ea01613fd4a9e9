"""The webhook: what becomes of pods, as the API server asks, and what their sidecars then do, as processes of this machine."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml

from .chart import ROOT, VERSIONS, objects, one, violations
from .pods import Pod, container
from .webhook_cluster import BUILT, GOLDEN, NODE, PATIENCE, REQUIRED, TRAIN, VALUES, Cluster, pod_of

pytestmark = pytest.mark.skipif(
    not REQUIRED and not BUILT.exists(), reason=f"{BUILT} is not there: cargo build makes it"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="webhook-", dir="/tmp"))
    folder.chmod(0o755)
    made = Cluster(folder)
    yield made
    made.end()
    shutil.rmtree(folder)


#: Pods that are admitted, with their golden files.
CASES = {
    "watch": pod_of({"restore": "run-7@latest", "watch": "/ckpt"}),
    "volumes": pod_of(
        {
            "watch": "/work/ckpt -> run-7, /new -> new",
            "restore": "data/v3 -> /data",
            "warm": "models/base",
            "credentials": "bucket",
            "grace": "45s",
            "cache": "100G",
        },
        {
            "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "work"}}],
            "initContainers": [{"name": "first", "image": "registry.example.com/first:1"}],
        },
        volumeMounts=[{"name": "work", "mountPath": "/work", "subPath": "a"}],
        env=[{"name": "A", "value": "1"}],
    ),
    "stage": pod_of({"stage": "models/base", "stage-memory": "20G", "hint": "required"}),
    "hint": pod_of(
        {"inputs": "models/base, data/v3", "hint": "preferred"},
        {"affinity": {"nodeAffinity": {}, "podAntiAffinity": {}}},
        resources={"limits": {"nvidia.com/gpu": "8"}},
    ),
    "gate": pod_of(
        {"restore": "run-7@latest", "watch": "/ckpt", "gate": "warm"},
        {"schedulingGates": [{"name": "example.com/quota"}]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_admissions_are_as_before(cluster, case):
    """After a change that is meant: TOWLINE_GOLDEN_WRITE=admission."""
    admitted = cluster.admitted(CASES[case])
    annotations = admitted["metadata"]["annotations"]
    if "towline.dev/authorities" in annotations:
        assert annotations["towline.dev/authorities"] == (cluster.folder / "authority/ca.crt").read_text()
        annotations["towline.dev/authorities"] = "CERTIFICATES"
    text = yaml.safe_dump(admitted, sort_keys=True)
    for port, name in ((cluster.port, "WEBHOOK"), (cluster.node, "NODE")):
        text = text.replace(str(port), name)
    file = GOLDEN / f"admission-{case}.yaml"
    if os.environ.get("TOWLINE_GOLDEN_WRITE") == "admission":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_admitted_is_valid_and_restricted(cluster, version):
    for case, pod in CASES.items():
        admitted = cluster.admitted(pod)
        kubernetes_validate.validate(admitted, version, strict=True)
        if case != "volumes":
            assert violations(admitted) == []
        volumes = {volume["name"] for volume in admitted["spec"].get("volumes", [])}
        for each in admitted["spec"].get("initContainers", []) + admitted["spec"]["containers"]:
            assert {mount["name"] for mount in each.get("volumeMounts", [])} <= volumes


def test_it_is_called_again_without_effect(cluster):
    for pod in CASES.values():
        admitted = cluster.admitted(pod)
        assert cluster.admitted(admitted) == admitted
    dry = cluster.review(CASES["watch"], dryRun=True)
    assert dry["patch"] == cluster.review(CASES["watch"])["patch"]


def test_others_are_let_through_unchanged(cluster):
    for pod, changed in (
        (pod_of({}), {}),
        (pod_of({"inputs": "no/such", "objective": "cost"}), {}),
        (CASES["watch"], {"operation": "UPDATE"}),
        (CASES["watch"], {"kind": {"group": "apps", "version": "v1", "kind": "Pod"}}),
        ({"metadata": {}, "spec": {"containers": []}}, {}),
    ):
        response = cluster.review(pod, **changed)
        assert response == {"uid": response["uid"], "allowed": True}, changed


def test_a_run_without_a_step_is_a_warning(cluster):
    response = cluster.review(pod_of({"watch": "/ckpt -> new"}))
    (warning,) = response["warnings"]
    assert response["allowed"] and "there is no step new@latest yet" in warning


def test_a_name_that_the_account_may_not_read_is_as_one_that_is_absent(cluster):
    def told(name: str, **spec: Any) -> str:
        return cluster.refused(pod_of({"restore": f"{name} -> /data"}, spec)).replace(name, "NAME")

    absent = told("models/absent")
    assert "there is no such name that service account ml/trainer may read" in absent
    for name in ("other/secret", "other/absent", "other@latest", "none@latest"):
        assert told(name) == absent, name
    assert told("data/v3", serviceAccountName="default").replace("default", "trainer") == absent


def test_the_policy_decides_for_the_account(cluster):
    assert cluster.admitted(pod_of({"restore": "data/clinic -> /data"}))
    told = cluster.refused(pod_of({"restore": "data/clinic -> /data"}), "cloud")
    assert "there is no such name that service account cloud/trainer may read" in told
    assert cluster.admitted(pod_of({"restore": "data/v3 -> /data"}), "cloud")
    for asked in ({"restore": "clinic@latest -> /data"}, {"watch": "/ckpt -> clinic"}):
        told = cluster.refused(pod_of(asked), "cloud")
        assert "there is no such name that service account cloud/trainer may read" in told


def test_a_hint_places_the_pod(cluster):
    def terms(pod: dict[str, Any], kind: str) -> list[dict[str, Any]]:
        return pod["spec"]["affinity"]["nodeAffinity"][f"{kind}DuringSchedulingIgnoredDuringExecution"]

    own = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": own}}
    pod = cluster.admitted(pod_of({"hint": "required", "inputs": "data/clinic"}, {"affinity": affinity}))
    assert len(terms(pod, "required")["nodeSelectorTerms"]) == 3
    for term in terms(pod, "required")["nodeSelectorTerms"]:
        first, *rest = term["matchExpressions"]
        assert first == {"key": "gpu", "operator": "Exists"}
        assert rest[-1]["values"] == ["archive", "home"], "the content may not go to the other site"
    preferred = terms(cluster.admitted(CASES["hint"]), "preferred")
    weights = {term["preference"]["matchExpressions"][-1]["values"][0]: term["weight"] for term in preferred}
    assert weights.keys() == {"archive", "home", "cloud"} and weights["archive"] == 100 > 50 > weights["cloud"], weights


def test_a_gate_is_for_the_site_of_the_pod(cluster):
    def site(annotations: dict[str, str], spec: dict[str, Any] | None = None) -> str:
        pod = cluster.admitted(pod_of({"gate": "warm"} | annotations, spec))
        assert pod["spec"]["schedulingGates"] == [{"name": "towline.dev/warm"}]
        assert "towline.dev/gated" in pod["metadata"]["annotations"]
        return pod["metadata"]["annotations"]["towline.dev/warm-at"]

    assert site({"inputs": "models/base"}) == "home", "that of the cluster"
    assert site({"inputs": "models/base", "warm-at": "cloud"}) == "cloud"
    assert site({"inputs": "models/base"}, {"nodeSelector": {"towline.dev/site": "cloud"}}) == "cloud"
    assert site({"inputs": "models/base", "hint": "preferred"}) == "archive", "where it is"
    assert site({"restore": "run-7@latest", "watch": "/ckpt"}) == "home", "with a sidecar"
    own = {"schedulingGates": [{"name": "towline.dev/warm"}]}
    assert site({"inputs": "models/base"}, own) == "home", "with the gate already"
    policy = one(objects(VALUES, "1.30.0"), "ValidatingAdmissionPolicy", "towline-webhook-towline")["spec"]
    assert refusals(pod_of({"gate": "warm", "inputs": "models/base", "warm-at": "cloud"}), policy), "no webhook"
    first = cluster.admitted(pod_of({"watch": "/ckpt -> new", "gate": "warm"}))
    assert "schedulingGates" not in first["spec"], "there is no step to wait for"
    assert first["metadata"]["annotations"]["towline.dev/warm-at"] == "home"


@pytest.mark.parametrize(
    ("pod", "told"),
    [
        (pod_of({"gate": "warm"}), "no data to wait for"),
        (pod_of({"gate": "warm", "inputs": "data/clinic", "warm-at": "cloud"}), "may not go to site cloud"),
        (pod_of({"gate": "warm", "inputs": "models/base", "warm-at": "nowhere"}), "nowhere"),
        (pod_of({"whatch": "/ckpt"}), "annotation is unknown"),
        (pod_of({"watch": "/ckpt"}), "watched folder has no run"),
        (pod_of({"watch": "/ckpt -> secret"}), "may not save checkpoints at secret"),
        (pod_of({"watch": "/c -> new", "container": "other"}), "no such container"),
        (pod_of({"watch": "/c -> new", "grace": "60s"}), "less than terminationGracePeriodSeconds"),
        (pod_of({"watch": "/c -> new"}, {"securityContext": {}}), "user of the training is unknown"),
        (pod_of({"watch": "/c -> new"}, {"os": {"name": "windows"}}), "Linux only"),
        (
            pod_of(
                {"watch": "/c -> new"},
                {"volumes": [{"name": "c", "configMap": {"name": "c"}}]},
                volumeMounts=[{"name": "c", "mountPath": "/c"}],
            ),
            "nothing can be written to this volume",
        ),
        (
            pod_of(
                {"watch": "/c -> new"},
                {"volumes": [{"name": "c", "emptyDir": {}}]},
                volumeMounts=[{"name": "c", "mountPath": "/c", "subPathExpr": "$(POD)"}],
            ),
            "use subPath",
        ),
        (
            pod_of(
                {"watch": "/etc/c -> new"},
                {"volumes": [{"name": "c", "emptyDir": {}}]},
                volumeMounts=[{"name": "c", "mountPath": "/etc"}],
            ),
            "would hide files of the sidecar",
        ),
        (
            pod_of(
                {"watch": "/c -> new"},
                {"volumes": [{"name": "c", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}}]},
                volumeMounts=[{"name": "c", "mountPath": "/c"}],
            ),
            "nothing can be written to this volume",
        ),
        (pod_of({"watch": "/c -> new"}, {"containers": []}), "pod has no container"),
        (pod_of({"watch": "/c -> new"}, {"hostNetwork": True}), "ClusterFirstWithHostNet"),
        (pod_of({"watch": "/c -> new"}, name="towline"), "reserved for the sidecar"),
        (pod_of({"watch": "/c -> new"}, {"initContainers": [{"name": "towline"}]}), "reserved for the sidecar"),
        (pod_of({"watch": ""}), "annotation is empty"),
        (pod_of({"watch": "/c -> new", "hint": "required"}), "nothing to place this pod by"),
        (
            pod_of(
                {"inputs": "models/base", "hint": "required"},
                {
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ["x"]},
                        }
                    }
                },
            ),
            "affinity of the pod is malformed",
        ),
        (pod_of({"watch": "/c -> new"}, {"volumes": [{"name": "towline-run", "emptyDir": {}}]}), "reserved"),
        ({"metadata": {"annotations": {"towline.dev/watch": "/c -> new"}}, "spec": {"containers": 1}}, "malformed"),
    ],
)
def test_a_pod_that_cannot_be_what_it_asks_for_is_refused(cluster, pod, told):
    message = cluster.refused(pod)
    assert message.startswith("towline: ") and told in message, message


def test_reviews_are_counted_by_their_outcome(cluster):
    def figures() -> list[int]:
        outcomes = ("patched", "unchanged", "refused", "failed")
        return [cluster.figure(f'towline_webhook_reviews_total{{outcome="{outcome}"}}') for outcome in outcomes]

    before = figures()
    cluster.admitted(pod_of({"watch": "/ckpt -> new"}))
    cluster.admitted(pod_of({}))
    cluster.refused(pod_of({"wach": "/ckpt"}))
    assert [after - count for count, after in zip(before, figures(), strict=True)] == [1, 1, 1, 0]


def test_what_is_no_review_is_refused(cluster):
    for body in (b"{}", b"", b'{"request":' + b"[" * 100_000):
        assert cluster.post("/mutate", body, {})[0] == 400
    # The answer may be lost: what is too long is not read to its end.
    with contextlib.suppress(OSError):
        assert cluster.post("/mutate", b"x" * (5 << 20), {})[0] == 413


def refusals(pod: dict[str, Any], policy: dict[str, Any]) -> list[str] | None:
    """What a ValidatingAdmissionPolicy has against a pod; None if it is not asked."""
    environment = celpy.Environment()

    def holds(expression: str) -> bool:
        program = environment.program(environment.compile(expression))
        return bool(program.evaluate({"object": celpy.json_to_cel(pod)}))

    if not all(holds(condition["expression"]) for condition in policy["matchConditions"]):
        return None
    return [rule["message"] for rule in policy.get("validations", []) if not holds(rule["expression"])]


def test_the_policy_of_the_cluster_refuses_a_pod_that_the_webhook_did_not_see(cluster):
    found = objects(VALUES, "1.30.0")
    policy = one(found, "ValidatingAdmissionPolicy", "towline-webhook-towline")["spec"]
    webhook = one(found, "MutatingWebhookConfiguration", "towline-webhook-towline")["webhooks"][0]
    assert webhook["failurePolicy"] == "Ignore" and webhook["sideEffects"] == "None"
    lacking = {"watch": 1, "volumes": 1, "stage": 2, "hint": 0, "gate": 2}
    for name, pod in CASES.items():
        assert refusals(pod, webhook) == []
        assert refusals(cluster.admitted(pod), policy) == []
        assert len(refusals(pod, policy)) == lacking[name], name
    (told,) = refusals(pod_of({"whatch": "/ckpt"}), policy)
    assert "an annotation is unknown" in told
    by_hand = copy.deepcopy(CASES["watch"])
    by_hand["spec"]["initContainers"] = [{"name": "towline", "image": "x"}]
    assert len(refusals(by_hand, policy)) == 1, "it ends before the training begins"
    for other in (pod_of({}), {"metadata": {}, "spec": {"containers": []}}):
        assert refusals(other, policy) is None and refusals(other, webhook) is None
    mirror = copy.deepcopy(CASES["watch"])
    mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    assert refusals(mirror, policy) is None
    before = objects(VALUES, "1.29.0")
    assert not [it for it in before if it["kind"].startswith("ValidatingAdmissionPolicy")]
    older = one(before, "MutatingWebhookConfiguration", "towline-webhook-towline")["webhooks"][0]
    assert older["failurePolicy"] == "Fail" and older["matchConditions"] == webhook["matchConditions"]


def test_the_policy_knows_the_annotations_that_the_webhook_knows():
    source = (ROOT / "src/agent/pods/annotations.rs").read_text()
    policy = one(objects(VALUES), "ValidatingAdmissionPolicy", "towline-webhook-towline")["spec"]
    known = set(re.findall(r"'(towline\.dev/[a-z-]+)'", policy["validations"][0]["expression"]))
    assert known == set(re.findall(r'"(towline\.dev/[a-z-]+)"', source.partition("#[cfg(test)]")[0]))
    table = (ROOT / "docs/deploy.md").read_text().partition("| annotation `towline.dev/...` |")[2].partition("\n\n")[0]
    shown = set(re.findall(r"`([a-z-]+)`", table))
    assert {name.removeprefix("towline.dev/") for name in known} - {
        "settings",
        "authorities",
        "placed",
        "gated",
    } <= shown


def test_the_pod_of_the_documents_is_admitted(cluster):
    (text,) = re.findall(r"^```yaml pod\n(.*?)^```", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE | re.DOTALL)
    job = yaml.safe_load(text)
    kubernetes_validate.validate(job, VERSIONS[0], strict=True)
    admitted = cluster.admitted(job["spec"]["template"], job["metadata"]["namespace"])
    assert {"secretRef": {"name": "bucket"}} in container(admitted["spec"], "towline")["envFrom"]


def jwt(name: str, *audiences: str) -> str:
    """A token with these claims; the API server of the tests knows it by its text."""
    parts = [{"alg": "none"}, {"aud": list(audiences), "sub": name}, {}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


def csr(folder: Path) -> bytes:
    command = ["openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += [
        "-keyout",
        folder / "key.pem",
        "-subj",
        "/CN=spiffe",
        "-addext",
        "subjectAltName=URI:towline://home/node",
    ]
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_a_certificate_is_of_the_account_whatever_is_asked(cluster, tmp_path):
    request = csr(tmp_path)

    def ask(token: str | None) -> tuple[int, bytes]:
        return cluster.post("/v1/certificates", request, {"authorization": f"Bearer {token}"} if token else {})

    good = jwt("good", "towline", "other")
    users = {
        good: "system:serviceaccount:ml:trainer",
        jwt("no-rule", "towline"): "system:serviceaccount:ml:other",
        jwt("user", "towline"): "ann",
    }
    cluster.api.tokens = {token: (user, ["towline"]) for token, user in users.items()}
    other = jwt("other-audience", "https://kubernetes.default.svc")
    cluster.api.tokens[other] = ("system:serviceaccount:ml:trainer", ["https://kubernetes.default.svc"])
    status, answer = ask(good)
    assert status == 200
    (tmp_path / "tls.crt").write_text(json.loads(answer)["certificate"])
    (shown,) = json.loads(cluster.towline("identity", "show", tmp_path / "tls.crt", "--json"))["certificates"]
    assert shown["identity"] == "spiffe://home/ns/ml/sa/trainer"
    for token in (*list(users)[1:], other, jwt("unknown", "towline"), "junk", None, jwt("x" * 20_000, "towline")):
        status, answer = ask(token)
        assert status == 403 and b"BEGIN" not in answer, token
    (cluster.folder / "account/token").write_text("revoked")
    assert ask(good)[0] == 503
    (cluster.folder / "account/token").write_text(cluster.api.reviewer)
    assert ask(good)[0] == 200
    assert cluster.post("/v1/certificates", b"no request", {"authorization": f"Bearer {good}"})[0] == 400
    assert cluster.post("/v1/certificates", b"x" * 20_000, {"authorization": f"Bearer {good}"})[0] == 413


def test_slow_clients_keep_nobody_out(cluster):
    """Silent connections, and requests whose bodies do not come, of one address, while others are answered."""
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(("127.0.0.1", cluster.port)))
        for number in range(40):
            line = held.enter_context(
                socket.create_connection(("127.0.0.1", cluster.port), source_address=("127.0.0.2", 0))
            )
            # Connections beyond the limit of an address are closed.
            with contextlib.suppress(OSError):
                line = held.enter_context(cluster.client.wrap_socket(line, server_hostname="localhost"))
                path = "/mutate" if number % 2 else "/v1/certificates"
                line.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n".encode())
        held.callback(cluster.bind, "127.0.0.1")
        cluster.bind("127.0.0.3")
        assert cluster.review(CASES["watch"])["allowed"]


def sidecar_of(cluster: Cluster, pod: dict[str, Any], number: int, token: str) -> Pod:
    """The pod that the webhook makes, run."""
    admitted = cluster.admitted(pod)
    told = admitted["metadata"]["annotations"]
    settings = told["towline.dev/settings"].replace("s3://models/team", str(cluster.folder / "repository"))
    files = {
        "towline-settings": {"agent.toml": settings, "ca.crt": told["towline.dev/authorities"]},
        "towline-token": {"token": token},
    }
    return Pod(admitted["spec"], cluster.folder / f"pod-{number}", files, {}, BUILT)


def test_a_sidecar_without_a_certificate_says_why(cluster):
    pod = sidecar_of(cluster, pod_of({"warm": "models/base"}), 100, jwt("nobody", "towline"))
    assert pod.agent.wait(PATIENCE) != 0
    assert "webhook issued no certificate" in pod.log("towline") and "403 Forbidden" in pod.log("towline")


def test_another_authority_is_used_without_a_restart(cluster):
    authority, old = cluster.folder / "authority", cluster.folder / "old"
    shutil.copytree(authority, old)
    cluster.towline("identity", "init", "--authority", cluster.folder / "later")
    try:
        for name in ("ca.key", "ca.crt"):
            shutil.copy(cluster.folder / "later" / name, authority / name)
        told = cluster.admitted(CASES["watch"])["metadata"]["annotations"]["towline.dev/authorities"]
        assert told == (cluster.folder / "later/ca.crt").read_text()
    finally:
        for name in ("ca.key", "ca.crt"):
            shutil.copy(old / name, authority / name)


def test_a_sidecar_acts_as_its_account_and_a_new_pod_goes_on(cluster):
    cluster.api.tokens = {
        jwt("trainer", "towline"): ("system:serviceaccount:ml:trainer", ["towline"]),
    }
    settings = cluster.folder / "node.toml"
    settings.write_text(NODE.format(folder=cluster.folder, node=cluster.node))
    cluster.start(settings)
    wanted = pod_of({"watch": "/ckpt -> new", "warm": "models/base"})
    pods: list[Pod] = []
    try:
        pods.append(sidecar_of(cluster, wanted, len(pods), jwt("trainer", "towline")))
        pods[-1].wait_until_started()
        assert "went on from 0" in pods[-1].train(TRAIN)
        # The node serves it by the policy's word and its own rule, as an agent of the site.
        told = json.loads(
            cluster.towline("top", "--once", "--json", agent=pods[-1].folder / "towline-run/agent/agent.sock")
        )
        (warm,) = [task["report"] for task in told["tasks"] if task["kind"] == "warm"]
        assert warm["sources"]["site"] == warm["bytes"] > 1_000_000, warm["sources"]
        assert pods[-1].end() == 0, pods[-1].log("towline")
        assert "has a certificate of its service account" in pods[-1].log("towline")
        pods.append(sidecar_of(cluster, wanted, len(pods), jwt("trainer", "towline")))
        pods[-1].wait_until_started()
        assert "went on from 1" in pods[-1].train(TRAIN)
        assert pods[-1].end() == 0, pods[-1].log("towline")
    finally:
        for pod in pods:
            pod.end_abruptly()
