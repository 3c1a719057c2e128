"""A second group of defects of Kubernetes documents, to measure `tidemill deploy check` on.

The writer had read neither the check nor the first groups. A row is a name and a mutation, as in
benchmarks/deploy_faults_unseen.py; the comments name the public report or page that a defect comes from. The check
found 41 of the 64 (64 %; aim 85 %) when they were written; rules for the kinds of what it missed followed.
"""

from __future__ import annotations

from typing import Any

from benchmarks.deploy_faults_unseen import (
    CLUSTER,
    GATEWAY_BOX,
    GATEWAY_POD,
    HEAD,
    HEAD_BOX,
    HEAD_POD,
    IMAGE,
    QUOTA,
    SEED,
    SEED_JOB,
    SEED_POD,
    SPOT,
    SPOT_BOX,
    SPOT_POD,
    Documents,
    Mutation,
    Path,
    add,
    append,
    drop,
    first_of,
    inside,
    named,
    put,
    rename,
)
from tidemill.deploy.kubernetes.check.findings import dotted

CLAIM, BUDGET, QUEUE = "PersistentVolumeClaim", "PodDisruptionBudget", "ClusterQueue"
SANDBOX = "extensions.agents.x-k8s.io/v1beta1"
SCALER: Path = (*CLUSTER, "autoscalerOptions")
HEAD_START: Path = (*HEAD, "rayStartParams")
SPOT_START: Path = (*SPOT, "rayStartParams")
BUCKET: Path = (*HEAD_POD, "volumes", 2, "csi", "volumeAttributes")
KEY: Path = (*HEAD_BOX, "env", 1, "valueFrom", "secretKeyRef")
FLAVOR: Path = (*QUOTA, "flavors", 0)
SEED_BOX: Path = (*SEED_POD, "containers", 0)
RULES: Path = ("spec", "failurePolicy", "rules")
TRAIN = "tidemill train @/etc/tidemill/"
REDIS = {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}
SHM = {"name": "shm", "emptyDir": {"medium": "memory"}}
DELETION = {"policy": "DeleteCluster", "condition": {"jobStatus": "FAILED", "ttlSeconds": 3600}}
SELECTOR = {"matchLabels": {"tidemill/role": "gateway"}}
COVERED = ["cpu", "memory", "nvidia.com/gpu", "ephemeral-storage"]
EVICTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
KILLED = {"name": "memory", "action": "FailJobSet", "onJobFailureReasons": ["OOMKilled"]}
AFTER = {"name": "prepare", "status": "Complete"}
NO_ROOM = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}
POD = {"containers": [{"name": "agent", "image": IMAGE}]}
BARE = {"podTemplate": POD}
WARM = {"replicas": 2, "sandboxTemplateRef": {"name": "coder"}}


def job(path: Path, value: Any) -> Mutation:
    return put("RayJob", path, value)


def seen(field: str, mutation: Mutation) -> Mutation:
    """The same change, whose mistake lies in another field than the changed one."""

    def mutate(documents: Documents) -> str:
        mutation(documents)
        return field

    return mutate


def move(old: Path, new: Path, name: str) -> Mutation:
    """A field of the RayJob written at another level of indentation."""

    def mutate(documents: Documents) -> str:
        inside(documents, "RayJob", new)[name] = inside(documents, "RayJob", old).pop(name)
        return dotted((*new, name))

    return mutate


def shipper_first(documents: Documents) -> str:
    boxes = inside(documents, "RayJob", (*HEAD_POD, "containers"))
    boxes.insert(0, {"name": "logs", "image": "fluent/fluent-bit:3.2.4"})
    return dotted((*HEAD_POD, "containers", 0))


BLIND: tuple[tuple[str, Mutation], ...] = (
    # RayJob: spelling, types, units, values and levels
    ("the time to keep a finished run is '10m'", job(("spec", "ttlSecondsAfterFinished"), "10m")),  # kuberay 3653
    ("the submission mode starts in lower case", job(("spec", "submissionMode"), "sidecarMode")),  # flyte 7799
    ("the upscaling mode is misspelt", job((*SCALER, "upscalingMode"), "Aggresive")),
    ("the spot containers lack the list's dash", job((*SPOT_POD, "containers"), {"name": "spot", "image": IMAGE})),
    ("a Ray start parameter is a bare number", job((*HEAD_START, "num-cpus"), 4)),  # Ray: RayCluster config
    ("the Ray version is a bare number", job((*CLUSTER, "rayVersion"), 2.6)),
    ("the head's volumes are indented into its container", move(HEAD_POD, HEAD_BOX, "volumes")),
    ("the spot node selector stands beside the pod", move(SPOT_POD, (*SPOT, "template"), "nodeSelector")),
    ("the autoscaler's resources lack the level of limits", job((*SCALER, "resources", "cpu"), "500m")),
    (
        "the pull secrets are a list of names",
        seen(dotted((*SPOT_POD, "imagePullSecrets", 0)), job((*SPOT_POD, "imagePullSecrets"), ["registry"])),
    ),
    (
        "the shared-memory volume's medium is in lower case",  # kubernetes 91262
        first_of(
            append("RayJob", (*HEAD_POD, "volumes"), SHM, "emptyDir", "medium"),
            append("RayJob", (*HEAD_BOX, "volumeMounts"), {"name": "shm", "mountPath": "/dev/shm"}),
        ),
    ),
    ("the runtime environment is a mapping", job(("spec", "runtimeEnvYAML"), {"pip": ["wandb"]})),  # kuberay 1898
    ("the reference to the key calls the secret secretName", rename("RayJob", KEY, "name", "secretName")),
    ("the bucket's mount options are a list", job((*BUCKET, "mountOptions"), ["implicit-dirs"])),  # gcsfuse 2504
    ("the shutdown is misspelt", rename("RayJob", ("spec",), "shutdownAfterJobFinishes", "shutdownAfterFinish")),
    ("the most replicas are quoted", job((*SPOT, "maxReplicas"), "4")),
    ("the head's image keeps a variable", job((*HEAD_BOX, "image"), "${REGISTRY}/tidemill:0.4")),  # kubeval 256
    # RayJob: fields that do not go together
    ("a Redis address without fault tolerance", append("RayJob", (*HEAD_BOX, "env"), REDIS)),  # KubeRay: validation.go
    ("the spot group is suspended under an autoscaler", job((*SPOT, "suspend"), True)),  # KubeRay: validation.go
    ("the Ray version has no token login yet", job((*CLUSTER, "rayVersion"), "2.46.0")),  # KubeRay: validation.go
    ("the run's name is too long", job(("metadata", "name"), "spot-" + "qwen3-8b-" * 5 + "run2")),  # kuberay 3980
    ("the spot group has the head's reserved name", job((*SPOT, "groupName"), "head")),  # Kueue: raycluster_webhook.go
    (
        "the recipe's folder is mounted under the file's name",
        job((*HEAD_BOX, "volumeMounts", 0, "mountPath"), "/etc/tidemill/recipe.toml"),
    ),
    ("the head's memory limit is in G, its request in Gi", job((*HEAD_BOX, "resources", "limits", "memory"), "32G")),
    ("the spot group offers a GPU that it lacks", job((*SPOT_START, "num-gpus"), "1")),
    ("the object store's size has a unit", job((*HEAD_START, "object-store-memory"), "10Gi")),  # kuberay 202
    ("the custom resources lose their quotes", job((*SPOT_START, "resources"), '{"spot": 1}')),  # KubeRay: TPU samples
    ("a log shipper stands before the Ray container", shipper_first),  # kuberay 1379
    ("the spot container still sleeps", job((*SPOT_BOX, "command"), ["sleep", "infinity"])),  # kuberay 912, 1704
    ("the autoscaler gets no API token", job((*HEAD_POD, "automountServiceAccountToken"), False)),  # kuberay 242
    ("the first workers exceed the queue's quota", job((*SPOT, "replicas"), 4)),  # Kueue: ClusterQueue
    (
        "Ray cannot write to the spot machine's disk",  # as llm-sandbox 121; Ray keeps its session in /tmp/ray
        job((*SPOT_BOX, "securityContext", "readOnlyRootFilesystem"), True),
    ),
    ("the bucket's name is an address", job((*BUCKET, "bucketName"), "gs://models")),  # gcsfuse 770
    (
        "deletion rules beside the shutdown after the run",  # KubeRay: validation.go
        job(("spec", "deletionStrategy", "deletionRules"), [DELETION]),
    ),
    ("the checkpoints go where no volume is", job(("spec", "entrypoint"), TRAIN + "recipe.toml --run.dir /run/spot")),
    ("the run has less time than its start may take", job(("spec", "activeDeadlineSeconds"), 600)),  # kuberay 1933
    ("the ConfigMap lacks the entrypoint's file", job(("spec", "entrypoint"), TRAIN + "spot.toml")),
    # Volume claim and ConfigMap
    (
        "the claim's storage lacks the level of requests",
        seen("spec.resources.storage", put(CLAIM, ("spec", "resources"), {"storage": "100Gi"})),
    ),
    ("the access mode is no list", put(CLAIM, ("spec", "accessModes"), "ReadWriteOnce")),
    (
        "a disk class shared by several machines",  # GKE: persistent volumes
        first_of(
            put(CLAIM, ("spec", "accessModes"), ["ReadWriteMany"]),
            put(CLAIM, ("spec", "storageClassName"), "premium-rwo"),
        ),
    ),
    ("the recipe is a mapping, not a text", put("ConfigMap", ("data", "recipe.toml"), {"run": {"name": "spot"}})),
    ("the recipe has a text without quotes", put("ConfigMap", ("data", "recipe.toml"), "[run]\nname = spot\n")),
    # Disruption budget
    ("both bounds of a disruption budget", put(BUDGET, ("spec", "minAvailable"), 1)),  # Kubernetes: disruptions
    (
        "the budget's labels lack the level of matchLabels",
        seen("spec.selector[tidemill/role]", put(BUDGET, ("spec", "selector"), {"tidemill/role": "head"})),
    ),
    ("the budget protects every pod", put(BUDGET, ("spec", "selector"), {})),  # Kubernetes: disruption budgets
    # Queues
    ("the queue is in Kueue's namespace", put("LocalQueue", ("metadata", "namespace"), "kueue-system")),  # kueue 546
    ("the cluster queue's key is misspelt", rename("LocalQueue", ("spec",), "clusterQueue", "clusterQueueName")),
    ("the cohort has its name of v1beta1", put(QUEUE, ("spec", "cohort"), "research")),  # OpenShift: using cohorts
    ("a borrowing limit without a cohort", put(QUEUE, (*FLAVOR, "resources", 0, "borrowingLimit"), 8)),  # Kueue's CRD
    ("the cluster queue selects no namespace", drop(QUEUE, "spec", "namespaceSelector")),  # kueue 532
    (
        "a covered resource has no quota",  # Kueue: clusterqueue_webhook.go
        seen(dotted((*FLAVOR, "resources")), put(QUEUE, (*QUOTA, "coveredResources"), COVERED)),
    ),
    ("the cluster queue is still on hold", put(QUEUE, ("spec", "stopPolicy"), "Hold")),  # Kueue: ClusterQueue
    # JobSet
    ("the command is one text", put("JobSet", (*SEED_BOX, "command"), TRAIN + "recipe.toml")),
    ("a space before the memory's unit", put("JobSet", (*SEED_BOX, "resources", "limits", "memory"), "8 Gi")),
    ("a job waits for one that is not there", put("JobSet", (*SEED, "dependsOn"), [AFTER])),  # jobset 817
    (
        "a failure rule names a pod's reason",  # jobset 537
        seen(dotted((*RULES, 0, "onJobFailureReasons", 0)), put("JobSet", RULES, [KILLED])),
    ),
    (
        "a pod failure policy on pods that restart in place",  # Kubernetes: Jobs
        first_of(
            put("JobSet", (*SEED_POD, "restartPolicy"), "OnFailure"),
            put("JobSet", (*SEED_JOB, "podFailurePolicy"), {"rules": [EVICTED]}),
        ),
    ),
    # Gateway
    (
        "a rolling update may neither add nor remove a pod",  # Kubernetes: Deployments
        seen("spec.strategy.rollingUpdate.maxUnavailable", put("Deployment", ("spec", "strategy"), NO_ROOM)),
    ),
    ("the gateway's pods never restart", put("Deployment", (*GATEWAY_POD, "restartPolicy"), "Never")),  # Kubernetes
    ("a liveness probe of two successes", put("Deployment", (*GATEWAY_BOX, "livenessProbe", "successThreshold"), 2)),
    (
        "the service's selector is written as a deployment's",
        seen("spec.selector.matchLabels", put("Service", ("spec", "selector"), SELECTOR)),
    ),
    (
        "a second port without a name",  # Kubernetes: multi-port services
        append("Service", ("spec", "ports"), {"port": 9090, "targetPort": 8000}, "name"),
    ),
    # Sandboxes
    (
        "the sandbox's pod template lacks the level of spec",
        add(named(SANDBOX, "SandboxTemplate", "coding", spec=BARE), "spec", "podTemplate", "containers"),
    ),
    (
        "the warm pool names another template",
        first_of(
            add(named(SANDBOX, "SandboxWarmPool", "warm", spec=WARM), "spec", "sandboxTemplateRef", "name"),
            add(named(SANDBOX, "SandboxTemplate", "coding", spec={"podTemplate": {"spec": POD}})),
        ),
    ),
)
