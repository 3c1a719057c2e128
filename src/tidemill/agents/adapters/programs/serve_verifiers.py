"""Environments of verifiers. Its rollouts ask for completions: a request is an observation, its answer an action.

The rollout's model is a server of this program on a loopback port, with a key. Tools are described and called in the
form of Hermes models: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from adapter_program import EnvironmentAdapter, EnvironmentFaultError, serve
from aiohttp import web
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
KEY = "TIDEMILL_VERIFIERS_KEY"
TOOLS = """\
You may call these functions, each with a line <tool_call>{"name": ..., "arguments": {...}}</tool_call>:
"""


@dataclass
class VerifiersEpisode:
    """An episode of verifiers while the policy plays it."""

    requests: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    actions: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    running: asyncio.Task[vf.Episode] | None = None
    seen: int = 0  # messages that the policy has been shown, or wrote


class VerifiersAdapter(EnvironmentAdapter):
    def __init__(self, id: str, taskset: str = "{}", env: str = "{}", held_out: int = 100) -> None:  # noqa: A002 -- verifiers' name
        config = {**json.loads(env), "taskset": {"id": id, **json.loads(taskset)}}
        roles = agent_config_fields(env_config_type(id, config.get("id", ""))())
        if len(roles) != 1:
            raise ValueError(f"{id} has the agents {', '.join(roles)}; one is supported")
        (role,) = roles
        seat = {"harness": {"id": "tidemill_harness"}, "runtime": {"type": "subprocess"}}
        self._env = load_environment(resolve_env_config({**config, role: {**seat, **config.get(role, {})}}))
        self._held_out = held_out
        self._tasks: list[vf.Task] = []
        self._iterator = iter(self._env.taskset)
        self._rollouts: dict[int, VerifiersEpisode] = {}
        self._by_trace: dict[str, VerifiersEpisode] = {}

    async def start(self) -> None:
        os.environ[KEY] = secrets.token_hex(16)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var=KEY)
        self._context = vf.ModelContext(model="policy", client=client)
        self._serving = self._env.serving()
        await self._serving.__aenter__()

    def tasks(self, split: str, count: int) -> list[dict[str, Any]]:
        first = 0 if split == "held_out" else self._held_out
        last = self._held_out if split == "held_out" else first + count
        known = len(self._upto(last))
        return [{"index": index} for index in range(first, min(known, first + count))]

    async def reset(self, episode: int, task: dict[str, Any], seed: int) -> str:
        rollout = self._rollouts[episode] = VerifiersEpisode()
        (slot,) = self._env.slots(self._upto(task["index"] + 1)[task["index"]])

        def watch(trace: vf.Trace) -> None:
            self._by_trace[trace.id] = rollout

        rollout.running = asyncio.create_task(self._env.run_slot(slot, self._context, on_trace=watch))
        text, _, done = await self._next(rollout)
        if done:
            raise EnvironmentFaultError("the rollout ended before it asked for a completion")
        return text

    async def step(self, episode: int, action: str) -> tuple[str, float, bool]:
        rollout = self._rollouts[episode]
        rollout.actions.put_nowait(action)
        return await self._next(rollout)

    async def close(self, episode: int) -> None:
        rollout = self._rollouts.pop(episode)
        self._by_trace = {key: value for key, value in self._by_trace.items() if value is not rollout}
        if rollout.running is not None:
            rollout.running.cancel()
            await asyncio.gather(rollout.running, return_exceptions=True)

    def _upto(self, count: int) -> list[vf.Task]:
        self._tasks += islice(self._iterator, max(0, count - len(self._tasks)))
        return self._tasks

    async def _next(self, rollout: VerifiersEpisode) -> tuple[str, float, bool]:
        """The next request's new messages; or the end, with the reward."""
        assert rollout.running is not None
        asking = asyncio.create_task(rollout.requests.get())
        await asyncio.wait([asking, rollout.running], return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            body = asking.result()
            texts = [_content(message) for message in body["messages"][rollout.seen :]]
            if rollout.seen == 0 and body.get("tools"):
                tools = [json.dumps(each["function"], sort_keys=True) for each in body["tools"]]
                texts = [TOOLS, *tools, *texts]
            rollout.seen = len(body["messages"]) + 1  # with the answer
            return "\n".join(texts), 0.0, False
        asking.cancel()
        episode = rollout.running.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise EnvironmentFaultError(f"the rollout failed: {errors[0].type}: {errors[0].message}")
        return "", float(sum(trace.reward for trace in episode.traces)), True

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a rollout's request for a completion with the policy's next action."""
        if request.headers.get("authorization") != f"Bearer {os.environ[KEY]}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        rollout = self._by_trace[request.headers["x-session-id"]]
        rollout.requests.put_nowait(await request.json())
        text = await rollout.actions.get()
        calls = [_call(number, each) for number, each in enumerate(CALL.findall(text))]
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        reply = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return web.json_response({**reply, "usage": usage})


def _call(number: int, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
        name, arguments = str(given["name"]), given.get("arguments", {})
    except (ValueError, KeyError, AttributeError, RecursionError):
        name, arguments = "unreadable", {}
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


if __name__ == "__main__":
    serve(VerifiersAdapter)
