"""Where the time of preemptible machines goes, in seconds of a decoding slot."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.controller.in_flight import InFlight
from tidemill.controller.samples import Sample, SampleState
from tidemill.core.protocols import Clock
from tidemill.core.records import GenerateRequest, PolicyVersion
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulated_worker import SimulatedHost

POLL_S = 1.0
DONE = (SampleState.FINISHED, SampleState.SCORED)


class TimedEngine(SimulatedEngine):
    """Counts the seconds that it computes prompts, continues samples that moved, and swaps weights."""

    def __init__(self, *args: Any, now_s: float, **more: Any) -> None:
        super().__init__(*args, now_s=now_s, **more)
        self.began_s, self.loaded_s = now_s, float("inf")
        self.fresh_s = self.moved_s = self.swap_s = 0.0

    @property
    def simulated_s(self) -> float:
        """Time up to which it was simulated; a machine that vanished loses what came after."""
        return self._until_s

    def load(self, version: PolicyVersion, **more: Any) -> None:
        super().load(version, **more)
        now_s = float(more["now_s"])
        if self.loaded_s == float("inf"):
            self.loaded_s = now_s
        self.swap_s += self._until_s - now_s

    def _start(self, request: GenerateRequest) -> int:
        tokens = super()._start(request)
        if request.prefix_ids:
            self.moved_s += self.costs.prefill_s(tokens)
        else:
            self.fresh_s += self.costs.prefill_s(tokens)
        return tokens


@dataclass
class Watch:
    """Looks once a virtual second at what is idle, and why: nothing waits for a slot, or something does, or only for
    engines that still pull its version."""

    clock: Clock
    end_s: float
    host: SimulatedHost | None = None
    in_flight: InFlight | None = None
    queue_slots: int = 0
    tail_slots: int = 0
    pull_slots: int = 0
    held_peak: int = 0  # tokens in unfinished samples
    longest_wait_s: float = 0.0  # of a sample between two machines, while a machine had the newest version
    longest_stall_s: float = 0.0  # in which such a sample waited although a machine had a free slot
    longest_pause_s: float = 0.0  # of a sample on a machine, until its next token
    dropped_tokens: int = 0  # that unfinished samples had and lost
    half_done_s: list[float] = field(default_factory=list)  # per batch: until half of its groups were complete
    _waiting: dict[tuple[int, int], float] = field(default_factory=dict)  # how long, by ordinal and attempt
    _stall_s: float = 0.0
    _grown: dict[int, tuple[int, float]] = field(default_factory=dict)  # by ordinal: tokens, since when
    _batch: tuple[int, float, bool] = (-1, 0.0, False)  # its first position, its start, whether half is done

    async def run(self) -> None:
        while self.clock.now() < self.end_s:
            await asyncio.sleep(POLL_S)
            if self.host is not None and self.in_flight is not None:
                self._look(self.host, self.in_flight)

    def _look(self, host: SimulatedHost, in_flight: InFlight) -> None:
        live = [worker.engine for worker in host.workers.values() if not worker._dead]
        waits = bool(in_flight.waiting) or any(engine.queued for engine in live)
        for engine in live:
            idle = engine.costs.slots - engine.running
            if engine.version.number < in_flight.newest_version and waits:
                self.pull_slots += idle
            elif waits:
                self.queue_slots += idle
            else:
                self.tail_slots += idle
        samples = list(in_flight.samples.values())
        held = sum(sample.length for sample in samples if sample.state not in DONE)
        self.held_peak = max(self.held_peak, held)
        now_s = self.clock.now()
        between = [(one.ordinal, one.attempt) for one in in_flight.waiting.values() if one.attempt]
        newest = [engine for engine in live if engine.version.number == in_flight.newest_version]
        self._waiting = {key: self._waiting.get(key, 0.0) + (POLL_S if newest else 0.0) for key in between}
        self.longest_wait_s = max([self.longest_wait_s, *self._waiting.values()])
        free = any(engine.running < engine.costs.slots and not engine.queued for engine in newest)
        self._stall_s = self._stall_s + POLL_S if between and free else 0.0
        self.longest_stall_s = max(self.longest_stall_s, self._stall_s)
        self._tokens([sample for sample in samples if sample.state not in DONE], now_s)
        self._halves(in_flight)

    def _tokens(self, unfinished: Sequence[Sample], now_s: float) -> None:
        grown = dict[int, tuple[int, float]]()
        for sample in unfinished:
            length, since_s = self._grown.get(sample.ordinal, (0, now_s))
            self.dropped_tokens += max(0, length - sample.length)
            if sample.length != length or sample.state is not SampleState.RUNNING:
                since_s = now_s
            self.longest_pause_s = max(self.longest_pause_s, now_s - since_s)
            grown[sample.ordinal] = (sample.length, since_s)
        self._grown = grown

    def _halves(self, in_flight: InFlight) -> None:
        if not in_flight.groups:
            return
        first, now_s = next(iter(in_flight.groups)), self.clock.now()
        if first != self._batch[0]:
            self._batch = (first, now_s, False)
        if not self._batch[2]:
            complete = [all(one.state in DONE for one in in_flight.group(position)) for position in in_flight.groups]
            if 2 * sum(complete) >= len(complete):
                self.half_done_s.append(now_s - self._batch[1])
                self._batch = (first, self._batch[1], True)


def shares(
    engines: Mapping[str, TimedEngine], leases: Mapping[str, tuple[float, float]], watch: Watch
) -> dict[str, float]:
    """How the leased time was spent; the shares add up to 1.

    Args:
        engines: by lease; a lease that ended while its machine booted has none.
        leases: (start, end) of each machine.
    """
    costs = next(iter(engines.values())).costs
    slots, step_s = costs.slots, costs.decode_s(costs.slots, 0, 1)
    total = sum(end_s - start_s for start_s, end_s in leases.values()) * slots
    served = [(engine, leases[lease][1]) for lease, engine in engines.items()]
    spent = {
        "decode": sum(engine.generated for engine, _ in served) * step_s,
        "prefill": sum(engine.fresh_s for engine, _ in served) * slots,
        "prefill_of_moved": sum(engine.moved_s for engine, _ in served) * slots,
        "swap": sum(engine.swap_s for engine, _ in served) * slots,
        "pull": sum(max(0.0, min(engine.loaded_s, end_s) - engine.began_s) for engine, end_s in served) * slots,
        "lost": sum(max(0.0, end_s - max(engine.simulated_s, engine.began_s)) for engine, end_s in served) * slots,
        "boot": total - sum(max(0.0, end_s - engine.began_s) for engine, end_s in served) * slots,
    }
    idle = total - sum(spent.values())
    polled = max(1, watch.queue_slots + watch.tail_slots + watch.pull_slots)
    spent["queue"], spent["tail"] = idle * watch.queue_slots / polled, idle * watch.tail_slots / polled
    spent["pull"] += idle * watch.pull_slots / polled
    return {name: value / total for name, value in spent.items()}
