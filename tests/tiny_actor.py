"""An actor with the place of a process of a run, and none of its work. Its module imports little: many are started."""

from __future__ import annotations

import ray

from tidemill.runtime.cluster.wire import AsyncActor, served


class TinyActor(AsyncActor):
    @served
    async def place(self) -> str:
        """The id of its node."""
        return str(ray.get_runtime_context().get_node_id())
