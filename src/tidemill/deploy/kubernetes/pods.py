"""The pod of a role: resources, nodes, volumes and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.config.deploy import BUCKET, DeployConfig
from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.objects import job_labels
from tidemill.deploy.places import MODELS_FOLDER, RECIPE_FOLDER, RUNS_FOLDER

RESERVED_GRACE_S = 120
"""From SIGTERM to SIGKILL of reserved pods, in seconds: time for a checkpoint."""
USER = 1000
"""User and group of the image."""
ROLE = "tidemill/role"
TOKENS, TOKEN_FILE = "TIDEMILL_TOKENS", "/tmp/tokens"
GKE_SPOT = "cloud.google.com/gke-spot"
GKE_ACCELERATOR = "cloud.google.com/gke-accelerator"
GPU = "nvidia.com/gpu"


def pod_template(
    deploy: DeployConfig,
    role: str,
    *,
    job: str,
    spot: bool,
    cpus: int,
    memory_gib: int,
    gpus: int = 0,
    recipe: str = "",
    env: Mapping[str, str] | None = None,
    container: Document | None = None,
    restart: str = "Never",
) -> Document:
    """The template of a pod with one container.

    Args:
        role: name of the container, and value of the label `tidemill/role`.
        job: name of the job, for the labels.
        spot: on preemptible nodes, with their grace and without the storage.
        recipe: name of the ConfigMap with the recipe and its files, mounted at /etc/tidemill; empty: none.
        env: environment variables beside the secrets.
        container: further fields of the container, such as command, ports and probes; without, KubeRay starts Ray in
            it, and mounts its shared memory.
        restart: the pod's restart policy.
    """
    resources = {"cpu": str(cpus), "memory": f"{memory_gib}Gi", **({GPU: str(gpus)} if gpus else {})}
    volumes = _volumes(deploy, spot=spot, recipe=recipe, shared_memory=container is not None)
    main = {
        "name": role,
        "image": deploy.image,
        "env": _environment(deploy, env or {}),
        "resources": {"requests": dict(resources), "limits": resources},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [mount for mount, _ in volumes],
        **(container or {}),
    }
    spec = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": deploy.notice_s if spot else RESERVED_GRACE_S,
        **({"serviceAccountName": deploy.service_account} if deploy.service_account else {}),
        **({"priorityClassName": deploy.priority_class} if deploy.priority_class and not spot else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_nodes(deploy, spot=spot, gpus=gpus),
        "containers": [main],
        "volumes": [volume for _, volume in volumes],
    }
    annotations = {"annotations": {"gke-gcsfuse/volumes": "true"}} if deploy.models.startswith(BUCKET) else {}
    return {"metadata": {"labels": {**job_labels(job), ROLE: role}, **annotations}, "spec": spec}


def with_token_file(command: Sequence[str]) -> list[str]:
    """A command that finds the tokens of the variable TOKENS in TOKEN_FILE.

    The files of a Secret will not do: in a pod with fsGroup its group may read them, and servers refuse such files.
    """
    script = f'umask 077 && printf "%s\\n" "${TOKENS}" > {TOKEN_FILE} && exec "$@"'
    return ["sh", "-c", script, "sh", *command]


def _environment(deploy: DeployConfig, env: Mapping[str, str]) -> list[Document]:
    """Plain variables, then those from Secrets, each in the order of their names."""
    plain: list[Document] = [{"name": name, "value": value} for name, value in sorted(env.items())]
    for variable, source in sorted(deploy.secrets.items()):
        secret, _, key = source.partition("/")
        plain.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return plain


def _volumes(deploy: DeployConfig, *, spot: bool, recipe: str, shared_memory: bool) -> list[tuple[Document, Document]]:
    """Mounts and their volumes."""
    volumes: list[tuple[Document, Document]] = []
    if recipe:
        mount = {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True}
        volumes.append((mount, {"name": "recipe", "configMap": {"name": recipe}}))
    if not spot:
        claim = {"claimName": deploy.storage}
        volumes.append(({"name": "runs", "mountPath": RUNS_FOLDER}, {"name": "runs", "persistentVolumeClaim": claim}))
    if shared_memory:  # 64 MB otherwise, too little for NCCL, Ray and processes of vLLM
        mount = {"name": "shared-memory", "mountPath": "/dev/shm"}
        volumes.append((mount, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}))
    if deploy.models:
        mount = {"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}
        volumes.append((mount, {"name": "models", **_models_source(deploy.models)}))
    return volumes


def _models_source(models: str) -> Document:
    if not models.startswith(BUCKET):
        return {"persistentVolumeClaim": {"claimName": models, "readOnly": True}}
    attributes = {
        "bucketName": models.removeprefix(BUCKET).rstrip("/"),
        "mountOptions": f"implicit-dirs,uid={USER},gid={USER}",
    }
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}}


def _nodes(deploy: DeployConfig, *, spot: bool, gpus: int) -> Document:
    """The nodes that a pod may run on. A reserved pod keeps off preemptible nodes even where these have no taint."""
    on_gke = deploy.target == "gke"
    preemptible = {**({GKE_SPOT: "true"} if on_gke else {}), **deploy.spot_selector}
    selector = dict(preemptible if spot else deploy.reserved_selector)
    if gpus and on_gke:
        selector[GKE_ACCELERATOR] = deploy.accelerator
    tolerations: list[Document] = []
    if spot:
        tolerations = [
            {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
            for label, value in preemptible.items()
        ]
    if gpus:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    nodes: Document = {}
    if selector:
        nodes["nodeSelector"] = selector
    if preemptible and not spot:
        others = [{"key": label, "operator": "NotIn", "values": [value]} for label, value in preemptible.items()]
        required = {"nodeSelectorTerms": [{"matchExpressions": others}]}
        nodes["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    if tolerations:
        nodes["tolerations"] = tolerations
    return nodes
