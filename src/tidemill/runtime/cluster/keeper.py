"""A Ray cluster on this machine that ends with the process that started it, however that process ends.

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
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from ray._private.node import Node
from ray._private.parameter import RayParams

from tidemill.core.records import Record

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 1.0
"""How often the parent is looked for; a closed input is seen at once."""


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


def main() -> int:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep = msgspec.json.decode(sys.stdin.buffer.readline(), type=Keep)
    folder = tempfile.mkdtemp(prefix="tidemill-ray-")
    watching = threading.Thread(target=_end_with, args=(parent, folder), daemon=True)
    watching.start()  # before anything else: whoever asked may be gone before the cluster is up
    try:
        # Ray lets everybody into its own folder and those below it; nobody else comes through this one.
        kept = start(keep, temp_dir=f"{folder}/ray", folder=folder)
        sys.stdout.buffer.write(msgspec.json.encode(kept) + b"\n")
        sys.stdout.buffer.flush()
        if not kept.error:
            watching.join()
    finally:
        _end_all()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end_with(parent: int, folder: str) -> None:
    """End it all once the input closes or the parent is gone, whatever the main thread is doing."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if readable:
            break
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _end_all() -> None:
    """Kill every process below this one. The children of the dead become its own, until there are none."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):  # the main thread, in the middle of a start, may have waited for it
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended; its children are another's now
            found += map(int, (task / "children").read_text().split())
    return found


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


class _Head(Node):  # type: ignore[misc]
    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """No dashboard: nobody looks at it, and it costs a second and 90 MB."""
        self._webui_url = ""


def start(keep: Keep, *, temp_dir: str, folder: str) -> Kept:
    """Start every node; what runs already when one fails is the caller's to end."""
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


if __name__ == "__main__":
    sys.exit(main())
