"""Carries out what the router and the offload policy decide, for the samples in flight."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import LOCAL, InFlight, by_previous_lease
from tidemill.controller.offload import WORSE, Balance, HandOver, can_finish, seeding_useful
from tidemill.controller.router import Load, Movable, Waiting, select_tail_workers, tail_begins
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.worker_state import WorkerState
from tidemill.core.errors import TidemillError

MAX_FAILURES = 3
"""Attempts at one sample that may end in an engine error before the run does."""

REBALANCE_S = 0.5
"""How often the load is evened out once nothing waits with the controller."""


LOOKS = 100
"""How often it is judged whether others can finish what is left, while a batch is learned from; more rarely where there
are so many samples that judging takes time."""
SAMPLES_PER_S = 10_000


class Dispatcher:
    """Gives waiting samples to workers, takes them back from those about to leave, and evens out the load.

    Args:
        window_s: how long the reserved side generates too, from now on, while preemptible workers serve.
    """

    def __init__(self, in_flight: InFlight, fleet: Fleet, *, window_s: float = math.inf) -> None:
        self._in_flight, self._fleet, self._window_s = in_flight, fleet, window_s
        self._began_s = self._balanced_s = fleet.clock.now()
        self._queue: list[tuple[bool, int, float, int]] = []  # a heap of waiting samples, see `_push`
        self._seeds = False
        self._keepers: frozenset[str] | None = None  # who generates the tail of the batch, once that has begun
        self._called_back: dict[int, int] = {}  # ordinal: the attempt that was asked back
        self.seeded_until_s: float | None = None  # since when the reserved side has not been generating
        self._workers, self._counted_s, self._worker_s = 0, self._began_s, 0.0
        self._balance: Balance | None = None
        self.handed_over: HandOver | None = None
        self._judged_s, self._can_finish = -math.inf, False

    def begin_step(self, window_s: float, balance: Balance | None = None) -> None:
        """New weights are there: the reserved side generates too for a while again.

        Args:
            balance: what its end is judged by; None for the window.
        """
        self._balance, self.handed_over, self._judged_s = balance, None, -math.inf
        self._began_s, self._window_s, self.seeded_until_s = self._fleet.clock.now(), window_s, None
        self._keepers = None
        self._workers, self._counted_s, self._worker_s = self._fleet.joined, self._began_s, 0.0

    @property
    def workers_mean(self) -> float:
        """Preemptible workers in this step, on average until the last look."""
        elapsed_s = self._counted_s - self._began_s
        return self._worker_s / elapsed_s if elapsed_s > 0 else float(self._workers)

    @property
    def window_left_s(self) -> float:
        """Until the reserved side may have to stop generating; infinite when it is not a question of time."""
        if self._balance is not None and self._fleet.elastic:
            return self._pause_s(self._balance)
        left_s = self._began_s + self._window_s - self._fleet.clock.now()
        return left_s if self._seeds and self._fleet.elastic and left_s > 0 else math.inf

    def _pause_s(self, balance: Balance) -> float:
        """Between two looks at what is left."""
        return max(balance.train_s / LOOKS, len(self._in_flight.samples) / SAMPLES_PER_S)

    def dispatch(self, *, trainer_waits: bool) -> bool:
        """Do what the state of samples and fleet asks for; never waits. Says whether samples were given out.

        Raises:
            TidemillError: engines failed again and again on one sample.
        """
        members = self._members(trainer_waits)
        self._count_workers()
        self._enqueue()
        if self._fleet.elastic and self._fleet.config.tail_fraction > 0:
            members = self._gather(members)
        if self._in_flight.waiting:
            return self._hand_out(members)
        if len(members) > 1:
            self._even_out(members)
        return False

    def hand_back(self, lease_ids: Iterable[str]) -> None:
        """Workers about to leave: call back what they are generating."""
        for lease_id in lease_ids:
            if lease_id in self._fleet and (samples := self._in_flight.held(lease_id).values()):
                self._fleet.event_log.asked_back(self._fleet[lease_id], len(samples))
                self._fleet.abort(lease_id, [sample.sample_id for sample in samples])

    def call_back_all(self) -> None:
        for lease_id in self._in_flight.leases:
            self._fleet.abort(lease_id, [sample.sample_id for sample in self._in_flight.held(lease_id).values()])

    def note_idle(self, lease_ids: Iterable[str]) -> None:
        """Workers that may have finished what they had."""
        for lease_id in lease_ids:
            if lease_id in self._fleet and not self._in_flight.held(lease_id):
                self._fleet.note_idle(lease_id)

    def _count_workers(self) -> None:
        now_s = self._fleet.clock.now()
        self._worker_s += self._workers * (now_s - self._counted_s)
        self._workers, self._counted_s = self._fleet.joined, now_s

    def _members(self, trainer_waits: bool) -> list[WorkerState]:
        """Who takes samples now. The reserved side's own are called back when its window is over."""
        fleet, in_flight = self._fleet, self._in_flight
        members = fleet.serving(in_flight.newest_version)
        if self._keepers is not None and not self._keepers <= {LOCAL, *(member.lease.lease_id for member in members)}:
            self._keepers = None  # one of them is gone: the others may be needed again
        if fleet.local is None:
            return members
        seeds = not fleet.elastic
        if fleet.elastic and fleet.config.seeding:
            keeps = self._keepers is None or LOCAL in self._keepers
            seeds = self._seeding_useful(len(members), trainer_waits) and keeps
        if self._seeds and not seeds:
            self.seeded_until_s = fleet.clock.now()
            if not fleet.local.behind:  # else it only finishes what it began under older weights
                fleet.abort(LOCAL, [sample.sample_id for sample in in_flight.held(LOCAL).values()])
        elif seeds:
            self.seeded_until_s = None
        self._seeds = seeds
        up_to_date = fleet.local.version is None or fleet.local.version.number == in_flight.newest_version
        return [*members, fleet.local] if seeds and up_to_date else members

    def _seeding_useful(self, workers: int, trainer_waits: bool) -> bool:
        """By the window; or, where both sides' speeds are known, beyond it until the others can be expected to finish
        in time, and again when so many of them went that they cannot."""
        now_s, fleet = self._fleet.clock.now(), self._fleet
        within = seeding_useful(elapsed_s=now_s - self._began_s, window_s=self._window_s, preemptible_serving=workers)
        if self._balance is None or within:
            return within
        over = self.handed_over
        if over is None and trainer_waits:
            return True
        if over is not None and not self._seeds and workers >= over.workers:
            return False
        if now_s - self._judged_s >= self._pause_s(self._balance):
            self._judged_s = now_s
            left = sum(self._expected(one) for one in self._in_flight if one.finish is None)
            self._can_finish = can_finish(
                self._balance,
                made_tokens=sum(one.length for one in self._in_flight),
                left_tokens=left if over is None or self._seeds else left / WORSE,
                workers=workers,
                best_tokens_per_s=fleet.profile.best_tokens_per_s,
                trained_s=0.0 if over is None else now_s - over.at_s,
            )
            if self._can_finish and (over is None or self._seeds or workers < over.workers):
                self.handed_over = HandOver(at_s=now_s, left_tokens=left, workers=workers)
        return not self._can_finish

    def _gather(self, members: Sequence[WorkerState]) -> list[WorkerState]:
        """In the tail of a batch: those who finish it. The others' samples are called back once, to go on there."""
        fleet, in_flight = self._fleet, self._in_flight
        fraction = fleet.config.tail_fraction
        if not tail_begins(unfinished=in_flight.unfinished, samples=len(in_flight.samples), fraction=fraction):
            self._keepers = None
            return list(members)
        here = {member.lease.lease_id for member in members}
        if not here:
            return []
        if self._keepers is None or not self._keepers <= here:
            loads = [
                Load(lease_id=lease_id, slots=fleet[lease_id].slots, assigned=len(in_flight.held(lease_id)))
                for lease_id in here
            ]
            self._keepers = select_tail_workers(
                loads, unfinished=in_flight.unfinished, plateau=fleet.profile.plateau(fleet.slots), last={LOCAL}
            )
            self._vacate(sorted(here - self._keepers))
        return [member for member in members if member.lease.lease_id in self._keepers]

    def _vacate(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            if lease_id == LOCAL:
                self._seeds, self.seeded_until_s = False, self._fleet.clock.now()
            if samples := self._in_flight.held(lease_id).values():
                self._fleet.event_log.vacated(self._fleet[lease_id], len(samples))
                self._fleet.abort(lease_id, [sample.sample_id for sample in samples])

    def _enqueue(self) -> None:
        for sample in self._in_flight.take_newly_waiting():
            if sample.failures >= MAX_FAILURES:
                raise TidemillError(
                    f"{sample.failures} attempts to generate {sample.sample_id} failed; the last: {sample.last_error}"
                )
            if sample.failures:  # its engine may still be at the attempt that went wrong
                self._fleet.abort(sample.lease_id, [sample.sample_id])
            self._push(sample)

    def _push(self, sample: Sample) -> None:
        """Where a publish may come in between, those begun elsewhere first. Then those of the batch that is due first;
        then the longest expected, for whatever begins last ends last; then canonical order."""
        waits = sample.attempt == 0 or self._in_flight.plan.exact_version
        heapq.heappush(self._queue, (waits, sample.from_version, -self._expected(sample), sample.ordinal))

    def _hand_out(self, members: Sequence[WorkerState]) -> bool:
        """Fill free slots and short queues. Without preemptible workers the local engine keeps the queue itself."""
        limit = self._fleet.config.queue_limit if self._fleet.elastic else len(self._in_flight.samples)
        held = {member.lease.lease_id: len(self._in_flight.held(member.lease.lease_id)) for member in members}
        slots = {member.lease.lease_id: member.slots for member in members}
        room = sum(max(0, slots[lease_id] + limit - assigned) for lease_id, assigned in held.items())
        chosen = self._pop(room)
        if not chosen:
            return False
        near = self._siblings(chosen)
        loads = [
            Load(lease_id=lease_id, slots=slots[lease_id], assigned=assigned, groups=frozenset(near[lease_id]))
            for lease_id, assigned in held.items()
            if assigned < slots[lease_id] + limit
        ]
        waiting = [
            Waiting(
                ordinal=sample.ordinal,
                group=sample.sample_id.group,
                expected_tokens=self._expected(sample),
                lost_lease=sample.lease_id,
            )
            for sample in chosen
        ]
        shares: defaultdict[str, list[Sample]] = defaultdict(list)
        for ordinal, lease_id in self._fleet.router.dispatch(waiting, loads, queue_limit=limit):
            shares[lease_id].append(self._in_flight.samples[ordinal])
        for lease_id, samples in shares.items():
            for source, moved in by_previous_lease(samples).items():
                if source != lease_id:
                    self._fleet.event_log.migrated(source, self._fleet[lease_id], moved)
            self._fleet.submit(
                lease_id, self._in_flight.assign(lease_id, samples), step=self._in_flight.newest_version + 1
            )
        for sample in chosen:  # what the router did not place waits on
            if sample.ordinal in self._in_flight.waiting:
                self._push(sample)
        return bool(shares)

    def _pop(self, room: int) -> list[Sample]:
        chosen: list[Sample] = []
        while self._queue and len(chosen) < room:
            *_, ordinal = heapq.heappop(self._queue)
            if ordinal in self._in_flight.waiting:
                chosen.append(self._in_flight.samples[ordinal])
        return chosen

    def _siblings(self, chosen: Sequence[Sample]) -> defaultdict[str, set[tuple[str, str, int]]]:
        """Which worker holds samples of the groups that wait, and so has computed their prompt."""
        near: defaultdict[str, set[tuple[str, str, int]]] = defaultdict(set)
        size = self._in_flight.plan.group_size
        for position in {sample.ordinal // size for sample in chosen}:
            for sibling in self._in_flight.group(position):
                if sibling.lease_id:
                    near[sibling.lease_id].add(sibling.sample_id.group)
        return near

    def _expected(self, sample: Sample) -> float:
        limit = self._in_flight.plan.sampling.max_new_tokens
        return self._fleet.lengths.expected_remaining(sample.sample_id.prompt_id, sample.length, limit)

    def _even_out(self, members: Sequence[WorkerState]) -> None:
        """Move samples from workers with a queue, or with more than pays, to workers with nothing to do."""
        now_s, fleet, in_flight = self._fleet.clock.now(), self._fleet, self._in_flight
        if now_s - self._balanced_s < REBALANCE_S:
            return
        self._balanced_s = now_s
        held = {member.lease.lease_id: in_flight.held(member.lease.lease_id) for member in members}
        slots = {member.lease.lease_id: member.slots for member in members}
        if all(len(samples) >= slots[lease_id] for lease_id, samples in held.items()) or self._awaiting_back():
            return
        moves = fleet.router.rebalance(
            [
                Load(lease_id=lease_id, slots=slots[lease_id], assigned=len(samples))
                for lease_id, samples in held.items()
            ],
            lambda lease_id: [self._movable(sample) for sample in held[lease_id].values()],
            plateau=fleet.profile.plateau(fleet.slots),
            max_moves=fleet.config.max_moves,
            queue_limit=fleet.config.queue_limit,
        )
        routes: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
        for move in moves:
            routes[move.source, move.target].append(in_flight.samples[move.ordinal])
        for (source, target), samples in routes.items():
            for sample in samples:
                sample.moves += 1
                self._called_back[sample.ordinal] = sample.attempt
            fleet.event_log.rebalanced(fleet[source], fleet[target], len(samples))
            fleet.abort(source, [sample.sample_id for sample in samples])

    def _awaiting_back(self) -> bool:
        """Whether a sample that was asked back has not come yet."""
        samples = self._in_flight.samples
        self._called_back = {
            ordinal: attempt
            for ordinal, attempt in self._called_back.items()
            if (sample := samples.get(ordinal)) is not None
            and sample.state is SampleState.RUNNING
            and sample.attempt == attempt
        }
        return bool(self._called_back)

    def _movable(self, sample: Sample) -> Movable:
        return Movable(
            ordinal=sample.ordinal,
            group=sample.sample_id.group,
            moves=sample.moves,
            expected_tokens=self._expected(sample),
            kept_tokens=sample.length,
        )
