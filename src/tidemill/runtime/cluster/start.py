"""The nodes of a Ray cluster on this machine, as processes below this one."""

from __future__ import annotations

from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams

from tidemill.runtime.cluster.keeper import Keep, Kept

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
