"""The cluster, through the user's kubectl: its configuration, credentials and permissions. Nothing is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from tidemill.core.errors import UserError
from tidemill.deploy.documents import Document, Rendered, to_yaml
from tidemill.deploy.kubernetes.objects import job_labels
from tidemill.deploy.programs import COMMAND_S, Program, ProgramFailed

MANAGER = "tidemill"
"""Owner of the fields that `apply` sets (server-side apply)."""
REQUEST_S, DRY_RUN_S = 15, 30
"""Time for one request of kubectl to the cluster, in seconds."""
DELETE_S = 300.0
"""Reserved pods have two minutes to write a checkpoint."""
NEXT_HEAD_S = 1800.0
"""Wait of `logs` for the cluster after a lost head."""
INTERVAL_S = 2.0
SUBMITTER = "ray-job-submitter"
"""KubeRay's container beside the head, which prints what the driver prints."""
ENDED = ("Complete", "Failed", "ValidationFailed")
CLAIM = "PersistentVolumeClaim"
RAY_JOB = "RayJob"
FAILURES = (
    (
        ("forbidden",),
        "the cluster refuses it to this user",
        "ask its administrator for the permission, or choose another context of kubectl",
    ),
    (
        ("Unauthorized", "must be logged in", "invalid bearer token", "getting credentials", "exec plugin"),
        "the cluster does not accept the credentials",
        "log in as the cluster's provider says (on GKE: gcloud container clusters get-credentials)",
    ),
    (
        ("localhost:8080", "current-context is not set", "context was not found", "Missing or incomplete"),
        "there is no cluster in kubectl's configuration",
        "choose one: `kubectl config get-contexts`, then `kubectl config use-context NAME`, or --context NAME",
    ),
    (
        ("refused", "no such host", "Unable to connect", "i/o timeout", "deadline exceeded", "Timeout exceeded"),
        "the cluster does not answer",
        "check `kubectl cluster-info`",
    ),
    (
        ("no matches for kind", "doesn't have a resource type", "could not find the requested resource"),
        "the cluster lacks an operator",
        "install KubeRay for a RayJob, JobSet for a sweep",
    ),
    (
        ("conflict with",),
        "another program has changed the same fields",
        "see `tidemill deploy diff`; delete the job to render it anew",
    ),
    (
        ("use autoscaling", "ElasticJobsViaWorkloadSlices"),
        "Kueue admits no job with an autoscaler",
        "update it to 0.18, or to 0.15.2 with the gate ElasticJobsViaWorkloadSlices; or leave deploy.queue out",
    ),
    (('namespaces "',), "the namespace does not exist", "create it, or change deploy.namespace"),
)
KUBECTL = Program(
    name="kubectl",
    install="see https://kubernetes.io/releases/download, or apply the files of `tidemill deploy render` elsewhere",
    look_at="check `kubectl cluster-info`, and see `tidemill deploy status`",
    meanings=FAILURES,
    otherwise="`tidemill deploy check` finds errors in documents",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was rendered, as the cluster knows it."""

    name: str
    namespace: str
    documents: tuple[Document, ...]

    @property
    def selector(self) -> str:
        return ",".join(f"{label}={value}" for label, value in job_labels(self.name).items())

    @property
    def kinds(self) -> list[str]:
        return [document["kind"] for document in self.documents]


def job_of(rendered: Rendered) -> Job:
    documents = tuple(yaml.safe_load_all(rendered.text))
    metadata = documents[-1]["metadata"]
    name = metadata["labels"]["app.kubernetes.io/instance"]
    return Job(name=name, namespace=metadata["namespace"], documents=documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """Every method raises UserError if kubectl is missing, the cluster does not answer, or it refuses."""

    context: str = ""  # empty: the current one of kubectl's configuration

    def diff(self, rendered: Rendered) -> str:
        """What `apply` would change, as a unified diff; empty if nothing."""
        arguments = ["diff", "--server-side", f"--field-manager={MANAGER}", "--filename=-"]
        return self._run(arguments, rendered.text, success=(0, 1))

    def apply(self, rendered: Rendered) -> list[str]:
        """Create or change what was rendered; returns one line for each document.

        A running job keeps the pods with which it started.
        """
        arguments = ["apply", "--server-side", f"--field-manager={MANAGER}", "--filename=-"]
        return [line.removesuffix(" serverside-applied") for line in self._run(arguments, rendered.text).splitlines()]

    def delete(self, job: Job, *, storage: bool = False) -> list[str]:
        """Delete what was rendered, and wait until it is gone; the claim with the runs only with `storage`."""
        documents = [each for each in reversed(job.documents) if storage or each["kind"] != CLAIM]
        text = "---\n".join(json.dumps(document) + "\n" for document in documents)
        options = ["--ignore-not-found", "--cascade=foreground", "--output=name", f"--timeout={DELETE_S:g}s"]
        return self._run(["delete", *options, "--filename=-"], text, deadline_s=DELETE_S + COMMAND_S).split()

    def objects(self, job: Job, kind: str, labels: str = "") -> list[Document]:
        """The objects of a kind that belong to a job."""
        selector = f"{job.selector},{labels}" if labels else job.selector
        text = self._run(["get", kind, f"--namespace={job.namespace}", f"--selector={selector}", "--output=json"])
        found: list[Document] = json.loads(text)["items"]
        return found

    def print_log(self, job: Job, *, follow: bool) -> None:
        """Pass the log of a job on to standard output; following it, also those of its next clusters, until its end."""
        if RAY_JOB not in job.kinds:
            pods = ["--all-containers", "--prefix", "--max-log-requests=100", f"--selector={job.selector}"]
            self._pass_on(job, pods, follow=follow)
            return
        seen = ""
        while head := self._head(job, after=seen, wait_s=NEXT_HEAD_S if follow else 0.0):
            seen = head["metadata"]["name"]
            code = self._pass_on(job, [seen, f"--container={SUBMITTER}"], follow=follow)
            if code and seen in [pod["metadata"]["name"] for pod in self.objects(job, "pods")]:
                raise UserError(f"kubectl logs ended with code {code}", hint="see `tidemill deploy status`")
            if not follow:
                return

    def _head(self, job: Job, *, after: str, wait_s: float) -> Document | None:
        """A head other than the last one, whose run was submitted; None if the job has ended. Raises UserError: none in
        time."""
        end_s = time.monotonic() + wait_s
        while True:
            for pod in self.objects(job, "pods", "ray.io/node-type=head"):
                if pod["metadata"]["name"] != after and _has_started(pod, SUBMITTER):
                    return pod
            jobs = self.objects(job, "rayjobs.ray.io")
            if after and (not jobs or jobs[0].get("status", {}).get("jobDeploymentStatus") in ENDED):
                return None
            if not jobs:
                raise UserError(f"no job {job.name} in {job.namespace}", hint="`tidemill deploy apply` creates it")
            if time.monotonic() >= end_s:
                raise UserError(f"{job.name} does not run yet", hint="see `tidemill deploy status`")
            time.sleep(INTERVAL_S)

    def _pass_on(self, job: Job, arguments: Sequence[str], *, follow: bool) -> int:
        """Runs as long as the containers, or until the user interrupts it."""
        options = [f"--namespace={job.namespace}", f"--follow={str(follow).lower()}"]
        return KUBECTL.pass_on([*self._context, "logs", *options, *arguments])

    def _run(
        self, arguments: Sequence[str], text: str = "", *, success: Sequence[int] = (0,), deadline_s: float = 0.0
    ) -> str:
        """Standard output of one command. Raises UserError."""
        verb = arguments[0]
        options = [*self._context, *([] if verb == "delete" else [f"--request-timeout={REQUEST_S}s"])]
        return KUBECTL.run([*options, *arguments], text, verb=verb, success=success, deadline_s=deadline_s)

    @property
    def _context(self) -> list[str]:
        return [f"--context={self.context}"] if self.context else []


def _has_started(pod: Document, container: str) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any(each["name"] == container and "waiting" not in each.get("state", {"waiting": {}}) for each in statuses)


def server_refusals(documents: Sequence[Document]) -> list[str]:
    """What the API server of the current context says to a dry run.

    Raises:
        UserError: there is no kubectl, or it does not end.
    """
    text = "---\n".join(to_yaml(each) for each in documents)
    as_apply = ["--server-side", f"--field-manager={MANAGER}"]  # without, a large ConfigMap exceeds an annotation
    arguments = ["apply", *as_apply, "--dry-run=server", f"--request-timeout={DRY_RUN_S}s", "--filename=-"]
    try:
        KUBECTL.run(arguments, text, verb="apply --dry-run=server", deadline_s=COMMAND_S + DRY_RUN_S)
    except ProgramFailed as failed:
        return [line.strip() for line in failed.output.splitlines() if line.strip() and "Warning:" not in line]
    return []
