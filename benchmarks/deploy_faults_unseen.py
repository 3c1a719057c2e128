"""Defects of Kubernetes documents, written by somebody who has not read the check.

A row is a name and a mutation: a function that changes the documents in place (those of
tests/data/deploy/rendered.yaml) and returns the changed field as the check writes it, such as
"spec.rayClusterSpec.workerGroupSpecs[0].replicas". The rows come from the documentation and public bug reports of
KubeRay, Kueue, JobSet, GKE, GCS FUSE and Kubernetes.

The check found 96 of the 128 (75 %; aim 85 %) when they were written. Rules for the kinds of what it missed followed,
so that the present share says nothing of defects that nobody has thought of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tidemill.deploy.kubernetes.check.findings import dotted

Documents = list[dict[str, Any]]
Mutation = Callable[[Documents], str]
Path = tuple[str | int, ...]

CLUSTER: Path = ("spec", "rayClusterSpec")
HEAD: Path = (*CLUSTER, "headGroupSpec")
SPOT: Path = (*CLUSTER, "workerGroupSpecs", 0)
HEAD_POD: Path = (*HEAD, "template", "spec")
SPOT_POD: Path = (*SPOT, "template", "spec")
HEAD_BOX: Path = (*HEAD_POD, "containers", 0)
SPOT_BOX: Path = (*SPOT_POD, "containers", 0)
SEED: Path = ("spec", "replicatedJobs", 0)
SEED_JOB: Path = (*SEED, "template", "spec")
SEED_POD: Path = (*SEED_JOB, "template", "spec")
GATEWAY_POD: Path = ("spec", "template", "spec")
GATEWAY_BOX: Path = (*GATEWAY_POD, "containers", 0)
QUOTA: Path = ("spec", "resourceGroups", 0)
QUEUE, ELASTIC = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/elastic-job"
GKE_SPOT, FUSE = "cloud.google.com/gke-spot", "gke-gcsfuse/volumes"
IMAGE = "registry.example/tidemill@sha256:0f8d6c2b5a0c5a34d1d8f5a9b2c3d4e5f60718293a4b5c6d7e8f901234567890"
LABEL = {"app.kubernetes.io/name": "tidemill"}
BOX = {"name": "submitter", "image": IMAGE}
TERM = {"matchExpressions": [{"key": GKE_SPOT, "operator": "NotEquals", "values": ["true"]}]}
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}}}


def inside(documents: Documents, kind: str, path: Path) -> Any:
    part: Any = next(each for each in documents if each["kind"] == kind)
    for step in path:
        part = part.setdefault(step, {}) if isinstance(step, str) else part[step]
    return part


def put(kind: str, path: Path, value: Any) -> Mutation:
    above, last = path[:-1], path[-1]

    def mutate(documents: Documents) -> str:
        inside(documents, kind, above)[last] = copy.deepcopy(value)
        return dotted(path)

    return mutate


def drop(kind: str, *path: str | int) -> Mutation:
    def mutate(documents: Documents) -> str:
        del inside(documents, kind, path[:-1])[path[-1]]
        return dotted(path)

    return mutate


def rename(kind: str, path: Path, old: str, new: str) -> Mutation:
    def mutate(documents: Documents) -> str:
        part = inside(documents, kind, path)
        part[new] = part.pop(old)
        return dotted((*path, new))

    return mutate


def append(kind: str, path: Path, item: Any, *shown: str) -> Mutation:
    """One more item of a list. Args: shown: what of the item is wrong."""

    def mutate(documents: Documents) -> str:
        items = inside(documents, kind, path)
        items.append(copy.deepcopy(item))
        return dotted((*path, len(items) - 1, *shown))

    return mutate


def again(kind: str, path: Path, *shown: str) -> Mutation:
    """Pastes the first item of a list once more."""

    def mutate(documents: Documents) -> str:
        items = inside(documents, kind, path)
        items.append(copy.deepcopy(items[0]))
        return dotted((*path, len(items) - 1, *shown))

    return mutate


def add(document: dict[str, Any], *shown: str | int) -> Mutation:
    def mutate(documents: Documents) -> str:
        documents.append(copy.deepcopy(document))
        return dotted(shown)

    return mutate


def first_of(*mutations: Mutation) -> Mutation:
    """Several changes of one mistake; the first one's field counts."""

    def mutate(documents: Documents) -> str:
        fields = [each(documents) for each in mutations]
        return fields[0]

    return mutate


def named(api: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "default"}, **fields}


UNSEEN: list[tuple[str, Mutation]] = [
    # KubeRay
    (
        "the entrypoint as a list",
        put("RayJob", ("spec", "entrypoint"), ["tidemill", "train", "@/etc/tidemill/recipe.toml"]),
    ),
    (
        "the entrypoint's recipe has another ending than the config map's",
        put("RayJob", ("spec", "entrypoint"), "tidemill train @/etc/tidemill/recipe.yaml --run.dir /runs/spot"),
    ),
    ("a time to live with a unit", put("RayJob", ("spec", "ttlSecondsAfterFinished"), "10m")),
    (
        "a queued job's cluster stays after the job",
        first_of(
            put("RayJob", ("spec", "shutdownAfterJobFinishes"), False),
            drop("RayJob", "spec", "ttlSecondsAfterFinished"),
        ),
    ),
    ("an active deadline of 0 for none", put("RayJob", ("spec", "activeDeadlineSeconds"), 0)),
    ("a backoff limit of -1 for no limit", put("RayJob", ("spec", "backoffLimit"), -1)),
    ("a submission mode without its ending", put("RayJob", ("spec", "submissionMode"), "Sidecar")),
    (
        "a submitter's pod beside a sidecar",
        put("RayJob", ("spec", "submitterPodTemplate"), {"spec": {"restartPolicy": "Never", "containers": [BOX]}}),
    ),
    ("a cluster selector beside a cluster", put("RayJob", ("spec", "clusterSelector"), {"ray.io/cluster": "shared"})),
    (
        "a deletion policy that keeps what the shutdown deletes",
        put(
            "RayJob",
            ("spec", "deletionStrategy"),
            {"onSuccess": {"policy": "DeleteNone"}, "onFailure": {"policy": "DeleteCluster"}},
        ),
    ),
    (
        "the runtime environment as a mapping",
        put("RayJob", ("spec", "runtimeEnvYAML"), {"env_vars": {"HF_HUB_OFFLINE": "1"}}),
    ),
    ("Ray's version as a number", put("RayJob", (*CLUSTER, "rayVersion"), 2.6)),
    ("autoscaling misspelt", rename("RayJob", CLUSTER, "enableInTreeAutoscaling", "enableInTreeAutoScaling")),
    ("an idle time with a unit", put("RayJob", (*CLUSTER, "autoscalerOptions", "idleTimeoutSeconds"), "60s")),
    ("an upscaling mode in lower case", put("RayJob", (*CLUSTER, "autoscalerOptions", "upscalingMode"), "aggressive")),
    ("replicas of the head", put("RayJob", (*HEAD, "replicas"), 1)),
    ("the names of the old autoscaler", rename("RayJob", SPOT, "maxReplicas", "maxWorkers")),
    ("more replicas than the most", put("RayJob", (*SPOT, "replicas"), 6)),
    ("a least above the most", put("RayJob", (*SPOT, "minReplicas"), 8)),
    ("a second group of the same name", again("RayJob", (*CLUSTER, "workerGroupSpecs"), "groupName")),
    ("a start parameter as a number", put("RayJob", (*SPOT, "rayStartParams", "num-cpus"), 4)),
    ("Ray is told of more CPUs than the pod has", put("RayJob", (*SPOT, "rayStartParams", "num-cpus"), "16")),
    ("Ray is told of a GPU that the pod lacks", put("RayJob", (*SPOT, "rayStartParams", "num-gpus"), "1")),
    ("start parameters as a list of flags", put("RayJob", (*HEAD, "rayStartParams"), ["--num-cpus=4"])),
    ("spot workers labelled as on demand", put("RayJob", (*SPOT, "labels", "ray.io/market-type"), "on-demand")),
    ("a worker that restarts in place", put("RayJob", (*SPOT_POD, "restartPolicy"), "Always")),
    ("an environment that turns the token off", put("RayJob", (*HEAD_BOX, "env", 0, "value"), "disabled")),
    # GKE
    ("the head on a spot node", put("RayJob", (*HEAD_POD, "nodeSelector", GKE_SPOT), "true")),
    ("a selector's value without quotes", put("RayJob", (*SPOT_POD, "nodeSelector", GKE_SPOT), True)),
    (
        "an accelerator that GKE does not name so",
        put("RayJob", (*HEAD_POD, "nodeSelector", "cloud.google.com/gke-accelerator"), "h100"),
    ),
    (
        "a toleration with an operator that has no value",
        put(
            "RayJob",
            (*SPOT_POD, "tolerations", 0),
            {"key": GKE_SPOT, "operator": "Exists", "value": "true", "effect": "NoSchedule"},
        ),
    ),
    ("a toleration's effect in lower case", put("RayJob", (*SPOT_POD, "tolerations", 0, "effect"), "noSchedule")),
    (
        "a toleration of another key than the node's",
        put("RayJob", (*SPOT_POD, "tolerations", 0, "key"), "cloud.google.com/spot"),
    ),
    ("a grace beyond a spot node's", put("RayJob", (*SPOT_POD, "terminationGracePeriodSeconds"), 300)),
    ("a drain longer than the grace", put("RayJob", (*SPOT_BOX, "env", 1, "value"), "30")),
    ("an affinity's operator that does not exist", put("RayJob", (*HEAD_POD, "affinity"), AFFINITY)),
    (
        "the service account's e-mail address",
        put("RayJob", (*HEAD_POD, "serviceAccountName"), "tidemill@project.iam.gserviceaccount.com"),
    ),
    # GCS FUSE
    (
        "the annotation of GCS FUSE on the job, not the pod",
        first_of(
            drop("RayJob", *HEAD, "template", "metadata", "annotations", FUSE),
            put("RayJob", ("metadata", "annotations", FUSE), "true"),
        ),
    ),
    (
        "the annotation of GCS FUSE without quotes",
        put("RayJob", (*HEAD, "template", "metadata", "annotations", FUSE), True),
    ),
    (
        "a bucket as an address",
        put("RayJob", (*HEAD_POD, "volumes", 2, "csi", "volumeAttributes", "bucketName"), "gs://models"),
    ),
    (
        "a bucket outside the attributes",
        first_of(
            put("RayJob", (*HEAD_POD, "volumes", 2, "csi", "bucketName"), "models"),
            drop("RayJob", *HEAD_POD, "volumes", 2, "csi", "volumeAttributes"),
        ),
    ),
    (
        "mount options as a list",
        put(
            "RayJob",
            (*HEAD_POD, "volumes", 2, "csi", "volumeAttributes", "mountOptions"),
            ["implicit-dirs", "uid=1000"],
        ),
    ),
    (
        "the driver of GCS FUSE misspelt",
        put("RayJob", (*HEAD_POD, "volumes", 2, "csi", "driver"), "gcs-fuse.csi.storage.gke.io"),
    ),
    # pods
    ("memory in GB", put("RayJob", (*SPOT_BOX, "resources", "limits", "memory"), "16GB")),
    (
        "memory in thousandths of a byte",
        first_of(
            put("RayJob", (*SPOT_BOX, "resources", "limits", "memory"), "512m"),
            put("RayJob", (*SPOT_BOX, "resources", "requests", "memory"), "512m"),
        ),
    ),
    ("a request above the limit", put("RayJob", (*SPOT_BOX, "resources", "requests", "cpu"), "8")),
    ("a GPU without a limit", drop("RayJob", *HEAD_BOX, "resources", "limits", "nvidia.com/gpu")),
    (
        "half a GPU",
        first_of(
            put("RayJob", (*HEAD_BOX, "resources", "limits", "nvidia.com/gpu"), "0.5"),
            put("RayJob", (*HEAD_BOX, "resources", "requests", "nvidia.com/gpu"), "0.5"),
        ),
    ),
    ("a digest cut short", put("RayJob", (*SPOT_BOX, "image"), "registry.example/tidemill@sha256:0f8d6c2b5a0c")),
    (
        "a command as one string",
        put("JobSet", (*SEED_POD, "containers", 0, "command"), "tidemill train @/etc/tidemill/recipe.toml"),
    ),
    ("an image pull policy that does not exist", put("RayJob", (*HEAD_BOX, "imagePullPolicy"), "IfNotPresents")),
    ("an environment's number without quotes", put("RayJob", (*SPOT_BOX, "env", 1, "value"), 13)),
    ("an environment's variable with two sources", put("RayJob", (*HEAD_BOX, "env", 1, "value"), "none")),
    (
        "a secret of one variable named as all of them",
        rename("RayJob", (*HEAD_BOX, "env", 1, "valueFrom"), "secretKeyRef", "secretRef"),
    ),
    ("a secret's reference without a key", drop("RayJob", *HEAD_BOX, "env", 1, "valueFrom", "secretKeyRef", "key")),
    (
        "a secret's value in the document",
        put(
            "RayJob",
            (*HEAD_BOX, "env", 1),
            {"name": "WANDB_API_KEY", "value": "0123456789abcdef0123456789abcdef01234567"},
        ),
    ),
    ("a mount of a volume that is not there", put("RayJob", (*HEAD_BOX, "volumeMounts", 1, "name"), "run")),
    ("two mounts at one path", put("RayJob", (*HEAD_BOX, "volumeMounts", 2, "mountPath"), "/runs")),
    ("runs are written where nothing is mounted", put("RayJob", (*HEAD_BOX, "volumeMounts", 1, "mountPath"), "/run")),
    ("the folder of runs mounted read-only", put("RayJob", (*HEAD_BOX, "volumeMounts", 1, "readOnly"), True)),
    ("a volume of two kinds", put("RayJob", (*HEAD_POD, "volumes", 1, "emptyDir"), {})),
    ("a config map of another name", put("RayJob", (*SPOT_POD, "volumes", 0, "configMap", "name"), "spot-recipes")),
    (
        "a config map named as a secret is",
        put("RayJob", (*HEAD_POD, "volumes", 0, "configMap"), {"configMapName": "spot-recipe"}),
    ),
    (
        "a key that the config map lacks",
        put("RayJob", (*HEAD_POD, "volumes", 0, "configMap", "items"), [{"key": "recipe.yaml", "path": "recipe.toml"}]),
    ),
    ("a claim of another name", put("RayJob", (*HEAD_POD, "volumes", 1, "persistentVolumeClaim", "claimName"), "run")),
    ("root where root is refused", put("RayJob", (*HEAD_POD, "securityContext", "runAsUser"), 0)),
    ("the group of files on the container", put("RayJob", (*HEAD_BOX, "securityContext", "fsGroup"), 1000)),
    ("privileged without escalation", put("RayJob", (*HEAD_BOX, "securityContext", "privileged"), True)),
    (
        "a profile in lower case",
        put("RayJob", (*HEAD_POD, "securityContext", "seccompProfile"), {"type": "runtimeDefault"}),
    ),
    # labels and names
    (
        "the queue as an annotation",
        first_of(
            put("RayJob", ("metadata", "annotations", QUEUE), "training"), drop("RayJob", "metadata", "labels", QUEUE)
        ),
    ),
    ("the queue's name misspelt", put("RayJob", ("metadata", "labels", QUEUE), "trainning")),
    ("the elastic job without quotes", put("RayJob", ("metadata", "annotations", ELASTIC), True)),
    ("annotations misspelt", rename("RayJob", ("metadata",), "annotations", "anotations")),
    ("a label's value with a slash", put("RayJob", ("metadata", "labels", "team"), "research/rl")),
    (
        "a job's name too long for its services",
        put("RayJob", ("metadata", "name"), "spot-smollm2-135m-arithmetic-held-out-0-4-seed-1-lr-1e-05"),
    ),
    ("a name with underscores", put("PersistentVolumeClaim", ("metadata", "name"), "spot_runs")),
    # config maps, secrets and claims
    (
        "a recipe that is not TOML",
        put("ConfigMap", ("data", "recipe.toml"), '[run]\nname = spot\ndir = "/runs/spot"\n'),
    ),
    (
        "a recipe as a mapping",
        put("ConfigMap", ("data", "recipe.toml"), {"run": {"name": "spot", "dir": "/runs/spot"}}),
    ),
    (
        "a secret that is not base64",
        add(named("v1", "Secret", "hub", type="Opaque", data={"token": "hub_plain-token"}), "data", "token"),
    ),
    (
        "a secret lacks the key that a pod reads",
        first_of(
            put("RayJob", (*HEAD_BOX, "env", 1, "valueFrom", "secretKeyRef", "key"), "token"),
            add(named("v1", "Secret", "wandb", type="Opaque", stringData={"api-key": "x"})),
        ),
    ),
    ("storage in GB", put("PersistentVolumeClaim", ("spec", "resources", "requests", "storage"), "100GB")),
    ("storage without a unit", put("PersistentVolumeClaim", ("spec", "resources", "requests", "storage"), 100)),
    ("an access mode cut short", put("PersistentVolumeClaim", ("spec", "accessModes"), ["RWO"])),
    ("a storage class misspelt", put("PersistentVolumeClaim", ("spec", "storageClass"), "premium-rwo")),
    # disruption budgets
    ("a budget with two bounds", put("PodDisruptionBudget", ("spec", "maxUnavailable"), 0)),
    (
        "a budget whose selector is misspelt",
        rename("PodDisruptionBudget", ("spec", "selector"), "matchLabels", "matchLabel"),
    ),
    (
        "a budget for no pod",
        put("PodDisruptionBudget", ("spec", "selector", "matchLabels", "tidemill/role"), "ray-head"),
    ),
    ("a budget that lets the only head go", put("PodDisruptionBudget", ("spec", "minAvailable"), 0)),
    ("a budget of a removed version", put("PodDisruptionBudget", ("apiVersion",), "policy/v1beta1")),
    # Kueue
    ("a queue of a cluster queue misspelt", put("LocalQueue", ("spec", "clusterQueue"), "tidemil")),
    ("a cluster queue for no namespace", drop("ClusterQueue", "spec", "namespaceSelector")),
    ("the cohort's old name", put("ClusterQueue", ("spec", "cohort"), "research")),
    (
        "a resource covered without a quota",
        put("ClusterQueue", (*QUOTA, "coveredResources"), ["cpu", "memory", "nvidia.com/gpu", "ephemeral-storage"]),
    ),
    (
        "quotas in another order than the resources",
        put("ClusterQueue", (*QUOTA, "coveredResources"), ["memory", "cpu"]),
    ),
    ("a quota in GB", put("ClusterQueue", (*QUOTA, "flavors", 0, "resources", 1, "nominalQuota"), "64GB")),
    ("a quota smaller than the head", put("ClusterQueue", (*QUOTA, "flavors", 0, "resources", 0, "nominalQuota"), 2)),
    ("borrowing without a cohort", put("ClusterQueue", (*QUOTA, "flavors", 0, "resources", 0, "borrowingLimit"), 8)),
    (
        "a preemption in the plural",
        put("ClusterQueue", ("spec", "preemption"), {"withinClusterQueue": "LowerPriorities"}),
    ),
    (
        "a flavor's node label without quotes",
        add(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "ResourceFlavor",
                "metadata": {"name": "reserved"},
                "spec": {"nodeLabels": {GKE_SPOT: False}},
            },
            "spec",
            "nodeLabels",
            GKE_SPOT,
        ),
    ),
    # JobSet
    ("a job's pod that always restarts", put("JobSet", (*SEED_POD, "restartPolicy"), "Always")),
    ("a replicated job's name with an underscore", put("JobSet", (*SEED, "name"), "seed_1")),
    ("a second replicated job of the same name", again("JobSet", ("spec", "replicatedJobs"), "name")),
    ("restarts as a string", put("JobSet", ("spec", "failurePolicy", "maxRestarts"), "3")),
    (
        "the first job waits for one that is not there",
        put("JobSet", (*SEED, "dependsOn"), [{"name": "prepare", "status": "Complete"}]),
    ),
    (
        "success of a job that is not there",
        put("JobSet", ("spec", "successPolicy"), {"operator": "All", "targetReplicatedJobs": ["seed-2"]}),
    ),
    ("a deadline in hours", put("JobSet", (*SEED_JOB, "activeDeadlineSeconds"), "2h")),
    ("a completion mode in lower case", put("JobSet", (*SEED_JOB, "completionMode"), "indexed")),
    ("a job's template by another name", rename("JobSet", SEED_JOB, "template", "podTemplate")),
    # deployments and services
    (
        "a template's label that the selector misses",
        put("Deployment", ("spec", "template", "metadata", "labels", "tidemill/role"), "gateways"),
    ),
    ("a deployment without a selector", drop("Deployment", "spec", "selector")),
    ("a deployment whose pods never restart", put("Deployment", (*GATEWAY_POD, "restartPolicy"), "Never")),
    (
        "a rolling update of a strategy without one",
        put("Deployment", ("spec", "strategy"), {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}),
    ),
    ("a probe's port number in quotes", put("Deployment", (*GATEWAY_BOX, "livenessProbe", "httpGet", "port"), "8000")),
    (
        "a probe of a port that is not there",
        put("Deployment", (*GATEWAY_BOX, "readinessProbe", "httpGet", "port"), "web"),
    ),
    ("a probe with two handlers", put("Deployment", (*GATEWAY_BOX, "readinessProbe", "exec"), {"command": ["true"]})),
    (
        "a liveness probe that must succeed thrice",
        put("Deployment", (*GATEWAY_BOX, "livenessProbe", "successThreshold"), 3),
    ),
    ("a probe's delay in the singular", put("Deployment", (*GATEWAY_BOX, "livenessProbe", "initialDelaySecond"), 30)),
    (
        "a probe's scheme in lower case",
        put("Deployment", (*GATEWAY_BOX, "readinessProbe", "httpGet", "scheme"), "https"),
    ),
    ("a port's protocol of another layer", put("Deployment", (*GATEWAY_BOX, "ports", 0, "protocol"), "HTTP")),
    ("a container's port beyond the last", put("Deployment", (*GATEWAY_BOX, "ports", 0, "containerPort"), 80000)),
    ("a service for a port that is not there", put("Service", ("spec", "ports", 0, "targetPort"), "https")),
    ("a service for no pod", put("Service", ("spec", "selector", "tidemill/role"), "gate-way")),
    (
        "a service's selector as a deployment's",
        put("Service", ("spec", "selector"), {"matchLabels": {"tidemill/role": "gateway"}}),
    ),
    ("a service of a misspelt type", put("Service", ("spec", "type"), "Loadbalancer")),
    (
        "a service's second port without a name",
        append("Service", ("spec", "ports"), {"port": 9090, "targetPort": 9090}, "name"),
    ),
    ("a service in another namespace than its pods", put("Service", ("metadata", "namespace"), "serving")),
    ("a service's port in quotes", put("Service", ("spec", "ports", 0, "port"), "80")),
    # monitoring
    (
        "a scrape interval without a unit",
        add(
            named(
                "monitoring.googleapis.com/v1",
                "PodMonitoring",
                "head",
                spec={"selector": {"matchLabels": LABEL}, "endpoints": [{"port": 8080, "interval": 30}]},
            ),
            "spec",
            "endpoints",
            0,
            "interval",
        ),
    ),
]
