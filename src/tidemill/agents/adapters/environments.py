"""Environments of other packages, as environments of Tidemill."""

from __future__ import annotations

import json
import threading
from typing import Any, ClassVar

from tidemill.agents.adapters.connection import Connection
from tidemill.agents.environment import Environment, Split, Step, ToolEnvironment, current_sandbox
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError

_connections: dict[str, Connection] = {}
_lock = threading.Lock()
_served: dict[str, list[dict[str, Any]]] = {}
"""Tools by the arguments and sandbox of their MCP servers."""


class AdapterEnvironment(Environment):
    """An environment whose episodes are in a program that all episodes of this process share."""

    adapter: ClassVar[str]
    costly_process = True

    def __init__(self, python: str, **params: Any) -> None:
        self._python, self._params = python, params

    @classmethod
    def tasks_for(cls, params: dict[str, Any], split: Split, count: int) -> list[dict[str, Any]]:
        return [{**row, "split": split} for row in cls.tasks(split, count)]

    def reset(self, task: dict[str, Any], seed: int) -> str:
        text: str = self._connection.call("reset", episode=id(self), task=task, seed=seed)
        return text

    def step(self, action: str) -> Step:
        text, reward, done = self._connection.call("step", episode=id(self), action=action)
        return Step(text=text, reward=reward, done=done)

    def close(self) -> None:
        self._connection.call("close", episode=id(self))

    @property
    def _connection(self) -> Connection:
        """Of this process for these arguments, made on first use."""
        key = json.dumps([self.adapter, self._params, self._python], sort_keys=True)
        with _lock:
            if key in _connections and _connections[key].lost:
                _connections.pop(key).close()
            if key not in _connections:
                sandbox = (current_sandbox.get() or SandboxConfig()) if self.needs_sandbox else None
                _connections[key] = Connection(self.adapter, self._params, python=self._python, sandbox=sandbox)
            return _connections[key]


class Gymnasium(AdapterEnvironment):
    """A text environment of gymnasium: its observations are text, or it renders itself as text ("ansi").

    Args:
        id: of the environment, such as "FrozenLake-v1".
        arguments: of `gymnasium.make`, a JSON object.
        actions: names of the actions, separated by commas; none: they are numbers.
        python: interpreter that has gymnasium; none: the installed one.
    """

    adapter = "gymnasium"

    def __init__(self, id: str, arguments: str = "{}", actions: str = "", python: str = "") -> None:  # noqa: A002 -- gymnasium's name
        super().__init__(python, id=id, arguments=arguments, actions=actions)


class TextArena(AdapterEnvironment):
    """A game of TextArena for one player.

    Args:
        id: of the game, such as "GuessTheNumber-v0".
        arguments: of `textarena.make`, a JSON object.
        python: interpreter that has textarena; none: the installed one.
    """

    adapter = "textarena"

    def __init__(self, id: str, arguments: str = "{}", python: str = "") -> None:  # noqa: A002 -- textarena's name
        super().__init__(python, id=id, arguments=arguments)


class SkyRLGym(AdapterEnvironment):
    """An environment of skyrl-gym, with the rows of a task: `prompt`, and `answer` or `reward_spec`. It runs in the
    sandbox, because some of them execute what the model wrote.

    Args:
        id: of the environment, such as "gsm8k_multi_turn".
        config: its `env_config`, a JSON object.
        extras: added to each row's, a JSON object.
        python: interpreter that has skyrl-gym; none: the installed one.
    """

    adapter = "skyrl-gym"
    needs_sandbox = True
    takes_rows = True

    def __init__(self, id: str, config: str = "{}", extras: str = "{}", python: str = "") -> None:  # noqa: A002 -- skyrl_gym's name
        super().__init__(python, id=id, config=config, extras=extras)


class OpenEnv(AdapterEnvironment):
    """An environment of OpenEnv. It runs in the sandbox, and so does its server if it is started here.

    Args:
        url: of a server; `sandbox.network` must name it.
        command: starts the server; "{port}" is replaced.
        files: folder that is copied into the sandbox, where the server starts.
        forward: names of environment variables that it is given, separated by commas.
        action: field of the action that is the turn's text; none: the text is the action as JSON.
        observation: field that is shown; none: all, as JSON.
        python: interpreter that has openenv; none: the installed one.
    """

    adapter = "openenv"
    needs_sandbox = True

    def __init__(
        self,
        url: str = "",
        command: str = "",
        files: str = "",
        forward: str = "",
        action: str = "message",
        observation: str = "",
        python: str = "",
    ) -> None:
        fields = {"action": action, "observation": observation}
        super().__init__(python, url=url, command=command, files=files, forward=forward, **fields)


class Verifiers(AdapterEnvironment):
    """An environment of verifiers with one agent. It runs in the sandbox. Tools are described in the first message, and
    called in the form of Hermes models.

    Args:
        id: of the taskset, such as "textarena".
        taskset: further settings of the taskset, a JSON object.
        env: settings of the environment, a JSON object.
        held_out: number of tasks, the first ones, that are held out.
        files: folder with the taskset's module or data, which is copied into the sandbox.
        forward: names of environment variables that it is given, separated by commas.
        python: interpreter that has verifiers; none: the installed one.
    """

    adapter = "verifiers"
    needs_sandbox = True

    def __init__(
        self,
        id: str,  # noqa: A002 -- verifiers' name
        taskset: str = "{}",
        env: str = "{}",
        held_out: int = 100,
        files: str = "",
        forward: str = "",
        python: str = "",
    ) -> None:
        super().__init__(python, id=id, taskset=taskset, env=env, held_out=held_out, files=files, forward=forward)

    @classmethod
    def tasks_for(cls, params: dict[str, Any], split: Split, count: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = cls(**params)._connection.call("tasks", split=split, count=count)
        return rows


class McpServer(ToolEnvironment):
    """The tools of an MCP server, which runs in the sandbox; every episode starts one of its own.

    Without a network its calls may be repeated when an episode is restored. With one, only those of tools that the
    server marks as idempotent or read-only.

    Args:
        command: starts the server, which talks by standard input and output.
        files: folder that is copied into the sandbox, where the server starts.
        forward: names of environment variables that it is given, separated by commas.
        server_python: interpreter that has the server's packages, in a virtual environment; "python" in `command` is
            this one. None: that of `python`.
        python: interpreter that has mcp, the client; none: the installed one.
    """

    adapter: ClassVar[str] = "mcp"
    needs_sandbox = True

    def __init__(
        self, command: str, files: str = "", forward: str = "", server_python: str = "", python: str = ""
    ) -> None:
        if not command.split():
            raise UserError("it is empty", where="env.params.command", hint="give the command that starts the server")
        self._params = {"command": command, "files": files, "forward": forward, "server_python": server_python}
        self._python = python
        self._opened: Connection | None = None

    @classmethod
    def served_tools(cls, params: dict[str, Any], sandbox: SandboxConfig) -> list[dict[str, Any]]:
        key = json.dumps([params, sandbox.model_dump(mode="json")], sort_keys=True)
        if key not in _served:
            current_sandbox.set(sandbox)
            connection = cls(**params)._connection
            connection.close()
            isolated = sandbox.network == "none" and sandbox.backend != "none"
            tools: list[dict[str, Any]] = connection.description["tools"]
            _served[key] = [{**tool, "idempotent": tool["idempotent"] or isolated} for tool in tools]
        return _served[key]

    def invoke(self, method: str, arguments: dict[str, Any]) -> Any:
        if method in ("reset", "score"):
            return super().invoke(method, arguments)
        return self._connection.call("call", episode=0, tool=method, arguments=arguments)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            sandbox = current_sandbox.get() or SandboxConfig()
            self._opened = Connection("mcp", self._params, python=self._python, sandbox=sandbox)
        return self._opened


ADAPTERS: dict[str, type[Environment]] = {
    "gymnasium": Gymnasium,
    "mcp": McpServer,
    "openenv": OpenEnv,
    "skyrl-gym": SkyRLGym,
    "textarena": TextArena,
    "verifiers": Verifiers,
}
