"""The administrator's part, applied once per team: quotas and queues of Kueue, flex-start, priority, monitoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.config.base import is_beyond_loopback
from tidemill.config.deploy import DeployConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.monitoring import GPU_EXPORTER, GPU_NAMESPACE, collector_rights, pod_monitoring
from tidemill.deploy.kubernetes.objects import job_labels, resource
from tidemill.deploy.kubernetes.pods import GKE_SPOT, GPU, ROLE
from tidemill.deploy.kubernetes.rayjob import HEAD
from tidemill.deploy.sizes import PodSize, Sizes

LABELS = {"app.kubernetes.io/name": "tidemill"}
"""Without the name of a job, so that deleting one leaves the administrator's part."""
KUEUE = "kueue.x-k8s.io"
VERSION = "v1beta2"
RESERVED, SPOT = "reserved", "spot"
FLEX_START_CLASS = "queued-provisioning.gke.io"
FLEX_START_NODE = ("autoscaling.gke.io/provisioning-request", "ResizeRequestName")
"""Node label of a granted request, and the detail of the request that is its value (GKE's documentation)."""
LONGEST_FLEX_START_S = 7 * 86400
"""Limit of Dynamic Workload Scheduler."""
BESIDE_HEAD = PodSize(cpus=1, memory_gib=1, gpus=0)
"""KubeRay's containers in the head's pod, which Kueue counts: autoscaler (500m, 512Mi) and submitter (500m, 200Mi)."""
PRIORITY = 1000


def admin_documents(
    deploy: DeployConfig,
    job: str,
    specs: Sequence[RunSpec],
    pods: Sizes,
    *,
    reserved_pods: int,
    spot_max: int,
    heads: int,
) -> list[Document]:
    """Documents with quotas for this recipe, which has `reserved_pods`, of which `heads` are of Ray, and at most
    `spot_max` others.

    Raises:
        UserError: the recipe needs nothing of an administrator.
    """
    documents = list[Document]()
    if deploy.queue:
        documents += _queue(deploy, pods, reserved_pods, spot_max, heads)
    if deploy.flex_start:
        documents += _flex_start(deploy)
    if deploy.priority_class:
        about = {"name": deploy.priority_class, "labels": LABELS}
        documents.append(resource("scheduling.k8s.io/v1", "PriorityClass", about, value=PRIORITY))
    if deploy.target == "gke":
        documents += _monitoring(deploy, job, specs, pods)
    if not documents:
        hint = "set deploy.queue for Kueue's quotas, or deploy.priority_class"
        raise UserError("the recipe needs nothing of an administrator", where="deploy.queue", hint=hint)
    return documents


def admin_notes(deploy: DeployConfig, specs: Sequence[RunSpec]) -> Iterator[str]:
    """What the administrator must know or provide."""
    if deploy.queue:
        yield "quotas are those of this recipe; raise nominalQuota for more runs at a time"
    if deploy.target == "gke" and any(
        spec.telemetry.port and not is_beyond_loopback(spec.telemetry.host) for spec in specs
    ):
        yield (
            'telemetry.host is of the loopback, where metrics are not scraped: set it to "0.0.0.0", '
            "telemetry.token_file to a file on the storage, and deploy.metrics_token"
        )


def _kueue(kind: str, name: str, spec: Document, **metadata: str) -> Document:
    return resource(f"{KUEUE}/{VERSION}", kind, {"name": name, **metadata, "labels": LABELS}, spec=spec)


def _queue(deploy: DeployConfig, pods: Sizes, reserved_pods: int, spot_max: int, heads: int) -> list[Document]:
    """Flavors, ClusterQueue and LocalQueue, all named after `deploy.queue`."""
    gke_spot = {GKE_SPOT: "true"} if deploy.target == "gke" else {}
    spot_nodes = {**gke_spot, **deploy.spot_selector}
    reserved = _quota((pods.reserved, reserved_pods), (BESIDE_HEAD, heads))
    nodes, quotas = {RESERVED: deploy.reserved_selector}, {RESERVED: reserved}
    if spot_max:
        nodes[SPOT], quotas[SPOT] = spot_nodes, _quota((pods.spot, spot_max))
    resources = [name for name in quotas[RESERVED] if any(quota[name] != "0" for quota in quotas.values())]
    flavors = [
        {"name": f"{deploy.queue}-{flavor}", "resources": [{"name": k, "nominalQuota": quota[k]} for k in resources]}
        for flavor, quota in quotas.items()
    ]
    checks = [{"name": f"{deploy.queue}-flex-start", "onFlavors": [f"{deploy.queue}-{RESERVED}"]}]
    spec: Document = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": deploy.namespace}},
        "resourceGroups": [{"coveredResources": resources, "flavors": flavors}],
        **({"admissionChecksStrategy": {"admissionChecks": checks}} if deploy.flex_start else {}),
    }
    return [
        *(
            _kueue("ResourceFlavor", f"{deploy.queue}-{flavor}", {"nodeLabels": dict(labels)} if labels else {})
            for flavor, labels in nodes.items()
        ),
        _kueue("ClusterQueue", deploy.queue, spec),
        _kueue("LocalQueue", deploy.queue, {"clusterQueue": deploy.queue}, namespace=deploy.namespace),
    ]


def _quota(*pods: tuple[PodSize, int]) -> Document:
    cpus, memory_gib, gpus = (
        sum(getattr(size, key) * count for size, count in pods) for key in ("cpus", "memory_gib", "gpus")
    )
    return {"cpu": str(cpus), "memory": f"{memory_gib}Gi", GPU: str(gpus)}


def _flex_start(deploy: DeployConfig) -> list[Document]:
    """The check that asks Dynamic Workload Scheduler for the GPUs of the reserved part, all at once."""
    name, (label, detail) = f"{deploy.queue}-flex-start", FLEX_START_NODE
    parameters = {"apiGroup": KUEUE, "kind": "ProvisioningRequestConfig", "name": name}
    config = {
        "provisioningClassName": FLEX_START_CLASS,
        "managedResources": [GPU],
        "parameters": {"maxRunDurationSeconds": str(LONGEST_FLEX_START_S)},
        "podSetUpdates": {"nodeSelector": [{"key": label, "valueFromProvisioningClassDetail": detail}]},
    }
    check = {"controllerName": f"{KUEUE}/provisioning-request", "parameters": parameters}
    return [_kueue("AdmissionCheck", name, check), _kueue("ProvisioningRequestConfig", name, config)]


def _monitoring(deploy: DeployConfig, job: str, specs: Sequence[RunSpec], pods: Sizes) -> list[Document]:
    documents = list[Document]()
    if port := next((spec.telemetry.port for spec in specs if spec.telemetry.port), None):
        metadata = {"name": f"{job}-metrics", "namespace": deploy.namespace, "labels": LABELS}
        selector = {**job_labels(job), ROLE: HEAD}
        documents.append(pod_monitoring(metadata, selector, port, secret=deploy.metrics_token))
    if deploy.metrics_token:
        documents += collector_rights(deploy, LABELS)
    if pods.reserved.gpus or pods.spot.gpus:
        metadata = {"name": "tidemill-gpus", "namespace": GPU_NAMESPACE, "labels": LABELS}
        documents.append(pod_monitoring(metadata, GPU_EXPORTER, "metrics"))
    return documents
