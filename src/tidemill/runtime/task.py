"""A run's task, checked against the context of the model that will do it; no weights are needed for that."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.envs.text.build import build_task
from tidemill.envs.text.task import Task, check_fits
from tidemill.models.codec import TextCodec


def fitting_task(spec: RunSpec, codec: TextCodec, *, limit: int) -> Task:
    """
    Args:
        limit: the longest sequence the model was made for, in tokens.

    Raises:
        UserError: the task cannot be had, or its prompts and completions do not fit.
    """
    task = build_task(
        spec.task,
        codec=codec,
        batch_prompts=spec.batch.prompts,
        seed=spec.run.seed,
        chat_template=spec.model.chat_template,
    )
    check_fits(task, longest_context(spec, limit), new_tokens(spec))
    return task


def engine_context(spec: RunSpec, *, limit: int, prompt_tokens: int) -> int:
    """Longest prompt plus completion that an engine makes room for, in tokens."""
    return spec.engine.context_tokens or min(prompt_tokens + new_tokens(spec), longest_context(spec, limit))


def new_tokens(spec: RunSpec) -> int:
    """The longest completion that training or evaluation may ask for."""
    return max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)


def longest_context(spec: RunSpec, limit: int) -> int:
    """Raises UserError: more is configured than the model was made for."""
    wanted = spec.engine.context_tokens
    if wanted > limit:
        raise UserError(
            f"{wanted} tokens are more than the model's own limit of {limit}",
            where="engine.context_tokens",
            cure=f"lower it to {limit}, or set it to 0 to take what the task needs",
        )
    return wanted or limit
