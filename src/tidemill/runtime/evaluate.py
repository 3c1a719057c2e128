"""`tidemill eval` in one process: one model on the task's held-out prompts, or two on the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Scorer
from tidemill.core.records import Group, Prompt, Reward, Trajectory
from tidemill.models.catalog import asked_for_by
from tidemill.runtime.answering import answering
from tidemill.runtime.measured import Measured, comparison, figures
from tidemill.runtime.parts import Parts, load_parts
from tidemill.runtime.rewards import check_reward_models, model_scores

DRAWN = "eval:held_out:drawn"
"""Names the random numbers of the samples for pass@k."""

Progress = Callable[[str], None]
Scorers = Mapping[str, Scorer]
"""Judges beside the task's own, by the name their score is told under."""


def evaluate(
    spec: RunSpec,
    *,
    model_folder: Path | None = None,
    compare: Path | str | None = None,
    scorers: Scorers | None = None,
    progress: Progress = lambda _: None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Mean reward of a model's greedy completions of the task's held-out prompts and, where answers are right or wrong,
    accuracy and (if samples are asked for) pass@k; lengths, diversity, and every greedy completion.

    Args:
        model_folder: a model or checkpoint instead of the configured one.
        compare: another model (a folder, or a source as in the configuration) to be asked the same and compared with.
        scorers: whoever else judges the greedy completions; closed by whoever made them.
        answers: where answered prompts are kept meanwhile; the same call goes on from there after a stop.

    Raises:
        UserError: a fault of the input.
    """
    this = measure(spec, model=model_folder, scorers=scorers or {}, progress=progress, answers=answers)
    found = figures(this, ks=spec.eval.ks)
    if compare is not None:
        progress(f"now {compare}, on the same prompts")
        with asked_for_by("eval.compare_with"):
            other = measure(spec, model=compare, scorers=scorers or {}, progress=progress, answers=answers)
        found["compared_with"] = comparison(other, this)
    return found


def measure(
    spec: RunSpec, *, model: Path | str | None, scorers: Scorers, progress: Progress, answers: Path | None = None
) -> Measured:
    """Ask one model everything: the configured one, that of a folder, or another source."""
    if isinstance(model, str):
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"source": model, "revision": None})})
    folder = model if isinstance(model, Path) else None
    check_reward_models(spec, progress=progress, policy_folder=folder)
    parts = load_parts(spec, progress=progress, folder=folder)
    return asyncio.run(_measure(parts, str(folder or parts.spec.model.source), scorers, progress, answers))


async def _measure(parts: Parts, name: str, scorers: Scorers, progress: Progress, answers: Path | None) -> Measured:
    spec, task = parts.spec, parts.task()
    prompts = list(task.source.held_out())[: spec.eval.prompts]
    drawn = list[Group]()
    async with answering(parts, task, progress, kept_in=answers) as model:
        greedy = await model.greedily(prompts)
        if wanted := spec.eval.samples_per_prompt:
            drawn = await model.draw(prompts, samples_per_prompt=wanted, purpose=DRAWN)
        scores = {name: await _score(scorer, prompts, greedy.samples) for name, scorer in scorers.items()}
    scores |= model_scores(greedy.samples)
    return Measured(model=name, prompts=tuple(prompts), greedy=greedy, drawn=tuple(drawn), scores=scores)


async def _score(scorer: Scorer, prompts: list[Prompt], samples: tuple[Trajectory, ...]) -> tuple[Reward, ...]:
    # All at once: one that computes in batches then sees them together.
    asked = (scorer.score(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True))
    return tuple(await asyncio.gather(*asked))
