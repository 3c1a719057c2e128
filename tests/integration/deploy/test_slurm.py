"""Rendered recipes under a real Slurm: jobs that are preempted, requeued and stopped by their time limit."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_runs import SMALL
from tests.doubles.slurm import GRACE_S, Slurm, unavailable
from tidemill.cli.app import main
from tidemill.core.errors import UserError

START_S, END_S = 90.0, 120.0
LEAST_NOTICE_S = 10.0
REQUEUE_S = 30.0
DAEMONS = ("slurmctld", "slurmd", "slurmscriptd")
# Its groups have a signal from the first steps on, so that equal weights mean equal updates.
LEARNING = {
    "trainer.threads": 1,
    "engine.batch_invariant": "true",
    "eval.every_steps": 0,
    "checkpoint.every_steps": 5,
    "fleet.seed_window_s": 0.2,
}

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    with Slurm(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("PATH", f"{cluster.bin}{os.pathsep}{os.environ['PATH']}")
        yield cluster


class Job:
    """A recipe as a job, with its runs in a folder of the cluster whose name has a space."""

    def __init__(self, slurm: Slurm, recipe: str, settings: dict[str, object], **keys: object) -> None:
        self.slurm, self.name = slurm, recipe
        self.runs = slurm.folder / "my runs"
        places = {"runs": str(self.runs), "reserved": "spot", "preemptible": "spot", **keys}
        lines = [f"{key} = {json.dumps(value)}" for key, value in places.items()]
        deploy = slurm.folder / "deploy.toml"
        head = '[deploy]\ntarget = "slurm"\nhead_memory_gb = 2\nworker_memory_gb = 2\n[deploy.slurm]\n'
        deploy.write_text(head + "\n".join(lines), encoding="utf-8")
        self.recipe = [f"@{recipe}", *(f"--{key}={value}" for key, value in settings.items())]
        self.items = [*self.recipe, f"@{deploy}"]

    def deploy(self, verb: str, *options: str, code: int = 0) -> None:
        assert main(["deploy", verb, *self.items, *options]) == code

    def id(self, name: str = "") -> str:
        command = ["--noheader", "--states=all", "--format=%A", f"--name={self.name}{name}"]
        return self.slurm.run("squeue", *command).split()[0]

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.runs / self.name / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n") and f'"event":"{name}"' in line]

    def leases(self) -> list[dict[str, Any]]:
        """Those of preemptible machines."""
        return [event for event in self.events("lease") if event["kind"] == "preemptible"]

    def steps(self) -> int:
        path = self.runs / self.name / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def log(self, name: str = "log") -> str:
        path = self.runs / "deploy" / self.name / name
        return path.read_text() if path.exists() else ""

    def wait(self, result: Callable[[], object], what: str, deadline_s: float) -> None:
        self.slurm.wait(result, what, deadline_s)

    def wait_for_requeue(self, job: str) -> None:
        self.wait(lambda: self.slurm.restarts(job) == 1, f"the requeue of job {job}", GRACE_S + REQUEUE_S)

    def wait_for_end(self, deadline_s: float = END_S) -> dict[str, Any]:
        """The run's summary."""
        job = self.id()
        self.wait(lambda: self.slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), "the end", deadline_s)
        assert self.slurm.state(job) == "COMPLETED", self.slurm.logs()
        self.wait(lambda: not self.left_processes(), "the end of all processes", REQUEUE_S)
        summary: dict[str, Any] = json.loads((self.runs / self.name / "summary.json").read_text())
        return summary

    def left_processes(self) -> list[str]:
        return [line for line in self.slurm.processes().values() if not any(name in line for name in DAEMONS)]

    def undisturbed_digest(self) -> str:
        """Digest of the weights of the same recipe, trained here without interruptions."""
        directory = self.slurm.folder / "undisturbed"
        assert main(["train", *self.recipe, f"--run.dir={directory}"]) == 0
        return str(json.loads((directory / "summary.json").read_text())["weights_digest"])


def test_weights_are_those_of_an_undisturbed_run_after_worker_and_trainer_were_preempted(slurm: Slurm) -> None:
    job = Job(
        slurm,
        "char-addition",
        {**LEARNING, "trainer.steps": 32},
    )
    job.items.append("--deploy.spot_max=1")
    job.deploy("apply")
    job.wait(lambda: job.events("join"), "the worker", START_S)
    worker, reserved = job.id("-rollouts"), job.id()
    slurm.preempt(worker, for_s=1)
    job.wait(lambda: job.events("notice"), "the notice", GRACE_S)
    assert LEAST_NOTICE_S <= job.events("notice")[0]["grace_s"] <= GRACE_S
    slurm.preempt(reserved, for_s=1)
    job.wait_for_requeue(reserved)
    digest = job.undisturbed_digest()  # while the jobs wait
    job.wait_for_requeue(worker)
    summary = job.wait_for_end()
    assert (summary["sessions"], summary["weights_digest"]) == (2, digest)
    assert [lease["session"] for lease in job.leases()] == [1, 2]  # the worker is back
    assert "training writes a checkpoint" in job.log() and "the run has notice" in job.log("log-rollouts-0")
