"""Applies the decisions of the router and the offload policy to the samples in flight."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import LOCAL, InFlight
from tidemill.controller.offload import REMAINING_FACTOR, Balance, HandOver, can_finish, seeding_useful
from tidemill.controller.router import GroupKey, Movable, Waiting, WorkerLoad, is_tail, select_tail_workers
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.waiting import CLOCK_RESOLUTION_S, LeaseOutcome
from tidemill.controller.worker_state import WorkerState
from tidemill.core.errors import GuardStop, TidemillError
from tidemill.core.records import count
from tidemill.telemetry.events import DRAIN, STALLED, WORKER_RELEASED

MAX_FAILURES = 3
"""Failed attempts at one sample after which the run fails."""

MAX_STALLS = 3
"""Evictions in a row without a new token after which only the reserved engine generates a sample."""

TOO_SHORT = 0.5
"""Without a reserved engine, the run ends when a sample stalled for this share of the eviction interval: a sample that
met three short lives by chance continues."""

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
        gives_up: raise if machines live shorter than a recomputation and there is no reserved engine.
    """

    def __init__(self, in_flight: InFlight, fleet: Fleet, *, window_s: float = math.inf, gives_up: bool = True) -> None:
        self._in_flight = in_flight
        self._fleet = fleet
        self._gives_up = gives_up
        self._balanced_s = fleet.clock.now()
        self._queue: list[tuple[bool, int, int, float, int]] = []  # a heap of waiting samples, see `_push`
        self._local_generates = False
        self._freed_s: dict[str, float] = {}  # when a sample last left a slot, by lease
        self._pinned: dict[int, Sample] = {}  # by ordinal: only the local worker generates them
        self._handed_back: dict[int, int] = {}  # last attempt by ordinal, of samples that the local worker returns
        self._aborted: dict[int, int] = {}  # attempt by ordinal, of samples aborted to be moved
        self._can_finish = False
        self.begin_step(window_s)

    def begin_step(self, window_s: float, balance: Balance | None = None, *, samples: float = math.inf) -> None:
        """Start a step: with the samples that are in flight, or after a publish.

        Args:
            samples: of the batch; later ones in the order of a round may be discarded unfinished.
            balance: decides when the local worker stops generating; None if the window alone does.
        """
        self._balance = balance
        self._batch_samples = samples
        self.hand_over: HandOver | None = None
        self._checked_s = -math.inf  # when `_can_finish` was computed
        self._started_s = self._fleet.clock.now()
        self._window_s = window_s
        self.local_idle_since_s: float | None = None  # when the local worker stopped generating
        self._tail_workers: frozenset[str] | None = None  # leases that finish the batch; None before its tail
        self._workers = self._fleet.serving_count
        self._counted_s = self._started_s
        self._worker_s = 0.0

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
        waits = self._local_generates and self._fleet.elastic and left_s > 0
        return max(left_s, CLOCK_RESOLUTION_S) if waits else math.inf

    def _check_interval_s(self, balance: Balance) -> float:
        return max(balance.train_s / CHECKS_PER_BATCH, len(self._in_flight.samples) / SAMPLES_PER_S)

    def dispatch(self, *, trainer_waits: bool) -> bool:
        """Assign waiting samples, or rebalance if there are none; never waits. Returns whether samples were assigned.

        Raises:
            TidemillError: `MAX_FAILURES` attempts at one sample failed.
            GuardStop: a sample stalls, and there is no reserved engine.
        """
        workers = self._available_workers(trainer_waits)
        now_s = self._fleet.clock.now()
        self._worker_s += self._workers * (now_s - self._counted_s)
        self._workers, self._counted_s = self._fleet.serving_count, now_s
        self._enqueue()
        assigned = self._assign_pinned() if self._pinned else False
        if self._fleet.elastic and self._fleet.config.tail_fraction > 0:
            workers = self._consolidate_tail(workers)
        if self._in_flight.waiting:
            return self._assign_waiting(workers) or assigned
        if len(workers) > 1:
            self._rebalance(workers)
        return assigned

    def drain(self, lease_ids: Iterable[str]) -> None:
        """Abort the samples of workers that are about to leave."""
        for lease_id in lease_ids:
            if lease_id in self._fleet and (samples := self._in_flight.held(lease_id).values()):
                self._fleet.event_log.log(DRAIN, self._fleet[lease_id], samples=len(samples))
                self._note_executed(lease_id, self._fleet[lease_id].executing)
                self._fleet.abort(lease_id, [sample.sample_id for sample in samples])

    def abort_all(self) -> None:
        for lease_id in self._in_flight.leases:
            self._fleet.abort(lease_id, [sample.sample_id for sample in self._in_flight.held(lease_id).values()])

    def note_ended(self, samples: Sequence[Sample]) -> None:
        """Samples, or turns of agents, ended: others may have their slots."""
        self._freed_s |= dict.fromkeys((sample.lease_id for sample in samples), self._fleet.clock.now())

    def note_evicted(self, outcome: LeaseOutcome) -> None:
        """A lease ended; its samples are revoked next."""
        self._note_executed(outcome.lease_id, outcome.executing)
        self._freed_s.pop(outcome.lease_id, None)

    def _note_executed(self, lease_id: str, executing: int) -> None:
        """Before a lease ends: store how long the first `executing` of its samples were executed. An engine starts
        samples in the order in which it was given them."""
        now_s, freed_s = self._fleet.clock.now(), self._freed_s.get(lease_id, 0.0)
        for sample in islice(self._in_flight.held(lease_id).values(), executing):
            sample.executed_s = now_s - max(sample.assigned_s, freed_s)

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
                self._hand_back()
        elif generates:
            self.local_idle_since_s = None
        self._local_generates = generates
        return [*workers, fleet.local] if generates and self._is_up_to_date(fleet.local) else workers

    def _hand_back(self) -> None:
        """Abort the samples of the local worker, each attempt once. One without a new token stalls: machines may come
        and go faster than the local worker computes its tokens again."""
        samples = [each for each in self._unpinned(LOCAL) if self._handed_back.get(each.ordinal) != each.attempt]
        self._handed_back |= {sample.ordinal: sample.attempt for sample in samples}
        self._note_executed(LOCAL, self._fleet[LOCAL].executing)
        self._fleet.abort(LOCAL, [sample.sample_id for sample in samples])

    def _is_up_to_date(self, local: WorkerState) -> bool:
        return local.version is None or local.version.number == self._in_flight.newest_version

    def _unpinned(self, lease_id: str) -> list[Sample]:
        """Samples of a lease that may move."""
        return [sample for ordinal, sample in self._in_flight.held(lease_id).items() if ordinal not in self._pinned]

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
            order = self._in_flight.order
            batch = [sample for sample in self._in_flight if order.get(sample.ordinal, 0) < self._batch_samples]
            left = sum(self._expected(sample) for sample in batch if sample.finish is None)
            self._can_finish = can_finish(
                self._balance,
                made_tokens=sum(sample.generated for sample in batch),
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
                WorkerLoad(lease_id=lease_id, slots=fleet[lease_id].slots, assigned=len(in_flight.held(lease_id)))
                for lease_id in here
            ]
            self._tail_workers = select_tail_workers(
                loads, unfinished=in_flight.unfinished, plateau=fleet.profile.plateau(fleet.slots), last={LOCAL}
            )
            for lease_id in sorted(here - self._tail_workers):
                if lease_id == LOCAL:
                    self._local_generates, self.local_idle_since_s = False, fleet.clock.now()
                if samples := self._unpinned(lease_id):
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
            if sample.stalls >= MAX_STALLS:
                self._pin(sample)
            if sample.ordinal not in self._pinned:
                self._push(sample)

    def _pin(self, sample: Sample) -> None:
        """A sample stalls: from now on the reserved engine generates it, also after its seeding window.

        Raises:
            GuardStop: there is none, and machines are evicted before they can generate a token of this sample.
        """
        fleet, tokens = self._fleet, sample.length + count(sample.prompt.token_ids)
        if fleet.local is not None and fleet.reserved_generates:
            if sample.ordinal not in self._pinned:
                stalled_s = round(sample.stalled_s, 3)
                fleet.event_log.log(STALLED, fleet.local, tokens=tokens, stalled_s=stalled_s)
            self._pinned[sample.ordinal] = sample
        elif self._gives_up and sample.stalled_s >= TOO_SHORT * fleet.eviction_interval_s:
            raise GuardStop(
                f"a sample was moved {sample.stalls} times without a new token: machines are evicted after "
                f"{fleet.eviction_interval_s:.3g} s on average, and computing the {tokens} tokens of the sample again "
                f"takes more than {sample.stalled_s:.3g} s\n  set fleet.seeding = true, so that the reserved engine "
                "generates such samples; then run the same command again: the run resumes"
            )

    def _assign_pinned(self) -> bool:
        """Assign pinned samples to the local worker, before others; returns whether there were any."""
        fleet = self._fleet
        in_flight = self._in_flight
        local = self._fleet.local
        self._pinned = {
            ordinal: sample
            for ordinal, sample in self._pinned.items()
            if in_flight.samples.get(ordinal) is sample and sample.finish is None
        }
        assert local is not None, "samples are pinned to it"
        if self._pinned:
            self.local_idle_since_s = None
        elif not self._local_generates:  # the last of them has ended
            self.local_idle_since_s = fleet.clock.now()
        room = local.slots + fleet.config.queue_limit - len(in_flight.held(LOCAL))
        waiting = [sample for ordinal, sample in sorted(self._pinned.items()) if ordinal in in_flight.waiting]
        if room <= 0 or not waiting or not self._is_up_to_date(local):
            return False
        self._submit(LOCAL, waiting[:room])
        return True

    def _push(self, sample: Sample) -> None:
        """Order: turns after an observation and started samples (if versions may change within one), older batches,
        the order of a round, longest expected, canonical."""
        waits = not sample.turns.returning and (sample.attempt == 0 or self._in_flight.plan.exact_version)
        place = self._in_flight.order.get(sample.ordinal, 0)
        heapq.heappush(self._queue, (waits, sample.from_version, place, -self._expected(sample), sample.ordinal))

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
        chosen = list[Sample]()
        total_room = sum(room[lease_id] for lease_id in takes)
        while self._queue and len(chosen) < total_room:
            *_, ordinal = heapq.heappop(self._queue)
            if ordinal in self._in_flight.waiting and ordinal not in self._pinned:
                chosen.append(self._in_flight.samples[ordinal])
        if not chosen:
            return False
        groups: defaultdict[str, set[GroupKey]] = defaultdict(set)  # whose prompt a worker has computed, by its lease
        for position in {self._in_flight.position(sample) for sample in chosen}:
            for sibling in self._in_flight.group(position):
                if sibling.lease_id:
                    groups[sibling.lease_id].add(sibling.sample_id.group)
        loads = [
            WorkerLoad(
                lease_id=lease_id,
                slots=slots[lease_id],
                assigned=held[lease_id],
                groups=frozenset(groups[lease_id]),
                tokens_left=self._fleet.tokens_left(self._fleet[lease_id]),
            )
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
            self._submit(lease_id, samples)
        for sample in chosen:
            if sample.ordinal in self._in_flight.waiting:  # the router did not place it
                self._push(sample)
        return bool(assigned_to)

    def _submit(self, lease_id: str, samples: Sequence[Sample]) -> None:
        fleet, in_flight = self._fleet, self._in_flight
        interrupted: defaultdict[str, list[Sample]] = defaultdict(list)  # by the lease of the last attempt
        for sample in samples:
            if not sample.turns.returning and sample.lease_id not in ("", LOCAL, lease_id):
                interrupted[sample.lease_id].append(sample)
        for source, moved in interrupted.items():
            fleet.event_log.migrated(source, fleet[lease_id], moved)
        fleet.submit(lease_id, in_flight.assign(lease_id, samples), step=in_flight.newest_version + 1)
        for sample in samples:
            sample.assigned_s = fleet.clock.now()

    def _expected(self, sample: Sample) -> float:
        """Expected number of remaining tokens. Finished siblings were observed, so they are not passed."""
        limit, prompt_tokens = self._in_flight.plan.sampling.max_new_tokens, count(sample.prompt.token_ids)
        lengths = self._fleet.lengths
        return lengths.expected_remaining(sample.sample_id.prompt_id, prompt_tokens, sample.generated, limit)

    # Balancing the load.

    def _rebalance(self, workers: Sequence[WorkerState]) -> None:
        """Abort samples of workers with a queue, or beyond their plateau, if another worker has room for them."""
        now_s = self._fleet.clock.now()
        fleet = self._fleet
        in_flight = self._in_flight
        if now_s - self._balanced_s < REBALANCE_S:
            return
        self._balanced_s = now_s
        held = {worker.lease.lease_id: in_flight.held(worker.lease.lease_id) for worker in workers}
        slots = {worker.lease.lease_id: worker.slots for worker in workers}
        if all(len(samples) >= slots[lease_id] for lease_id, samples in held.items()) or self._moves_pending():
            return
        moves = fleet.router.rebalance(
            [
                WorkerLoad(
                    lease_id=lease_id,
                    slots=slots[lease_id],
                    assigned=len(samples),
                    tokens_left=fleet.tokens_left(fleet[lease_id]),
                )
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
                for sample in self._unpinned(lease_id)
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
            self._freed_s[source] = now_s
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
