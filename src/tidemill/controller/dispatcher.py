"""Applies the decisions of the router and the offload policy to the samples in flight."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import LOCAL, InFlight
from tidemill.controller.offload import REMAINING_FACTOR, Balance, HandOver, can_finish, seeding_useful
from tidemill.controller.router import GroupKey, Load, Movable, Waiting, is_tail, select_tail_workers
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.worker_state import WorkerState
from tidemill.core.errors import TidemillError
from tidemill.telemetry.events import DRAIN, WORKER_RELEASED

MAX_FAILURES = 3
"""Failed attempts at one sample after which the run fails."""

REBALANCE_S = 0.5
"""Interval of rebalancing while no sample is waiting."""

CHECKS_PER_BATCH = 100
SAMPLES_PER_S = 10_000
"""Whether preemptible workers can finish the batch is checked `CHECKS_PER_BATCH` times while the trainer learns from
one, but not so often that checking reads more than `SAMPLES_PER_S` samples per second."""


class Dispatcher:
    """Assigns waiting samples to workers, drains workers that are about to leave, and balances the load.

    Args:
        window_s: how long from now on the local worker generates while preemptible workers serve.
    """

    def __init__(self, in_flight: InFlight, fleet: Fleet, *, window_s: float = math.inf) -> None:
        self._in_flight, self._fleet, self._window_s = in_flight, fleet, window_s
        self._started_s = self._balanced_s = fleet.clock.now()
        self._queue: list[tuple[bool, int, float, int]] = []  # a heap of waiting samples, see `_push`
        self._local_generates = False
        self.local_idle_since_s: float | None = None  # when the local worker stopped generating
        self._tail_workers: frozenset[str] | None = None  # leases that finish the batch; None before its tail
        self._aborted: dict[int, int] = {}  # attempt by ordinal, of samples aborted to be moved
        self._workers, self._counted_s, self._worker_s = 0, self._started_s, 0.0
        self._balance: Balance | None = None
        self.hand_over: HandOver | None = None
        self._checked_s, self._can_finish = -math.inf, False

    def begin_step(self, window_s: float, balance: Balance | None = None) -> None:
        """Start a step after a publish.

        Args:
            balance: decides when the local worker stops generating; None if the window alone does.
        """
        self._balance, self.hand_over, self._checked_s = balance, None, -math.inf
        self._started_s, self._window_s, self.local_idle_since_s = self._fleet.clock.now(), window_s, None
        self._tail_workers = None
        self._workers, self._counted_s, self._worker_s = self._fleet.serving_count, self._started_s, 0.0

    @property
    def workers_mean(self) -> float:
        """Mean number of serving preemptible workers from the start of the step to the last dispatch."""
        elapsed_s = self._counted_s - self._started_s
        return self._worker_s / elapsed_s if elapsed_s > 0 else float(self._workers)

    @property
    def next_check_s(self) -> float:
        """Seconds until the local worker may have to stop generating; infinite if that does not depend on time."""
        if self._balance is not None and self._fleet.elastic:
            return self._check_interval_s(self._balance)
        left_s = self._started_s + self._window_s - self._fleet.clock.now()
        return left_s if self._local_generates and self._fleet.elastic and left_s > 0 else math.inf

    def _check_interval_s(self, balance: Balance) -> float:
        return max(balance.train_s / CHECKS_PER_BATCH, len(self._in_flight.samples) / SAMPLES_PER_S)

    def dispatch(self, *, trainer_waits: bool) -> bool:
        """Assign waiting samples, or rebalance if there are none; never waits. Returns whether samples were assigned.

        Raises:
            TidemillError: `MAX_FAILURES` attempts at one sample failed.
        """
        workers = self._available_workers(trainer_waits)
        now_s = self._fleet.clock.now()
        self._worker_s += self._workers * (now_s - self._counted_s)
        self._workers, self._counted_s = self._fleet.serving_count, now_s
        self._enqueue()
        if self._fleet.elastic and self._fleet.config.tail_fraction > 0:
            workers = self._consolidate_tail(workers)
        if self._in_flight.waiting:
            return self._assign_waiting(workers)
        if len(workers) > 1:
            self._rebalance(workers)
        return False

    def drain(self, lease_ids: Iterable[str]) -> None:
        """Abort the samples of workers that are about to leave."""
        for lease_id in lease_ids:
            if lease_id in self._fleet and (samples := self._in_flight.held(lease_id).values()):
                self._fleet.event_log.log(DRAIN, self._fleet[lease_id], samples=len(samples))
                self._fleet.abort(lease_id, [sample.sample_id for sample in samples])

    def abort_all(self) -> None:
        for lease_id in self._in_flight.leases:
            self._fleet.abort(lease_id, [sample.sample_id for sample in self._in_flight.held(lease_id).values()])

    def note_idle(self, lease_ids: Iterable[str]) -> None:
        """Tell the fleet which of these workers have no samples left."""
        for lease_id in lease_ids:
            if lease_id in self._fleet and not self._in_flight.held(lease_id):
                self._fleet.note_idle(lease_id)

    # Which workers take samples.

    def _available_workers(self, trainer_waits: bool) -> list[WorkerState]:
        """Workers that take samples now. Aborts the local worker's samples when it stops generating."""
        fleet, in_flight = self._fleet, self._in_flight
        workers = fleet.serving(in_flight.newest_version)
        here = {LOCAL, *(worker.lease.lease_id for worker in workers)}
        if self._tail_workers is not None and not self._tail_workers <= here:
            self._tail_workers = None  # one of them is gone: select again
        if fleet.local is None:
            return workers
        generates = not fleet.elastic
        if fleet.elastic and fleet.config.seeding:
            selected = self._tail_workers is None or LOCAL in self._tail_workers
            generates = self._local_useful(len(workers), trainer_waits) and selected
        if self._local_generates and not generates:
            self.local_idle_since_s = fleet.clock.now()
            if not fleet.local.load_when_idle:  # else it finishes samples of older weights
                fleet.abort(LOCAL, [sample.sample_id for sample in in_flight.held(LOCAL).values()])
        elif generates:
            self.local_idle_since_s = None
        self._local_generates = generates
        up_to_date = fleet.local.version is None or fleet.local.version.number == in_flight.newest_version
        return [*workers, fleet.local] if generates and up_to_date else workers

    def _local_useful(self, workers: int, trainer_waits: bool) -> bool:
        """Whether the local worker should generate.

        Within the window it should. With a `Balance` it continues until preemptible workers are expected to finish
        before the trainer does, and starts again if so many workers left that they are not.
        """
        now_s, fleet = self._fleet.clock.now(), self._fleet
        within = seeding_useful(elapsed_s=now_s - self._started_s, window_s=self._window_s, preemptible_serving=workers)
        if self._balance is None or within:
            return within
        before = self.hand_over
        if before is None and trainer_waits:
            return True
        if before is not None and not self._local_generates and workers >= before.workers:
            return False
        if now_s - self._checked_s >= self._check_interval_s(self._balance):
            self._checked_s = now_s
            left = sum(self._expected(sample) for sample in self._in_flight if sample.finish is None)
            self._can_finish = can_finish(
                self._balance,
                made_tokens=sum(sample.generated for sample in self._in_flight),
                left_tokens=left if before is None or self._local_generates else left / REMAINING_FACTOR,
                workers=workers,
                best_tokens_per_s=fleet.profile.best_tokens_per_s,
                trained_s=0.0 if before is None else now_s - before.at_s,
            )
            if self._can_finish and (before is None or self._local_generates or workers < before.workers):
                self.hand_over = HandOver(at_s=now_s, left_tokens=left, workers=workers)
        return not self._can_finish

    def _consolidate_tail(self, workers: Sequence[WorkerState]) -> list[WorkerState]:
        """In the tail of a batch: the workers that finish it. Samples of the others are aborted once, to move there."""
        fleet, in_flight = self._fleet, self._in_flight
        fraction = fleet.config.tail_fraction
        if not is_tail(unfinished=in_flight.unfinished, samples=len(in_flight.samples), fraction=fraction):
            self._tail_workers = None
            return list(workers)
        here = {worker.lease.lease_id for worker in workers}
        if not here:
            return []
        if self._tail_workers is None or not self._tail_workers <= here:
            loads = [
                Load(lease_id=lease_id, slots=fleet[lease_id].slots, assigned=len(in_flight.held(lease_id)))
                for lease_id in here
            ]
            self._tail_workers = select_tail_workers(
                loads, unfinished=in_flight.unfinished, plateau=fleet.profile.plateau(fleet.slots), last={LOCAL}
            )
            for lease_id in sorted(here - self._tail_workers):
                if lease_id == LOCAL:
                    self._local_generates, self.local_idle_since_s = False, fleet.clock.now()
                if samples := in_flight.held(lease_id).values():
                    fleet.event_log.log(WORKER_RELEASED, fleet[lease_id], samples=len(samples))
                    fleet.abort(lease_id, [sample.sample_id for sample in samples])
        return [worker for worker in workers if worker.lease.lease_id in self._tail_workers]

    # Assigning what waits.

    def _enqueue(self) -> None:
        for sample in self._in_flight.take_newly_waiting():
            if sample.failures >= MAX_FAILURES:
                raise TidemillError(
                    f"{sample.failures} attempts to generate {sample.sample_id} failed; last error: {sample.last_error}"
                )
            if sample.failures:  # its engine may still run the failed attempt
                self._fleet.abort(sample.lease_id, [sample.sample_id])
            self._push(sample)

    def _push(self, sample: Sample) -> None:
        """Order: turns after an observation and started samples (if versions may change within one), older batches,
        longest expected, canonical."""
        waits = not sample.turns.returning and (sample.attempt == 0 or self._in_flight.plan.exact_version)
        heapq.heappush(self._queue, (waits, sample.from_version, -self._expected(sample), sample.ordinal))

    def _assign_waiting(self, workers: Sequence[WorkerState]) -> bool:
        """Fill free slots and short queues. Without preemptible workers the local engine queues all samples itself.

        A worker without a free slot takes samples when its queue has room for a group, so that siblings go to one
        worker and share the cache of their prompt.
        """
        elastic = self._fleet.elastic
        limit = self._fleet.config.queue_limit if elastic else len(self._in_flight.samples)
        least_room = min(self._in_flight.plan.group_size, limit) if elastic else 1
        slots = {worker.lease.lease_id: worker.slots for worker in workers}
        held = {lease_id: len(self._in_flight.held(lease_id)) for lease_id in slots}
        room = {lease_id: slots[lease_id] + limit - count for lease_id, count in held.items()}
        takes = [lease_id for lease_id in slots if held[lease_id] < slots[lease_id] or room[lease_id] >= least_room]
        chosen = self._pop(sum(room[lease_id] for lease_id in takes))
        if not chosen:
            return False
        groups = self._groups_by_lease(chosen)
        loads = [
            Load(lease_id=lease_id, slots=slots[lease_id], assigned=held[lease_id], groups=frozenset(groups[lease_id]))
            for lease_id in takes
        ]
        waiting = [
            Waiting(
                ordinal=sample.ordinal,
                group=sample.sample_id.group,
                expected_tokens=self._expected(sample),
                lost_lease="" if sample.turns.returning else sample.lease_id,
                kept_lease=sample.lease_id if sample.turns.returning else "",
            )
            for sample in chosen
        ]
        assigned_to: defaultdict[str, list[Sample]] = defaultdict(list)
        for ordinal, lease_id in self._fleet.router.dispatch(waiting, loads, queue_limit=limit):
            assigned_to[lease_id].append(self._in_flight.samples[ordinal])
        for lease_id, samples in assigned_to.items():
            interrupted = (sample for sample in samples if not sample.turns.returning)
            for source, moved in by_previous_lease(interrupted).items():
                if source != lease_id:
                    self._fleet.event_log.migrated(source, self._fleet[lease_id], moved)
            self._fleet.submit(
                lease_id, self._in_flight.assign(lease_id, samples), step=self._in_flight.newest_version + 1
            )
        for sample in chosen:
            if sample.ordinal in self._in_flight.waiting:  # the router did not place it
                self._push(sample)
        return bool(assigned_to)

    def _pop(self, room: int) -> list[Sample]:
        chosen: list[Sample] = []
        while self._queue and len(chosen) < room:
            *_, ordinal = heapq.heappop(self._queue)
            if ordinal in self._in_flight.waiting:
                chosen.append(self._in_flight.samples[ordinal])
        return chosen

    def _groups_by_lease(self, chosen: Sequence[Sample]) -> defaultdict[str, set[GroupKey]]:
        """The groups of these samples whose prompt a worker has computed, by its lease."""
        groups: defaultdict[str, set[GroupKey]] = defaultdict(set)
        size = self._in_flight.plan.group_size
        for position in {sample.ordinal // size for sample in chosen}:
            for sibling in self._in_flight.group(position):
                if sibling.lease_id:
                    groups[sibling.lease_id].add(sibling.sample_id.group)
        return groups

    def _expected(self, sample: Sample) -> float:
        """Expected number of remaining tokens."""
        limit = self._in_flight.plan.sampling.max_new_tokens
        return self._fleet.lengths.expected_remaining(sample.sample_id.prompt_id, sample.generated, limit)

    # Balancing the load.

    def _rebalance(self, workers: Sequence[WorkerState]) -> None:
        """Abort samples of workers with a queue, or beyond their plateau, if another worker has room for them."""
        now_s, fleet, in_flight = self._fleet.clock.now(), self._fleet, self._in_flight
        if now_s - self._balanced_s < REBALANCE_S:
            return
        self._balanced_s = now_s
        held = {worker.lease.lease_id: in_flight.held(worker.lease.lease_id) for worker in workers}
        slots = {worker.lease.lease_id: worker.slots for worker in workers}
        if all(len(samples) >= slots[lease_id] for lease_id, samples in held.items()) or self._moves_pending():
            return
        moves = fleet.router.rebalance(
            [
                Load(lease_id=lease_id, slots=slots[lease_id], assigned=len(samples))
                for lease_id, samples in held.items()
            ],
            lambda lease_id: [
                Movable(
                    ordinal=sample.ordinal,
                    group=sample.sample_id.group,
                    moves=sample.moves,
                    expected_tokens=self._expected(sample),
                    kept_tokens=sample.length,
                )
                for sample in held[lease_id].values()
            ],
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
                self._aborted[sample.ordinal] = sample.attempt
            fleet.event_log.rebalanced(fleet[source], fleet[target], len(samples))
            fleet.abort(source, [sample.sample_id for sample in samples])

    def _moves_pending(self) -> bool:
        """Whether a sample that was aborted to be moved is still running."""
        samples = self._in_flight.samples
        self._aborted = {
            ordinal: attempt
            for ordinal, attempt in self._aborted.items()
            if (sample := samples.get(ordinal)) is not None
            and sample.state is SampleState.RUNNING
            and sample.attempt == attempt
        }
        return bool(self._aborted)


def by_previous_lease(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples that a preemptible worker generated before, by its lease."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.lease_id not in ("", LOCAL):
            found[sample.lease_id].append(sample)
    return found
