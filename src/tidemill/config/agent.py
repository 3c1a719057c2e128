"""Agents: the environment that answers a sample's turns, and its budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import Config, NameOrFunction

ADAPTERS = ("gymnasium", "mcp", "openenv", "skyrl-gym", "textarena", "verifiers")
BUILT_IN = ("guess", "calculator", "python", *ADAPTERS)


class EnvConfig(Config):
    name: Annotated[str, NameOrFunction("environment", ("", *BUILT_IN))] = ""
    """Environment of multi-turn samples: a built-in one, `path/file.py:Class`, `package.module:Class` or the name of an
    entry point. Empty: samples are single completions."""
    params: dict[str, bool | int | float | str] = {}
    """Arguments of the environment's class."""
    turns: int = Field(8, ge=1)
    """Maximum number of turns of an episode."""
    turn_tokens: int = Field(0, ge=0)
    """Maximum number of tokens of one turn; 0: only sampling.max_new_tokens, which limits all turns of an episode
    together."""
    calls: int = Field(32, ge=1)
    """Maximum number of tool calls of an episode."""
    seconds: float = Field(600.0, gt=0)
    """Maximum time that an episode spends in its environment, in seconds; it starts again when a run is resumed."""
    call_timeout_s: float = Field(30.0, gt=0)
    """Deadline of a call or step without one of its own, from the start of its execution, in seconds."""
    observation_tokens: int = Field(256, ge=8)
    """Maximum length of an observation; the middle of a longer one is cut out."""
    concurrency: int = Field(16, ge=1)
    """Maximum number of calls at the same time. They never hold an engine slot."""
    attempts: int = Field(3, ge=1)
    """Attempts at a call whose process dies or does not start."""
    failure_reward: float | None = None
    """Reward of an episode that breaks its environment; none: the lowest reward that the environment declares."""
    max_environment_errors: int = Field(20, ge=1)
    """Number of episodes lost to faults of the environment after which the run ends."""
    thinking: Literal["template", "keep"] = "template"
    """Earlier thinking in chat templates that remove it, such as Qwen3's. template: it is removed, and every turn is a
    branch with a context of its own. keep: it stays in the context."""
    self_test: int = Field(2, ge=0)
    """Number of tasks whose episodes are run twice at the start, to find environments that are not deterministic; 0:
    no test."""

    @property
    def enabled(self) -> bool:
        return bool(self.name)

    def issues(self) -> Iterator[str]:
        if self.params and not self.enabled:
            yield "params is set without name; name the environment"
