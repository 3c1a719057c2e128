"""The agent of a run: its environment, the format of its turns, and the pool that answers them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tidemill.agents.find import find_environment
from tidemill.agents.pool import EnvironmentPool
from tidemill.agents.prompts import AgentPrompts
from tidemill.agents.self_test import self_test
from tidemill.agents.turn_plan import task_of
from tidemill.config.schema import RunSpec
from tidemill.controller.turns import AgentLimits
from tidemill.core.protocols import TurnFormat
from tidemill.data.prompts import Task
from tidemill.models.codec import TextCodec
from tidemill.models.turn_format import turn_format


def agent_prompts(spec: RunSpec, codec: TextCodec | TurnFormat) -> AgentPrompts | None:
    """What makes the prompts of `spec.env`; None without an environment.

    Args:
        codec: of the model; or the format itself.

    Raises:
        UserError: the environment does not exist or is wrong, or the model's chat template does not work with turns.
    """
    if not spec.env.enabled:
        return None
    environment = find_environment(spec.env, spec.sandbox).function
    chat = spec.model.chat_template
    format = turn_format(codec, spec.env, chat_template=chat) if isinstance(codec, TextCodec) else codec  # noqa: A001
    return AgentPrompts(environment=environment, config=spec.env, format=format, sandbox=spec.sandbox)  # type: ignore[arg-type]


def agent_limits(spec: RunSpec, context_tokens: int) -> AgentLimits | None:
    """The limits of a turn; None without an environment and sessions."""
    if spec.gateway.sessions:
        return AgentLimits(context_tokens=context_tokens, opens=True)
    if not spec.env.enabled:
        return None
    return AgentLimits(context_tokens=context_tokens, turn_tokens=spec.env.turn_tokens)


@asynccontextmanager
async def open_environments(
    spec: RunSpec, codec: TextCodec, task: Task, *, run_id: str, report: Callable[[str], None]
) -> AsyncIterator[EnvironmentPool | None]:
    """The environments of a run, after their self-test; closed when the block ends. None without an environment.

    Args:
        run_id: part of the ids of calls.
        report: gets findings of the self-test, and the first fault of each kind.

    Raises:
        UserError: as `agent_prompts`, or an environment cannot be reset.
    """
    prompts = agent_prompts(spec, codec)
    if prompts is None:
        yield None
        return
    pool = EnvironmentPool(
        find_environment(spec.env, spec.sandbox),
        spec.env,
        prompts.format,
        sandbox=spec.sandbox,
        run_id=run_id,
        report=report,
    )
    try:
        if spec.env.self_test:
            tasks = [task_of(prompt) for _, prompt in task.source.train_batch(1)]
            if warning := await self_test(pool, tasks):
                report(warning)
        yield pool
    finally:
        await pool.close()
