"""Weights of which only the size matters: a publisher and what workers pull."""

from __future__ import annotations

import asyncio

from tidemill.core.clock import Clock
from tidemill.core.records import PolicyVersion, Pulled, WeightManifest
from tidemill.sim.costs import WeightCosts
from tidemill.sim.uplink import Uplink


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
    """Implements `core.protocols.WeightSource`: takes the time, moves nothing. Who has the version before pulls the
    difference where there is one, all others the whole.

    Args:
        uplink: what the bytes of all workers travel on.
    """

    def __init__(self, costs: WeightCosts, clock: Clock, uplink: Uplink) -> None:
        self._costs, self._clock, self._uplink = costs, clock, uplink
        self._number: int | None = None  # of the version that it has

    async def prepare(self, version: PolicyVersion) -> Pulled:
        began_s, costs = self._clock.now(), self._costs
        full = not costs.delta_nbytes or self._number != version.number - 1
        nbytes = costs.nbytes if full else costs.delta_nbytes
        await self._uplink.carry(nbytes)
        await asyncio.sleep(costs.pull_s())
        return Pulled(
            manifest=_manifest(version, costs),
            nbytes=nbytes,
            full=full,
            pull_s=self._clock.now() - began_s,
            retries=0,
        )

    def swap(self, pulled: Pulled) -> None:
        self._number = pulled.manifest.version.number

    def close(self) -> None:
        pass
