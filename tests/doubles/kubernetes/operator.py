"""The operator KubeRay: a RayJob becomes a cluster whose head also runs the autoscaler and the entrypoint.

As KubeRay in SidecarMode, but the entrypoint runs directly instead of through Ray's job server. A cluster that lost its
head, or whose entrypoint failed, is replaced until the job's backoffLimit is used up.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.doubles.kubernetes.api import Object, Store
from tests.doubles.kubernetes.kubelet import HOST, Kubelet, Pod

SUBMITTER = "ray-job-submitter"
GCS_PORT = 6379
START_HEAD = ["--head", f"--port={GCS_PORT}", "--no-monitor", "--include-dashboard=false"]
OBJECT_STORE_BYTES = 90_000_000
TOKEN = "t" * 64
READY = "Ray runtime started"
API_PORT = 6443


class Operator:
    def __init__(self, store: Store, kubelet: Kubelet) -> None:
        self.store, self.kubelet = store, kubelet
        self._pods = 0

    def look(self) -> None:
        for job in self._all("rayjobs"):
            self._job(copy.deepcopy(job))
        for cluster in self._all("rayclusters"):
            self._workers(cluster)

    def _all(self, plural: str) -> list[Object]:
        with self.store.lock:
            return [value for (kind, _), value in self.store.objects.items() if kind == plural]

    def _job(self, job: Object) -> None:
        name, status = job["metadata"]["name"], job.setdefault("status", {"failed": 0})
        cluster = self.store.objects.get(("rayclusters", status.get("rayClusterName", "")))
        is_over = status.get("jobDeploymentStatus") in ("Complete", "Failed")
        if "deletionTimestamp" in job["metadata"] or status.get("jobDeploymentStatus") == "Retrying":
            if cluster is not None:
                self._tear_down(cluster)
            elif "deletionTimestamp" in job["metadata"]:
                self.store.remove(("rayjobs", name))
            else:
                self._set_status(job, jobDeploymentStatus="Initializing", jobStatus="")
        elif is_over:
            if cluster is not None and job["spec"].get("shutdownAfterJobFinishes"):
                self._tear_down(cluster)
        elif cluster is None:
            self._start(job)
        else:
            self._watch(job, cluster)

    def _start(self, job: Object) -> None:
        name, spec = job["metadata"]["name"], job["spec"]["rayClusterSpec"]
        cluster = f"{name}-{job['status']['failed'] + 1}"
        metadata = {"name": cluster, "namespace": "default", "labels": dict(job["metadata"]["labels"])}
        content = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": copy.deepcopy(spec)}
        self.store.put("rayclusters", content)
        group = spec["headGroupSpec"]
        head = self._pod(cluster, "head", "headgroup", group, START_HEAD)
        options = spec["autoscalerOptions"]
        env = {each["name"]: each["value"] for each in options.get("env", ())}
        address = f"{head.ip}:{GCS_PORT}"
        command = ["ray", "kuberay-autoscaler", "--cluster-name", cluster, "--cluster-namespace", "default"]
        self.kubelet.sidecar(head, "autoscaler", [*command, "--gcs-address", address], env)
        self._set_status(job, rayClusterName=cluster, jobDeploymentStatus="Initializing")

    def _watch(self, job: Object, cluster: Object) -> None:
        name = cluster["metadata"]["name"]
        head = self.kubelet.pods.get(f"{name}-head")
        submitter = head.containers.get(SUBMITTER) if head else None
        if head is None or (submitter and submitter.poll()):
            status = job["status"]
            status["failed"] += 1
            again = status["failed"] <= job["spec"]["backoffLimit"]
            self.store.record("failed", cluster=name)
            self._set_status(job, jobStatus="FAILED", jobDeploymentStatus="Retrying" if again else "Failed")
        elif submitter and submitter.poll() == 0:
            self.store.record("succeeded", cluster=name)
            self._set_status(job, jobStatus="SUCCEEDED", jobDeploymentStatus="Complete")
        elif submitter is None and READY in self.kubelet.log(head.name, "head"):
            entrypoint = ["sh", "-c", f"exec {job['spec']['entrypoint']}"]
            self.kubelet.sidecar(head, SUBMITTER, entrypoint, {"PYTHONUNBUFFERED": "1"})
            self.store.record("entrypoint", cluster=name)
            self._set_status(job, jobStatus="RUNNING", jobDeploymentStatus="Running")

    def _workers(self, cluster: Object) -> None:
        """Remove the pods that the autoscaler chose and those that failed; start those that are missing."""
        name = cluster["metadata"]["name"]
        if "deletionTimestamp" in cluster["metadata"] or f"{name}-head" not in self.kubelet.pods:
            return
        for group in cluster["spec"]["workerGroupSpecs"]:
            selector = {"labelSelector": [f"ray.io/cluster={name},ray.io/group={group['groupName']}"]}
            pods = {each["metadata"]["name"]: each for each in self.store.select("pods", selector)}
            for pod, found in list(pods.items()):
                if found["status"]["phase"] == "Failed":
                    self.store.remove(("pods", pod))
                    del pods[pod]
                elif pod in group.get("scaleStrategy", {}).get("workersToDelete", ()):
                    self.store.delete(("pods", pod))
                if "deletionTimestamp" in found["metadata"]:
                    pods.pop(pod, None)
            head = self.kubelet.pods[f"{name}-head"]
            for _ in range(group["replicas"] - len(pods)):
                self._pods += 1
                pod = f"{group['groupName']}-{self._pods}"
                self._pod(name, pod, group["groupName"], group, [f"--address={head.ip}:{GCS_PORT}"])

    def _pod(self, cluster: str, role: str, group: str, spec: Object, start: list[str]) -> Pod:
        labels = {
            "ray.io/cluster": cluster,
            "ray.io/group": group,
            "ray.io/node-type": "head" if role == "head" else "worker",
        }
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        params = {
            "memory": str(int(limits["memory"].removesuffix("Gi")) << 30),
            "object-store-memory": str(OBJECT_STORE_BYTES),
            "labels": ",".join(f"{key}={value}" for key, value in spec.get("labels", {}).items()),
            **spec["rayStartParams"],
        }
        ray = ["ray", "start", "--block", *start, *(f"--{key}={value}" for key, value in params.items())]
        ray += ["--node-ip-address={ip}", "--disable-usage-stats"]
        return self.kubelet.start(f"{cluster}-{role}", spec["template"], labels, ray)

    def _tear_down(self, cluster: Object) -> None:
        name = cluster["metadata"]["name"]
        pods = list(self.store.select("pods", {"labelSelector": [f"ray.io/cluster={name}"]}))
        for pod in pods:
            if pod["status"]["phase"] == "Failed":
                self.store.remove(("pods", pod["metadata"]["name"]))
            elif "deletionTimestamp" not in pod["metadata"]:
                self.store.delete(("pods", pod["metadata"]["name"]))
        self.store.delete(("rayclusters", name))
        if not pods:
            self.store.remove(("rayclusters", name))

    def _set_status(self, job: Object, **fields: Any) -> None:
        job["status"].update(fields)
        with self.store.lock:  # the specification may have changed meanwhile
            now = self.store.objects["rayjobs", job["metadata"]["name"]]
            self.store.put("rayjobs", {**copy.deepcopy(now), "status": job["status"]})


def ray_environment(env: dict[str, str]) -> dict[str, str]:
    """What KubeRay and Kubernetes add to the environment of every container."""
    ours = {key: value for key, value in env.items() if not key.startswith(("RAY_", "KUBERNETES_"))}
    return ours | {
        "KUBERNETES_SERVICE_HOST": HOST,
        "KUBERNETES_SERVICE_PORT_HTTPS": str(API_PORT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_autoscaler_v2": "1",
    }
