"""The chart deploy/helm/towline, rendered by real helm, with the values that the tests use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/towline"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")

#: Versions of Kubernetes that objects are validated for.
VERSIONS = [*(f"1.{minor}.0" for minor in range(29, 36)), kubernetes_validate.latest_version()]

MINIMAL: dict[str, Any] = {
    "site": "home",
    "repositories": ["s3://models/team"],
    "certificates": {"issuer": {"name": "towline-ca"}},
    "allow": [{"agents": "home/*", "names": "**"}],
}

SITES = """
[[site]]
name = "home"
repositories = "s3://models/team"

[[site]]
name = "cloud"

[[link]]
from = "home"
to = "cloud"
rate = "1Gbit"
price = { unit = "GB", usd = "0.09" }
"""

FULL: dict[str, Any] = {
    **MINIMAL,
    "repositories": ["s3://models/team", "s3://data/team"],
    "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
    "credentials": {"secret": "bucket"},
    "extraEnv": [{"name": "AWS_REGION", "value": "eu-west-1"}],
    "podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/towline"}},
    "certificates": {"issuer": {"name": "towline-ca", "kind": "ClusterIssuer"}},
    "allow": [
        {"agents": "home/*", "names": "**"},
        {"agents": ["cloud/*", "edge/*"], "names": ["run-7/**", "models/base"]},
    ],
    "settings": {"endpoint": "https://s3.example.com", "caller_pins": {"max_pins": 4194304}},
    "nodes": {
        "cache": {"capacity": "2T", "hostPath": "/mnt/nvme/towline"},
        "settings": {"cache": {"tenant_quota": "500G", "tenants": {"clinic": "200G", "a b": "1G"}}},
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
    },
    "gateways": [
        {
            "name": "gateway-a",
            "address": "a.towline.example.com:7171",
            "cache": {"capacity": "500G", "claim": {"storageClassName": "fast", "size": "600Gi"}},
            "service": {"annotations": {"example.com/internal": "true"}, "loadBalancerClass": "example.com/lb"},
        },
        {
            "name": "gateway-b",
            "address": "b.towline.example.com:7171",
            "cache": {"capacity": "50G", "claim": {"size": "200Gi"}},
            "service": {"type": "NodePort", "nodePort": 30171, "quic": False},
            "settings": {
                "handoff": {
                    "dir": "/var/lib/towline/handoff",
                    "capacity": "100G",
                    "accept": [{"from": "cloud/*", "names": ["run-7/*"]}],
                }
            },
        },
    ],
    "advisor": {"enabled": True, "sites": SITES, "callers": ["home/scheduler"]},
    "webhook": {
        "enabled": True,
        "allow": [{"namespaces": "ml", "accounts": "trainer", "names": ["run-7/*", "models/**"]}],
        "authoritySecret": "towline-ca",
        "namespaceSelector": {"matchLabels": {"towline.dev/sidecars": "yes"}},
        "sidecar": {"env": {"AWS_REGION": "eu-west-1"}},
    },
    "kueue": {"enabled": True, "admitAfter": "30m", "dispatch": True},
    "networkPolicy": {"sites": ["203.0.113.0/24", "2001:db8::/32"]},
    "monitoring": {
        "labels": {"release": "kube-prometheus-stack"},
        "serviceMonitor": {"enabled": True},
        "rules": {"enabled": True},
    },
}

#: Without cert-manager.
OWN: dict[str, Any] = {
    **MINIMAL,
    "certificates": {"secrets": True},
    "nodes": {"hostIdentity": "/etc/towline/identity"},
    "gateways": [
        {
            "name": "gateway",
            "address": "towline.example.com:7171",
            "identitySecret": "towline-gateway-identity",
            "cache": {"capacity": "50G"},
        }
    ],
    "advisor": {"enabled": True, "sites": SITES, "identitySecret": "towline-advisor-identity"},
    "webhook": {
        "enabled": True,
        "allow": [{"namespaces": ["ml", "team-*"], "names": "**"}],
        "authoritySecret": "towline-ca",
        "identitySecret": "towline-webhook-identity",
        "certificateSecret": "towline-webhook-tls",
        "caBundle": "-----BEGIN CERTIFICATE-----\n",
    },
    "monitoring": {"serviceMonitor": {"enabled": True}, "scraperSecret": "towline-prometheus-identity"},
}


def helm(*arguments: str | Path, values: dict[str, Any], check: bool = True) -> subprocess.CompletedProcess[str]:
    """A run of helm with `values` as a file."""
    assert HELM, "no helm: tests/python/setup.sh installs it"
    return subprocess.run(
        [HELM, *arguments, "--values", "-"], input=yaml.safe_dump(values), capture_output=True, text=True, check=check
    )


def rendered(values: dict[str, Any], version: str | None = None) -> str:
    """What `helm install` would send, as text; to a cluster of some version of Kubernetes."""
    words = ["--kube-version", version] if version else []
    return helm("template", "towline", CHART, "--namespace", "towline", *words, values=values).stdout


def objects(values: dict[str, Any], version: str | None = None) -> list[dict[str, Any]]:
    """What `helm install` would send."""
    return [one for one in yaml.safe_load_all(rendered(values, version)) if one]


def one(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The object of that kind and name."""
    (it,) = (it for it in found if (it["kind"], it["metadata"]["name"]) == (kind, name))
    return it


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The templates of pods, by the name of what makes them."""
    made = (it for it in found if it["kind"] in ("DaemonSet", "StatefulSet", "Deployment"))
    return {it["metadata"]["name"]: it["spec"]["template"] for it in made}


def violations(pod: dict[str, Any]) -> list[str]:
    """What the profile "restricted" has against a pod; https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    spec, found = pod["spec"], []
    found += [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}: {key}" for key in volume.keys() - allowed - {"name"}]
    whole = spec["securityContext"]
    if whole.get("runAsNonRoot") is not True or whole.get("runAsUser") == 0:
        found.append("root")
    if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("seccomp")
    for container in spec.get("initContainers", []) + spec["containers"]:
        own = container["securityContext"]
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            found.append("privileges")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append("capabilities")
        found += ["host port" for port in container.get("ports", []) if "hostPort" in port]
    return found
