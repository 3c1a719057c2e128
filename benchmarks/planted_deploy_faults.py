"""Defects planted in rendered Kubernetes documents: how many does `tidemill deploy check` find, with field and hint?

    python -m benchmarks.planted_deploy_faults [--crds FOLDER] [--documents FILE_OR_FOLDER]

`known` defects were written beside the check; the two groups of `unseen` ones (benchmarks/deploy_faults_unseen.py and
deploy_faults_blind.py) by others, who had not read it. Rules for the kinds of what the check missed followed, so that
the aim for unseen defects is judged by `FOUND_AT_FIRST`. A defect is found if a new finding names its field, or one
above or below, and has a hint. Exit code 1: the unchanged documents have an error, or too few defects are found.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.deploy_faults_blind import BLIND
from benchmarks.deploy_faults_unseen import UNSEEN
from benchmarks.measuring import print_records, write_result
from tidemill.deploy.kubernetes.check.crds import Crds
from tidemill.deploy.kubernetes.check.documents import check, read_documents
from tidemill.deploy.kubernetes.check.findings import Finding, dotted

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ROOT / "tests" / "data" / "deploy" / "rendered.yaml"
SHARED = next((each / "shared" / "data" for each in ROOT.parents if (each / "shared" / "data" / "crds").is_dir()), ROOT)
KNOWN_SHARE, UNSEEN_SHARE = 0.95, 0.85
FOUND_AT_FIRST = {"unseen_1": 96, "unseen_2": 41}
"""Found when the group was written, before any rule for it."""
STEP = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")
DROP = object()

Documents = list[dict[str, Any]]
Mutation = Callable[[Documents], str]


def steps(field: str) -> list[str | int]:
    words = [match[1] or match[2] for match in STEP.finditer(field)]
    return [int(word) if word.isdigit() else word for word in words]


def put(kind: str, field: str, value: Any, *, shown: str = "") -> Mutation:
    """Sets a field of the first document of a kind. Args: shown: the field that the finding names, if another."""

    def mutate(documents: Documents) -> str:
        part: Any = next(each for each in documents if each["kind"] == kind)
        *path, last = steps(field)
        for step in path:
            part = part.setdefault(step, {}) if isinstance(part, dict) else part[step]
        if value is DROP:
            del part[last]
        else:
            part[last] = copy.deepcopy(value)
        return dotted(tuple(steps(shown or field)))

    return mutate


def drop(kind: str, field: str, *, shown: str = "") -> Mutation:
    return put(kind, field, DROP, shown=shown)


def both(*mutations: Mutation) -> Mutation:
    """Several changes; the first one's field counts."""

    def mutate_all(documents: Documents) -> str:
        fields = [mutate(documents) for mutate in mutations]
        return fields[0]

    return mutate_all


def twice(kind: str, field: str) -> Mutation:
    """Repeats the first item of a list."""

    def mutate(documents: Documents) -> str:
        part: Any = next(each for each in documents if each["kind"] == kind)
        for step in steps(field):
            part = part[step]
        part.append(copy.deepcopy(part[0]))
        return f"{field}[{len(part) - 1}]"

    return mutate


def repeat(documents: Documents) -> str:
    documents.append(copy.deepcopy(documents[0]))
    return "metadata.name"


CLUSTER = "spec.rayClusterSpec."
HEAD, SPOT = CLUSTER + "headGroupSpec.", CLUSTER + "workerGroupSpecs[0]."
HEAD_POD, SPOT_POD = HEAD + "template.spec.", SPOT + "template.spec."
HEAD_BOX, SPOT_BOX = HEAD_POD + "containers[0].", SPOT_POD + "containers[0]."
SET_POD = "spec.replicatedJobs[0].template.spec.template.spec."
GATEWAY_BOX = "spec.template.spec.containers[0]."
KUEUE = "kueue.x-k8s.io/"


def job(field: str, value: Any, *, shown: str = "") -> Mutation:
    return put("RayJob", field, value, shown=shown)


KNOWN: list[tuple[str, Mutation]] = [
    # Schemas.
    ("misspelt key of the cluster", job(CLUSTER + "enableInTreeAutoscalling", True)),
    ("misspelt key of the job", job("spec.shutdownAfterJobFinish", True)),
    ("misspelt key of a pod", job(SPOT_POD + "nodeSelectr", {})),
    ("misspelt key of a container", job(SPOT_BOX + "volumeMount", [])),
    ("replicas in quotes", job(SPOT + "replicas", "2")),
    ("no containers", drop("RayJob", SPOT_POD + "containers")),
    ("unknown submission mode", job("spec.submissionMode", "Sidecar")),
    ("unknown autoscaler version", job(CLUSTER + "autoscalerOptions.version", "v3")),
    ("unknown upscaling mode", job(CLUSTER + "autoscalerOptions.upscalingMode", "Fast")),
    ("unknown authentication", job(CLUSTER + "authOptions.mode", "tokens")),
    ("label without quotes", job(SPOT + "labels", {"a": 1})),
    ("annotation true without quotes", job(f"metadata.annotations[{KUEUE}elastic-job]", True)),
    ("start parameter without quotes", job(SPOT + "rayStartParams[num-cpus]", 4)),
    ("environment value without quotes", job(SPOT_BOX + "env[0].value", 3)),
    ("containers as a map", job(SPOT_POD + "containers", {"name": "spot"})),
    ("wrong apiVersion", put("RayJob", "apiVersion", "ray.io/v2")),
    ("wrong apiVersion of a core kind", put("PodDisruptionBudget", "apiVersion", "v1")),
    ("misspelt kind", put("PersistentVolumeClaim", "kind", "PersistentVolumeClaims")),
    ("budget without its selector's spelling", put("PodDisruptionBudget", "spec.selectors", {})),
    ("config map with a number", put("ConfigMap", "data[recipe.toml]", 3)),
    ("queue without quota", drop("ClusterQueue", "spec.resourceGroups[0].flavors[0].resources[0].nominalQuota")),
    ("job set with two equal jobs", twice("JobSet", "spec.replicatedJobs")),
    ("deployment without selector", drop("Deployment", "spec.selector")),
    ("service port as text", put("Service", "spec.ports[0].port", "80")),
    # KubeRay.
    ("minimum above maximum", job(SPOT + "minReplicas", 5)),
    ("replicas above maximum", job(SPOT + "replicas", 9)),
    ("negative maximum", job(SPOT + "maxReplicas", -1)),
    ("labels in rayStartParams", job(SPOT + "rayStartParams.labels", "a=b")),
    ("misspelt start parameter", job(SPOT + "rayStartParams[num-cpu]", "4")),
    ("resources twice", job(SPOT + "resources", {"CPU": "1"})),
    ("token with an old Ray", job(CLUSTER + "rayVersion", "2.40.0")),
    ("token without a version", drop("RayJob", CLUSTER + "rayVersion")),
    ("no authentication on the cluster", drop("RayJob", CLUSTER + "authOptions.mode")),
    ("SidecarMode with submitterConfig", job("spec.submitterConfig", {"backoffLimit": 2})),
    ("SidecarMode with clusterSelector", job("spec.clusterSelector", {"ray.io/cluster": "a"})),
    ("head restarts under SidecarMode", job(HEAD_POD + "restartPolicy", "Always")),
    ("workers restart under autoscaler v2", job(SPOT_POD + "restartPolicy", "OnFailure")),
    ("negative backoffLimit", job("spec.backoffLimit", -1)),
    ("time to live without shutdown", job(
        "spec.shutdownAfterJobFinishes", False, shown="spec.ttlSecondsAfterFinished")),
    ("queue without shutdown", both(
        job("spec.shutdownAfterJobFinishes", False), job("spec.ttlSecondsAfterFinished", 0))),
    ("deadline of zero", job("spec.activeDeadlineSeconds", 0)),
    ("deadlines in the wrong order", job("spec.activeDeadlineSeconds", 900, shown="spec.preRunningDeadlineSeconds")),
    ("no deadline before running", drop("RayJob", "spec.preRunningDeadlineSeconds")),
    ("interactive with backoffLimit", job("spec.submissionMode", "InteractiveMode", shown="spec.backoffLimit")),
    ("no command", drop("RayJob", "spec.entrypoint")),
    ("no cluster", drop("RayJob", "spec.rayClusterSpec")),
    ("runtime environment is no map", job("spec.runtimeEnvYAML", "- a")),
    ("autoscaler off", job(CLUSTER + "enableInTreeAutoscaling", False)),
    ("autoscaler version twice", both(
        job(CLUSTER + "autoscalerOptions.version", "v2"),
        job(HEAD_BOX + "env[0]", {"name": "RAY_enable_autoscaler_v2", "value": "1"}))),
    ("idle timeout without v2", both(
        job(SPOT + "idleTimeoutSeconds", 30), job(CLUSTER + "autoscalerOptions.version", "v1"))),
    ("negative idle timeout", job(CLUSTER + "autoscalerOptions.idleTimeoutSeconds", -1)),
    ("two groups of one name", twice("RayJob", CLUSTER + "workerGroupSpecs")),
    ("long name", put("RayJob", "metadata.name", "a" * 48)),
    ("upper case in a name", put("RayJob", "metadata.name", "Spot")),
    ("unknown market type", job(SPOT + "labels[ray.io/market-type]", "preemptible")),
    # Spot machines.
    ("grace above GKE's", job(SPOT_POD + "terminationGracePeriodSeconds", 45)),
    ("no grace", drop("RayJob", SPOT_POD + "terminationGracePeriodSeconds")),
    ("drain above grace", job(SPOT_BOX + "env[1].value", "30")),
    ("drain equals grace", job(SPOT_BOX + "env[1].value", "15")),
    ("spot trainer", job(HEAD_POD + "nodeSelector[cloud.google.com/gke-spot]", "true")),
    ("spot selector with True", job(SPOT_POD + "nodeSelector[cloud.google.com/gke-spot]", "True")),
    ("misspelt spot selector", job(SPOT_POD + "nodeSelector", {"cloud.google.com/gke-spots": "true"})),
    ("unknown accelerator", job(HEAD_POD + "nodeSelector[cloud.google.com/gke-accelerator]", "nvidia-h100")),
    ("flex-start for spot", job(SPOT_POD + "nodeSelector[cloud.google.com/gke-flex-start]", "true")),
    ("misspelt effect", job(SPOT_POD + "tolerations[0].effect", "NoScheduel")),
    ("Exists with a value", job(SPOT_POD + "tolerations[0].operator", "Exists", shown=SPOT_POD + "tolerations[0]")),
    # Pods.
    ("32GB", job(SPOT_BOX + "resources.limits.memory", "32GB")),
    ("request above limit", job(SPOT_BOX + "resources.requests.cpu", "8")),
    ("memory in bytes by mistake", job(SPOT_BOX + "resources.limits.memory", "16", shown=SPOT_BOX + "resources")),
    ("GPU without domain", job(HEAD_BOX + "resources.limits.gpu", "1")),
    ("misspelt GPU", job(HEAD_BOX + "resources.limits[nvidia.com/gpus]", "1")),
    ("GPU request without limit", drop("RayJob", HEAD_BOX + "resources.limits[nvidia.com/gpu]",
                                       shown=HEAD_BOX + "resources.requests[nvidia.com/gpu]")),
    ("two containers of one name", twice("RayJob", SPOT_POD + "containers")),
    ("mount without volume", job(SPOT_BOX + "volumeMounts[0].name", "recipes")),
    ("volume twice", twice("RayJob", SPOT_POD + "volumes")),
    ("two mounts at one path", twice("RayJob", SPOT_BOX + "volumeMounts")),
    ("no image", drop("RayJob", SPOT_BOX + "image")),
    ("image without digest", job(SPOT_BOX + "image", "registry.example/tidemill:latest")),
    ("misspelt pull policy", job(SPOT_BOX + "imagePullPolicy", "IfNotPresnt")),
    ("root excluded and chosen", job(HEAD_POD + "securityContext.runAsUser", 0)),
    ("secret in the open", job(HEAD_BOX + "env[1]", {"name": "WANDB_API_KEY", "value": "abc"})),
    ("container's name with _", job(SPOT_BOX + "name", "spot_worker")),
    ("sweep restarts always", put("JobSet", SET_POD + "restartPolicy", "Always")),
    ("probe of a missing port", put("Deployment", GATEWAY_BOX + "readinessProbe.httpGet.port", "web")),
    # References.
    ("run directory on FUSE", job(HEAD_POD + "volumes[1]", {
        "name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "runs"}}},
        shown=HEAD_BOX + "volumeMounts[1]")),
    ("FUSE without its annotation", drop("RayJob", HEAD + "template.metadata.annotations")),
    ("bucket with gs://", job(HEAD_POD + "volumes[2].csi.volumeAttributes.bucketName", "gs://models")),
    ("misspelt config map", job(HEAD_POD + "volumes[0].configMap.name", "spot-recipes")),
    ("claim that nothing defines", job(HEAD_POD + "volumes[1].persistentVolumeClaim.claimName", "disk")),
    ("budget that selects nothing", put(
        "PodDisruptionBudget", "spec.selector.matchLabels", {"tidemill/role": "heads"})),
    ("service that selects nothing", put("Service", "spec.selector", {"tidemill/role": "gatewy"})),
    ("deployment that selects other pods", put("Deployment", "spec.selector.matchLabels", {"tidemill/role": "head"})),
    ("queue label misspelt", put("RayJob", "metadata.labels", {f"{KUEUE}queue-nam": "training"})),
    ("elastic-job with yes", job(f"metadata.annotations[{KUEUE}elastic-job]", "yes")),
    ("autoscaled in a queue without elastic-job", drop("RayJob", "metadata.annotations")),
    ("misspelt queue", job(f"metadata.labels[{KUEUE}queue-name]", "trainings")),
    ("misspelt cluster queue", put("LocalQueue", "spec.clusterQueue", "tidemil")),
    ("quota in another order", put("ClusterQueue", "spec.resourceGroups[0].coveredResources", ["memory", "cpu"],
                                   shown="spec.resourceGroups")),
    ("job set names a missing job", put("JobSet", "spec.successPolicy",
                                        {"operator": "All", "targetReplicatedJobs": ["seed-2"]})),
    ("claim without size", drop("PersistentVolumeClaim", "spec.resources.requests.storage")),
    ("misspelt access mode", put("PersistentVolumeClaim", "spec.accessModes", ["ReadWriteMulti"])),
    ("service to a missing port", put("Service", "spec.ports[0].targetPort", "web")),
    ("budget in another namespace", put("PodDisruptionBudget", "metadata.namespace", "other")),
    ("job in another namespace", put("RayJob", "metadata.namespace", "other")),
    ("GPU nodes without a GPU", both(
        drop("RayJob", HEAD_BOX + "resources.limits[nvidia.com/gpu]", shown=HEAD_POD + "nodeSelector"),
        drop("RayJob", HEAD_BOX + "resources.requests[nvidia.com/gpu]"))),
    ("more CPUs for Ray than the container's", job(SPOT + "rayStartParams.num-cpus", "8")),
    ("short digest", job(SPOT_BOX + "image", "registry.example/tidemill@sha256:0f8d")),
    ("two documents of one name", repeat),
    ("label value with a slash", put("RayJob", "metadata.labels[app.kubernetes.io/name]", "tide/mill")),
]  # fmt: skip


def found(documents: Documents, mutate: Mutation, crds: Crds, before: Sequence[Finding]) -> Finding | None:
    """The finding of a defect, or None."""
    changed = copy.deepcopy(documents)
    field = mutate(changed)
    for each in check(changed, crds):
        near = each.field.startswith(field) or field.startswith((f"{each.field}.", f"{each.field}["))
        if each not in before and near and each.hint:
            return each
    return None


def measure(documents: Documents, crds: Crds) -> dict[str, Any]:
    """Shares found, the names of those missed, and the time of a document."""
    check(documents, crds)  # compiles schemas and rules
    started = time.process_time()
    before = check(documents, crds)
    document_s = (time.process_time() - started) / len(documents)
    figures: dict[str, Any] = {"false_alarms": sum(not each.warning for each in before), "document_s": document_s}
    for group, rows in (("known", KNOWN), ("unseen_1", UNSEEN), ("unseen_2", BLIND)):
        missed = [name for name, mutate in rows if not found(documents, mutate, crds, before)]
        figures[group] = len(rows)
        figures[f"{group}_found"] = len(rows) - len(missed)
        figures[f"{group}_missed"] = missed
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crds", type=Path, default=SHARED / "crds")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS)
    given = parser.parse_args()
    started = time.process_time()
    crds = Crds.read(given.crds)
    crds_s = time.process_time() - started
    figures = {"crds_s": crds_s, **measure(read_documents(given.documents), crds), "found_at_first": FOUND_AT_FIRST}
    aims = {
        "no_false_alarm": figures["false_alarms"] == 0,
        "known": figures["known_found"] >= KNOWN_SHARE * figures["known"],
        "unseen": sum(FOUND_AT_FIRST.values()) >= UNSEEN_SHARE * sum(figures[group] for group in FOUND_AT_FIRST),
    }
    print_records("planted_deploy_faults", [figures | {f"{name}_reached": reached for name, reached in aims.items()}])
    write_result("planted_deploy_faults", {"figures": figures, "reached": aims})
    return 0 if all(aims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
