"""A harness of verifiers: the chat of a model that may call the task's tools, in this process.

Every model call goes through verifiers' own interception server, so that its limits, stop conditions and records work.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["TidemillHarness"]
OK = 200


class TidemillHarnessConfig(vf.HarnessConfig):
    pass


class TidemillHarness(vf.Harness[TidemillHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # type: ignore[override]
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"authorization": f"Bearer {secret}"}
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client,
        ):
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                answer = await client.post(f"{endpoint.rstrip('/')}/chat/completions", json=body)
                if answer.status_code != OK:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                reply = answer.json()["choices"][0]["message"]
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in reply["tool_calls"]:
                    name = call["function"]["name"]
                    try:
                        arguments = json.loads(call["function"]["arguments"])
                        content = await call_mcp(connections, dispatch, name, arguments)
                    except Exception as error:  # noqa: BLE001 -- the model sees it
                        content = f"error: {type(error).__name__}: {error}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
