"""Runs episodes twice at the start of a run, to find environments that are not deterministic."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.envs.agents.hosts import Host, LostError
from tidemill.envs.agents.instances import Outcome, Work
from tidemill.envs.agents.pool import EnvironmentPool
from tidemill.envs.agents.turn_plan import FaultError, task_seed

ACTIONS = 4
"""Random actions of an episode."""
ACTION_CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz"
SIMPLE: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}


class SelfTest(Record):
    """Result of a self-test."""

    deterministic: bool
    warning: str = ""  # how two runs differ


async def self_test(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> SelfTest:
    """Run `env.self_test` of the tasks in one process, and in reverse order in another, with the same actions: random
    texts, or every idempotent tool once with arguments made from its schema. An environment whose `step` must not be
    repeated is only reset.

    Raises:
        UserError: it cannot be reset.
    """
    tasks = tasks[: pool.config.self_test]
    try:
        first = await _run(pool, tasks)
        second = (await _run(pool, tasks[::-1]))[::-1]
    except (LostError, FaultError) as error:
        raise UserError(f"the self-test of the environment failed: {error}", where="env.name") from error
    for task, *outcomes in zip(tasks, first, second, strict=True):
        for one, other in zip(*outcomes, strict=True):
            if one != other:
                name = pool.environment.__name__
                what = f"the environment {name} is not deterministic: two runs of seed {task_seed(task)} with the same"
                hint = "draw all random numbers from the seed; otherwise an episode that loses its process is left out"
                return SelfTest(
                    deterministic=False, warning=f"{what} actions gave {_show(one)} and {_show(other)}; {hint}"
                )
    return SelfTest(deterministic=True)


async def _run(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> list[list[Outcome]]:
    """Outcomes of each task's calls, all in one new process."""
    async with pool.fresh_host() as host:
        return [await _episode(pool, host, key, task) for key, task in enumerate(tasks)]


async def _episode(pool: EnvironmentPool, host: Host, key: int, task: dict[str, Any]) -> list[Outcome]:
    outcomes = [await pool.reset(host, key, task)]
    for method, arguments in _script(pool):
        work = Work(index=0, episode=key, method=method, arguments=json.dumps(arguments))
        outcomes.append(await pool.single(host, work, pool.config.call_timeout_s))
        if outcomes[-1].done:
            break
    return outcomes


def _script(pool: EnvironmentPool) -> list[tuple[str, dict[str, Any]]]:
    """Methods and arguments."""
    draw = random.Random(0)
    if pool.planner.uses_tools:
        tools = [each for each in pool.planner.tools.values() if each.options.idempotent]
        return [
            (each.name, {name: _argument(given, draw) for name, given in parameters["properties"].items()})
            for each in tools
            if (parameters := each.schema["function"]["parameters"]) and hasattr(pool.environment, each.name)
        ]
    if not pool.environment.idempotent:
        return []
    return [("step", {"action": "".join(draw.choices(ACTION_CHARACTERS, k=8))}) for _ in range(ACTIONS)]


def _argument(schema: dict[str, Any], draw: random.Random) -> Any:
    """A value that a schema allows."""
    if "default" in schema:
        return schema["default"]
    if "anyOf" in schema:
        return _argument(schema["anyOf"][0], draw)
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    return SIMPLE.get(schema.get("type", ""), str(draw.randrange(10)))


def _show(outcome: Outcome) -> str:
    return repr(f"{outcome.text} (reward {outcome.reward:g})")[:80]
