"""Processes on the reserved side: each an actor in a placement group of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidemill.core.errors import UserError
from tidemill.runtime.cluster.blocking import blocking, let_go

PLACE_S = 60.0


@asynccontextmanager
async def placed(
    actor: type, *, cpus: float, gpus: float, selector: Mapping[str, str], who: str, keys: tuple[str, str]
) -> AsyncIterator[Any]:
    """The handle of a new actor; it and its place end with the block.

    Args:
        selector: labels of the nodes it may be on.
        who: its role, in words.
        keys: where its CPUs and its GPUs are configured.

    Raises:
        UserError: no node has the room.
    """
    need = {"CPU": cpus, "GPU": gpus}
    bundle = {kind: amount for kind, amount in need.items() if amount} or {"CPU": 0.001}
    group = placement_group([bundle], strategy="PACK", bundle_label_selector=[dict(selector)])
    try:
        found = await blocking(lambda: group.wait(PLACE_S), awaited=f"a place for the {who}", timeout_s=PLACE_S + 10)
        if not found:
            wanted = " and ".join(f"{amount:g} free {kind}" for kind, amount in bundle.items())
            labels = " and ".join(f"{key}={value}" for key, value in selector.items()) or "any label"
            raise UserError(
                f"no node with label {labels} has {wanted} for the {who}",
                where=keys[0].partition(".")[0],
                cure=f"lower {' or '.join(keys)}, change ray.reserved_selector, or add a node",
            )
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        handle = ray.remote(actor).options(scheduling_strategy=where, max_task_retries=0, **options).remote()
        try:
            yield handle
        finally:
            await let_go(lambda: ray.kill(handle, no_restart=True), awaited=f"the {who}'s end")
    finally:
        await let_go(lambda: remove_placement_group(group), awaited=f"the end of the {who}'s place")
