"""The demo's recipe, with a small model and long completions, as a job in a Kubernetes double."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.doubles.kubernetes import Kubernetes
from tidemill.deploy.documents import Rendered
from tidemill.deploy.render import render

IDLE_S = 5
GRACE_S = 15.0
"""From SIGTERM to SIGKILL of a preemptible pod."""
DEPLOY = f"""\
[deploy]
target = "kubernetes"
image = "registry/tidemill@sha256:0"
idle_s = {IDLE_S}
head_memory_gb = 2
worker_memory_gb = 2
"""
LETTERS = "".join(chr(code) for code in range(0x100, 0x300))
"""A large alphabet: an untrained model rarely stops before the maximum length."""
SMALL = {
    "model.source": "char",
    "model.char.alphabet": f"0123456789+=\n{LETTERS}",
    "model.char.context": 256,
    "task.shots": 0,
    "sampling.max_new_tokens": 200,
    "engine.slots": 8,
    "batch.prompts": 4,
    "batch.group_size": 4,
    "fleet.seed_window_s": 0.2,
    "fleet.heartbeat_timeout_s": 20,
    "trainer.threads": 1,
    "eval.every_steps": 0,
    "checkpoint.every_steps": 5,
    "pool.workers": 1,
}
KEPT, SHUT_DOWN = "shutdownAfterJobFinishes: false", "shutdownAfterJobFinishes: true"


def items(folder: Path, recipe: str = "spot-trace", **changes: object) -> list[str]:
    """The command line of a recipe, the demo's with the settings above; `__` in names of `changes` stands for a dot."""
    (folder / "deploy.toml").write_text(DEPLOY, encoding="utf-8")
    settings = (SMALL if recipe == "spot-trace" else {}) | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    return [f"@{recipe}", f"@{folder / 'deploy.toml'}", *(f"--{key}={value}" for key, value in settings.items())]


def kept_cluster(rendered: Rendered) -> Rendered:
    """The same job, whose cluster stays after its end."""
    return Rendered(files={name: text.replace(SHUT_DOWN, KEPT) for name, text in rendered.files.items()})


@contextmanager
def kubernetes(folder: Path) -> Iterator[Kubernetes]:
    """A cluster that the kubectl in PATH reaches."""
    before = os.environ["PATH"]
    with Kubernetes(folder) as cluster:
        os.environ["PATH"] = f"{cluster.bin}{os.pathsep}{before}"
        try:
            yield cluster
        finally:
            os.environ["PATH"] = before


class ClusterRun:
    """The run of a job: its events, those of the cluster, and the figures that follow from both."""

    def __init__(self, cluster: Kubernetes, name: str = "spot-trace") -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "runs" / name

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n") and f'"event":"{name}"' in line]
        for each in found:
            each["unix_s"] = datetime.fromisoformat(each["time"]).timestamp()
        return [each for each in found if all(each.get(key) == value for key, value in fields.items())]

    def wait(self, name: str, number: int, deadline_s: float) -> dict[str, Any]:
        """The event of a number, counted from 0, of those with a name."""
        what = f"event {number} {name} of the run"
        return self.cluster.wait(lambda: self.events(name)[number:], what, deadline_s)[0]

    def through_a_reclaimed_pod(self, *, start_s: float, end_s: float) -> dict[str, Any]:
        """Reclaim the first worker's pod; returns the figures once the job has ended and the workers are gone."""
        self.wait("join", 0, start_s)
        requested_s = self.events("publish")[0]["unix_s"]  # just before the pool requests its workers
        sigterm_s = self.reclaim(self.worker_pods()[0])
        notice = self.wait("notice", 0, GRACE_S)
        eviction = self.wait("eviction", 0, 2 * GRACE_S)
        ended_s = self.cluster.wait(lambda: self.cluster.events("succeeded"), "the job's end", end_s)[0]["unix_s"]
        idle_s = self.cluster.wait(lambda: self.replica_patches(0), "replicas 0", IDLE_S + end_s)[-1]
        return {
            "patch_s": self.replica_patches(1)[0] - requested_s,
            "notice_s": notice["unix_s"] - sigterm_s,
            "notice_grace_s": notice["grace_s"],
            "noticed": eviction["noticed"],
            "tokens_lost": eviction["tokens_lost"],
            "pod_ended": self.cluster.events("end")[0]["how"],
            "replicas_0_after_idle_s": idle_s - ended_s - IDLE_S,
        }

    def worker_pods(self) -> list[str]:
        """Names of the preemptible pods that run, in the order in which they started."""
        ended = {event["pod"] for event in self.cluster.events() if event["event"] in ("end", "sigterm")}
        return [
            each["name"]
            for each in self.cluster.events("pod")
            if "-spot-" in each["name"] and each["name"] not in ended
        ]

    def reclaim(self, pod: str) -> float:
        """Take a pod away as a spot node does: SIGTERM, then SIGKILL after the grace period. Returns the time."""
        before = len(self.cluster.events("sigterm"))
        self.cluster.kubectl("delete", "pod", pod, "--wait=false")
        signalled = self.cluster.wait(lambda: self.cluster.events("sigterm")[before:], "SIGTERM", 10.0)
        return float(signalled[0]["unix_s"])

    def replica_patches(self, replicas: int) -> list[float]:
        """Times at which the autoscaler asked for a number of preemptible pods."""
        patches = self.cluster.events("patch")
        return [each["unix_s"] for each in patches if each["path"].endswith("/replicas") and each["value"] == replicas]


def document(folder: Path, recipe: str = "spot-trace", **changes: object) -> Rendered:
    return render(items(folder, recipe, **changes))
