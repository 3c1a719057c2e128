"""Carries out tail batching: starts the groups of a round, decides about them by their ranks, and closes the round."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from tidemill.config.schema import RunSpec
from tidemill.controller.batching import BatchBuilder, GroupAssembly, has_signal
from tidemill.controller.collector import SampleCollector
from tidemill.controller.in_flight import InFlight, plan_groups
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.samples import Sample
from tidemill.controller.tail_batching import TailBatching
from tidemill.core.records import Prompt

SAMPLES_PER_S = 10_000
"""Ranking reads no more samples per second than this."""


class Rounds:
    """The rounds of one run.

    Args:
        prompt_at: the (epoch, prompt) at a place of the source.
        abort: aborts samples wherever they are.
    """

    def __init__(
        self,
        spec: RunSpec,
        rollout: RolloutContext,
        in_flight: InFlight,
        assembly: GroupAssembly,
        *,
        prompt_at: Callable[[int], tuple[int, Prompt]],
        abort: Callable[[Sequence[Sample]], None],
    ) -> None:
        self._spec, self._rollout, self._in_flight, self._assembly = spec, rollout, in_flight, assembly
        self._prompt_at, self._abort = prompt_at, abort
        self._tail = TailBatching(spec, in_flight)
        self._returned: dict[int, tuple[int, Prompt]] = {}  # queued prompts, by place
        self._ranked_s = 0.0  # when groups were last ranked

    @property
    def prompts_waiting(self) -> int:
        """Prompts that wait for a long round."""
        return self._tail.waiting

    async def begin(self, step: int, collector: SampleCollector) -> BatchBuilder:
        """Start the groups of a step, unless a resume has restored them; returns its batch."""
        tail, in_flight, ledger = self._tail, self._in_flight, self._rollout.ledger
        tail.apply(ledger.rounds, step - 1)
        closed, positions, order = ledger.rounds.get(step), tail.initial(step), list[int]()
        if closed is None and not positions:
            places = tail.places()
            pairs = [self._returned.get(place) or self._prompt_at(place) for place in places]
            order = tail.order(step, places, [prompt for _, prompt in pairs])
            in_flight.order = {ordinal: at for at, ordinal in enumerate(order)}
            restarts = tail.restarts(places)
            await self._open(pairs, tail.first_position(step), collector, places=places, restarts=restarts)
        elif closed is None:
            places = [in_flight.groups[at].place for at in positions]
            order = tail.order(step, places, [in_flight.group(at)[0].prompt for at in positions])
            in_flight.order = {ordinal: at for at, ordinal in enumerate(order)}
        if closed is None:
            tail.begin(step, order)
        else:
            for position in set(closed.positions) & in_flight.groups.keys():
                ordinals = [sample.ordinal for sample in in_flight.group(position)]
                self._keep(position, set(ordinals) - set(closed.set_aside))
        return BatchBuilder(
            step,
            self._spec.batch.prompts,
            membership="ranked",
            order="canonical",
            recorded=closed.positions if closed is not None else None,
            ranked=tail.ranked,
        )

    async def rank(self, batch: BatchBuilder, collector: SampleCollector) -> None:
        """Decide about complete groups, in the order of their ranks; `batch` may take those that it needs.

        With dynamic sampling, another group replaces one without reward signal.
        """
        tail, assembly, algorithm = self._tail, self._assembly, self._spec.algorithm
        self._ranked_s = self._rollout.clock.now()
        while len(tail.ranked) < batch.size and (position := tail.next_ended()) is not None:
            if self._spec.schedule.extra_samples:
                self._keep(position, tail.schedule.kept(position))
            if position not in assembly.complete and position not in batch.taken:
                return  # its rewards are not here yet
            replaceable = algorithm.dynamic_sampling and position not in batch.taken
            all_redrawn = len(tail.redrawn) >= algorithm.max_redraws * batch.size
            if not replaceable or all_redrawn or has_signal(assembly.complete[position]):
                tail.take()
                continue
            self._in_flight.counters.groups_redrawn += 1
            if (start := tail.replace(batch.step)) is not None:
                position, place = start
                await self._open([self._prompt_at(place)], position, collector, places=[place])
                tail.add(position)

    async def _open(
        self,
        pairs: Sequence[tuple[int, Prompt]],
        first: int,
        collector: SampleCollector,
        *,
        places: Sequence[int],
        restarts: Sequence[int] | None = None,
    ) -> None:
        groups = plan_groups(
            pairs,
            first_position=first,
            from_version=self._in_flight.newest_version,
            places=places,
            restarts=restarts,
        )
        await self._rollout.ledger.open(self._in_flight, groups, [prompt for _, prompt in pairs])
        collector.mailbox.notify()

    def _keep(self, position: int, kept: Container[int]) -> None:
        """Generate no more of the samples that a group does not need."""
        samples = self._in_flight.group(position)
        others = [sample for sample in samples if sample.needed and sample.ordinal not in kept]
        if others:
            self._abort(others)
            self._in_flight.set_aside(others)
            self._in_flight.counters.tokens_discarded += sum(sample.generated for sample in others)
            self._assembly.keep(position, [sample.sample_id for sample in samples if sample.needed])

    def ranking_may_change(self) -> bool:
        """Whether tokens that arrived may decide about a group; false for a while after `rank`, which reads all
        samples."""
        if not self._tail.may_advance():
            return False
        return self._rollout.clock.now() - self._ranked_s >= len(self._in_flight.samples) / SAMPLES_PER_S

    def rank_again(self, batch: BatchBuilder, leases: Container[str]) -> list[Sample]:
        """Samples to restart because these leases computed wrongly: theirs, and those that were set aside, which may be
        among the shortest of their group now. Call `restarted` afterwards."""
        restarted = list[Sample]()
        for position in self._in_flight.groups.keys() - set(batch.taken):
            samples = self._in_flight.group(position)
            aside = [sample for sample in samples if not sample.needed]
            self._in_flight.need(aside)
            if aside:
                self._assembly.keep(position, [sample.sample_id for sample in samples])
            restarted += [sample for sample in samples if sample in aside or sample.uses(leases)]
        return sorted(restarted, key=lambda sample: sample.ordinal)

    def restarted(self, step: int) -> None:
        """Rank the groups of the round from the start: lengths may differ now."""
        self._tail.begin(step, list(self._in_flight.order))

    async def close(self, batch: BatchBuilder, collector: SampleCollector) -> None:
        """Store which groups the batch has, and return the prompts of the others."""
        tail, ledger, in_flight = self._tail, self._rollout.ledger, self._in_flight
        closed = ledger.rounds.get(batch.step) or tail.closed(batch.step, batch.taken)
        others = [at for at in tail.positions(batch.step) if at not in set(batch.taken)]
        running = [sample for position in others for sample in in_flight.group(position)]
        in_flight.set_aside(running)
        self._abort(running)
        await collector.until_local_returned()  # it may read the weights that change next
        for position in others:
            samples, group = in_flight.group(position), in_flight.groups[position]
            self._returned[group.place] = group.epoch, samples[0].prompt
            in_flight.counters.tokens_discarded += sum(sample.generated for sample in samples)
            self._assembly.forget(position)
        in_flight.counters.groups_returned += len(closed.returned)
        await ledger.close_round(in_flight, closed, others)
        tail.apply(ledger.rounds, batch.step)
        self._returned = {place: pair for place, pair in self._returned.items() if place in tail.queued}
