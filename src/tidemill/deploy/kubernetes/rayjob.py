"""A run as a RayJob of KubeRay: a reserved head with driver and trainer, and a group of preemptible workers."""

from __future__ import annotations

import dataclasses
from base64 import b64encode
from collections.abc import Mapping

from tidemill.config.deploy import DeployConfig
from tidemill.deploy.cluster_recipe import MARKET
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.objects import job_labels, metadata
from tidemill.deploy.kubernetes.pods import ROLE, pod_template
from tidemill.deploy.places import RECIPE_FOLDER
from tidemill.deploy.recipe_files import RECIPE
from tidemill.deploy.sizes import PodSize, Sizes

RAY_VERSION = "2.60.0"
HEAD, TRAINER, SPOT = "head", "trainer", "spot"
RETRIES = 20
"""Clusters after the first: each resumes the run after the loss of its head."""
PRE_RUNNING_S = 1800
"""Time until the run must have started, in seconds. A head that fails at once never uses up the retries (KubeRay issue
4637)."""
AUTOSCALER_INTERVAL_S = "1"
"""Ray's default of 5 s delays every replacement of a pod."""
DRAIN_MARGIN_S = 2
"""Ray drains a node until this long before SIGKILL, in seconds."""
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
ON_DEMAND = {MARKET: "on-demand"}
ENTRYPOINT = f"tidemill train @{RECIPE_FOLDER}/{RECIPE}"


def config_map(deploy: DeployConfig, job: str, recipe: str, files: Mapping[str, bytes]) -> Document:
    """The recipe and its files; those that are not UTF-8 text as base64."""
    data, binary = {RECIPE: recipe}, dict[str, str]()
    for name, content in sorted(files.items()):
        try:
            data[name] = content.decode()
        except UnicodeDecodeError:
            binary[name] = b64encode(content).decode()
    about = metadata(deploy, recipe_name(job), job=job)
    texts = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}
    return texts | ({"binaryData": binary} if binary else {})


def recipe_name(job: str) -> str:
    return f"{job}-recipe"


def claim(deploy: DeployConfig, job: str, *, machines: int) -> Document:
    """The claim of the storage."""
    modes = ["ReadWriteMany" if machines > 1 else "ReadWriteOnce"]
    spec = {"accessModes": modes, "resources": {"requests": {"storage": deploy.storage_size}}}
    about = metadata(deploy, deploy.storage, job=job)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": about, "spec": spec}


def disruption_budget(deploy: DeployConfig, job: str) -> Document:
    """Node drains and upgrades wait for the head. Of a custom resource's pods Kubernetes counts `minAvailable` only."""
    spec = {"minAvailable": 1, "selector": {"matchLabels": {**job_labels(job), ROLE: HEAD}}}
    about = metadata(deploy, f"{job}-{HEAD}", job=job)
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": about, "spec": spec}


def ray_job(deploy: DeployConfig, job: str, sizes: Sizes, *, spot_max: int, spot_labels: Mapping[str, str]) -> Document:
    """The RayJob.

    Args:
        spot_max: maximum number of preemptible pods; 0: no such group.
        spot_labels: Ray labels of their nodes, which the pool selects.
    """
    queued: Document = {}
    if deploy.queue:
        queued["labels"] = {"kueue.x-k8s.io/queue-name": deploy.queue}
        queued["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    groups: list[Document] = []
    if others := sizes.reserved_machines - 1:
        replicas = {"replicas": others, "minReplicas": others, "maxReplicas": others}
        groups.append({"groupName": TRAINER, **replicas, **_part(deploy, TRAINER, job, sizes.reserved, ON_DEMAND)})
    if spot_max:
        replicas = {"replicas": 0, "minReplicas": 0, "maxReplicas": spot_max}
        groups.append({"groupName": SPOT, **replicas, **_part(deploy, SPOT, job, sizes.spot, spot_labels)})
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": deploy.idle_s,
            "upscalingMode": "Default",
            "env": [{"name": "AUTOSCALER_UPDATE_INTERVAL_S", "value": AUTOSCALER_INTERVAL_S}],
        },
        "headGroupSpec": _part(deploy, HEAD, job, sizes.reserved, ON_DEMAND),
        "workerGroupSpecs": groups,
    }
    spec = {
        "entrypoint": ENTRYPOINT,
        "submissionMode": "SidecarMode",
        "backoffLimit": RETRIES,
        "preRunningDeadlineSeconds": PRE_RUNNING_S,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    about = metadata(deploy, job, job=job, **queued)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}


def _part(deploy: DeployConfig, role: str, job: str, size: PodSize, labels: Mapping[str, str]) -> Document:
    """Labels, start parameters and pods of the head or a group. The autoscaler reads no labels in rayStartParams."""
    env = {DRAIN: str(deploy.notice_s - DRAIN_MARGIN_S)} if role == SPOT else {}
    pods = pod_template(
        deploy, role, job=job, spot=role == SPOT, recipe=recipe_name(job), env=env, **dataclasses.asdict(size)
    )
    start = {"num-cpus": str(size.cpus), **({"num-gpus": str(size.gpus)} if size.gpus else {})}
    return {"labels": dict(labels), "rayStartParams": start, "template": pods}
