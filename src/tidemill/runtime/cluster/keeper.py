"""Program that holds a Ray cluster on this machine and ends it with the process that started it, even after kill -9.

It reads one line of JSON (`LocalClusterPlan`) from standard input, answers with one line (`StartReport`), and runs
until its input closes or its parent dies. Ray's own servers exit with the process that started them, but their helpers
and busy actors remain for a minute or more. The keeper is the subreaper of all these processes, and kills them within a
fraction of a second.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import tempfile
import threading
from typing import Any

import msgspec

from tidemill.core import ipc
from tidemill.core.records import Record

PARENT_CHECK_S = 1.0
"""Interval of the checks for the parent; a closed input is noticed at once."""


class LocalNode(Record):
    """One Ray node to start."""

    name: str
    cpus: float
    gpus: float
    labels: dict[str, str]
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES of its processes


class LocalClusterPlan(Record):
    """The cluster to start; the first node is the head."""

    nodes: tuple[LocalNode, ...]
    object_store_bytes: int  # of each node


class StartReport(Record):
    """The started cluster, or the error."""

    address: str = ""
    error: str = ""
    folder: str = ""  # holds all its files; to be removed if the keeper is killed


def main() -> int:
    parent = os.getppid()
    ipc.adopt_descendants()
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=LocalClusterPlan)
    folder = tempfile.mkdtemp(prefix="tidemill-ray-")
    watching = threading.Thread(target=_end_with, args=(parent, folder), daemon=True)
    watching.start()  # first, because the parent may die before the cluster is up
    try:
        # Ray makes its own folder accessible to all users; this one is not.
        report = start(plan, temp_dir=f"{folder}/ray", folder=folder)
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
        if not report.error:
            watching.join()
    finally:
        ipc.kill_children()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end_with(parent: int, folder: str) -> None:
    """End the cluster and this process once the input closes or the parent dies, whatever the main thread does."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], PARENT_CHECK_S)
        if readable:
            break
    ipc.kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def start(plan: LocalClusterPlan, *, temp_dir: str, folder: str) -> StartReport:
    """Start all nodes. If one fails, the caller ends those that already run."""
    from tidemill.runtime.cluster.ray_internals import start_head, start_node  # slow to import: only once watched

    common: dict[str, Any] = {
        "node_ip_address": "127.0.0.1",
        "object_store_memory": plan.object_store_bytes,
        "temp_dir": temp_dir,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "include_log_monitor": False,
    }
    head = None
    try:
        for node in plan.nodes:
            own = {"num_cpus": node.cpus, "num_gpus": node.gpus, "labels": node.labels, "node_name": node.name}
            if node.visible_gpus is not None:
                own["env_vars"] = {"CUDA_VISIBLE_DEVICES": node.visible_gpus}
            if head is None:
                head = start_head(**own, **common)
            else:
                start_node(head.gcs_address, **own, **common)
    except Exception as error:  # noqa: BLE001 - reported to the parent
        return StartReport(error=f"{type(error).__name__}: {error}")
    assert head is not None
    return StartReport(address=head.gcs_address, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
