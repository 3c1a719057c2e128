"""The state of a job in plain words, from the objects in the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemill.deploy.documents import Document
from tidemill.deploy.kubectl import RAY_JOB, Job, Kubectl

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
WAITING = {
    "ErrImagePull": "cannot pull its image",
    "ImagePullBackOff": "cannot pull its image",
    "InvalidImageName": "cannot pull its image",
    "CreateContainerConfigError": "lacks a Secret or ConfigMap",
    "CrashLoopBackOff": "fails again and again",
}
KINDS = {RAY_JOB: "rayjobs.ray.io", "JobSet": "jobsets.jobset.x-k8s.io", "Deployment": "deployments.apps"}
"""What runs, of what is rendered, by its name in kubectl."""
UNKNOWN = "-"


def job_state(kubectl: Kubectl, job: Job) -> dict[str, list[dict[str, Any]]]:
    """The job, its Ray cluster and its pods: each with kind, name and state. Raises UserError as `Kubectl` does."""
    kinds = {kind: KINDS[kind] for kind in job.kinds if kind in KINDS}
    jobs = [(kind, each) for kind, plural in kinds.items() for each in kubectl.objects(job, plural)]
    clusters = kubectl.objects(job, "rayclusters.ray.io") if RAY_JOB in kinds else []
    pods = kubectl.objects(job, "pods")
    return {
        "jobs": [_row(kind, each, _job(kind, each)) for kind, each in jobs],
        "clusters": [_row("RayCluster", each, _cluster(each)) for each in clusters],
        "pods": [_row("Pod", each, _pod(each)) | {"role": _label(each, "tidemill/role")} for each in pods],
    }


def lines(state: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for row in [*state["jobs"], *state["clusters"]]:
        yield f"{row['kind']} {row['name']}: {row['state']}"
    width = max((len(row["name"]) for row in state["pods"]), default=0)
    for row in state["pods"]:
        yield f"  {row['name']:{width}}  {row['role']:8}  {row['state']}"


def _row(kind: str, found: Document, state: str) -> dict[str, Any]:
    metadata = found["metadata"]
    ends = " (is being deleted)" if "deletionTimestamp" in metadata else ""
    return {"kind": kind, "name": metadata["name"], "state": f"{state}{ends}"}


def _label(found: Document, label: str) -> str:
    return str(found["metadata"].get("labels", {}).get(label, UNKNOWN))


def _job(kind: str, job: Document) -> str:
    status = job.get("status", {})
    if kind == "Deployment":
        return f"{status.get('readyReplicas', 0)} of {job['spec'].get('replicas', 1)} ready"
    if kind == "JobSet":
        ended = [each["type"] for each in status.get("conditions", ()) if each["status"] == "True"]
        parts = status.get("replicatedJobsStatus", ())
        counts = ", ".join(f"{sum(each.get(key, 0) for each in parts)} {key}" for key in ("active", "succeeded", "failed"))
        return f"{counts}{''.join(f'; {each.lower()}' for each in ended)}"
    state = str(status.get("jobDeploymentStatus", ""))
    words = JOB_STATES.get(state, state)
    failed, most = status.get("failed", 0), job["spec"].get("backoffLimit", 0)
    retries = f"; cluster {failed + 1} of {most + 1}" if failed and failed <= most else ""
    message = f": {status['message']}" if status.get("message") else ""
    return f"{words}{retries}{message}"


def _cluster(cluster: Document) -> str:
    status = cluster.get("status", {})
    most = sum(group["maxReplicas"] for group in cluster["spec"].get("workerGroupSpecs", ()))
    wanted = sum(group["replicas"] for group in cluster["spec"].get("workerGroupSpecs", ()))
    return f"{status.get('readyWorkerReplicas', 0)} workers ready, {wanted} wanted, {most} at most"


def _pod(pod: Document) -> str:
    status = pod.get("status", {})
    phase = status.get("phase", "Pending")
    states = [each.get("state", {}) for each in status.get("containerStatuses", ())]
    for waiting in (state["waiting"] for state in states if "waiting" in state):
        if (words := WAITING.get(waiting.get("reason", ""))) is not None:
            return _with_message(words, waiting)
    if phase == "Pending":
        places = [each for each in status.get("conditions", ()) if each["type"] == "PodScheduled"]
        unplaced = [each for each in places if each["status"] == "False"]
        return _with_message("waits for a machine", unplaced[0]) if unplaced else "starts"
    if phase == "Running":
        return "runs"
    ends = [state["terminated"] for state in states if state.get("terminated", {}).get("exitCode")]
    if any(each.get("reason") == "OOMKilled" for each in ends):
        return "ran out of memory; raise deploy.head_memory_gb or worker_memory_gb"
    code = f" (exit code {ends[0]['exitCode']})" if ends else ""
    words = {"Failed": "failed", "Succeeded": "ended"}.get(phase, phase)
    return _with_message(f"{words}{code}", status)


def _with_message(words: str, found: Document) -> str:
    message = found.get("message") or found.get("reason") or ""
    return f"{words}: {message}" if message else words
