"""Rendered recipes under a real Slurm: jobs that are preempted, requeued and stopped by their time limit."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_runs import SMALL
from tests.doubles.slurm import GRACE_S, Slurm, unavailable
from tidemill.cli.app import main
from tidemill.deploy.render import render
from tidemill.deploy.slurm.batch import ROLLOUTS
from tidemill.deploy.slurm.job_state import LIVE
from tidemill.deploy.slurm.queue import SlurmQueue

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
        self.wait(lambda: self.slurm.state(job) not in LIVE, "the end", deadline_s)
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


def test_weights_are_those_of_an_undisturbed_run_after_a_preemption(slurm: Slurm) -> None:
    job = Job(slurm, "char-addition", {**LEARNING, "trainer.steps": 10})
    job.deploy("apply")
    reserved = job.id()
    job.wait(lambda: job.steps() >= 3, "step 3", START_S)
    slurm.preempt(reserved, for_s=1)
    job.wait_for_requeue(reserved)
    digest = job.undisturbed_digest()  # while the job waits
    summary = job.wait_for_end()
    assert (summary["sessions"], summary["weights_digest"]) == (2, digest)
    assert "training writes a checkpoint" in job.log()


@pytest.mark.slow
def test_weights_are_those_of_an_undisturbed_run_after_worker_and_trainer_were_preempted(slurm: Slurm) -> None:
    job = Job(slurm, "char-addition", {**LEARNING, "trainer.steps": 32})
    job.deploy("apply", "--deploy.spot_max=1")
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


PLAIN_WORKER = """\
srun sh -c 'until grep -q "[0-9]:[0-9]" head.json; do sleep 1; done
  field() {{ sed "s/.*\\"$1\\":\\"\\([^\\"]*\\)\\".*/\\1/" head.json; }}
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(field token) RAY_USAGE_STATS_ENABLED=0
  exec {ray} start --block --address=$(field address) --num-cpus=1 --labels=ray.io/market-type=spot'
"""


@pytest.mark.slow
def test_a_worker_without_the_launcher_is_lost_without_notice(slurm: Slurm) -> None:
    """Slurm's SIGTERM ends the raylet: the control of the test above."""
    job = Job(slurm, "char-addition", {**LEARNING, "trainer.steps": 200})
    made = render([*job.items, "--deploy.spot_max=1"])
    script = made.files[ROLLOUTS]
    line = next(line for line in script.splitlines() if line.startswith("srun "))
    plain = script.replace(line, PLAIN_WORKER.format(ray=Path(sys.executable).parent / "ray"))
    queue = SlurmQueue()
    queue.apply(dataclasses.replace(made, files=made.files | {ROLLOUTS: plain}))
    job.wait(lambda: job.events("join"), "the worker", START_S)
    slurm.preempt(job.id("-rollouts"), for_s=1)
    job.wait(lambda: job.events("eviction"), "the loss of the worker", END_S)
    assert not job.events("notice") and not job.events("eviction")[0]["noticed"]
    queue.delete(made, storage=True)
    assert not job.left_processes() and not (job.runs / job.name).exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute, of which half a minute trains, until all steps are done
def test_a_run_with_two_reserved_machines_continues_after_its_time_limit(slurm: Slurm) -> None:
    # Slurm looks every 30 s, and signals up to that much earlier.
    options = ["--time=1", "--signal=TERM@1", "--nodes=2"]
    job = Job(slurm, "char-addition", {**LEARNING, "trainer.steps": 150}, options=options)
    job.deploy("apply")
    reserved = job.id()
    job.wait(lambda: slurm.restarts(reserved), "the time limit", END_S)
    assert "training writes a checkpoint" in job.log() and "joined the cluster" in job.log()
    digest = job.undisturbed_digest()
    summary = job.wait_for_end(6 * END_S)
    assert summary["sessions"] >= 2 and summary["weights_digest"] == digest


@pytest.mark.slow
def test_the_demo_runs_to_its_end_through_a_preempted_worker_and_a_requeued_trainer(
    slurm: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(slurm, "spot-trace", {**SMALL, "trainer.steps": 30})
    job.deploy("apply")
    job.wait(lambda: job.events("join"), "the worker", START_S)
    worker, reserved = job.id("-rollouts"), job.id()
    slurm.preempt(worker, for_s=1)
    job.wait(lambda: job.events("eviction"), "the eviction", 2 * GRACE_S)
    assert job.events("notice")[0]["grace_s"] >= LEAST_NOTICE_S
    assert job.events("eviction")[0]["noticed"] and not job.events("eviction")[0]["tokens_lost"]
    slurm.preempt(reserved, for_s=1)
    job.wait_for_requeue(reserved)
    summary = job.wait_for_end(2 * END_S)
    assert (summary["outcome"], summary["steps"], summary["sessions"]) == ("finished", 30, 2)
    capfd.readouterr()
    job.deploy("status")
    states = capfd.readouterr().out.splitlines()
    assert len(states) == 2 and all("has ended" in state and state.endswith("start 2") for state in states)
    job.deploy("logs")
    assert "step 30/30" in capfd.readouterr().out
    job.deploy("delete", "--storage")
    assert list(job.runs.iterdir()) == [job.runs / "deploy"]


def test_a_folder_that_nodes_do_not_share_shows_in_the_state(
    slurm: Slurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(slurm, "char-addition", {}, runs=str(tmp_path / "elsewhere"))
    job.deploy("apply")
    reserved = job.id()
    job.wait(lambda: slurm.state(reserved) == "FAILED", "the failure", START_S)
    capfd.readouterr()
    job.deploy("status")
    assert "could not open the log; do all nodes share deploy.slurm.runs?" in capfd.readouterr().out


def test_a_queued_job_is_left_and_a_dry_run_shows_refusals(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    slurm.submit("sleep 100", "--partition=high", "--nodes=2", "--exclusive")
    job = Job(slurm, "char-addition", {"deploy.spot_max": 2})
    for _ in range(2):
        job.deploy("apply")
    slurm.wait(lambda: "Dependency" in slurm.run("squeue", "--format=%r"), "Slurm's reason", START_S)
    job.deploy("status")
    lines = capfd.readouterr().out.splitlines()
    applied, rows = lines[:4], lines[4:]
    assert applied[:2] == ["char-addition is submitted as job 2", "char-addition-rollouts is submitted as job 3"]
    assert applied[2].startswith("char-addition is left as job 2, which waits in the queue")
    assert applied[3].startswith("char-addition-rollouts is left as job 3")
    assert len(rows) == 2 and "waits in the queue for the reserved job to start" in rows[1]
    job.deploy("diff")
    assert capfd.readouterr().out == "no changes\n"
    job.deploy("diff", "--trainer.steps=7")
    assert "+steps = 7" in capfd.readouterr().out
    job.deploy("check", "--server", "--deploy.slurm.preemptible=none", code=1)
    assert "rollouts.sbatch: sbatch: there is no such partition" in capfd.readouterr().out
    job.deploy("delete")
    assert "waits" not in slurm.run("squeue")
