"""The samples in flight of one purpose (training, or one evaluation), indexed by group, state and lease."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.config.schema import RunSpec
from tidemill.controller.samples import Sample, SampleState, Verdict
from tidemill.controller.turns import AgentLimits
from tidemill.core.errors import UserError
from tidemill.core.protocols import Codec
from tidemill.core.records import (
    ITEM_BYTES,
    GenerateRequest,
    Observation,
    Prompt,
    Record,
    Reward,
    SampleId,
    SamplingParams,
    TokenDelta,
)

TRAIN = "train"
LOCAL = "local"
"""Lease of the trainer's own engine."""

FATAL: frozenset[Verdict] = frozenset({"malformed", "wrong_version", "gap"})
"""Verdicts after which no later delta of the same attempt can be applied."""


class SamplingPlan(Record):
    """Settings shared by all groups of one purpose; compared on resume."""

    purpose: str
    run_seed: int
    group_size: int
    sampling: SamplingParams
    exact_version: bool = True  # the newest version generates every token
    agent: AgentLimits | None = None  # None: a sample is one completion


class PlannedGroup(Record):
    """One prompt and its index among the groups of training, or of one evaluation."""

    position: int
    place: int  # of its prompt among those of the source; with tail batching it differs from the position
    epoch: int
    prompt_id: str
    prompt_digest: str  # of its token ids
    from_version: int  # newest version when the group was started
    restarts: int = 0  # its samples were started before, in earlier rounds


def sampling_params(spec: RunSpec, codec: Codec, stop_strings: tuple[str, ...]) -> SamplingParams:
    """Sampling of training completions; the task's stop strings apply unless the user gave some."""
    sampling = spec.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=codec.stop_token_ids,
        stop_strings=sampling.stop or stop_strings,
    )


def plan_groups(
    prompts: Sequence[tuple[int, Prompt]],
    *,
    first_position: int,
    from_version: int,
    places: Sequence[int] | None = None,
    restarts: Sequence[int] | None = None,
) -> tuple[PlannedGroup, ...]:
    """Groups of (epoch, prompt) pairs, at consecutive positions; the prompts' places are equal to these by default."""
    return tuple(
        PlannedGroup(
            position=first_position + index,
            place=first_position + index if places is None else places[index],
            epoch=epoch,
            prompt_id=prompt.prompt_id,
            prompt_digest=hashlib.blake2b(prompt.token_ids, digest_size=16).hexdigest(),
            from_version=from_version,
            restarts=0 if restarts is None else restarts[index],
        )
        for index, (epoch, prompt) in enumerate(prompts)
    )


@dataclass(slots=True)
class StepCounters:
    """Counts since the last logged step."""

    tokens_accepted: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    tokens_recomputed: int = 0  # completion tokens sent as the prefix of an assignment
    tokens_discarded: int = 0  # of restarted and dropped samples
    samples_restarted: int = 0
    groups_dropped: int = 0  # because of the lag limit
    groups_redrawn: int = 0  # replaced by dynamic sampling
    groups_returned: int = 0  # whose prompts a later round starts again
    turns_answered: int = 0  # by environments
    answer_s: float = 0.0  # sum of the times from the end of a turn to its answer
    ignored: Counter[Verdict] = field(default_factory=Counter)


class InFlight:
    """The open samples of one purpose.

    Versions from a group's `from_version` to `newest_version` may generate its samples; at lag 0 and in an evaluation
    these are equal. The digest may differ within a sample, because a version is recomputed after a resume.
    """

    def __init__(self, plan: SamplingPlan, *, version_number: int) -> None:
        self.plan, self.newest_version = plan, version_number
        self.groups: dict[int, PlannedGroup] = {}  # by position, ascending
        self.samples: dict[int, Sample] = {}  # by ordinal, ascending
        self.counters = StepCounters()
        self.order: Mapping[int, int] = {}  # place of samples among those that are assigned, by ordinal; others first
        self._attempts: dict[SampleId, int] = {}  # of samples that a round returned
        self._by_id: dict[SampleId, Sample] = {}
        self._invalid_leases: dict[str, Verdict] = {}
        self._rebuild_index()

    def _rebuild_index(self) -> None:
        self._states = Counter(sample.state for sample in self)
        self._aside = {sample.ordinal: sample for sample in self if not sample.needed}
        # Unordered.
        self.waiting = {each.ordinal: each for each in self if each.state is SampleState.WAITING and each.needed}
        self._newly_waiting = list(self.waiting)
        self._opened = list[int]()  # ordinals of samples whose environments act first, until they are asked for
        self._held: defaultdict[str, dict[int, Sample]] = defaultdict(dict)
        self._oldest: dict[int, int | None] = {}  # cache of `oldest_version`, by position
        for sample in self:
            if sample.state is SampleState.RUNNING:
                self._held[sample.lease_id][sample.ordinal] = sample

    # Groups.

    def open(self, groups: Iterable[PlannedGroup], prompts: Iterable[Prompt]) -> None:
        """Start groups, each with its prompt.

        Raises:
            UserError: a prompt is already open in the same epoch, so that sample ids would not be unique.
        """
        size, opens = self.plan.group_size, self.plan.agent is not None and self.plan.agent.opens
        for group, prompt in zip(groups, prompts, strict=True):
            self.groups[group.position] = group
            for index in range(size):
                sample_id = SampleId(
                    run_seed=self.plan.run_seed,
                    purpose=self.plan.purpose,
                    prompt_id=group.prompt_id,
                    epoch=group.epoch,
                    index=index,
                )
                if sample_id in self._by_id:
                    raise UserError(
                        f"prompt {group.prompt_id} occurs twice among the prompts in flight ({self.plan.purpose})",
                        where="task",
                        hint="remove duplicate prompts from the data",
                    )
                sample = Sample(
                    sample_id=sample_id,
                    ordinal=group.position * size + index,
                    prompt=prompt,
                    from_version=group.from_version,
                    opens=opens,
                    state=SampleState.ACTING if opens else SampleState.WAITING,
                )
                sample.attempt = self._attempts.pop(sample_id, 0)  # deltas of earlier attempts are stale
                sample.restarts = group.restarts
                self._add(sample)

    def open_alone(self, sample_id: SampleId, prompt: Prompt, sampling: SamplingParams, *, position: int) -> Sample:
        """Start a group of one sample with its own sampling parameters; its id must not be in flight."""
        self.groups[position] = PlannedGroup(
            position=position,
            place=position,
            epoch=sample_id.epoch,
            prompt_id=sample_id.prompt_id,
            prompt_digest="",
            from_version=self.newest_version,
        )
        sample = Sample(
            sample_id=sample_id,
            ordinal=position * self.plan.group_size,
            prompt=prompt,
            from_version=self.newest_version,
            sampling=sampling,
        )
        self._add(sample)
        return sample

    def _add(self, sample: Sample) -> None:
        self.samples[sample.ordinal] = self._by_id[sample.sample_id] = sample
        self._states[sample.state] += 1
        if sample.opens:
            self._opened.append(sample.ordinal)
            return
        self.waiting[sample.ordinal] = sample
        self._newly_waiting.append(sample.ordinal)

    def return_group(self, position: int) -> None:
        """Remove a group whose prompt will be started again."""
        for sample in self.close(position):
            self._attempts[sample.sample_id] = sample.attempt

    def set_aside(self, samples: Iterable[Sample]) -> None:
        """Generate no more tokens of these samples: their group is complete without them."""
        for sample in samples:
            sample.needed = False
            self._aside[sample.ordinal] = sample
            self.waiting.pop(sample.ordinal, None)

    def need(self, samples: Iterable[Sample]) -> None:
        """Generate samples that were set aside."""
        for sample in samples:
            sample.needed = True
            self._aside.pop(sample.ordinal, None)
            if sample.state is SampleState.WAITING:
                self.waiting[sample.ordinal] = sample
                self._newly_waiting.append(sample.ordinal)

    def close(self, position: int) -> list[Sample]:
        """Remove a group that was trained on or dropped; returns its samples."""
        del self.groups[position]
        self._oldest.pop(position, None)
        samples = self.group(position)
        for sample in samples:
            del self.samples[sample.ordinal], self._by_id[sample.sample_id]
            self._states[sample.state] -= 1
            self._aside.pop(sample.ordinal, None)
            self.waiting.pop(sample.ordinal, None)
            self._held[sample.lease_id].pop(sample.ordinal, None)
        return samples

    def restart(self, samples: Iterable[Sample]) -> None:
        """Discard the samples' tokens; the newest weights generate them from the start."""
        for sample in samples:
            before = sample.state
            sample.restart()
            self._invalidate_oldest(sample)
            self._update_index(before, sample)
            sample.lease_id = ""  # no worker holds a prefix of it
            if sample.opens:
                self._opened.append(sample.ordinal)

    def take_opened(self) -> list[Sample]:
        """Samples whose environments have to act first, started or restarted since the last call."""
        opened, self._opened = self._opened, []
        return [self.samples[ordinal] for ordinal in dict.fromkeys(opened) if ordinal in self.samples]

    def group(self, position: int) -> list[Sample]:
        """The samples of an open group, in order."""
        return [self.samples[ordinal] for ordinal in self._ordinals(position)]

    def oldest_version(self, position: int) -> int | None:
        """Minimum `Sample.oldest_version` of a group; None until one of its samples is assigned."""
        if position not in self._oldest:
            oldest, least = None, self.groups[position].from_version
            for ordinal in self._ordinals(position):
                version = self.samples[ordinal].oldest_version
                if version is not None and (oldest is None or version < oldest):
                    oldest = version
                    if oldest <= least:  # the minimum possible
                        break
            self._oldest[position] = oldest
        return self._oldest[position]

    def position(self, sample: Sample) -> int:
        """Of the sample's group."""
        return sample.ordinal // self.plan.group_size

    def _ordinals(self, position: int) -> range:
        size = self.plan.group_size
        return range(position * size, (position + 1) * size)

    # Samples.

    def __iter__(self) -> Iterator[Sample]:
        """In canonical order."""
        return iter(self.samples.values())

    def __getitem__(self, sample_id: SampleId) -> Sample:
        return self._by_id[sample_id]

    def get(self, sample_id: SampleId) -> Sample | None:
        return self._by_id.get(sample_id)

    def is_current(self, sample: Sample, attempt: int, state: SampleState) -> bool:
        """Whether a sample was neither restarted nor dropped meanwhile."""
        return sample.state is state and sample.attempt == attempt and self.samples.get(sample.ordinal) is sample

    @property
    def running(self) -> int:
        return self._states[SampleState.RUNNING]

    @property
    def acting(self) -> int:
        """Acting samples that are needed."""
        return self._states[SampleState.ACTING] - sum(one.state is SampleState.ACTING for one in self._aside.values())

    @property
    def unfinished(self) -> int:
        """Samples that are needed and not finished."""
        open_states = (SampleState.RUNNING, SampleState.ACTING, SampleState.WAITING)
        aside = sum(sample.state in open_states for sample in self._aside.values())
        return sum(self._states[state] for state in open_states) - aside

    @property
    def scored(self) -> int:
        return self._states[SampleState.SCORED]

    @property
    def all_scored(self) -> bool:
        return self.scored == len(self.samples)

    def in_state(self, state: SampleState) -> list[Sample]:
        """Samples in one state, in canonical order."""
        return [sample for sample in self if sample.state is state]

    def missing_logprobs(self, version: int) -> list[Sample]:
        """Samples with tokens of older versions whose logprobs under `version` are not stored."""
        return [sample for sample in self if version not in sample.published and sample.tokens_before(version)]

    def take_newly_waiting(self) -> list[Sample]:
        """Samples that became waiting since the last call and still are.

        After a resume, a sample whose version was not recomputed yet is held back until it was.
        """
        waiting = [self.waiting[ordinal] for ordinal in dict.fromkeys(self._newly_waiting) if ordinal in self.waiting]
        self._newly_waiting = [sample.ordinal for sample in waiting if sample.min_version > self.newest_version]
        return [sample for sample in waiting if sample.min_version <= self.newest_version]

    def take_counters(self) -> StepCounters:
        counters, self.counters = self.counters, StepCounters()
        return counters

    # Leases.

    @property
    def leases(self) -> list[str]:
        """Leases with running samples."""
        return [lease_id for lease_id, samples in self._held.items() if samples]

    def held(self, lease_id: str) -> Mapping[int, Sample]:
        """Samples running on a lease, by ordinal."""
        return self._held[lease_id]

    def assign(self, lease_id: str, samples: Iterable[Sample] | None = None) -> list[GenerateRequest]:
        """Assign waiting samples (default: all, in canonical order) to a lease; each continues from its tokens."""
        chosen = self.in_state(SampleState.WAITING) if samples is None else list(samples)
        for sample in chosen:
            kept = sample.turns.returning and sample.lease_id == lease_id  # its worker has its keys and values
            self.counters.tokens_recomputed += 0 if kept else sample.length
            sample.assign(lease_id, self.newest_version)
            self._update_index(SampleState.WAITING, sample)
        exact_version = self.newest_version if self.plan.exact_version else None
        return [sample.request(self._sampling(sample), exact_version, self.plan.agent) for sample in chosen]

    def _sampling(self, sample: Sample) -> SamplingParams:
        return sample.sampling or self.plan.sampling

    def revoke(self, lease_id: str) -> list[Sample]:
        """Return the samples of an ended lease to waiting, with their tokens; its later deltas are stale."""
        samples = list(self._held[lease_id].values())
        for sample in samples:
            sample.interrupt()
            self._update_index(SampleState.RUNNING, sample)
        return samples

    # Deltas and rewards.

    def apply(self, delta: TokenDelta, source: str = "") -> Sample | None:
        """Append a delta's tokens if its lease and attempt are current and `start` is the sample's length.

        Args:
            source: engine and worker that generated the tokens.

        Returns the sample, or None when the delta is ignored and counted. A `FATAL` verdict fails the attempt, and the
        sample waits for the next one.
        """
        sample = self._by_id.get(delta.sample_id)
        if sample is None:
            self.counters.ignored["unknown_sample"] += 1
            return None
        verdict = sample.check(delta, self.newest_version)
        if verdict == "applied":
            if not sample.version_starts:
                self._invalidate_oldest(sample)
            sample.extend(delta.token_ids, delta.logprobs, delta.version, source, delta.lease_id)
            self.counters.tokens_accepted += len(delta.token_ids) // ITEM_BYTES
            if delta.finish is not None:
                sample.end_attempt(delta.finish, delta.error, self._sampling(sample), self.plan.agent)
                self._update_index(SampleState.RUNNING, sample)
            return sample
        self.counters.ignored[verdict] += 1
        if verdict in FATAL:
            self._invalid_leases[sample.lease_id] = verdict
            sample.end_attempt("error", f"its engine sent an invalid delta ({verdict})", self.plan.sampling)
            self._update_index(SampleState.RUNNING, sample)
        return None

    def observe(self, sample: Sample, answer: Observation) -> None:
        """Append the environment's answer to an acting sample."""
        assert self.plan.agent is not None
        sample.observe(answer, self.plan.sampling, self.plan.agent)
        self._update_index(SampleState.ACTING, sample)

    def take_invalid_leases(self) -> dict[str, Verdict]:
        """Leases that sent a delta with a `FATAL` verdict since the last call, with that verdict."""
        leases, self._invalid_leases = self._invalid_leases, {}
        return leases

    def score(self, sample: Sample, reward: Reward) -> None:
        """Store a finished sample's reward."""
        before = sample.state
        sample.score(reward)
        self._update_index(before, sample)

    def finish_replay(self) -> None:
        """Return running samples to waiting and rebuild the index, after samples were restored from the journal."""
        for sample in self:
            if sample.state is SampleState.RUNNING:
                sample.move(SampleState.WAITING)
            sample.recovered = sample.generated
        self._rebuild_index()

    def _update_index(self, before: SampleState, sample: Sample) -> None:
        """Update the index after a sample left state `before`."""
        after = sample.state
        if after is before:
            return
        if not sample.version_starts:
            self._invalidate_oldest(sample)
        self._states[before] -= 1
        self._states[after] += 1
        if before is SampleState.WAITING:
            self.waiting.pop(sample.ordinal, None)
        elif before is SampleState.RUNNING:
            del self._held[sample.lease_id][sample.ordinal]
        if after is SampleState.WAITING:
            if sample.needed:
                self.waiting[sample.ordinal] = sample
                self._newly_waiting.append(sample.ordinal)
        elif after is SampleState.RUNNING:
            self._held[sample.lease_id][sample.ordinal] = sample

    def _invalidate_oldest(self, sample: Sample) -> None:
        self._oldest.pop(self.position(sample), None)
