"""deploy/helm/towline: rendered by real helm, valid for Kubernetes 1.29 and newer, restricted, the same as before, and in
agreement with itself and the documents."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import tomllib
import yaml

from .chart import CHART, FULL, MINIMAL, OWN, ROOT, VERSIONS, helm, objects, one, pods, rendered, violations

ACCOUNTS = {"namespaces": "ml", "names": "**"}
ADVISOR = {"enabled": True, "sites": "[[site]]\nname = 'home'\n"}
GATEWAY = {"name": "a", "address": "a:1", "cache": {"capacity": "1G"}}
CASES = {"minimal": MINIMAL, "full": FULL, "own-certificates": OWN}
GOLDEN = Path(__file__).parent / "golden"

#: Fields of objects that are no part of Kubernetes, at each place; a place that is not listed may hold anything.
#: https://cert-manager.io/docs/reference/api-docs/#cert-manager.io/v1.CertificateSpec,
#: https://prometheus-operator.dev/docs/api-reference/api/ and
#: https://kueue.sigs.k8s.io/docs/reference/kueue.v1beta2/#kueue-x-k8s-io-v1beta2-AdmissionCheck
EXTENSIONS = {
    "cert-manager.io/v1 Certificate": {
        "spec": "secretName duration renewBefore commonName dnsNames uris usages privateKey issuerRef",
        "spec.privateKey": "algorithm size rotationPolicy encoding",
        "spec.issuerRef": "name kind group",
    },
    "monitoring.coreos.com/v1 ServiceMonitor": {
        "spec": "selector endpoints podTargetLabels targetLabels jobLabel namespaceSelector",
        "spec.endpoints": "port scheme path interval tlsConfig relabelings",
        "spec.endpoints.relabelings": "targetLabel replacement sourceLabels",
        "spec.endpoints.tlsConfig": "serverName ca cert keySecret insecureSkipVerify",
        "spec.endpoints.tlsConfig.ca": "secret configMap",
        "spec.endpoints.tlsConfig.cert": "secret configMap",
        "spec.endpoints.tlsConfig.keySecret": "name key",
    },
    "monitoring.coreos.com/v1 PrometheusRule": {
        "spec": "groups",
        "spec.groups": "name interval rules",
        "spec.groups.rules": "alert expr for labels annotations",
    },
    "kueue.x-k8s.io/v1beta2 AdmissionCheck": {"spec": "controllerName parameters"},
}


def extension_of(manifest: dict[str, Any]) -> dict[str, str] | None:
    return EXTENSIONS.get(f"{manifest['apiVersion']} {manifest['kind']}")


def strays(value: Any, known: dict[str, str], place: str) -> Iterator[str]:
    """Fields below `place` that are not among the known ones."""
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or place not in known:
            continue
        for key, inner in item.items():
            if key not in known[place].split():
                yield f"{place}.{key}"
            yield from strays(inner, known, f"{place}.{key}")


@pytest.fixture(scope="module", params=CASES)
def case(request) -> tuple[str, list[dict[str, Any]]]:
    return request.param, objects(CASES[request.param])


def test_helm_has_nothing_to_say_against_it():
    for values in CASES.values():
        told = helm("lint", CHART, "--strict", values=values)
        assert "[WARNING]" not in told.stdout and "[ERROR]" not in told.stdout, told.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid(case, version):
    for manifest in objects(CASES[case[0]], version):
        if extension_of(manifest) is None:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_objects_of_extensions_have_known_fields(case):
    kinds = set()
    for manifest in case[1]:
        if known := extension_of(manifest):
            assert list(strays(manifest["spec"], known, "spec")) == []
            kinds.add(manifest["kind"])
    expected = {
        "minimal": set(),
        "full": {"AdmissionCheck", "Certificate", "ServiceMonitor", "PrometheusRule"},
        "own-certificates": {"ServiceMonitor"},
    }
    assert kinds == expected[case[0]]


def test_it_renders_as_before(case):
    """After a change that is meant: TOWLINE_GOLDEN_WRITE=helm."""
    file = GOLDEN / f"helm-{case[0]}.yaml"
    text = rendered(CASES[case[0]])
    if os.environ.get("TOWLINE_GOLDEN_WRITE") == "helm":
        file.write_text(text)
    assert text == file.read_text()


def test_pods_are_restricted_but_for_folders_of_the_node(case):
    for name, pod in pods(case[1]).items():
        expected = {
            ("full", "towline-nodes"): ["volume cache: hostPath"],
            ("own-certificates", "towline-nodes"): ["volume identity: hostPath"],
        }
        assert violations(pod) == expected.get((case[0], name), []), name
        (agent,) = pod["spec"]["containers"]
        assert agent["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["spec"]["automountServiceAccountToken"] is (
            name == "towline-webhook" or (case[0] == "full" and name == "towline-advisor")
        )


def test_a_pod_that_is_not_restricted_is_seen():
    (pod,) = pods(objects(MINIMAL)).values()
    for path, value in [
        (("hostNetwork",), True),
        (("securityContext", "runAsUser"), 0),
        (("containers", 0, "securityContext", "capabilities"), {}),
    ]:
        wrong = copy.deepcopy(pod)
        place = wrong["spec"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert len(violations(wrong)) == 1, path


def test_objects_name_what_there_is(case):
    found = case[1]
    there = {(it["kind"], it["metadata"]["name"]) for it in found}
    assert len(there) == len(found), "each name once"
    templates = pods(found)
    for pod in templates.values():
        spec = pod["spec"]
        claimed = {
            claim["metadata"]["name"]
            for it in found
            if it["kind"] == "StatefulSet" and it["spec"]["template"] is pod
            for claim in it["spec"].get("volumeClaimTemplates", [])
        }
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert ("ServiceAccount", spec["serviceAccountName"]) in there
        assert ("ConfigMap", volumes["settings"]["configMap"]["name"]) in there
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys() | claimed
    selectors = [it["spec"]["selector"] for it in found if it["kind"] == "Service"]
    selectors += [it["spec"]["selector"]["matchLabels"] for it in found if it["kind"] == "PodDisruptionBudget"]
    selectors += [it["spec"]["podSelector"]["matchLabels"] for it in found if it["kind"] == "NetworkPolicy"]
    for selector in selectors:
        assert any(selector.items() <= pod["metadata"]["labels"].items() for pod in templates.values()), selector
    for it in found:
        if it["kind"] in ("DaemonSet", "StatefulSet", "Deployment"):
            labels = it["spec"]["template"]["metadata"]["labels"]
            taken = it["spec"]["selector"]["matchLabels"]
            assert taken.items() <= labels.items()
            others = [pod for name, pod in templates.items() if name != it["metadata"]["name"]]
            assert not any(taken.items() <= pod["metadata"]["labels"].items() for pod in others), "pods of one alone"


def test_discovery_finds_all_agents_and_the_monitor_finds_discovery():
    found = objects(FULL)
    agents = one(found, "Service", "towline-agents")
    assert all(agents["spec"]["selector"].items() <= pod["metadata"]["labels"].items() for pod in pods(found).values())
    monitor = one(found, "ServiceMonitor", "towline")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    matching = [it for it in found if it["kind"] == "Service" and wanted <= it["metadata"]["labels"].items()]
    assert matching == [agents], "each agent is read once"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in agents["spec"]["ports"]]
    certificate = one(found, "Certificate", endpoint["tlsConfig"]["keySecret"]["name"])
    for name in ("towline-nodes", "towline-gateway-a", "towline-advisor"):
        settings = tomllib.loads(one(found, "ConfigMap", name)["data"]["agent.toml"])
        assert [f"towline://{scraper}" for scraper in settings["scrapers"]] == certificate["spec"]["uris"]
        assert settings["peers"]["dns"] == ["towline-agents.towline.svc.cluster.local:7171"]


def test_the_controller_for_kueue_may_do_what_its_tests_permit_and_nothing_else():
    found = objects(FULL)
    role = (
        one(found, "ClusterRole", "towline-advisor-towline")["rules"] + one(found, "Role", "towline-advisor")["rules"]
    )
    assert role == json.loads((ROOT / "tests/it/kubernetes/kueue.json").read_text())
    settings = {
        name: tomllib.loads(one(found, "ConfigMap", f"towline-{name}")["data"]["agent.toml"])
        for name in ("advisor", "gateway-a", "gateway-b")
    }
    kueue = settings["advisor"]["kueue"]
    assert kueue["holders"] == ["home/gateway-a", "home/gateway-b"]
    assert kueue["allow"] == FULL["webhook"]["allow"] and kueue["admit_after"] == "30m" and kueue["dispatch"]
    assert all(settings[name]["callers"] == ["home/towline-advisor-*"] for name in ("gateway-a", "gateway-b"))
    own = objects(
        {
            **OWN,
            "settings": {"callers": "home/a"},
            "advisor": OWN["advisor"] | {"agent": "home/advisor"},
            "kueue": {"enabled": True, "check": ""},
        }
    )
    gateway = tomllib.loads(one(own, "ConfigMap", "towline-gateway")["data"]["agent.toml"])
    assert gateway["callers"] == ["home/a", "home/advisor"], "beside others"
    assert not [it for it in own if it["kind"] == "AdmissionCheck"]


def test_the_controller_of_gates_may_do_what_its_tests_permit_and_nothing_else():
    values = {**FULL, "gates": {"enabled": True, "admitAfter": "1h"}}
    for version in VERSIONS:
        if version < "1.30":
            refused = helm("template", "t", CHART, "--kube-version", version, values=values, check=False)
            assert "gates: requires Kubernetes 1.30" in refused.stderr
            continue
        found = objects(values, version)
        for manifest in found:
            if extension_of(manifest) is None:
                kubernetes_validate.validate(manifest, version, strict=True)
    role = one(found, "ClusterRole", "towline-gates-towline")["rules"] + one(found, "Role", "towline-gates")["rules"]
    assert role == json.loads((ROOT / "tests/it/kubernetes/gates.json").read_text())
    settings = {
        name: tomllib.loads(one(found, "ConfigMap", f"towline-{name}")["data"]["agent.toml"])
        for name in ("advisor", "webhook")
    }
    gates = settings["advisor"]["gates"]
    assert gates["holders"] == ["home/gateway-a", "home/gateway-b"] and gates["admit_after"] == "1h"
    assert gates["allow"] == FULL["webhook"]["allow"] and settings["webhook"]["webhook"]["gates"] is True
    policy = one(found, "ValidatingAdmissionPolicy", "towline-gates-towline")["spec"]

    def refusals(user: str, **changed: Any) -> list[str] | None:
        """What the policy has against a change of a pod; None if it is not asked."""
        gated = [{"name": "example.com/quota"}, {"name": "towline.dev/warm"}]
        before = {
            "metadata": {"labels": {"app": "a"}, "annotations": {"a": "b"}},
            "spec": {"containers": [{"image": "x"}], "schedulingGates": gated},
        }
        after = copy.deepcopy(before)
        after["spec"]["schedulingGates"] = gated[:1]
        for path, value in changed.items():
            part, _, field = path.partition("_")
            after[part][field] = value
        environment = celpy.Environment()
        known = {
            "object": celpy.json_to_cel(after),
            "oldObject": celpy.json_to_cel(before),
            "request": celpy.json_to_cel({"userInfo": {"username": user}}),
        }

        def holds(rule: dict[str, str]) -> bool:
            return bool(environment.program(environment.compile(rule["expression"])).evaluate(known))

        if not all(map(holds, policy["matchConditions"])):
            return None
        return [rule["message"] for rule in policy["validations"] if not holds(rule)]

    advisor = "system:serviceaccount:towline:towline-advisor"
    assert refusals(advisor) == [] and refusals("system:serviceaccount:ml:other") is None
    for change, told in (
        ({"spec_containers": [{"image": "evil"}]}, "containers"),
        ({"spec_tolerations": [{"operator": "Exists"}]}, "tolerations"),
        ({"spec_nodeSelector": {"a": "b"}}, "nodeSelector"),
        ({"spec_schedulingGates": []}, "gates of others"),
        ({"metadata_labels": {"app": "b"}}, "labels"),
        ({"metadata_labels": {"app": "a", "towline.dev/peer": "true"}}, "labels"),
        ({"metadata_annotations": {}}, "annotations"),
        ({"metadata_finalizers": ["x"]}, "finalizers"),
    ):
        (refused,) = refusals(advisor, **change)
        assert told in refused, change


def test_values_become_settings():
    found = objects(FULL)
    settings = {name: tomllib.loads(one(found, "ConfigMap", name)["data"]["agent.toml"]) for name in pods(found)}
    nodes, second = settings["towline-nodes"], settings["towline-gateway-b"]
    assert nodes["allow"] == FULL["allow"] and nodes["repositories"] == FULL["repositories"]
    assert nodes["cache"]["tenants"] == {"clinic": "200G", "a b": "1G"} and nodes["cache"]["capacity"] == "2T"
    assert all(each["endpoint"] == "https://s3.example.com" for each in settings.values())
    # Not 4.194304e+06.
    assert all(each["caller_pins"]["max_pins"] == 4194304 for each in settings.values())
    assert nodes["peers"]["registered"] is True, "they find gateways of other sites"
    assert second["peers"]["register"] == "b.towline.example.com:7171" and "register" not in nodes["peers"]
    assert second["handoff"]["accept"] == [{"from": "cloud/*", "names": ["run-7/*"]}]
    for name, pod in pods(found).items():
        grace = int(settings[name]["grace"].removesuffix("s"))
        assert grace == pod["spec"]["terminationGracePeriodSeconds"] - 10


def test_names_have_room_for_what_kubernetes_adds():
    longest = {**MINIMAL, "gateways": [{**GATEWAY, "name": "g" * 22}]}
    text = helm("template", "r" * 53, CHART, values=longest).stdout
    made = [one for one in yaml.safe_load_all(text) if one]
    # A StatefulSet puts its name and a hash of 11 characters into a label of 63.
    assert max(len(it["metadata"]["name"]) for it in made) <= 52
    dotted = helm("template", "team.a", CHART, values=MINIMAL).stdout
    names = [one["metadata"]["name"] for one in yaml.safe_load_all(dotted) if one]
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name) for name in names), names


def test_a_setting_that_is_null_is_left_out():
    nulls = {
        "memory": None,
        "caller_pins": {"max_pins": None, "max_bytes": "1G"},
        "limits": [{"site": "a", "rate": None}],
    }
    found = objects({**MINIMAL, "settings": nulls})
    settings = tomllib.loads(one(found, "ConfigMap", "towline-nodes")["data"]["agent.toml"])
    assert "memory" not in settings
    assert (settings["caller_pins"], settings["limits"]) == ({"max_bytes": "1G"}, [{"site": "a"}])


def test_a_new_version_of_the_chart_alone_replaces_no_pod():
    labels = [pod["metadata"]["labels"] for pod in pods(objects(FULL)).values()]
    assert not any("version" in key or "chart" in key for each in labels for key in each)


def test_rules_are_changed_without_a_restart():
    def stamp(values: dict[str, Any]) -> str:
        return pods(objects(values))["towline-nodes"]["metadata"]["annotations"]["checksum/settings"]

    rules = {"allow": [{"agents": "**", "names": "**"}], "monitoring": {"scraper": "monitoring/other"}}
    assert stamp(MINIMAL) == stamp({**MINIMAL, **rules})
    assert stamp(MINIMAL) != stamp({**MINIMAL, "settings": {"memory": "1G"}})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"site": ""}, "/site"),
        ({"site": "Home"}, "/site"),
        ({"repositories": []}, "/repositories"),
        ({"allow": []}, "/allow"),
        ({"allow": [{"agents": "**"}]}, "/allow/0"),
        ({"sites": "x"}, "additional properties 'sites'"),
        ({"nodes": {"settings": {"listn": "x"}}}, "additional properties 'listn'"),
        ({"settings": {"repository": "s3://other/place"}}, "additional properties 'repository'"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"gateways": [{"name": "nodes", "address": "a:1", "cache": {"capacity": "1G"}}]}, "/gateways/0/name"),
        ({"gateways": [{"name": "a", "address": "https://a", "cache": {"capacity": "1G"}}]}, "/gateways/0/address"),
        ({"gateways": [{"name": "a", "address": "a:1", "cache": {"capacity": "1G"}}] * 2}, "two are called a"),
        ({"certificates": {}}, "set issuer.name for cert-manager"),
        ({"certificates": {"secrets": True, "issuer": {"name": "ca"}}}, "set one of them"),
        ({"certificates": {"secrets": True}}, "nodes.hostIdentity: required"),
        ({"advisor": {"enabled": True}}, "advisor.sites: the text"),
        ({"monitoring": {"scraper": "", "serviceMonitor": {"enabled": True}}}, "monitoring.scraper: required"),
        ({"monitoring": {"scraper": "prometheus"}}, "/monitoring/scraper"),
        ({"fullnameOverride": "7b"}, "cannot be the name of a Service"),
        ({"fullnameOverride": "a" * 30}, "at most 29"),
        ({"webhook": {"enabled": True}}, "webhook.allow: required"),
        ({"webhook": {"enabled": True, "allow": [ACCOUNTS]}}, "webhook.authoritySecret: required"),
        ({"webhook": {"allow": [{"names": "**"}]}}, "/webhook/allow/0"),
        ({"kueue": {"enabled": True}}, "kueue: requires advisor.enabled"),
        ({"kueue": {"enabled": True}, "advisor": ADVISOR}, "kueue.allow: required"),
        ({"kueue": {"enabled": True, "allow": [ACCOUNTS]}, "advisor": ADVISOR}, "kueue.holders: required"),
        ({**OWN, "kueue": {"enabled": True}}, "advisor.agent: required"),
        ({"gates": {"enabled": True}}, "gates: requires advisor.enabled"),
        ({**OWN, "gates": {"enabled": True}}, "advisor.agent: required"),
        ({"kueue": {"admitAfter": "soon"}}, "/kueue/admitAfter"),
        (
            {**OWN, "webhook": {"enabled": True, "allow": [ACCOUNTS], "authoritySecret": "ca"}},
            "webhook.identitySecret: required",
        ),
        ({"nodes": {"cache": {"capacity": ""}}}, "/nodes/cache/capacity"),
        ({"nodes": {"maxUnavailable": 0}}, "/nodes/maxUnavailable"),
        ({"certificates": {"issuer": {"name": "ca"}, "duration": "24h"}}, "/certificates/duration"),
        ({"networkPolicy": {"dns": []}}, "/networkPolicy/dns"),
        ({"settings": {"audit": {"dir": "/var/lib/towline/audit"}}}, "audit and handoff are of one agent"),
        ({"nodes": {"settings": {"audit": {"dir": "/x"}}}}, "audit: only for gateways"),
        ({"nodes": {"settings": {"handoff": {"dir": "/x"}}}}, "requires nodes.cache.hostPath"),
        ({"gateways": [GATEWAY | {"settings": {"handoff": {"dir": "/x"}}}]}, "no cache.claim"),
        ({"gateways": [GATEWAY | {"service": {"type": "ClusterIP", "loadBalancerClass": "x"}}]}, "loadBalancerClass"),
    ],
)
def test_a_wrong_value_is_named(wrong, told):
    run = helm("template", "towline", CHART, values={**MINIMAL, **wrong}, check=False)
    assert run.returncode != 0 and told in run.stderr, run.stderr


def test_the_notes_say_how_to_go_on():
    shown = helm("install", "towline", CHART, "--dry-run=client", "--namespace", "towline", values=FULL).stdout
    notes = shown.partition("NOTES:")[2]
    assert "rollout status daemonset/towline-nodes" in notes and "enforce=privileged" in notes
    assert "closed to other sites" not in notes
    assert "a.towline.example.com:7171 must lead to the service towline-gateway-a" in notes


def test_values_in_the_documents_render():
    blocks = re.findall(r"^```yaml values\n(.*?)^```", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        values = yaml.safe_load(block)
        # The policies for gates came with 1.30.
        version = VERSIONS[1] if "gates" in values else VERSIONS[0]
        for manifest in objects(values, version):
            if extension_of(manifest) is None:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_the_objects_of_kueue_in_the_documents_are_those_of_the_chart():
    section = (ROOT / "docs/placement.md").read_text().partition("## Kueue")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    check, flavor, queue = yaml.safe_load_all(block)
    made = one(objects(FULL), "AdmissionCheck", "towline")
    assert (check["apiVersion"], check["metadata"]["name"]) == (made["apiVersion"], made["metadata"]["name"])
    assert check["spec"] == made["spec"]
    (rule,) = queue["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert (rule["name"], rule["onFlavors"]) == (check["metadata"]["name"], [flavor["metadata"]["name"]])
    assert list(flavor["spec"]["nodeLabels"]) == ["towline.dev/site"]


def test_the_readme_lists_the_values():
    table = (CHART / "README.md").read_text()
    for value in yaml.safe_load((CHART / "values.yaml").read_text()):
        assert f"`{value}" in table or value in ("serviceAccount", "clusterDomain", "gatewayDefaults"), value


def test_the_schema_knows_the_settings_of_the_documents():
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["$defs"]["settings"]["properties"].keys()
    table = (ROOT / "docs/operations.md").read_text().partition("| key | meaning | default |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    sections = {match[1] for cell in cells if (match := re.match(r" `\[+([a-z_]+)", cell))}
    names = {name for cell in cells if "`[" not in cell for name in re.findall(r"`([a-z_]+)`", cell)} | sections
    assert "admission" in names and "handshakes" not in names
    decided = {
        "repository",
        "repositories",
        "socket",
        "identity",
        "listen",
        "service_account",
        "webhook",
        "kueue",
        "gates",
    }
    assert known == names - decided
