"""Ray's private names, all of them, each with the reason why no public one serves."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

import ray._private.utils
import ray._private.worker
from ray._private import ray_constants, state
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from tidemill.core import ipc

HOOK = f"{__name__}.set_up_process"
"""Passed to Ray as its `worker_process_setup_hook`."""

DRAIN_TIMEOUT_S = 5

_pipes: list[tuple[int, int]] = []

# Failures on a local cluster must be noticed within seconds. Only a head started through `Node` takes these settings.
SYSTEM_CONFIG: dict[str, Any] = {
    # A raylet that died refuses connections and is declared dead after three tries; a slow one gets more time.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
    # A call to an actor whose node died fails without waiting until the node is declared dead.
    "timeout_ms_task_wait_for_death_info": 200,
    # A stopped (SIGSTOP) process is killed, and its resources freed, this long after its exit was requested.
    "kill_worker_timeout_milliseconds": 1000,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


class _HeadNode(Node):  # type: ignore[misc]
    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """No dashboard: it costs a second and 90 MB."""
        self._webui_url = ""


def start_head(**parameters: Any) -> Node:
    """Start the servers of a head node. `ray start` takes longer, and its servers outlive the process that ran it."""
    params = RayParams(**parameters, no_monitor=True, include_dashboard=False, _system_config=SYSTEM_CONFIG)
    return _HeadNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True)


def start_node(address: str, **parameters: Any) -> Node:
    """Start a further node of the cluster at an address. `ray start` leaves its node's id unknown."""
    params = RayParams(**parameters, gcs_address=address, redis_address=address, node_manager_port=0)
    return Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)


def drain(node: Node, reason: str, grace_s: float) -> bool:
    """Give a node notice that it will be taken away. Only the autoscaler and `ray start --block` do that by themselves.

    Returns whether the cluster accepts it.
    """
    end_ms = int((time.time() + grace_s) * 1000)
    preempted = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    client = GcsClient(address=node.gcs_address)
    accepted, _ = client.drain_node(node.node_id, preempted, reason, end_ms, timeout=DRAIN_TIMEOUT_S)
    return bool(accepted)


def reset_driver(*, allow_remote_address: bool) -> None:
    """Prepare this process for `ray.init` on a cluster other than its previous one.

    Ray reads these settings from the environment only once, at import or at the first connection, and offers no way to
    read them again.
    """
    ray_constants.ENABLE_RAY_CLUSTER = allow_remote_address
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    # Ray prints messages of its servers to standard output, which holds the command's result; no option stops that.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


def free_resources() -> dict[str, dict[str, float]]:
    """Free resources by node id. The public `ray.available_resources` gives only their sum; the state API needs the
    dashboard."""
    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def drain_deadlines() -> dict[str, float]:
    """Unix time at which each draining node ends, by node id. `ray.nodes` does not show draining."""
    draining = state.state.get_draining_nodes()
    # 0 means that no deadline was given.
    return {node_id: end_ms / 1000 if end_ms else time.time() for node_id, end_ms in draining.items()}


def set_up_process() -> None:
    """Runs in the main thread of every new worker process; only the main thread may set signal handlers."""
    if sys.platform == "linux":  # the parent is the node's raylet; without this the process may outlive it by minutes
        ipc.die_with_parent(signal.SIGKILL)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGTERM, _ignore_signal)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _pipes.append((reading, writing))
    # After this hook Ray would install a SIGTERM handler that ends the process at once; no option prevents that.
    ray._private.utils.set_sigterm_handler = lambda handler: None


SIGTERM_GRACE_S = 5.0
"""Time between SIGTERM and Ray's own SIGKILL."""


def signal_fd() -> int:
    """A file descriptor from which each received signal can be read as one byte, its number."""
    assert _pipes, f"{HOOK} has not run in this process"
    return _pipes[0][0]


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The worker uses its grace period instead; see `signal_fd`."""
