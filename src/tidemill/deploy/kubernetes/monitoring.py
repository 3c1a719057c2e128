"""What Google's Managed Prometheus scrapes: the metrics of a job, and of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.config.deploy import DeployConfig
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.objects import resource

INTERVAL = "30s"
GPU_NAMESPACE = "gpu-operator"
GPU_EXPORTER = {"app": "nvidia-dcgm-exporter"}
"""Namespace and label of DCGM's exporter as NVIDIA's GPU operator installs it."""


def pod_monitoring(metadata: Document, selector: Mapping[str, str], port: str | int, *, secret: str = "") -> Document:
    """Scrapes pods in the namespace of `metadata`, with the token of a `secret`, "secret/key"."""
    endpoint: Document = {"port": port, "path": "/metrics", "interval": INTERVAL}
    if secret:
        name, _, key = secret.partition("/")
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"secret": {"name": name, "key": key}}}
    spec = {"selector": {"matchLabels": dict(selector)}, "endpoints": [endpoint]}
    return resource("monitoring.googleapis.com/v1", "PodMonitoring", metadata, spec=spec)


def collector_rights(deploy: DeployConfig, labels: Mapping[str, str]) -> list[Document]:
    """Let Managed Prometheus read the Secret of `deploy.metrics_token`, and no other."""
    group, secret = "rbac.authorization.k8s.io", deploy.metrics_token.partition("/")[0]
    metadata = {"name": f"{secret}-collector", "namespace": deploy.namespace, "labels": dict(labels)}
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get", "list", "watch"]}
    role = {"apiGroup": group, "kind": "Role", "name": metadata["name"]}
    collector = {"kind": "ServiceAccount", "name": "collector", "namespace": "gmp-system"}
    return [
        resource(f"{group}/v1", "Role", metadata, rules=[rule]),
        resource(f"{group}/v1", "RoleBinding", metadata, roleRef=role, subjects=[collector]),
    ]
