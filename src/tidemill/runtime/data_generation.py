"""Data files made from a task's prompts: demonstrations, and preference pairs from a model's own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import count as counting
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tidemill.config.schema import RunSpec
from tidemill.controller.evaluation import correct, right_or_wrong
from tidemill.core.errors import UserError
from tidemill.core.records import Group, Prompt, Trajectory, unpack_tokens
from tidemill.envs.text.build_task import build_task
from tidemill.envs.text.prompts import Task
from tidemill.envs.text.rows import ScoredCompletion, demonstration_row, pair_rows
from tidemill.models.catalog import resolve
from tidemill.models.codec import TextCodec, load_codec
from tidemill.runtime.batch_generation import batch_generator
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.manifest import versions

PURPOSE = "pairs"
"""Names the samples, and their random numbers."""
Progress = Callable[[str], None]
Side: TypeAlias = Literal["train", "held_out"]


def make_demonstrations(
    spec: RunSpec, path: Path, *, prompts: int, progress: Progress, side: Side = "train"
) -> dict[str, Any]:
    """Write the task's prompts with their answers as JSON lines, and where they come from beside them.

    Args:
        prompts: at most so many; training prompts in the order of the run's seed.
        side: "held_out" for what `data.held_out_path` names.

    Returns:
        The provenance, as it is written to `provenance_path(path)`.

    Raises:
        UserError: the file is there already, or the task cannot be had or has no answers.
    """
    _refuse_existing(path)
    codec = load_codec(resolve(spec.model, progress=progress))
    task = build_task(
        spec.task,
        codec=codec,
        batch_prompts=spec.batch.prompts,
        seed=spec.run.seed,
        chat_template=spec.model.chat_template,
    )
    ending = next(iter(spec.sampling.stop or task.default_stop_strings), "")
    rows = [demonstration_row(prompt, ending=ending) for prompt in prompts_of(task, side, prompts)]
    return _write(path, rows, {"kind": "demonstrations", "side": side, **_origin(spec, task)})


def make_pairs(
    spec: RunSpec,
    path: Path,
    *,
    prompts: int,
    samples_per_prompt: int,
    pairs_per_prompt: int,
    progress: Progress,
    side: Side = "train",
    model_folder: Path | None = None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Let the model answer the task's prompts, several times each, and write right answers against wrong ones.

    What it writes is a function of the configuration, its seed and the model's weights. Prompts that are always or
    never answered right give no pair, and are counted.

    Args:
        prompts, side: as for `make_demonstrations`.
        model_folder: a model or checkpoint instead of the configured one.
        answers: where answered prompts are kept meanwhile; the same call goes on from there after a stop.

    Returns:
        The provenance, as it is written to `provenance_path(path)`.

    Raises:
        UserError: the file is there already; the task or the model cannot be had; the reward is
            graded; no prompt gives a pair.
    """
    _refuse_existing(path)
    bundle = load_model_bundle(_for_drawing(spec), progress=progress, folder=model_folder)
    task = bundle.task()
    asked = prompts_of(task, side, prompts)
    groups, digest = asyncio.run(_draw(bundle, task, asked, samples_per_prompt, progress, answers))
    if right_or_wrong([sample for group in groups for sample in group.trajectories]) is None:
        raise UserError(
            "pairs are made of right and wrong answers, and this reward is graded or gave no valid value",
            where="scoring.rewards",
            hint='use a reward that is 1 for a right answer and 0 for a wrong one, such as "numeric"',
        )
    judged = [[_judged(sample, bundle.codec) for sample in group.trajectories] for group in groups]
    rows = [
        row
        for prompt, samples in zip(asked, judged, strict=True)
        for row in pair_rows(prompt, samples, most=pairs_per_prompt)
    ]
    right = [sum(sample.right for sample in samples) for samples in judged]
    if not rows:
        raise UserError(
            f"none of {len(asked)} prompts was answered both right and wrong in {samples_per_prompt} samples "
            f"({sum(map(bool, right))} were answered right at all)",
            where="task",
            hint="draw more samples of each, raise sampling.temperature, or take an easier or harder task",
        )
    return _write(
        path,
        rows,
        {
            "kind": "pairs",
            "side": side,
            **_origin(bundle.spec, task),
            "weights_digest": digest,
            "samples_per_prompt": samples_per_prompt,
            "pairs_per_prompt": pairs_per_prompt,
            "prompts": len(asked),
            "prompts_never_right": right.count(0),
            "prompts_always_right": right.count(samples_per_prompt),
            "samples_right": sum(right),
        },
    )


def prompts_of(task: Task, side: Side, most: int) -> list[Prompt]:
    """The first different prompts of a side of the task: no prompt is on both."""
    if side == "held_out":
        return list(task.source.held_out())[:most]
    found: dict[str, Prompt] = {}
    wanted = min(most, task.train_size)
    for step in counting(1):
        for _, prompt in task.source.train_batch(step):
            found.setdefault(prompt.prompt_id, prompt)
        if len(found) >= wanted:
            break
    return list(found.values())[:wanted]


def provenance_path(path: Path) -> Path:
    """`pairs.jsonl` has `pairs.provenance.json`."""
    return path.with_suffix(".provenance.json")


def _judged(sample: Trajectory, codec: TextCodec) -> ScoredCompletion:
    # With the end token written out, for some samples end with it and others with a stop string.
    text = codec.decode_whole(unpack_tokens(sample.completion_ids))
    return ScoredCompletion(text, correct(sample), not sample.truncated)


def _for_drawing(spec: RunSpec) -> RunSpec:
    """With the completion limit of training: samples should be as long as they would be there."""
    return spec.model_copy(update={"eval": spec.eval.model_copy(update={"max_new_tokens": 0})})


async def _draw(
    bundle: ModelBundle,
    task: Task,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    progress: Progress,
    answers: Path | None,
) -> tuple[list[Group], str]:
    def told(done: int) -> None:
        progress(f"{done} of {len(prompts)} prompts answered, {samples_per_prompt} times each")

    async with batch_generator(bundle, task, lambda _: None, kept_in=answers) as model:
        groups = await model.draw(prompts, samples_per_prompt=samples_per_prompt, purpose=PURPOSE, told=told)
        return groups, model.version.digest


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
        raise UserError("the file is there already", where=str(path), hint="name another, or delete it")


def _write(path: Path, rows: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> dict[str, Any]:
    """Rows appear whole or not at all, and never without their provenance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    provenance = {"rows": len(rows), **provenance}
    write_atomically(provenance_path(path), json.dumps(provenance, indent=2, ensure_ascii=False).encode() + b"\n")
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return provenance
