"""Instances of a user's environment, one per episode, and the calls of their methods.

Used in environment processes, and on threads for classes that another process cannot import.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Awaitable
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Record
from tidemill.envs.agents.environment import AgentMistake, Environment, Step, current_call, current_sandbox

if TYPE_CHECKING:
    from tidemill.config.sandbox import SandboxConfig

LONGEST_KEY = 10_000
"""Characters of a state key."""
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class Work(Record, gc=False):
    """One call of a method: reset, step, score, close or a tool."""

    index: int  # of the call in its turn
    episode: int
    method: str
    arguments: str = "{}"  # JSON object
    call_id: str = ""


class Outcome(Record, gc=False, omit_defaults=True):
    """What a call returned, or how it failed."""

    index: int
    text: str = ""  # observation, or the error
    # raised: an exception; invalid: not what a method may return; late: no result within the deadline
    error: Literal["", "raised", "invalid", "late"] = ""
    reward: float = 0.0  # of a step or score
    done: bool = False
    state_key: str = ""


class Instances:
    """The live episodes of one process.

    Args:
        longest: characters that an observation may have; the prompt's length is limited elsewhere.
        sandbox: settings of `Environment.sandbox`.
    """

    def __init__(
        self, environment: type[Environment], params: dict[str, Any], longest: int, sandbox: SandboxConfig | None
    ) -> None:
        self._environment, self._params, self._longest, self._sandbox = environment, params, longest, sandbox
        self._live: dict[int, Environment] = {}

    def invoke(self, work: Work) -> Any:
        """The method's result, which may be awaitable. Raises what the method raises."""
        current_call.set(work.call_id)
        current_sandbox.set(self._sandbox)
        if work.method == "reset":
            self._live[work.episode] = self._environment(**self._params)
        elif work.method == "close":
            return _closed(self._live.pop(work.episode))
        return self._live[work.episode].invoke(work.method, json.loads(work.arguments))

    def outcome(self, work: Work, value: Any) -> Outcome:
        """Check what a method returned."""
        problem = ""
        step = Step()
        if work.method == "step":
            step, problem = value, _step_problem(value)
        elif work.method == "score":
            step, problem = Step(reward=value), _number_problem(value)
        elif work.method != "close":
            step = Step(text=value)
        problem = problem or _text_problem("", step.text, 0 if work.method == "reset" else self._longest)
        problem = problem or _text_problem(" as state_key", step.state_key, LONGEST_KEY)
        if problem:
            return Outcome(index=work.index, text=f"{self._name(work)} {problem}", error="invalid")
        return Outcome(
            index=work.index, text=step.text, reward=float(step.reward), done=step.done, state_key=step.state_key
        )

    def failed(self, work: Work, error: BaseException | str) -> Outcome:
        """What an exception means: in a tool or step the agent's mistake, elsewhere a fault of the environment."""
        text = str(error) if isinstance(error, (str, AgentMistake)) else exception_text(error)
        text = ADDRESS.sub("0x…", text).replace("\0", "\\0")  # equal when it is repeated
        if work.method in ("reset", "score", "close") or isinstance(error, UserError):
            return Outcome(index=work.index, text=f"{self._name(work)} raised {text}", error="invalid")
        return Outcome(index=work.index, text=text, error="raised")

    def _name(self, work: Work) -> str:
        return f"{self._environment.__name__}.{work.method}"


def _closed(environment: Environment) -> Awaitable[None] | None:
    """Close an environment, and then its sandbox."""
    result = environment.close()
    if inspect.isawaitable(result):
        return _close_after(result, environment)
    environment.close_sandbox()
    return None


async def _close_after(result: Awaitable[None], environment: Environment) -> None:
    await result
    environment.close_sandbox()


def _text_problem(place: str, text: Any, longest: int) -> str:
    if not isinstance(text, str):
        return f"returned {type(text).__name__}{place}, and text is needed"
    if longest and len(text) > longest:
        return f"returned {len(text):,} characters{place}; more than {longest:,} are refused"
    if "\0" in text:
        return f"returned text with a NUL character{place}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"returned text that is not valid Unicode{place}"
    return ""


def _step_problem(step: Any) -> str:
    if type(step) is not Step:
        return f"returned {type(step).__name__}, and a Step is needed"
    if [type(step.done), type(step.state_key)] != [bool, str]:
        return f"returned {step!r:.80}; done is True or False, and state_key is text"
    return _number_problem(step.reward)


def _number_problem(reward: Any) -> str:
    try:
        finite = isinstance(reward, Real) and math.isfinite(float(reward))
    except OverflowError:
        finite = False
    if not finite:
        return f"returned the reward {reward!r:.40}, and a finite number is needed"
    return ""
