"""A SmolLM2 run in fast mode that generates every batch twice from the same weights: on the reserved side, and on
workers that are evicted repeatedly. It trains on the former and compares the latter sample by sample."""

from __future__ import annotations

import asyncio
import io
import math
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.saboteur import Cue, Eviction, Saboteur
from benchmarks.subjects import check_counts
from tidemill.config.load import RECIPES, merge
from tidemill.config.schema import RunSpec
from tidemill.controller.collector import collect_samples
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import TRAIN, InFlight, SamplingPlan, plan_groups, sampling_params
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.core.protocols import Clock, Trainer
from tidemill.core.records import (
    Completion,
    Group,
    LogprobBuffer,
    PolicyVersion,
    Record,
    SampleId,
    StepMetrics,
    Trajectory,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.jobs.train import train
from tidemill.models.attention import hidden_states, vocabulary_logits
from tidemill.models.token_tree import build_tree
from tidemill.models.tree_attention import TreePlan
from tidemill.rollout.sampling import gumbel, noise_key
from tidemill.runtime.backend import RuntimeBackend, scorers
from tidemill.runtime.local import InProcessHost, in_process
from tidemill.telemetry.recorder import NullTelemetry, Recorder
from tidemill.telemetry.run_dir import RunDirectory

RECIPE = RECIPES / "smollm2-addition.toml"
NEW_TOKENS, WORKERS, STEPS_PER_TICK = 20, 2, 3
CUES: tuple[Cue, ...] = ("mid_tick", "noticed", "mid_tick", "mid_tick")
CHANGES: dict[str, Any] = {
    # The model continues after its answer with further problems, so samples are long enough to move.
    "sampling": {"max_new_tokens": NEW_TOKENS, "stop": ["no such string"]},
    "scoring": {"rewards": [{"kind": "python", "function": "benchmarks.twin_batches:first_line_right"}]},
    "engine": {"slots": 16},
    "trainer": {"threads": 1},
    "eval": {"every_steps": 0, "prompts": 1},
    "checkpoint": {"every_steps": 0},
    "fleet": {"drain_margin_s": 0.3},
    "pool": {"kind": "static", "workers": WORKERS},
}


def first_line_right(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """The run's reward: only the first line counts."""
    return float(completion.split("\n", maxsplit=1)[0].strip() == answer.strip())


class Difference(Record):
    """Where two versions of a sample diverge."""

    step: int
    prompt_id: str
    index: int
    position: int  # completion token
    attempts_began_at: list[int]  # completion positions; more than one means that the sample migrated
    migrated_before: bool
    gap: float  # between the two highest noisy scores there, by one forward pass over prompt and shared completion
    between_the_two: bool  # the two chosen tokens are those two


class StepComparison(Record):
    """One batch, twice."""

    step: int
    version: int
    samples: int
    migrated: int
    identical: int
    tokens: int  # of the quiet batch
    tokens_compared: int  # up to and including each sample's first difference
    largest_logprob_difference: float  # over equal tokens
    evictions: dict[str, int]
    tokens_lost: int
    lost_more_than_a_tick: int  # evictions
    lost_after_notice: int  # tokens


@dataclass
class Twin:
    """Implements `core.protocols.Trainer` around the run's trainer: compares before the commit, with the weights that
    generated the batch."""

    inner: Trainer
    backend: RuntimeBackend
    spec: RunSpec
    clock: Clock
    groups: list[Group] = field(default_factory=list)
    steps: list[StepComparison] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def version(self) -> PolicyVersion:
        return self.inner.version

    async def accumulate(self, group: Group) -> None:
        self.groups.append(group)
        await self.inner.accumulate(group)

    async def commit(self, step: int) -> StepMetrics:
        quiet = {one.sample_id: one for group in self.groups for one in group.trajectories}
        self.groups = []
        saboteur, disturbed = await self._disturbed(step)
        self._compare(step, quiet, disturbed, saboteur)
        return await self.inner.commit(step)

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        return await self.inner.logprobs(completions)

    async def _disturbed(self, step: int) -> tuple[Saboteur, dict[SampleId, Trajectory]]:
        """The batch, generated only by workers that are evicted."""
        backend, spec, telemetry = self.backend, self.spec, NullTelemetry()
        assert backend.host is not None
        saboteur = Saboteur(
            backend.host,
            clock=self.clock,
            workers=WORKERS,
            steps_per_tick=STEPS_PER_TICK,
            grace_s=0.6,
            cues=CUES,
            seed=step,
        )
        sampling = sampling_params(spec, backend.codec, backend.task.default_stop_strings)
        prompts = backend.task.source.train_batch(step)
        plan = SamplingPlan(purpose=TRAIN, run_seed=spec.run.seed, group_size=spec.batch.group_size, sampling=sampling)
        from_version = self.version.number
        groups = plan_groups(prompts, first_position=(step - 1) * len(prompts), from_version=from_version)
        ledger, scoring = Ledger(None), scorers(spec, backend.task)
        fleet = Fleet(
            None,
            slots=spec.engine.slots,
            clock=self.clock,
            telemetry=telemetry,
            config=spec.fleet,
            provider=saboteur,
            host=saboteur,
            publisher=backend.publisher,
            heartbeat_timeout_s=math.inf,
        )
        try:
            async with fleet:
                await fleet.publishing.publish(self.version)
                rollout = RolloutContext(
                    fleet=fleet,
                    ledger=ledger,
                    scorer=scoring.training,
                    codec=backend.codec,
                    telemetry=telemetry,
                    clock=self.clock,
                    stop=asyncio.Event(),
                )
                in_flight = InFlight(plan, version_number=from_version)
                await ledger.open(in_flight, groups, [prompt for _, prompt in prompts])
                async with collect_samples(in_flight, rollout) as samples:
                    made = {one.sample_id: one async for one in samples}
        finally:
            await saboteur.close()
            await scoring.close()
        return saboteur, made

    def _compare(
        self, step: int, quiet: dict[SampleId, Trajectory], disturbed: dict[SampleId, Trajectory], saboteur: Saboteur
    ) -> None:
        host = self.backend.host
        assert isinstance(host, InProcessHost)
        compared, largest, found = 0, 0.0, list[Difference]()
        for sample_id, one in quiet.items():
            ours, theirs = (unpack_tokens(t.completion_ids) for t in (one, disturbed[sample_id]))
            said = [unpack_logprobs(t.rollout_logprobs) for t in (one, disturbed[sample_id])]
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            if at is None and len(ours) != len(theirs):
                raise ValueError(f"{sample_id}: equal tokens, but different ends")
            same = len(ours) if at is None else at
            compared += same + (at is not None)
            largest = max([largest, *(abs(a - b) for a, b in zip(said[0][:same], said[1][:same], strict=True))])
            if at is not None:
                chosen = {ours[at], theirs[at]}
                found.append(self._difference(step, one, at, chosen, saboteur.attempts[sample_id], host.bundle.model))
        self.differences += found
        attempts = [saboteur.attempts[sample_id] for sample_id in quiet]
        self.steps.append(
            StepComparison(
                step=step,
                version=self.version.number,
                samples=len(quiet),
                migrated=sum(any(began > 0 for began in one) for one in attempts),
                identical=len(quiet) - len(found),
                tokens=sum(one.completion_length for one in quiet.values()),
                tokens_compared=compared,
                largest_logprob_difference=largest,
                evictions=saboteur.counts,
                **losses(saboteur.evictions),
            )
        )
        print(self.steps[-1], *found, sep="\n", flush=True)

    def _difference(
        self, step: int, one: Trajectory, at: int, chosen: set[int], attempts: list[int], model: PreTrainedModel
    ) -> Difference:
        best, gap = _two_best(model, one, at)
        return Difference(
            step=step,
            prompt_id=one.sample_id.prompt_id,
            index=one.sample_id.index,
            position=at,
            attempts_began_at=attempts,
            migrated_before=any(0 < began <= at for began in attempts),
            gap=gap,
            between_the_two=chosen == best,
        )


@torch.inference_mode()
def _two_best(model: PreTrainedModel, one: Trajectory, at: int) -> tuple[set[int], float]:
    """The tokens with the two highest noisy scores at completion position `at`, and their distance."""
    known = unpack_tokens(one.token_ids)[: one.prompt_length + at]
    tree = build_tree([torch.tensor(known, dtype=torch.int32).numpy()])
    tokens, positions = torch.from_numpy(tree.token_ids), torch.from_numpy(tree.depths)
    logits = vocabulary_logits(model, hidden_states(model, tokens, positions, TreePlan(tree, tokens.device))[-1:])
    scores = logits + gumbel([noise_key(one.sample_id.seed(), len(known) - 1)], logits.shape[1], logits.device)
    best = scores[0].topk(2)
    return set(best.indices.tolist()), float(best.values[0] - best.values[1])


def losses(evictions: Sequence[Eviction]) -> dict[str, int]:
    """Lost tokens, and the allowed numbers."""
    return {
        "tokens_lost": sum(one.tokens_lost for one in evictions),
        "lost_more_than_a_tick": sum(one.tokens_lost > one.tick_tokens for one in evictions),
        "lost_after_notice": sum(one.tokens_lost for one in evictions if one.cue == "noticed"),
    }


def twin_run(directory: Path, *, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train with a comparison in each step; return the figures.

    Raises:
        RuntimeError: see `check_steps`.
    """
    here = {"run": {"dir": directory, "seed": seed}, "trainer": {"steps": steps}}
    spec = RunSpec.model_validate(merge(merge(tomllib.loads(RECIPE.read_text()), CHANGES), here))
    twins: list[Twin] = []

    @asynccontextmanager
    async def open_backend(
        spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
    ) -> AsyncIterator[RuntimeBackend]:
        async with in_process(spec, run, recorder, clock) as backend:
            twins.append(Twin(backend.trainer, backend, spec, clock))
            yield replace(backend, trainer=twins[0], provider=None, host=None, publisher=None)

    summary = train(spec, telemetry_stream=io.StringIO(), open_backend=open_backend)
    check_steps(twins[0].steps)
    return _figures(twins[0], summary)


def check_steps(steps: Sequence[StepComparison]) -> None:
    """Raises RuntimeError: no machine was evicted in a step, or no sample of it moved."""
    for one in steps:
        check_counts(f"step {one.step}", evictions=sum(one.evictions.values()), migrated_samples=one.migrated)


def _figures(twin: Twin, summary: dict[str, Any]) -> dict[str, Any]:
    steps, evictions = twin.steps, Counter[str]()
    for step in steps:
        evictions.update(step.evictions)
    samples, identical = sum(step.samples for step in steps), sum(step.identical for step in steps)
    return {
        "steps": len(steps),
        "samples": samples,
        "identical": identical,
        "identical_share": identical / samples,
        "migrated": sum(step.migrated for step in steps),
        "tokens": sum(step.tokens for step in steps),
        "evictions": dict(evictions),
        "tokens_lost": sum(step.tokens_lost for step in steps),
        "lost_more_than_a_tick": sum(step.lost_more_than_a_tick for step in steps),
        "lost_after_notice": sum(step.lost_after_notice for step in steps),
        "largest_logprob_difference": max(step.largest_logprob_difference for step in steps),
        "optimizer_steps": summary["optimizer_steps"],
        "differences": [{name: getattr(one, name) for name in one.__struct_fields__} for one in twin.differences],
        "by_step": [{name: getattr(one, name) for name in one.__struct_fields__} for one in steps],
    }
