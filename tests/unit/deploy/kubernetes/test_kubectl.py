"""Questions to kubectl, and what its answers mean; a script stands for it (the real one: tests/integration/deploy)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.deploy.conftest import RenderRecipe
from tidemill.core.errors import UserError
from tidemill.deploy.kubernetes.job_state import job_state
from tidemill.deploy.kubernetes.kubectl import KUBECTL, Kubectl, job_of

Answer = Callable[..., Path]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """`answer("text", code=1)`: a kubectl that prints this. Returns the file with its arguments and input."""

    def install(out: str = "", *, code: int = 0, error: str = "") -> Path:
        for name, text in (("out", out), ("error", error)):
            (tmp_path / name).write_text(text)
        program = tmp_path / "bin" / "kubectl"
        program.parent.mkdir(exist_ok=True)
        asked = tmp_path / "asked"
        lines = (
            f'echo "$@" > {asked}',
            f"/bin/cat >> {asked}",
            f"/bin/cat {tmp_path}/out",
            f"/bin/cat {tmp_path}/error >&2",
        )
        program.write_text("\n".join(["#!/bin/sh", *lines, f"exit {code}"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        return asked

    return install


def test_apply_is_server_side_as_tidemill(answer: Answer, rendered: RenderRecipe) -> None:
    asked = answer("configmap/small-recipe serverside-applied\nrayjob.ray.io/small serverside-applied\n")
    result = rendered()
    assert Kubectl(context="far").apply(result) == ["configmap/small-recipe", "rayjob.ray.io/small"]
    first, _, rest = asked.read_text().partition("\n")
    assert first == "--context=far --request-timeout=15s apply --server-side --field-manager=tidemill --filename=-"
    assert rest == result.text


def test_diff_of_a_change_is_no_failure(answer: Answer, rendered: RenderRecipe) -> None:
    answer("-  a: 1\n", code=1)
    assert Kubectl().diff(rendered()) == "-  a: 1\n"
    answer(code=2, error="error: openapi")
    with pytest.raises(UserError, match="openapi"):
        Kubectl().diff(rendered())


@pytest.mark.parametrize(("storage", "claims"), [(False, 0), (True, 1)])
def test_delete_keeps_the_storage(answer: Answer, rendered: RenderRecipe, storage: bool, claims: int) -> None:
    asked = answer("rayjob.ray.io/small\n")
    assert Kubectl().delete(job_of(rendered("--deploy.storage_size=1Gi")), storage=storage) == ["rayjob.ray.io/small"]
    documents = [json.loads(line) for line in asked.read_text().splitlines() if line.startswith("{")]
    kinds = [document["kind"] for document in documents]
    assert kinds[0] == "RayJob"  # its pods end before their ConfigMap is gone
    assert kinds.count("PersistentVolumeClaim") == claims
    assert "--ignore-not-found" in asked.read_text()


MESSAGES = [
    (
        'Error from server (Forbidden): rayjobs.ray.io is forbidden: User "a" cannot list resource "rayjobs"',
        "refuses it to this user",
    ),
    ("error: You must be logged in to the server (Unauthorized)", "does not accept the credentials"),
    ("The connection to the server localhost:8080 was refused - did you specify", "no cluster in kubectl's"),
    ("error: context was not found for specified context: far", "no cluster in kubectl's"),
    ("The connection to the server 10.0.0.1:6443 was refused - did you specify", "does not answer"),
    ("Unable to connect to the server: dial tcp: lookup nowhere: no such host", "does not answer"),
    ('error: the server doesn\'t have a resource type "rayjobs"', "lacks an operator"),
    ('resource mapping not found: no matches for kind "RayJob" in version "ray.io/v1"', "lacks an operator"),
    ('Apply failed with 1 conflict: conflict with "helm": .spec.entrypoint', "another program"),
    (
        (
            'admission webhook "vrayjob.kb.io" spec.rayClusterSpec.enableInTreeAutoscaling: Invalid '
            "value: true: a kueue managed job should not use autoscaling"
        ),
        "Kueue admits no job",
    ),
    ('Error from server (NotFound): namespaces "research" not found', "namespace does not exist"),
    ("error: something else", "something else"),
]


@pytest.mark.parametrize(("message", "meaning"), MESSAGES)
def test_errors_name_the_cause_and_a_way_out(message: str, meaning: str) -> None:
    error = KUBECTL.failure("apply", message)
    assert meaning in error.what and error.where == "kubectl apply" and error.hint


def test_a_missing_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendered: RenderRecipe) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="not installed"):
        Kubectl().apply(rendered())


def test_a_hanging_kubectl_ends(answer: Answer, monkeypatch: pytest.MonkeyPatch, rendered: RenderRecipe) -> None:
    program = answer().parent / "bin" / "kubectl"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr("tidemill.deploy.programs.COMMAND_S", 0.1)
    with pytest.raises(UserError, match=r"did not end within 0\.1 s"):
        Kubectl().apply(rendered())


POD_STATES = [
    ({}, "starts"),
    (
        {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient cpu."}],
        },
        "waits for a machine: 0/3 nodes: Insufficient cpu.",
    ),
    (
        {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
        "cannot pull its image",
    ),
    ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, "runs"),
    (
        {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled"}}}]},
        "ran out of memory: raise deploy.head_memory_gb or deploy.worker_memory_gb",
    ),
    ({"phase": "Failed", "reason": "Terminated"}, "has failed: Terminated"),
]


@pytest.mark.parametrize(("status", "words"), POD_STATES)
def test_states_of_pods(
    monkeypatch: pytest.MonkeyPatch, rendered: RenderRecipe, status: dict[str, object], words: str
) -> None:
    assert _states(monkeypatch, rendered, "pods", {"status": status}) == [words]


JOB_STATES = [
    ({}, "not started: its operator has not seen it"),
    ({"jobDeploymentStatus": "Running"}, "runs"),
    ({"jobDeploymentStatus": "Retrying", "failed": 2}, "lost its cluster; the next one starts (cluster 3 of 21)"),
    ({"jobDeploymentStatus": "Failed", "message": "no head"}, "has failed: no head"),
]


@pytest.mark.parametrize(("status", "words"), JOB_STATES)
def test_states_of_a_job(
    monkeypatch: pytest.MonkeyPatch, rendered: RenderRecipe, status: dict[str, object], words: str
) -> None:
    job = {"spec": {"backoffLimit": 20}, "status": status}
    assert _states(monkeypatch, rendered, "rayjobs.ray.io", job) == [words]


def test_the_state_of_a_cluster(monkeypatch: pytest.MonkeyPatch, rendered: RenderRecipe) -> None:
    cluster = {"spec": {"workerGroupSpecs": [{"replicas": 2, "maxReplicas": 8}]}, "status": {"readyWorkerReplicas": 1}}
    words = "2 of at most 8 workers wanted, 1 ready"
    assert _states(monkeypatch, rendered, "rayclusters.ray.io", cluster) == [words]


def _states(monkeypatch: pytest.MonkeyPatch, rendered: RenderRecipe, kind: str, found: dict[str, object]) -> list[str]:
    """States of a job of which one object is in the cluster."""
    objects = {kind: [{"metadata": {"name": "one"}, **found}]}
    monkeypatch.setattr(Kubectl, "objects", lambda self, job, plural: objects.get(plural, []))
    return [row["state"] for row in job_state(Kubectl(), job_of(rendered()))]
