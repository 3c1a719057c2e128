"""The classes that users derive environments from. This module is imported in every environment process: it stays
light."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, overload

from tidemill.core.errors import UserError
from tidemill.extensions.results import place_of

if TYPE_CHECKING:
    from tidemill.config.sandbox import SandboxConfig
    from tidemill.sandbox import Sandbox

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Split: TypeAlias = Literal["train", "held_out"]

HELD_OUT_SEEDS = 2**32
"""First seed of held-out tasks; training seeds are below it."""
TOOL_MARK = "__tidemill_tool__"

current_call: ContextVar[str] = ContextVar("current_call", default="")
current_sandbox: ContextVar[SandboxConfig | None] = ContextVar("current_sandbox", default=None)


class AgentMistake(Exception):
    """A mistake of the agent, whose message it sees as it is."""


class ProgramLostError(Exception):
    """A program that an environment needs has ended: the call is made again, in another process."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to an action."""

    text: str = ""  # observation
    reward: float = 0.0  # of this turn
    done: bool = False
    state_key: str = ""  # equal for equal states; empty: the text's digest


class Environment:
    """A multi-turn task. Every episode has an instance, which lives in a process of its own or shared with others.

    Methods may be `async`. An episode whose process was lost is restored: a new instance is reset and repeats the
    earlier actions, so results must depend only on the task, the seed and the actions.
    """

    lowest_reward: ClassVar[float] = 0.0
    """The lowest reward of an episode: what an episode gets that breaks its environment."""
    system_prompt: ClassVar[str] = ""
    """First message of the chat template. A row that starts with a system message keeps its own."""
    stop: ClassVar[tuple[str, ...]] = ()
    """Strings that end a turn of a model without chat template."""
    idempotent: ClassVar[bool] = True
    """Whether `step` may be repeated, in a new instance with the same history. If not, an episode whose process is lost
    is left out of its group."""

    needs_sandbox: ClassVar[bool] = False
    """Whether it uses `self.sandbox`. A run then starts only if its sandbox works."""

    costly_process: ClassVar[bool] = False
    """Whether a process of it takes much time to start, or much memory: many episodes then share a few."""
    takes_rows: ClassVar[bool] = False
    """Whether `reset` returns the prompt of a row, so that any task's rows can be its tasks."""

    @classmethod
    def tasks(cls, split: Split, count: int) -> list[dict[str, Any]]:
        """At most `count` rows; those of "train" and "held_out" must be disjoint."""
        first = HELD_OUT_SEEDS if split == "held_out" else 0
        return [{"seed": first + number} for number in range(count)]

    @classmethod
    def tasks_for(cls, params: dict[str, Any], split: Split, count: int) -> list[dict[str, Any]]:
        """As `tasks`, where the rows depend on the arguments."""
        return cls.tasks(split, count)

    def invoke(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method or tool."""
        return getattr(self, method)(**arguments)

    def reset(self, task: dict[str, Any], seed: int) -> str | Awaitable[str]:
        """Start an episode; returns the first user message, or the prompt of a model without chat template.

        Args:
            task: the row.
            seed: equal for all samples of a group.
        """
        raise NotImplementedError

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer an action, the text of one turn. An exception is the agent's mistake: its message becomes the
        observation."""
        raise NotImplementedError

    def demonstrate(self) -> str | Awaitable[str]:
        """The next action of a teacher, for demonstrations (stages of kind "demonstrations"). Optional."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds. Not called if its process is lost."""

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of this episode, with the settings of `[sandbox]`; opened on first use, closed with the episode.

        Raises:
            UserError: the class does not say `needs_sandbox = True`.
        """
        if not self.needs_sandbox:
            hint = "add needs_sandbox = True to the class"
            raise UserError("self.sandbox is not prepared", where=type(self).__name__, hint=hint)
        if (opened := vars(self).get("_sandbox")) is None:
            from tidemill.config.sandbox import SandboxConfig
            from tidemill.sandbox import open_sandbox

            opened = vars(self)["_sandbox"] = open_sandbox(current_sandbox.get() or SandboxConfig())
        found: Sandbox = opened
        return found

    def close_sandbox(self) -> None:
        """Close it, if it was opened; called after `close`."""
        if (opened := vars(self).pop("_sandbox", None)) is not None:
            opened.close()

    @property
    def call_id(self) -> str:
        """Identifies the running step or tool call: run, episode, turn and index. Equal when it is repeated."""
        return current_call.get()


class ToolEnvironment(Environment):
    """An environment whose methods marked with `@tool` are functions that the model may call.

    A turn without a call ends the episode; its text is the final answer. The calls of one turn run at the same time, on
    several threads if they are not `async`.
    """

    takes_rows = True
    offer_finish: ClassVar[bool] = False
    """Offer a tool `finish(answer)`, which ends the episode."""
    stateful: ClassVar[bool] = True
    """Whether a call can change the results of later ones. If not, a lost episode is restored without repeating
    calls."""

    @classmethod
    def served_tools(cls, params: dict[str, Any], sandbox: SandboxConfig) -> list[dict[str, Any]]:
        """Tools that are not methods: `name`, `description`, `parameters` (a JSON schema), `idempotent`.

        Args:
            params: arguments of the class.
            sandbox: settings of the run.
        """
        return []

    def reset(self, task: dict[str, Any], seed: int) -> str | Awaitable[str]:
        """By default the task's prompt."""
        self.task, self.seed = task, seed
        return str(task["prompt"])

    def score(self, answer: str) -> float | Awaitable[float]:
        """Reward of the final answer, which ends the episode; by default 0."""
        return 0.0


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What `@tool` stores in a method."""

    timeout_s: float | None  # None: env.call_timeout_s
    idempotent: bool


@overload
def tool(function: FunctionT, /) -> FunctionT: ...
@overload
def tool(*, timeout_s: float | None = None, idempotent: bool = True) -> Callable[[FunctionT], FunctionT]: ...
def tool(function: Any = None, /, *, timeout_s: float | None = None, idempotent: bool = True) -> Any:
    """Mark a method of a `ToolEnvironment` as a tool: it returns text, and its type hints and docstring are its schema.

    Args:
        timeout_s: deadline, from the start of its execution; by default `env.call_timeout_s`.
        idempotent: it may be repeated, in a new instance with the same history. If not, it runs at most once; an
            episode that loses its result is left out of its group.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise UserError(f"timeout_s = {timeout_s!r}", where="@tool", hint="give seconds above 0")
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name in ("tool", "called"):  # of this module and of `api.entry`
        frame = frame.f_back
    body = frame.f_locals if frame is not None else {}

    def marked(given: FunctionT) -> FunctionT:
        if not hasattr(inspect.unwrap(given), "__code__"):
            raise UserError(f"@tool cannot mark {given!r:.60}", hint="write a method around it with def")
        if hasattr(earlier := body.get(given.__name__), TOOL_MARK):
            what = f"two tools are named {given.__name__}; the other is at {place_of(earlier) if earlier else ''}"
            raise UserError(what, where=place_of(given), hint="rename one of them")
        setattr(given, TOOL_MARK, ToolOptions(timeout_s=timeout_s, idempotent=idempotent))
        return given

    return marked(function) if function is not None else marked
