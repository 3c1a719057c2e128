"""Invariants of the controller's samples, checked at every event of a simulated run.

One object covers all restarts of a run. It knows the expected tokens and reads the journal independently of the ledger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tests.fault_simulation.episodes import Episodes, Told, ToldTurn, Walked, WrongEpisode, compact
from tests.fault_simulation.journal_reading import DurableSample, DurableState
from tests.fault_simulation.mailbox import ObservedFleet
from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import TRAIN, InFlight
from tidemill.controller.samples import Sample, SampleState
from tidemill.core.protocols import LoopClock
from tidemill.core.records import (
    ITEM_BYTES,
    Call,
    Episode,
    EpisodeLimit,
    Finish,
    GenerateRequest,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    VersionRun,
    count,
    pack_tokens,
)
from tidemill.sim.workload import Completions

if TYPE_CHECKING:
    from tests.fault_simulation.guarding import GuardInvariants
    from tests.fault_simulation.tail_invariants import TailInvariants

ACTING, RUNNING, SCORED, WAITING = SampleState.ACTING, SampleState.RUNNING, SampleState.SCORED, SampleState.WAITING
"""For what runs once per event and sample: looking up an enum member is slow before Python 3.12."""

PROMPT = pack_tokens([1] * 3)
"""The tokens of every prompt."""

Draws: TypeAlias = dict[tuple[int, int], TokenBuffer]
"""The context at the start of the turn in which a sample drew, by branch and position in the branch's context."""

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
        patience_s: longest time without a new token while samples are unfinished.
        episodes: of an agent; None if samples are single completions.
    """

    def __init__(
        self,
        spec: RunSpec,
        completions: Completions,
        *,
        most_held: float = math.inf,
        patience_s: float = math.inf,
        episodes: Episodes | None = None,
    ) -> None:
        self.spec, self.completions, self.episodes = spec, completions, episodes
        self.durable = self.nothing_durable()
        self.faults: set[tuple[SampleId, int]] = set()  # given by environments, with their turns
        self._draws: dict[int, Draws] = {}  # by ordinal, since the sample was last started
        self._executed: Counter[tuple[int, int, int]] = Counter()  # by ordinal, turn and index, likewise
        self.newest = 0  # of all published versions
        self.looks = 0
        self._most_held, self._patience_s = most_held, patience_s
        self._progressed_s = 0.0  # time of the last new token or observation
        self.in_flight: InFlight | None = None
        self.guarding: GuardInvariants | None = None
        self.tail: TailInvariants | None = None
        self._fleet: ObservedFleet | None = None
        self._seen: dict[int, _Seen] = {}
        self._attempts: dict[SampleId, int] = {}  # in this life, also before the prompt was returned
        self._gone: dict[str, float] = {}  # leases unknown to the fleet, and since when
        self._clock = LoopClock()

    def begin_life(self, fleet: ObservedFleet) -> None:
        self._fleet, self.in_flight = fleet, None
        self._progressed_s = self._clock.now()
        self._seen.clear()
        self._attempts.clear()
        self._gone.clear()

    def nothing_durable(self) -> DurableState:
        limits = self.episodes.plan.limits if self.episodes else None
        return DurableState(
            self.spec.batch.group_size + self.spec.schedule.extra_samples,
            limits=limits,
            most=self.spec.sampling.max_new_tokens,
            prompt_tokens=count(PROMPT),
        )

    def note_renewed(self) -> None:
        """Forget what samples did before they durably started again: they have no turn."""
        known, none = self.durable.samples, DurableSample(0)
        self._draws = {at: draws for at, draws in self._draws.items() if known.get(at, none).turns}
        self._executed = Counter({key: n for key, n in self._executed.items() if known.get(key[0], none).turns})

    def resumed(self, in_flight: InFlight, learned: Collection[int]) -> None:
        """Check a replay: it contains exactly the durable state.

        Args:
            learned: groups already in the restored weights.
        """
        self.in_flight = in_flight
        left = self.durable.positions - set(learned)
        require(set(in_flight.groups) == left, f"groups {sorted(in_flight.groups)} were resumed, not {sorted(left)}")
        for sample in in_flight:
            kept = self.durable.samples[sample.ordinal]
            require(bytes(sample.token_ids) == kept.token_ids, f"{sample.ordinal} was resumed with other tokens")
            require(sample.finish == kept.finish, f"{sample.ordinal} was resumed as {sample.finish}, not {kept.finish}")
            require(sample.reward == kept.reward, f"{sample.ordinal} was resumed with another reward")
            require(sample.published == kept.published, f"{sample.ordinal} was resumed without its publish logprobs")
            require(list(sample.version_starts) == kept.versions, f"{sample.ordinal} was resumed with other versions")
            self._resumed_turns(sample, kept)

    def _resumed_turns(self, sample: Sample, kept: DurableSample) -> None:
        turns, acting = sample.turns, sample.state is SampleState.ACTING
        calls = list(turns.started_calls), dict(turns.finished_calls)
        said = len(turns.ended), acting, list(turns.observations), *calls
        right = kept.turns, kept.acting, kept.observed, kept.started, kept.finished
        require(said == right, f"{sample.ordinal} was resumed with the turns {said}, not {right}")

    def saved(self, step: int) -> None:
        """A checkpoint was written."""
        if self.guarding is not None:
            self.guarding.saved.add(step)

    def look(self) -> None:
        """Check all samples in flight."""
        in_flight = self.in_flight
        if in_flight is None:
            return
        self.looks += 1
        states, needed = Counter[SampleState](), Counter[SampleState]()
        waiting: set[int] = set()
        unfinished = False
        for sample in in_flight:
            state = sample.state
            states[state] += 1
            if sample.needed:
                needed[state] += 1
                unfinished = unfinished or sample.finish is None
                if state is WAITING:
                    waiting.add(sample.ordinal)
            self._look_at(sample)
        self._look_at_counts(in_flight, states, needed, waiting)
        if not unfinished:
            self._progressed_s = self._clock.now()
        stalled_s = self._clock.now() - self._progressed_s
        if stalled_s > self._patience_s:
            raise Violation(f"no sample got a token for {stalled_s:.1f} s")
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

    def check_end(self, sample_id: SampleId, length: int, finish: Finish | EpisodeLimit | None, limit: int) -> None:
        """Check the length and finish reason of a finished sample."""
        whole = self.completions.length(sample_id)
        require(length == min(whole, limit), f"{sample_id} ended with {length} of {min(whole, limit)} tokens")
        require(finish == ("stop" if whole <= limit else "length"), f"{sample_id} ended as {finish}")

    # Agents.

    def requested(self, request: GenerateRequest) -> Draws:
        """A turn is requested: what it continues must be durable. Returns what the sample has drawn."""
        if request.sample_id.purpose != TRAIN or self.in_flight is None:
            return {}
        sample = self.in_flight.get(request.sample_id)
        if sample is None or sample.ordinal not in self.durable.samples:
            return {}
        current = request.attempt == sample.attempt and sample.state is SampleState.RUNNING
        if self.tail is not None and not current:  # sent before a restart or a return
            return {}
        kept = self.durable.samples[sample.ordinal]
        if request.prefix_ids or request.branch:  # possibly it was restarted, which is not durable yet
            context = kept.context(PROMPT)
            said = request.prompt_ids + request.prefix_ids
            require(not kept.acting and context == said, f"{sample.ordinal} continues what is not durable")
            base = 0 if kept.context_start is None else kept.context_start + count(request.prompt_ids)
            here = [(start - base, end - base) for start, end in kept.observed if start >= base]
            require(list(request.observations) == here, f"{sample.ordinal} has observations at {request.observations}")
            require(request.offset == base, f"{sample.ordinal} is continued at {request.offset}, not {base}")
        return self._draws.setdefault(sample.ordinal, {})

    @staticmethod
    def draws(drawn: Draws, request: GenerateRequest, context: TokenBuffer, start: int, end: int) -> None:
        """Tokens [start, end) after the prompt are drawn in the turn that begins after `context`."""
        first = count(request.prompt_ids)
        for at in range(start, end):
            known = drawn.setdefault((request.branch, first + at), context)
            require(
                known == context,
                f"{request.sample_id} draws position {first + at} of branch {request.branch} under two contexts",
            )

    def _ordinal(self, sample_id: SampleId) -> int | None:
        """None for evaluations and dropped samples."""
        sample = self.in_flight.get(sample_id) if self.in_flight and sample_id.purpose == TRAIN else None
        return sample.ordinal if sample else None

    def acts(self, episode: Episode) -> None:
        """An environment is asked: the episode must be durable."""
        ordinal = self._ordinal(episode.sample_id)
        if ordinal is None:
            return
        kept = self.durable.samples[ordinal]
        said = len(episode.turns), episode.finished, list(episode.started)
        right = kept.turns, kept.finished, kept.started
        require(kept.acting and said == right, f"{ordinal} acts with {said}, not {right}")
        require(episode.token_ids == kept.context(PROMPT), f"{ordinal} acts with tokens that are not durable")

    def executes(self, episode: Episode, turn: int, index: int, *, repeatable: bool) -> None:
        """A call is made."""
        ordinal = self._ordinal(episode.sample_id)
        if ordinal is None or repeatable:
            return
        require(index in self.durable.samples[ordinal].started, f"{ordinal} makes call {index} before it is durable")
        self._executed[ordinal, turn, index] += 1
        require(self._executed[ordinal, turn, index] == 1, f"{ordinal} makes call {index} of turn {turn} twice")

    @staticmethod
    def reuses(episode: Episode, right: Call, said: Call) -> None:
        require(said == right, f"{episode.sample_id} has the call {said}, not {right}")

    def gives_fault(self, episode: Episode) -> None:
        self.faults.add((episode.sample_id, len(episode.turns) - 1))

    def finished(self, opened: Collection[SampleId]) -> None:
        """The run finished: environments may keep only the state of samples in flight."""
        assert self.in_flight is not None
        left = [sample_id for sample_id in opened if self.in_flight.get(sample_id) is None]
        require(not left, f"the states of {left} are never forgotten")

    def check_episode(self, sample_id: SampleId, told: Told, most: int) -> Walked:
        """Check an episode against its model and environment."""
        assert self.episodes is not None
        try:
            walked = self.episodes.walk(sample_id, PROMPT, told, most)
        except WrongEpisode as error:
            raise Violation(str(error)) from error
        if told.end == "fault":
            require((sample_id, len(told.turns) - 1) in self.faults, f"{sample_id} has a fault that nobody gave")
        return walked

    def _look_at_episode(self, sample: Sample) -> None:
        turns = sample.turns
        ended = []
        for turn in turns.ended:
            answer = turn.observation
            ended.append(
                ToldTurn(
                    start=turn.start,
                    end=turn.end,
                    finish=turn.finish,
                    observation_end=turn.observation_end,
                    reward=answer.reward if answer else 0.0,
                    calls=answer.calls if answer else (),
                    answered=answer is not None,
                )
            )
        last = turns.ended[-1].observation if turns.ended else None
        told = Told(
            token_ids=bytes(sample.token_ids),
            logprobs=compact(bytes(sample.logprobs), turns.observations),
            versions=tuple(sample.versions),
            turns=tuple(ended),
            end=turns.episode_end,
            fault=last.reason if last else "",
        )
        walked = self.check_episode(sample.sample_id, told, self.spec.sampling.max_new_tokens)
        stages = {SampleState.ACTING: "acting", SampleState.FINISHED: "ended", SampleState.SCORED: "ended"}
        right = stages.get(sample.state, "generating"), sample.finish
        require((walked.stage, walked.finish) == right, f"{sample.ordinal} is {right}, not {walked}")
        segments = sample.turns.segments(count(PROMPT), sample.length)
        trained = [segment for segment in segments if segment.trained and segment.end > segment.start]
        require(
            trained == [segment for segment in walked.segments if segment.trained],
            f"{sample.ordinal} trains {trained}, not {walked.segments}",
        )

    # All samples.

    def _look_at(self, sample: Sample) -> None:
        before = self._seen.get(sample.ordinal)
        begun = 0
        if before is not None and before.sample is sample:
            same = before.state is sample.state and before.attempt == sample.attempt
            if same and before.length == len(sample.token_ids) // ITEM_BYTES:
                return
            require(sample.attempt >= before.attempt, f"sample {sample.ordinal} returned to an earlier attempt")
            kept = sample.length >= before.length and sample.version_starts[: len(before.made_by)] == before.made_by
            require(kept or self._may_restart, f"tokens of sample {sample.ordinal} were lost")
            begun = before.length if kept else 0
        repeats = sample.attempt < self._attempts.get(sample.sample_id, 0)
        require(not repeats, f"sample {sample.ordinal} repeats attempt {sample.attempt} of an earlier round")
        self._attempts[sample.sample_id] = sample.attempt
        if before is None or sample.length != before.length:
            self._progressed_s = self._clock.now()
        self._seen[sample.ordinal] = _Seen(sample, sample.length, sample.attempt, sample.state, sample.version_starts)
        require(
            len(sample.logprobs) == len(sample.token_ids),
            f"sample {sample.ordinal} has a different number of logprobs than tokens",
        )
        if self.episodes:
            self._look_at_episode(sample)
        else:
            self.check_tokens(
                sample.sample_id, bytes(sample.token_ids), bytes(sample.logprobs), sample.versions, start=begun
            )
        self._check_versions(sample)
        finished = sample.state in (SampleState.FINISHED, SampleState.SCORED)
        require(finished == (sample.finish is not None), f"sample {sample.ordinal} is {sample.state}: {sample.finish}")
        if finished and not self.episodes:
            self.check_end(sample.sample_id, sample.length, sample.finish, self.spec.sampling.max_new_tokens)
        scored = sample.state is SampleState.SCORED
        require(scored == (sample.reward is not None), f"sample {sample.ordinal} is {sample.state}: {sample.reward}")

    @property
    def _may_restart(self) -> bool:
        schedule = self.spec.schedule
        tainted = self.tail is not None and self.tail.was_tainted
        return tainted or schedule.unfinished == "restart" or schedule.on_lag_limit == "restart"

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

    @staticmethod
    def _look_at_counts(
        in_flight: InFlight, states: Counter[SampleState], needed: Counter[SampleState], waiting: set[int]
    ) -> None:
        """`waiting`: ordinals of needed samples."""
        counted = (in_flight.running, in_flight.scored, in_flight.acting, in_flight.unfinished)
        unfinished = needed[RUNNING] + needed[WAITING] + needed[ACTING]
        right = (states[RUNNING], states[SCORED], needed[ACTING], unfinished)
        if counted != right:
            raise Violation(f"(running, scored, acting, unfinished) are counted as {counted}, expected {right}")
        if in_flight.waiting.keys() != waiting:
            raise Violation(f"samples {[*in_flight.waiting]} wait, expected {waiting}")
        held = sum(len(in_flight.held(lease_id)) for lease_id in in_flight.leases)
        if held != right[0]:
            raise Violation(f"workers hold {held} samples, expected {right[0]}")

    def _look_at_lease(self, in_flight: InFlight, lease_id: str) -> None:
        fleet, held = self._fleet, in_flight.held(lease_id)
        assert fleet is not None, "a lease before a fleet"
        if lease_id in fleet:
            self._gone.pop(lease_id, None)
        else:
            gone_s = self._clock.now() - self._gone.setdefault(lease_id, self._clock.now())
            require(gone_s <= SLOW_S, f"{lease_id} ended {gone_s:.1f} s ago and still holds {len(held)} samples")
        if len(held) > self._most_held:
            raise Violation(f"{lease_id} holds {len(held)} samples, limit {self._most_held}")
        for sample in held.values():
            if sample.state is not RUNNING or sample.lease_id != lease_id:
                raise Violation(f"{lease_id} has sample {sample.ordinal}: {sample.state} at {sample.lease_id}")
