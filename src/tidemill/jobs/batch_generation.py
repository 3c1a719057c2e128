"""Generate and score completions of many prompts outside of a run, and write them as data files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tidemill.agents.demonstrations import agent_demonstrations
from tidemill.agents.run_agent import agent_limits, agent_prompts, open_environments
from tidemill.config.schema import RunSpec
from tidemill.controller.entries import Evaluated
from tidemill.controller.evaluation import draw, eval_result, evaluate
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import sampling_params
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.core.errors import UserError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion, Prompt, Record, SamplingParams, Trajectory, decode_json, unpack_tokens
from tidemill.data.build_task import configured_task
from tidemill.data.prompts import Task
from tidemill.data.rows import ScoredCompletion, demonstration_row, pair_rows
from tidemill.jobs.sandbox_check import check_needed_sandbox
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.loading import context_limit
from tidemill.models.model_source import ModelSource
from tidemill.models.weights_digest import weights_digest
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import scorers
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import ModelBundle, engine_context, load_model_bundle
from tidemill.telemetry.jsonl import JsonlWriter, write_atomically
from tidemill.telemetry.manifest import versions
from tidemill.telemetry.metrics import HELD_OUT_NAME
from tidemill.telemetry.recorder import NullTelemetry

Progress = Callable[[str], None]


class CachedCompletions(Record):
    """A line of the cache file: all completions of some prompts."""

    key: str  # digest of the prompts, the model and the sampling parameters
    duration_s: float
    samples: tuple[Trajectory, ...]


class CompletionCache:
    """Completions stored in a file, or nothing without a path. Raises UserError: the file cannot be opened."""

    def __init__(self, path: Path | None) -> None:
        self._writer = JsonlWriter(path) if path else None  # cuts a torn last line
        self.known: dict[str, CachedCompletions] = {}
        for line in path.read_bytes().splitlines() if path else ():
            with suppress(msgspec.DecodeError):  # the prompts of an unreadable line are generated again
                cached = decode_json(line, CachedCompletions)
                self.known[cached.key] = cached

    def add(self, completions: CachedCompletions) -> None:
        """Raises UserError: the disk is full."""
        self.known[completions.key] = completions
        if self._writer:
            self._writer.write(completions)

    def close(self) -> None:
        if self._writer:
            self._writer.close()


SAMPLES_AT_ONCE = 512
"""Samples generated and cached together; an interruption loses at most this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGenerator:
    """Generates completions with one model. They depend only on its weights, the prompts and the run's seed."""

    version: PolicyVersion
    rollout: RolloutContext  # with the evaluation's scorer
    sampling: SamplingParams
    seed: int
    cache: CompletionCache

    async def greedily(self, prompts: Sequence[Prompt], *, name: str = HELD_OUT_NAME) -> Evaluated:
        """One greedy completion of each prompt of a set; raises like `controller.evaluation.evaluate`."""

        async def generate(chunk: Sequence[Prompt]) -> Sequence[Trajectory]:
            evaluation = await evaluate(
                step=0,
                version=self.version,
                prompts=chunk,
                rollout=self.rollout,
                scorer=self.rollout.scorer,
                sampling=self.sampling,
                seed=self.seed,
                name=name,
            )
            return evaluation.samples

        samples, duration_s = await self._completions(prompts, SAMPLES_AT_ONCE, [name], generate)
        return Evaluated(eval_result(name, 0, self.version, samples, duration_s), tuple(samples))

    async def draw(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        purpose: str,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[tuple[Trajectory, ...]]:
        """`samples_per_prompt` samples of each prompt, in the order of the prompts; raises like `collect_samples`.

        Args:
            purpose: part of the sample ids, which seed the random numbers.
            on_progress: called after each chunk with the number of prompts that are finished.
        """

        async def generate(chunk: Sequence[Prompt]) -> Sequence[Trajectory]:
            drawn = await draw(
                version=self.version,
                prompts=chunk,
                rollout=self.rollout,
                sampling=self.sampling,
                seed=self.seed,
                purpose=purpose,
                samples_per_prompt=samples_per_prompt,
            )
            return [sample for group in drawn for sample in group]

        at_once, settings = max(1, SAMPLES_AT_ONCE // samples_per_prompt), [purpose, samples_per_prompt]
        samples, _ = await self._completions(prompts, at_once, settings, generate, on_progress)
        return [
            tuple(samples[first : first + samples_per_prompt]) for first in range(0, len(samples), samples_per_prompt)
        ]

    async def _completions(
        self,
        prompts: Sequence[Prompt],
        at_once: int,
        settings: Sequence[object],
        generate: Callable[[Sequence[Prompt]], Awaitable[Sequence[Trajectory]]],
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[list[Trajectory], float]:
        """All samples, from the cache or generated `at_once` prompts at a time, and the seconds that they took.

        Args:
            settings: what decides the completions of a prompt beside the model, the seed and the sampling parameters.
        """
        samples, duration_s = list[Trajectory](), 0.0
        for first in range(0, len(prompts) or 1, at_once):  # also without prompts, which `generate` reports
            chunk = prompts[first : first + at_once]
            decisive = [self.version.digest, self.seed, *settings, self.sampling]
            identity = msgspec.json.encode([decisive, [prompt.prompt_id for prompt in chunk]])
            key = hashlib.blake2b(identity, digest_size=16).hexdigest()
            completions = self.cache.known.get(key)
            if completions is None:
                start_s = self.rollout.clock.now()
                new = tuple(await generate(chunk))
                completions = CachedCompletions(key=key, duration_s=self.rollout.clock.now() - start_s, samples=new)
                self.cache.add(completions)
            samples += completions.samples
            duration_s += completions.duration_s
            on_progress(min(first + at_once, len(prompts)))
        return samples, duration_s


@asynccontextmanager
async def batch_generator(
    bundle: ModelBundle, task: Task, progress: Progress, *, cache_file: Path | None = None
) -> AsyncIterator[BatchGenerator]:
    """Start an engine and scorers for a model, and stop them when the block ends.

    Args:
        cache_file: completions that an interrupted call with the same configuration stored; None stores nothing.

    Raises:
        UserError: a reward cannot be built.
    """
    spec, clock, telemetry = bundle.spec, LoopClock(), NullTelemetry(progress)
    check_needed_sandbox(spec)
    version = PolicyVersion(number=0, digest=weights_digest(bundle.model))
    async with AsyncExitStack() as stack:
        cache = stack.enter_context(closing(CompletionCache(cache_file)))
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        engine = bundle.engine(version, prompt_tokens=task.longest_prompt_tokens)
        worker = EngineWorker(engine, compute, clock=clock, tick_s=spec.engine.tick_s)
        stack.push_async_callback(worker.close)
        scoring = scorers(spec, task, compute, warn=progress)
        stack.push_async_callback(scoring.close)
        fleet = Fleet(worker, slots=spec.engine.slots, clock=clock, telemetry=telemetry)
        await stack.enter_async_context(fleet)
        environments = await stack.enter_async_context(
            open_environments(spec, bundle.codec, task, run_id=version.digest[:12], report=progress)
        )
        context = engine_context(spec, limit=context_limit(bundle.model), prompt_tokens=task.longest_prompt_tokens)
        rollout = RolloutContext(
            fleet=fleet,
            ledger=Ledger(None),
            scorer=scoring.held_out,
            codec=bundle.codec,
            telemetry=telemetry,
            clock=clock,
            stop=asyncio.Event(),
            phase="evaluation",
            window_s=math.inf,
            environments=environments,
            agent=agent_limits(spec, context),
        )
        sampling = sampling_params(spec, bundle.codec, task.default_stop_strings)
        limit = spec.eval.max_new_tokens or sampling.max_new_tokens
        yield BatchGenerator(
            version=version,
            rollout=rollout,
            sampling=msgspec.structs.replace(sampling, max_new_tokens=limit),
            seed=spec.run.seed,
            cache=cache,
        )


PAIRS = "pairs"
"""Purpose of the samples that preference pairs are made of."""
Split: TypeAlias = Literal["train", "held_out"]


def make_demonstrations(
    spec: RunSpec, path: Path, *, prompts: int, progress: Progress, split: Split = "train"
) -> dict[str, Any]:
    """Write the task's prompts with their answers, or an agent's episodes with its environment's teacher, as JSON
    lines, and a provenance file next to it.

    Args:
        prompts: maximum number; training prompts are taken in the order of the run's seed.
        split: "held_out" for the file that `data.held_out_path` names.

    Returns:
        The provenance, as written to `provenance_path(path)`.

    Raises:
        UserError: the file exists, the task cannot be built or has no answers, or the teacher's episodes fail.
    """
    _refuse_existing(path)
    check_memory(spec, "load", note=progress)  # a built-in model may have to be built
    codec = load_codec(resolve(spec.model, progress=progress))
    agent = agent_prompts(spec, codec)
    task = configured_task(spec, codec=codec, agent=agent)
    chosen = prompts_of(task, split, prompts)
    if agent is not None:
        rows = agent_demonstrations(agent, chosen, chat_template=spec.model.chat_template, report=progress)
    else:
        ending = next(iter(spec.sampling.stop or task.default_stop_strings), "")
        answered = [prompt for prompt in chosen if prompt.answer and prompt.answer.strip()]
        rows = [demonstration_row(prompt, ending=ending) for prompt in answered or chosen]
    left_out = {"left_out": len(chosen) - len(rows)} if len(rows) < len(chosen) else {}
    return _write_rows(path, rows, {"kind": "demonstrations", "side": split, **left_out, **_origin(spec, task)})


def make_pairs(
    spec: RunSpec,
    path: Path,
    *,
    prompts: int,
    samples_per_prompt: int,
    pairs_per_prompt: int,
    progress: Progress,
    split: Split = "train",
    model: ModelSource | None = None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Sample completions of the task's prompts and write preference pairs of right and wrong ones as JSON lines.

    The rows depend only on the configuration, its seed and the model's weights. Prompts that are always or never
    answered correctly give no pair; they are counted.

    Args:
        prompts, split: as for `make_demonstrations`.
        answers: a file that stores finished completions, so that an interrupted call can be resumed.

    Returns:
        The provenance, as written to `provenance_path(path)`.

    Raises:
        UserError: the file exists, the task or the model cannot be loaded, the reward is graded, or no prompt gives a
            pair.
    """
    _refuse_existing(path)
    # The completion limit of training applies, so that samples are as long as in training.
    drawing = spec.model_copy(update={"eval": spec.eval.model_copy(update={"max_new_tokens": 0})})
    check_memory(drawing, "eval", folder=model.folder if model else None, note=progress)
    bundle = load_model_bundle(drawing, progress=progress, model=model)
    task = bundle.task()
    asked = prompts_of(task, split, prompts)

    async def draw() -> tuple[list[tuple[Trajectory, ...]], str]:
        async with batch_generator(bundle, task, lambda _: None, cache_file=answers) as generator:
            drawn = await generator.draw(
                asked,
                samples_per_prompt=samples_per_prompt,
                purpose=PAIRS,
                on_progress=lambda done: progress(f"{done} of {len(asked)} prompts: {samples_per_prompt} samples each"),
            )
            return drawn, generator.version.digest

    drawn, digest = asyncio.run(draw())
    rewards = [sample.reward for samples in drawn for sample in samples]
    valid = [reward for reward in rewards if reward is not None and reward.valid]
    # A reward tells right from wrong by its kind, or because every value is 0 or 1.
    if not valid or any(reward.correct is None and reward.value not in (0.0, 1.0) for reward in valid):
        raise UserError(
            "pairs need right and wrong answers, but this reward is graded or gave no valid value",
            where="scoring.rewards",
            hint='use a reward that compares with the answer, such as "numeric", or set its correct_at',
        )
    # Decoded with the end token, because some samples end with it and others with a stop string.
    completions = [
        [
            ScoredCompletion(
                bundle.codec.decode_whole(unpack_tokens(sample.completion_ids)),
                sample.reward.value == 1.0 if sample.reward.correct is None else sample.reward.correct,
                not sample.truncated,
            )
            for sample in samples
            if sample.reward is not None and sample.reward.valid  # else it is neither right nor wrong
        ]
        for samples in drawn
    ]
    rows = [
        row
        for prompt, samples in zip(asked, completions, strict=True)
        for row in pair_rows(prompt, samples, most=pairs_per_prompt)
    ]
    right = [sum(sample.right for sample in samples) for samples in completions]
    if not rows:
        raise UserError(
            f"none of {len(asked)} prompts has both right and wrong answers in {samples_per_prompt} samples "
            f"({sum(map(bool, right))} have any right answer)",
            where="task",
            hint="draw more samples of each, raise sampling.temperature, or choose an easier or harder task",
        )
    return _write_rows(
        path,
        rows,
        {
            "kind": "pairs",
            "side": split,
            **_origin(bundle.spec, task),
            "weights_digest": digest,
            "samples_per_prompt": samples_per_prompt,
            "pairs_per_prompt": pairs_per_prompt,
            "prompts": len(asked),
            "prompts_never_right": right.count(0),
            "prompts_always_right": right.count(samples_per_prompt),
            "samples_right": sum(right),
            "samples_invalid": len(asked) * samples_per_prompt - sum(map(len, completions)),
        },
    )


def prompts_of(task: Task, split: Split, limit: int) -> list[Prompt]:
    """The first distinct prompts of one split of the task; the splits have no prompt in common."""
    if split == "held_out":
        return list(task.source.held_out(limit))
    found: dict[str, Prompt] = {}
    wanted = min(limit, task.train_size)
    for step in counting(1):
        for _, prompt in task.source.train_batch(step):
            found.setdefault(prompt.prompt_id, prompt)
        if len(found) >= wanted:
            break
    return list(found.values())[:wanted]


def provenance_path(path: Path) -> Path:
    """`pairs.jsonl` has `pairs.provenance.json`."""
    return path.with_suffix(".provenance.json")


def _origin(spec: RunSpec, task: Task) -> dict[str, Any]:
    return {
        "task": task.description,
        "task_digest": task.digest,
        "model": spec.model.source,
        "seed": spec.run.seed,
        "config": spec.model_dump(mode="json"),
        "versions": versions(),
    }


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError("the file already exists", where=str(path), hint="name another, or delete it")


def _write_rows(path: Path, rows: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> dict[str, Any]:
    """Write the provenance first, so that rows never exist without it; each file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    provenance = {"rows": len(rows), **provenance}
    write_atomically(provenance_path(path), json.dumps(provenance, indent=2, ensure_ascii=False).encode() + b"\n")
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return provenance
