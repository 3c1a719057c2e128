"""A run under Ray's autoscaler, with kubectl, in a Kubernetes double: delays, lost tokens, resumed runs. Root only.

    python -m benchmarks.cluster [--only PART] [--kills 20] [--controls 5]

- provider: CPU seconds to grant a lease on each of 1,000 and 10,000 nodes that join a cluster at once.
- autoscaler: a run through one reclaimed pod, and `tidemill deploy diff`.
- kills: pods get SIGTERM while they decode thousands of tokens a sample, and SIGKILL 15 s later; the tokens of these
  samples that other workers must decode again. Control: the same pods with Ray's own drain time of 30 s.
- resume: SIGKILL of the head pod, of the trainer and of the driver. The next cluster resumes, and the final weights are
  those of a run without a kill; `tidemill deploy logs`, started before, prints until the end.

Each pod is a network namespace of this machine (`tests/doubles/kubernetes`): what differs from a real cluster is the
time to get a machine and an image.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.measuring import exit_code, print_records, write_part
from benchmarks.origin import parsed
from tests.cluster_runs import KEPT, SHUT_DOWN, ClusterRun, document, items, kept_cluster, kubernetes
from tests.doubles.kubernetes import unavailable
from tidemill.config.pool import RayPool
from tidemill.config.processes import worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import LoopClock
from tidemill.deploy.documents import Rendered
from tidemill.deploy.kubernetes.kubectl import Kubectl
from tidemill.runtime.cluster.connection import NodeView, NodeWatch
from tidemill.runtime.cluster.ray_backend import RayProvider

PATCH_AIM_S, NOTICE_AIM_S, SCALE_DOWN_AIM_S = 3.0, 1.0, 15.0
NODES_AIM_CPU_S = {1_000: 0.5, 10_000: 5.0}
START_S, GRACE_S, RUN_S = 120.0, 15.0, 300.0
LOGS_S = 30.0
"""From the end of all pods to that of `tidemill deploy logs`."""
DECODING_S = 6.0
"""From the join of a worker, which then gets the samples that wait, to SIGTERM of its pod."""
LONG: dict[str, Any] = {
    "trainer__steps": 100_000,
    "model__char__alphabet": "0123456789+=\n" + "".join(chr(code) for code in range(0x4E00, 0x6E00)),
    "model__char__context": 4000,
    "sampling__max_new_tokens": 3900,
    "batch__microbatch_tokens": 4096,
}
"""Samples that take longer than the grace period: an untrained model hardly ever draws the end of a line."""
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
DRAIN_S, RAY_DRAIN_S = "13", "30"
RESUME: dict[str, Any] = {
    "recipe": "ray-local",  # learns something, and is batch-invariant
    "trainer__steps": 12,
    "checkpoint__every_steps": 3,
    "eval__every_steps": 0,
    "batch__prompts": 8,
    "batch__group_size": 8,
    "pool__workers": 1,
    "fleet__heartbeat_timeout_s": 20,
}
KILL_AT_STEP = 5
ROLES = {"trainer": r"ray::TrainerActor", "driver": r"\S*python\S* \S*/tidemill train"}
"""How the command line of a process begins."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("provider", "autoscaler", "kills", "resume"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--controls", type=int, default=5)
    options = parsed(parser)
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "provider": lambda _: {"rows": [granted(nodes) for nodes in NODES_AIM_CPU_S]},
        "autoscaler": autoscaler,
        "kills": lambda folder: kills(folder, options.kills, options.controls),
        "resume": resume,
    }
    missed = 0
    for name, measure in parts.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="tidemill-cluster-") as folder:
                if name != "provider" and (why := unavailable(Path(tempfile.mkdtemp(dir=folder)))):
                    raise SystemExit(f"cannot run here: {why}")
                figures = measure(Path(folder))
            print_records(name, figures.get("rows", [figures]))
            write_part("cluster", name, figures, parts=tuple(parts))
            missed |= exit_code(figures)
    return missed


class Nodes:
    """As many spot nodes of one CPU, all there at once."""

    lost = None

    def __init__(self, count: int) -> None:
        labels, free = {"ray.io/market-type": "spot"}, {"CPU": 1.0}
        names = [f"node-{number}" for number in range(count)]
        self.nodes = {name: NodeView(node_id=name, name=name, labels=labels, free=free) for name in names}

    def fitting(self, selector: Mapping[str, str]) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.fits(selector)]

    def name(self, node_id: str) -> str:
        return node_id

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(0)


def granted(nodes: int) -> dict[str, Any]:
    async def measured() -> dict[str, Any]:
        watch = cast("NodeWatch", Nodes(nodes))
        pool = RayPool(kind="ray", max_workers=nodes)
        provider = RayProvider(pool, worker_process(RunSpec()), watch, clock=LoopClock(), session=1)
        start_s = time.process_time()
        leases = 0
        while await provider.next_event(0.0) is not None:
            leases += 1
        cpu_s = time.process_time() - start_s
        reached = leases == nodes and cpu_s <= NODES_AIM_CPU_S[nodes]
        return {"nodes": nodes, "leases": leases, "cpu_s": cpu_s, "reached": reached}

    return asyncio.run(measured())


def autoscaler(folder: Path) -> dict[str, Any]:
    rendered = document(folder, trainer__steps=30)
    kubectl = Kubectl()
    with kubernetes(folder / "cluster") as cluster:
        kubectl.apply(kept_cluster(rendered))
        diff_after_apply = kubectl.diff(kept_cluster(rendered))
        run = ClusterRun(cluster)
        figures = run.through_a_reclaimed_pod(start_s=START_S, end_s=RUN_S)
        diff = [line for line in kubectl.diff(rendered).splitlines() if line.startswith(("-  ", "+  "))]
    diff_is_exact = not diff_after_apply and diff == [f"-  {KEPT}", f"+  {SHUT_DOWN}"]
    return {
        **figures,
        "reached": {
            "patch": figures["patch_s"] <= PATCH_AIM_S,
            "notice": figures["notice_s"] <= NOTICE_AIM_S,
            "scale_down": figures["replicas_0_after_idle_s"] <= SCALE_DOWN_AIM_S,
            "diff": diff_is_exact,
        },
    }


def kills(folder: Path, count: int, controls: int) -> dict[str, Any]:
    ours = killed(folder / "ours", count, DRAIN_S)
    control = killed(folder / "control", controls, RAY_DRAIN_S)
    without_loss = sum(row["tokens_lost"] == 0 for row in ours)
    return {
        "rows": [*ours, *control],
        "kills": len(ours),
        "without_loss": without_loss,
        "notice_s_median": statistics.median(row["notice_s"] for row in ours),
        "control_kills": len(control),
        "control_tokens_lost": sum(row["tokens_lost"] for row in control),
        "reached": without_loss == len(ours) and any(row["tokens_lost"] for row in control),
    }


def killed(folder: Path, count: int, drain_s: str) -> list[dict[str, Any]]:
    """One run, whose only worker is killed again and again."""
    folder.mkdir()
    rendered = with_drain(document(folder, **LONG), drain_s)
    rows = []
    with kubernetes(folder / "cluster") as cluster:
        Kubectl().apply(rendered)
        run = ClusterRun(cluster)
        for number in range(count):
            run.wait("join", number, START_S)
            time.sleep(DECODING_S)
            pod = run.worker_pods()[-1]
            sigterm_s = run.reclaim(pod)
            notice = run.wait("notice", number, GRACE_S)
            eviction = run.wait("eviction", number, 2 * GRACE_S)
            ended = cluster.wait(partial(ends, run, pod), f"the end of {pod}", GRACE_S)
            drains = run.events("drain")
            rows.append(
                {
                    "drain_s": float(drain_s),
                    "notice_s": notice["unix_s"] - sigterm_s,
                    "eviction_s": eviction["unix_s"] - sigterm_s,
                    "ended": ended[0]["how"],
                    "ended_s": ended[0]["after_s"],
                    "tokens_decoded": run.wait("lease_end", number, GRACE_S)["tokens"],
                    "samples_handed_back": sum(each["samples"] for each in drains if each["lease"] == notice["lease"]),
                    "samples_killed": eviction["samples"],
                    "tokens_lost": eviction["tokens_lost"],
                }
            )
            print(rows[-1], flush=True)
    return rows


def ends(run: ClusterRun, pod: str) -> list[dict[str, Any]]:
    return [each for each in run.cluster.events("end") if each["pod"] == pod]


def with_drain(rendered: Rendered, drain_s: str) -> Rendered:
    variable = re.compile(rf"(- name: {DRAIN}\n +value: )\S+")
    if len(variable.findall(rendered.text)) != 1:
        raise RuntimeError(f"the documents have no {DRAIN}")
    files = {name: variable.sub(rf"\g<1>'{drain_s}'", text) for name, text in rendered.files.items()}
    return Rendered(files=files)


def resume(folder: Path, roles: Sequence[str] = ("head", *ROLES)) -> dict[str, Any]:
    rows = [interrupted(folder / role, role) for role in ("none", *roles)]
    digests = {row["digest"] for row in rows}
    return {
        "rows": rows,
        "same_weights_reached": len(digests) == 1,
        "resumed_reached": all(row["sessions"] == 2 for row in rows[1:]),
        "log_followed_reached": all(row["log_followed"] for row in rows),
        "no_orphan_reached": not any(row["left"] for row in rows),
    }


def interrupted(folder: Path, role: str) -> dict[str, Any]:
    folder.mkdir()
    with kubernetes(folder / "cluster") as cluster:
        kubectl, rendered = Kubectl(), document(folder, **RESUME)
        kubectl.apply(rendered)
        run = ClusterRun(cluster, RESUME["recipe"])
        followed = folder / "followed.log"
        command = [sys.executable, "-m", "tidemill", "deploy", "logs", *items(folder, **RESUME)]
        with followed.open("wb") as log:
            logs = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if role != "none":
            run.wait("publish", KILL_AT_STEP, START_S)
            if role == "head":
                name = cluster.events("pod")[0]["name"]
                cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
            else:
                os.kill(
                    next(pid for pid, line in cluster.processes().items() if re.match(ROLES[role], line)),
                    signal.SIGKILL,
                )
        cluster.wait(lambda: cluster.events("succeeded"), "the job's end", RUN_S)
        publishes = run.events("publish")
        clusters = len(cluster.events("entrypoint"))
        cluster.wait(lambda: not cluster.kubectl("get", "pods", "-o", "name"), "the end of all pods", 150.0)
        code = logs.wait(LOGS_S)
        left = [line for line in cluster.processes().values() if "ray" in line]
    last_step = f"step {RESUME['trainer__steps']}/{RESUME['trainer__steps']}"
    row = {
        "killed": role,
        "clusters": clusters,
        "sessions": len(run.events("session_start")),
        "version": publishes[-1]["version"],
        "digest": publishes[-1]["digest"],
        "log_followed": code == 0 and last_step in followed.read_text(),
        "left": left,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
