"""The numbers a configuration implies: samples, optimizer steps, microbatches, tokens, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask

SIMULATED_SAMPLES = 65536
"""Beyond so many samples in a minibatch, microbatches are counted from their mean size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What one step and the whole run amount to. Token counts are upper bounds: every completion at its limit."""

    samples_per_step: int
    optimizer_steps_per_batch: int
    samples_per_optimizer_step: int
    optimizer_steps: int  # of the policy, over the run
    samples: int  # over the run
    prompt_tokens: int | None  # estimate of one prompt; None where only the tokenizer can say
    microbatches_per_optimizer_step: int  # at most; without the prompts where their length is not known
    microbatches_per_step: int
    completion_tokens_per_step: int
    completion_tokens: int  # over the run, generated
    trained_tokens: int  # over the run, each epoch counted
    evaluations: int
    eval_samples: int  # over all evaluations
    eval_tokens: int  # over all evaluations
    checkpoints: int  # written
    checkpoints_kept: int  # at most, at the end


def derive(spec: RunSpec, *, prompt_tokens: int | None = None) -> Derived:
    """The arithmetic of a run; `prompt_tokens` is one prompt's length if known, else estimated where possible."""
    batch, steps = spec.batch, spec.trainer.steps
    if prompt_tokens is None:
        prompt_tokens = estimated_prompt_tokens(spec)
    samples = batch.prompts * batch.group_size
    per_batch = batch.minibatches * batch.epochs
    per_step = samples * spec.sampling.max_new_tokens
    microbatches = count_microbatches(
        groups=batch.prompts // batch.minibatches,
        group_size=batch.group_size,
        prompt_tokens=prompt_tokens or 0,
        completion_tokens=spec.sampling.max_new_tokens,
        budget_tokens=batch.microbatch_tokens,
    )
    evaluations = 1 + times(steps, spec.eval.every_steps)
    eval_limit = spec.eval.max_new_tokens or spec.sampling.max_new_tokens
    checkpoints = times(steps, spec.checkpoint.every_steps)
    return Derived(
        samples_per_step=samples,
        optimizer_steps_per_batch=per_batch,
        samples_per_optimizer_step=samples // batch.minibatches,
        optimizer_steps=spec.policy_steps,
        samples=steps * samples,
        prompt_tokens=prompt_tokens,
        microbatches_per_optimizer_step=microbatches,
        microbatches_per_step=microbatches * per_batch,
        completion_tokens_per_step=per_step,
        completion_tokens=steps * per_step,
        trained_tokens=steps * per_step * batch.epochs,
        evaluations=evaluations,
        eval_samples=evaluations * spec.eval.prompts,
        eval_tokens=evaluations * spec.eval.prompts * eval_limit,
        checkpoints=checkpoints,
        checkpoints_kept=min(checkpoints, spec.checkpoint.keep_last + spec.checkpoint.keep_best),
    )


def times(steps: int, every: int) -> int:
    """How often something happens that is due every so many steps and after the last one; 0 means only then."""
    return 1 + ((steps - 1) // every if every else 0)


def count_microbatches(
    *, groups: int, group_size: int, prompt_tokens: int, completion_tokens: int, budget_tokens: int
) -> int:
    """Microbatches that equally long samples fill, in order: a group's prompt counts once in each it has samples in."""
    if groups * group_size > SIMULATED_SAMPLES:
        packed = groups * (prompt_tokens + group_size * completion_tokens)
        return -(-packed // budget_tokens)
    microbatches, used, held = 0, 0, -1  # held: the last group whose prompt is in the open microbatch
    for sample in range(groups * group_size):
        group = sample // group_size
        cost = completion_tokens + (prompt_tokens if group != held else 0)
        if microbatches == 0 or used + cost > budget_tokens:
            microbatches, used, cost = microbatches + 1, 0, completion_tokens + prompt_tokens
        used, held = used + cost, group
    return microbatches


def estimated_prompt_tokens(spec: RunSpec) -> int | None:
    """The longest prompt, one token a character, where the task alone fixes its text; None elsewhere."""
    task = spec.task
    if not isinstance(task, ArithmeticTask):
        return None
    question = 2 * task.digits + 2  # 12+34=
    answer = (2 * task.digits if "*" in task.operators else task.digits + 1) + 1  # and its newline
    return task.shots * (question + answer) + question
