"""The state of a job in plain words, from the objects in the cluster."""

from __future__ import annotations

from tidemill.deploy.documents import Document
from tidemill.deploy.kubernetes.kubectl import RAY_JOB, Job, Kubectl

KINDS = {RAY_JOB: "rayjobs.ray.io", "JobSet": "jobsets.jobset.x-k8s.io", "Deployment": "deployments.apps"}
"""What runs, of what is rendered, by its name in kubectl."""
JOB_STATES = {
    "": "not started: its operator has not seen it",
    "Initializing": "its cluster starts",
    "Waiting": "waits to be submitted",
    "Running": "runs",
    "Complete": "has ended",
    "Failed": "has failed",
    "ValidationFailed": "is refused by KubeRay",
    "Suspending": "gives its machines back to the queue",
    "Suspended": "waits in the queue",
    "Retrying": "lost its cluster; the next one starts",
}
"""KubeRay's jobDeploymentStatus."""
POD_STATES = {"Pending": "starts", "Running": "runs", "Succeeded": "has ended", "Failed": "has failed"}
WAITING = {
    "ErrImagePull": "cannot pull its image",
    "ImagePullBackOff": "cannot pull its image",
    "CreateContainerConfigError": "lacks a Secret or ConfigMap",
    "CrashLoopBackOff": "fails again and again",
    "OOMKilled": "ran out of memory: raise deploy.head_memory_gb or deploy.worker_memory_gb",
}
"""Reasons of containers that do not run."""


def job_state(kubectl: Kubectl, job: Job) -> list[dict[str, str]]:
    """The job, its Ray cluster and its pods: kind, name, role and state. Raises UserError as `Kubectl` does."""
    kinds = [kind for kind in job.kinds if kind in KINDS]
    found = [(kind, each) for kind in kinds for each in kubectl.objects(job, KINDS[kind])]
    if RAY_JOB in kinds:
        found += [("RayCluster", each) for each in kubectl.objects(job, "rayclusters.ray.io")]
    found += [("Pod", each) for each in kubectl.objects(job, "pods")]
    rows = []
    for kind, each in found:
        metadata = each["metadata"]
        state = "is being deleted" if "deletionTimestamp" in metadata else _state(kind, each)
        role = metadata.get("labels", {}).get("tidemill/role", "") if kind == "Pod" else ""
        rows.append({"kind": kind, "name": metadata["name"], "role": role, "state": state})
    return rows


def _state(kind: str, found: Document) -> str:
    spec, status = found.get("spec", {}), found.get("status", {})
    conditions = [each["type"] for each in status.get("conditions", ()) if each["status"] == "True"]
    if kind == "Pod":
        return _pod(status)
    if kind == "Deployment":
        return f"{status.get('readyReplicas', 0)} of {spec.get('replicas', 1)} ready"
    if kind == "JobSet":
        parts = status.get("replicatedJobsStatus", ())
        counts = [f"{sum(each.get(key, 0) for each in parts)} {key}" for key in ("active", "succeeded", "failed")]
        return ", ".join(counts + conditions)
    if kind == "RayCluster":
        groups = spec.get("workerGroupSpecs", ())
        wanted, most = (sum(group[key] for group in groups) for key in ("replicas", "maxReplicas"))
        return f"{wanted} of at most {most} workers wanted, {status.get('readyWorkerReplicas', 0)} ready"
    words = JOB_STATES.get(status.get("jobDeploymentStatus", ""), status.get("jobDeploymentStatus", ""))
    retries = f" (cluster {status['failed'] + 1} of {spec['backoffLimit'] + 1})" if status.get("failed") else ""
    return _with_message(f"{words}{retries}", status)


def _pod(status: Document) -> str:
    for container in status.get("containerStatuses", ()):
        for details in container.get("state", {}).values():
            if details.get("reason") in WAITING:
                return _with_message(WAITING[details["reason"]], {"message": details.get("message", "")})
    phase = str(status.get("phase", "Pending"))
    for condition in status.get("conditions", ()):
        if phase == "Pending" and condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _with_message("waits for a machine", condition)
    return _with_message(POD_STATES.get(phase, phase), status)


def _with_message(words: str, found: Document) -> str:
    message = found.get("message") or found.get("reason")
    return f"{words}: {message}" if message else words
