"""Runs episodes twice at the start of a run, to find environments that are not deterministic."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from tidemill.agents.hosts import Host
from tidemill.agents.instances import CallOutcome, Work
from tidemill.agents.pool import EnvironmentPool
from tidemill.agents.tools import FINISH
from tidemill.agents.turn_plan import FaultError, task_seed
from tidemill.core.errors import UserError
from tidemill.extensions.processes import LostError

ACTIONS = 4
"""Random actions of an episode."""
ACTION_CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz"
SIMPLE: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}


async def self_test(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> str:
    """Run `env.self_test` of the tasks in one process, and in reverse order in another, with the same actions: random
    texts, or every idempotent tool once with arguments made from its schema. An environment whose `step` must not be
    repeated is only reset. Returns how two runs differ; empty if they do not.

    Raises:
        UserError: it cannot be reset, or a method returned something wrong.
    """
    tasks = tasks[: pool.config.self_test]
    try:
        first, second = await _run(pool, tasks), (await _run(pool, tasks[::-1]))[::-1]
    except (LostError, FaultError) as error:
        raise UserError(f"the self-test of the environment failed: {error}", where="env.name") from error
    for task, *outcomes in zip(tasks, first, second, strict=True):
        for one, other in zip_longest(*outcomes):
            if one != other:
                what = f"the environment {pool.environment.__name__} is not deterministic: two runs of seed"
                differ = f"{task_seed(task)} with the same actions gave {_show(one)} and {_show(other)}"
                hint = "draw random numbers from the seed; otherwise an episode that loses its process is left out"
                return f"{what} {differ}; {hint}"
            if one.error == "invalid":
                raise UserError(one.text, where="env.name", hint="correct the method: every such episode is lost")
    return ""


async def _run(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> list[list[CallOutcome]]:
    """Outcomes of each task's calls, in one new process; in another one after a call that ends it."""
    episodes: list[list[CallOutcome]] = []
    while len(episodes) < len(tasks):
        async with pool.placement.fresh_host() as host:
            while host.alive and len(episodes) < len(tasks):
                episodes.append(await _episode(pool, host, len(episodes), tasks[len(episodes)]))
    return episodes


async def _episode(pool: EnvironmentPool, host: Host, key: int, task: dict[str, Any]) -> list[CallOutcome]:
    outcomes = [await pool.reset(host, key, task)]
    for method, arguments, timeout_s in _script(pool):
        work = Work(index=0, episode=key, method=method, arguments=json.dumps(arguments))
        try:
            outcomes.append(await host.make(work, timeout_s or pool.config.call_timeout_s))
        except LostError as error:
            outcomes.append(CallOutcome(index=0, text=str(error), done=True))
        if outcomes[-1].done:
            break
    return outcomes


def _script(pool: EnvironmentPool) -> list[tuple[str, dict[str, Any], float | None]]:
    """Methods, arguments and deadlines."""
    draw = random.Random(0)
    if not pool.planner.uses_tools:
        texts = ["".join(draw.choices(ACTION_CHARACTERS, k=8)) for _ in range(ACTIONS)]
        return [("step", {"action": text}, None) for text in texts if pool.environment.idempotent]
    script: list[tuple[str, dict[str, Any], float | None]] = []
    for tool in pool.planner.tools.values():
        if tool.options.idempotent and tool.name != FINISH:
            properties = tool.schema["function"]["parameters"]["properties"]
            arguments = {name: _argument(schema, draw) for name, schema in properties.items()}
            script.append((tool.name, arguments, tool.options.timeout_s))
    return script


def _argument(schema: dict[str, Any], draw: random.Random) -> Any:
    """A value that a schema allows."""
    if "default" in schema:
        return schema["default"]
    if "anyOf" in schema:
        return _argument(schema["anyOf"][0], draw)
    if "enum" in schema:
        return schema["enum"][0]
    return schema["const"] if "const" in schema else SIMPLE.get(schema.get("type", ""), str(draw.randrange(10)))


def _show(outcome: CallOutcome) -> str:
    return repr(f"{outcome.text} (reward {outcome.reward:g})")[:80]
