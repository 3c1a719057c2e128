"""Invariants of the controller's samples, checked at every event of a simulated run.

One object covers all restarts of a run. It knows the expected tokens and reads the journal independently of the ledger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.fault_simulation.journal_reading import DurableState
from tests.fault_simulation.mailbox import ObservedFleet
from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import InFlight
from tidemill.controller.samples import Sample, SampleState
from tidemill.core.protocols import LoopClock
from tidemill.core.records import ITEM_BYTES, Finish, PolicyVersion, SampleId, VersionRun
from tidemill.sim.workload import Completions

SLOW_S = 10.0
"""Longest time to process the end of a lease."""


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last observed state of a sample."""

    sample: Sample
    length: int
    attempt: int
    state: SampleState
    made_by: tuple[tuple[PolicyVersion, int], ...]


class Invariants:
    """Checks samples in flight.

    Args:
        completions: the expected tokens.
        most_held: limit of samples per worker.
    """

    def __init__(self, spec: RunSpec, completions: Completions, *, most_held: float = math.inf) -> None:
        self.spec, self.completions = spec, completions
        self.durable = DurableState(spec.batch.group_size)
        self.newest = 0  # of all published versions
        self.looks = 0
        self._most_held = most_held
        self._in_flight: InFlight | None = None
        self._fleet: ObservedFleet | None = None
        self._seen: dict[int, _Seen] = {}
        self._gone: dict[str, float] = {}  # leases unknown to the fleet, and since when
        self._clock = LoopClock()

    def begin_life(self, fleet: ObservedFleet) -> None:
        self._fleet, self._in_flight = fleet, None
        self._seen.clear()
        self._gone.clear()

    def resumed(self, in_flight: InFlight, learned: Collection[int]) -> None:
        """Check a replay: it contains exactly the durable state.

        Args:
            learned: groups already in the restored weights.
        """
        self._in_flight = in_flight
        left = self.durable.positions - set(learned)
        require(set(in_flight.groups) == left, f"groups {sorted(in_flight.groups)} were resumed, not {sorted(left)}")
        for sample in in_flight:
            kept = self.durable.samples[sample.ordinal]
            require(bytes(sample.token_ids) == kept.token_ids, f"{sample.ordinal} was resumed with other tokens")
            require(sample.finish == kept.finish, f"{sample.ordinal} was resumed as {sample.finish}, not {kept.finish}")
            require(sample.reward == kept.reward, f"{sample.ordinal} was resumed with another reward")
            require(sample.published == kept.published, f"{sample.ordinal} was resumed without its publish logprobs")
            require(list(sample.version_starts) == kept.versions, f"{sample.ordinal} was resumed with other versions")

    def look(self) -> None:
        """Check all samples in flight."""
        in_flight = self._in_flight
        if in_flight is None:
            return
        self.looks += 1
        states: Counter[SampleState] = Counter()
        for sample in in_flight:
            states[sample.state] += 1
            self._look_at(sample)
        self._look_at_counts(in_flight, states)
        for lease_id in in_flight.leases:
            self._look_at_lease(in_flight, lease_id)

    def check_tokens(
        self,
        sample_id: SampleId,
        token_ids: bytes,
        logprobs: bytes,
        versions: Sequence[VersionRun],
        *,
        start: int = 0,
    ) -> None:
        """Check completion tokens from `start` against their versions."""
        for run in versions:
            begin = max(start, run.start)
            if begin >= run.end:
                continue
            piece = slice(begin * ITEM_BYTES, run.end * ITEM_BYTES)
            tokens, right = self.completions.tokens(sample_id, run.version, begin, run.end)
            require(token_ids[piece] == tokens, f"{sample_id} has wrong tokens in [{begin}, {run.end})")
            require(logprobs[piece] == right, f"{sample_id} has wrong logprobs in [{begin}, {run.end})")

    def check_end(self, sample_id: SampleId, length: int, finish: Finish | None, limit: int) -> None:
        """Check the length and finish reason of a finished sample."""
        whole = self.completions.length(sample_id)
        require(length == min(whole, limit), f"{sample_id} ended with {length} of {min(whole, limit)} tokens")
        require(finish == ("stop" if whole <= limit else "length"), f"{sample_id} ended as {finish}")

    def _look_at(self, sample: Sample) -> None:
        before = self._seen.get(sample.ordinal)
        begun = 0
        if before is not None and before.sample is sample:
            if (before.length, before.attempt, before.state) == (sample.length, sample.attempt, sample.state):
                return
            require(sample.attempt >= before.attempt, f"sample {sample.ordinal} returned to an earlier attempt")
            kept = sample.length >= before.length and sample.version_starts[: len(before.made_by)] == before.made_by
            require(kept or self._may_restart, f"tokens of sample {sample.ordinal} were lost")
            begun = before.length if kept else 0
        self._seen[sample.ordinal] = _Seen(sample, sample.length, sample.attempt, sample.state, sample.version_starts)
        require(
            len(sample.logprobs) == len(sample.token_ids),
            f"sample {sample.ordinal} has a different number of logprobs than tokens",
        )
        self.check_tokens(
            sample.sample_id, bytes(sample.token_ids), bytes(sample.logprobs), sample.versions, start=begun
        )
        self._check_versions(sample)
        finished = sample.state in (SampleState.FINISHED, SampleState.SCORED)
        require(finished == (sample.finish is not None), f"sample {sample.ordinal} is {sample.state}: {sample.finish}")
        if finished:
            self.check_end(sample.sample_id, sample.length, sample.finish, self.spec.sampling.max_new_tokens)
        scored = sample.state is SampleState.SCORED
        require(scored == (sample.reward is not None), f"sample {sample.ordinal} is {sample.state}: {sample.reward}")

    @property
    def _may_restart(self) -> bool:
        schedule = self.spec.schedule
        return schedule.unfinished == "restart" or schedule.on_lag_limit == "restart"

    def _check_versions(self, sample: Sample) -> None:
        numbers = [version.number for version, _ in sample.version_starts]
        require(numbers == sorted(numbers), f"sample {sample.ordinal} returned to older weights: {numbers}")
        bounds = [sample.from_version, *numbers, self.newest]
        require(bounds == sorted(bounds), f"sample {sample.ordinal} is of versions {numbers}, not of {bounds}")
        if self.spec.schedule.one_version:
            require(
                set(numbers) <= {sample.from_version},
                f"sample {sample.ordinal} was generated by other versions: {numbers}",
            )

    def _look_at_counts(self, in_flight: InFlight, states: Counter[SampleState]) -> None:
        counted = (in_flight.running, in_flight.unfinished - in_flight.running, in_flight.scored)
        right = (states[SampleState.RUNNING], states[SampleState.WAITING], states[SampleState.SCORED])
        require(counted == right, f"(running, waiting, scored) are counted as {counted}, expected {right}")
        require(len(in_flight.waiting) == right[1], f"{len(in_flight.waiting)} samples wait, expected {right[1]}")
        held = sum(len(in_flight.held(lease_id)) for lease_id in in_flight.leases)
        require(held == right[0], f"workers hold {held} samples, expected {right[0]}")

    def _look_at_lease(self, in_flight: InFlight, lease_id: str) -> None:
        fleet, held = self._fleet, in_flight.held(lease_id)
        assert fleet is not None, "a lease before a fleet"
        if lease_id in fleet:
            self._gone.pop(lease_id, None)
        else:
            gone_s = self._clock.now() - self._gone.setdefault(lease_id, self._clock.now())
            require(gone_s <= SLOW_S, f"{lease_id} ended {gone_s:.1f} s ago and still holds {len(held)} samples")
        require(len(held) <= self._most_held, f"{lease_id} holds {len(held)} samples, limit {self._most_held}")
        for sample in held.values():
            right = sample.state is SampleState.RUNNING and sample.lease_id == lease_id
            require(right, f"{lease_id} has sample {sample.ordinal}, which is {sample.state} at {sample.lease_id}")
