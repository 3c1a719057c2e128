"""The tools of an MCP server, which is started here and ends with this program."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import AsyncExitStack
from typing import Any

from adapter_program import AgentMistakeError, EnvironmentAdapter, EnvironmentFaultError, ServiceLostError, serve
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CONNECTION_CLOSED
from pydantic import ValidationError

NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class McpAdapter(EnvironmentAdapter):
    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        self._server = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self._client = await self._stack.enter_async_context(Client(stdio_client(self._server)))

    async def describe(self) -> dict[str, Any]:
        tools = (await self._client.list_tools()).tools
        self._names = {NOT_IN_NAMES.sub("_", tool.name): tool.name for tool in tools}
        found = []
        for tool in tools:
            hints = tool.annotations
            found.append(
                {
                    "name": NOT_IN_NAMES.sub("_", tool.name),
                    "description": tool.description or tool.name,
                    "parameters": tool.input_schema,
                    "idempotent": bool(hints and (hints.read_only_hint or hints.idempotent_hint)),
                }
            )
        return {"tools": found}

    async def call(self, episode: int, tool: str, arguments: dict[str, Any]) -> str:
        try:
            result = await self._client.call_tool(self._names[tool], arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ServiceLostError("the MCP server has ended") from error
            raise
        except ValidationError as error:
            raise EnvironmentFaultError(f"the MCP server's answer to {tool} is malformed: {error}") from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise AgentMistakeError(text)
        return text


if __name__ == "__main__":
    serve(McpAdapter)
