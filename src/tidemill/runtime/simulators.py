"""Who computes the chunks of a run: this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tidemill.config.schema import RunSpec
from tidemill.core.chunks import Array, ChunkAnswer, ChunkRequest, Chunks
from tidemill.core.protocols import Clock
from tidemill.core.records import PolicyVersion
from tidemill.robots.policy_arrays import Weights, unpack
from tidemill.robots.setup import SimulationSetup, build
from tidemill.robots.simulation import Simulation
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory


class LocalChunks:
    """Implements `core.chunks.Chunks` in this process, one chunk after another."""

    def __init__(self, setups: Sequence[SimulationSetup]) -> None:
        self._setups = setups
        self._simulations: dict[int, Simulation] = {}
        self._weights: dict[int, Weights] = {}

    async def publish(self, version: PolicyVersion, weights: Mapping[str, Array]) -> None:
        self._weights = {number: each for number, each in self._weights.items() if number >= version.number - 1}
        self._weights[version.number] = unpack(weights)

    async def run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        answers = []
        for request in requests:
            if request.setup not in self._simulations:
                self._simulations[request.setup] = build(self._setups[request.setup])
            simulation = self._simulations[request.setup]
            answers.append(simulation.run(self._weights[version], request, version=version))
            await asyncio.sleep(0)
        return answers


@asynccontextmanager
async def open_chunks(
    spec: RunSpec,
    setups: Sequence[SimulationSetup],
    *,
    run: RunDirectory | None,
    recorder: Recorder | None,
    clock: Clock,
) -> AsyncIterator[Chunks]:
    """Start what computes the chunks of a run, and stop all of it when the block ends.

    Args:
        setups: the simulations, by the number in `ChunkRequest.setup`.
        run: the run's directory; None: of a job without one.
        recorder: gets the fleet's events; None: nobody does.

    Raises:
        UserError: a task or its model cannot be used.
    """
    yield LocalChunks(setups)
