"""A Ray cluster on this machine that ends with the process that asked for it, however that process ends.

Run as a program with one line of JSON (`Keep`) on standard input; it answers with one line (`Kept`) and stays until its
input closes or its parent is gone. Ray's servers die with whoever started them, but their helpers and busy actors stay
for a minute or more. This process adopts what is orphaned below it and ends it all within a fraction of a second.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from ray._private.node import Node
from ray._private.parameter import RayParams

from tidemill.core.records import Record

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 1.0
"""How often the parent is looked for; a closed input is seen at once."""

SYSTEM: dict[str, Any] = {
    # A raylet that is gone refuses the connection and is given up after three tries; one that is slow has its time.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
    # A call whose actor vanished with its node fails without waiting for the verdict on the node.
    "timeout_ms_task_wait_for_death_info": 200,
    # A stopped process is ended, and its place free, this long after it was told to end.
    "kill_worker_timeout_milliseconds": 1000,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


class LocalNode(Record):
    """One Ray node to start."""

    name: str
    cpus: float
    gpus: float
    labels: dict[str, str]
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES of what runs on it


class Keep(Record):
    """What to start; the first node is the head."""

    nodes: tuple[LocalNode, ...]
    object_store_bytes: int  # of each node


class Kept(Record):
    """Where it is, or why it is not."""

    address: str = ""
    error: str = ""
    folder: str = ""  # with all its files: for whoever outlives the keeper to remove


class _Head(Node):  # type: ignore[misc]
    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """No dashboard: nobody looks at it, and it costs a second and 90 MB."""
        self._webui_url = ""


def main() -> int:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep = msgspec.json.decode(sys.stdin.buffer.readline(), type=Keep)
    folder = tempfile.mkdtemp(prefix="tidemill-ray-")
    try:
        # Ray lets everybody into its own folder and those below it; nobody else comes through this one.
        kept = _start(keep, temp_dir=f"{folder}/ray", folder=folder)
        sys.stdout.buffer.write(msgspec.json.encode(kept) + b"\n")
        sys.stdout.buffer.flush()
        while not kept.error and os.getppid() == parent:
            readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
            if readable:
                break
    finally:
        _end_all()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _start(keep: Keep, *, temp_dir: str, folder: str) -> Kept:
    common: dict[str, Any] = {
        "node_ip_address": "127.0.0.1",
        "object_store_memory": keep.object_store_bytes,
        "temp_dir": temp_dir,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "include_log_monitor": False,
    }
    head: Node | None = None
    try:
        for node in keep.nodes:
            own = {"num_cpus": node.cpus, "num_gpus": node.gpus, "labels": node.labels, "node_name": node.name}
            if node.visible_gpus is not None:
                own["env_vars"] = {"CUDA_VISIBLE_DEVICES": node.visible_gpus}
            if head is None:
                params = RayParams(**own, **common, no_monitor=True, include_dashboard=False, _system_config=SYSTEM)
                head = _Head(params, head=True, shutdown_at_exit=False, spawn_reaper=True)
            else:
                joining = {"gcs_address": head.gcs_address, "redis_address": head.redis_address, "node_manager_port": 0}
                params = RayParams(**own, **common, **joining)
                Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)
    except Exception as error:  # noqa: BLE001 - told to the parent, in words
        return Kept(error=f"{type(error).__name__}: {error}")
    assert head is not None
    return Kept(address=head.gcs_address, folder=folder)


def _end_all() -> None:
    """Kill every process below this one. The children of the dead become its own, until there are none."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)  # a zombie at worst: nobody else waits for it
        for child in children:
            os.waitpid(child, 0)


def _children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
