"""Weights of which only the size matters: a publisher and what workers pull."""

from __future__ import annotations

import asyncio

from tidemill.core.clock import Clock
from tidemill.core.records import PolicyVersion, Pulled, WeightManifest
from tidemill.sim.costs import WeightCosts


def _manifest(version: PolicyVersion, costs: WeightCosts) -> WeightManifest:
    return WeightManifest(version=version, digest=version.digest, nbytes=costs.nbytes, tensors=())


class SimulatedPublisher:
    """Implements `core.protocols.Publisher`."""

    def __init__(self, costs: WeightCosts) -> None:
        self._costs = costs

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        await asyncio.sleep(self._costs.publish_s())
        return _manifest(version, self._costs)

    async def close(self) -> None:
        pass


class CountedWeights:
    """Implements `core.protocols.WeightSource`: takes the time, moves nothing."""

    def __init__(self, costs: WeightCosts, clock: Clock) -> None:
        self._costs, self._clock = costs, clock

    async def prepare(self, version: PolicyVersion) -> Pulled:
        began_s = self._clock.now()
        await asyncio.sleep(self._costs.pull_s())
        return Pulled(
            manifest=_manifest(version, self._costs),
            nbytes=self._costs.nbytes,
            full=True,
            pull_s=self._clock.now() - began_s,
            retries=0,
        )

    def swap(self, pulled: Pulled) -> None:
        pass

    def close(self) -> None:
        pass
