"""The result of a simulated run: its logs in memory, and the figures from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tidemill.controller.loop import LoopResult
from tidemill.core.protocols import Clock
from tidemill.core.records import FleetRow, Prompt, Record, StepMetrics, Trajectory
from tidemill.telemetry.events import DECODE, EVICTION, NOT_PART_OF_A_STEP, event_line
from tidemill.telemetry.fleet_figures import (
    HOUR_S,
    HeldLease,
    amount,
    covered_s,
    fleet_figures,
    held_leases,
    moment,
    recomputed,
    sessions_of,
)
from tidemill.telemetry.metrics import STEP_TIME, MetricLine


class SimulatedRun(Record):
    """Times in virtual seconds since the run began. What an unfinished step took and cost is in no figure."""

    result: LoopResult
    events: tuple[dict[str, Any], ...]  # as in events.jsonl
    metrics: tuple[MetricLine, ...]  # as in metrics.jsonl, one a step; at least one
    digest: str  # of both
    learned: tuple[tuple[float, float], ...]  # (begin, end) of each stretch in which the trainer learned
    reserved_usd_per_hour: float
    shares_gpus: bool  # the same GPUs learn and, as reserved engines, generate
    put_back: int  # samples that lost their cache when an engine's was full
    put_back_tokens: int  # theirs, computed again
    generated: int  # tokens that engines made, those nobody received among them

    @property
    def seconds(self) -> float:
        """To the end of the last step."""
        return self.metrics[-1].elapsed_s

    @property
    def tokens_trained(self) -> int:
        return int(sum(line.values["tokens_trained"] for line in self.metrics))

    @property
    def throughput_tokens_per_s(self) -> float:
        return self.tokens_trained / self.seconds

    @property
    def leases(self) -> tuple[HeldLease, ...]:
        return tuple(held_leases(self.events, sessions_of(self.events, self.metrics)).values())

    @property
    def preemptible(self) -> tuple[HeldLease, ...]:
        return tuple(lease for lease in self.leases if lease.kind == "preemptible")

    @property
    def cost_usd(self) -> float:
        """Each machine for as long as it was held: the reserved side all the time."""
        preemptible = sum(
            lease.cost_usd * (self._within(lease.start_s, lease.end_s) / (lease.end_s - lease.start_s))
            for lease in self.preemptible
            if lease.end_s > lease.start_s
        )
        return self.reserved_usd_per_hour * self.seconds / HOUR_S + preemptible

    @property
    def tokens_per_usd(self) -> float | None:
        """None where nothing has a price."""
        return self.tokens_trained / self.cost_usd if self.cost_usd else None

    @property
    def learning_share(self) -> float:
        """Of the time, that in which the trainer learned."""
        return self._covered_s(self.learned) / self.seconds

    @property
    def reserved_generating_share(self) -> float:
        """Of the time, that in which reserved engines had samples; where they share GPUs, while those did not learn."""
        generating_s = self._covered_s(self.decoding("reserved"))
        if self.shares_gpus:
            return self._busy_s / self.seconds - self.learning_share
        return generating_s / self.seconds

    @property
    def trainer_idle_share(self) -> float:
        """Of the time, that in which the GPUs that learn did neither that nor, where they do, generate."""
        busy_s = self._busy_s if self.shares_gpus else self._covered_s(self.learned)
        return max(0.0, 1 - busy_s / self.seconds)

    @property
    def worker_idle_share(self) -> float | None:
        """Of the time preemptible machines were held, that in which they had no samples; None without any."""
        held_s = sum(self._within(lease.start_s, lease.end_s) for lease in self.preemptible)
        busy_s = sum(self._within(*stretch) for stretch in self.decoding("preemptible"))
        return max(0.0, 1 - busy_s / held_s) if held_s else None

    @property
    def workers_mean(self) -> float:
        """Preemptible machines held, on average."""
        return sum(self._within(lease.start_s, lease.end_s) for lease in self.preemptible) / self.seconds

    @property
    def evictions(self) -> int:
        return sum(event["event"] == EVICTION for event in self.events)

    @property
    def tokens_recomputed(self) -> int:
        """Of samples that went on elsewhere, or again after their cache was full."""
        return recomputed(self.metrics) + self.put_back_tokens

    def total(self, name: str) -> float:
        """A metric, summed over the steps."""
        return sum(line.values.get(name, 0.0) for line in self.metrics)

    def fleet_figures(self) -> dict[str, Any]:
        """As in the summary of a real run."""
        return fleet_figures(
            self.events,
            self.metrics,
            wall_s=self.seconds,
            tokens_trained=self.tokens_trained,
            reserved_usd_per_hour=self.reserved_usd_per_hour,
        )

    @property
    def _busy_s(self) -> float:
        return self._covered_s([*self.learned, *self.decoding("reserved")])

    def _covered_s(self, stretches: Iterable[tuple[float, float]]) -> float:
        """Seconds up to the end of the last step that lie in at least one stretch."""
        return covered_s((begin_s, min(end_s, self.seconds)) for begin_s, end_s in stretches if begin_s < self.seconds)

    def decoding(self, kind: str) -> list[tuple[float, float]]:
        """Stretches in which a worker of this kind had samples."""
        sessions = sessions_of(self.events, self.metrics)
        return [
            (moment(event, sessions) - amount(event, "duration_s"), moment(event, sessions))
            for event in self.events
            if event["event"] == DECODE and event.get("kind") == kind
        ]

    def _within(self, begin_s: float, end_s: float) -> float:
        """Seconds of a stretch up to the end of the last step."""
        return max(0.0, min(end_s, self.seconds) - begin_s)


SESSION = 1


class Recording:
    """Implements `core.protocols.Telemetry`. Whatever reads the logs of a run reads these, too.

    Args:
        tell: called at the end of each step with its number and the virtual seconds so far.
    """

    def __init__(self, clock: Clock, tell: Callable[[int, float], None] = lambda step, seconds: None) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[MetricLine] = []
        self._clock, self._tell = clock, tell
        self._step_began_s: float | None = None

    @property
    def digest(self) -> str:
        """Of everything that was told: equal runs, equal digests."""
        lines = [self.events, [list(line) for line in self.metrics]]
        return hashlib.blake2b(msgspec.json.encode(lines), digest_size=16).hexdigest()

    def resume(self, step: int) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        self.events.append(event_line(name, fields, unix_s=0.0, session=SESSION, elapsed_s=self._clock.now()))
        if name in NOT_PART_OF_A_STEP and self._step_began_s is not None:
            self._step_began_s += fields["duration_s"]

    def step(self, metrics: StepMetrics) -> None:
        now_s = self._clock.now()
        line = MetricLine(
            step=metrics.step,
            policy_version=metrics.version.number,
            weights_digest=metrics.version.digest,
            optimizer_steps=metrics.optimizer_steps,
            session=SESSION,
            elapsed_s=now_s,
            values={**metrics.values, STEP_TIME: now_s - (self._step_began_s or 0.0)},
        )
        self.metrics.append(line)
        self._step_began_s = now_s
        self._tell(metrics.step, now_s)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        if self._step_began_s is None:
            self._step_began_s = self._clock.now()

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass
