"""Instances of a user's environment, one per episode, and the calls of their methods.

Used in environment processes, and on threads for classes that another process cannot import.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tidemill.agents.environment import AgentMistake, Environment, Step, current_call, current_sandbox
from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Record
from tidemill.extensions.calls import raised_at

if TYPE_CHECKING:
    from tidemill.config.sandbox import SandboxConfig

LONGEST_MESSAGE = 1_000_000
"""Characters of a first message, and of a teacher's action."""
LONGEST_KEY = 10_000
"""Characters of a state key; a longer one is replaced by its digest."""
OWN_METHODS = ("tasks", "reset", "demonstrate", "score", "close")
"""Methods whose exceptions are not the agent's mistakes."""
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
UNCLEAN = re.compile(r"[\x00\ud800-\udfff]")
"""NUL and lone surrogates, which cannot be stored or sent."""


def clean(text: str) -> str:
    """The text with U+FFFD in place of NUL and lone surrogates."""
    return UNCLEAN.sub("\ufffd", text)


class Work(Record, gc=False):
    """One call of a method: reset, step, score, close, demonstrate or a tool; or of the class: tasks."""

    index: int  # of the call in its turn
    episode: int
    method: str
    arguments: str = "{}"  # JSON object
    call_id: str = ""


class CallOutcome(Record, gc=False, omit_defaults=True):
    """What a call returned, or how it failed."""

    index: int
    text: str = ""  # observation, or the error
    tail: str = ""  # its end, if it was cut; of an exception that is no mistake, its place
    cut: int = 0  # characters left out between them
    cleaned: bool = False  # characters were replaced, or left out
    # raised: an exception; invalid: not what a method may return; late: no result within the deadline
    error: Literal["", "raised", "invalid", "late"] = ""
    reward: float = 0.0  # of a step or score
    done: bool = False
    state_key: str = ""


class WrongResultError(Exception):
    """A method returned a wrong result."""


class Instances:
    """The live episodes of one process.

    Args:
        longest: characters of an observation; the middle of a longer one is cut out.
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
        if work.method == "tasks":
            return self._environment.tasks_for(dict(self._params), **json.loads(work.arguments))
        if work.method == "reset":
            self._live[work.episode] = self._environment(**self._params)
        elif work.method == "close":
            return _closed(self._live.pop(work.episode))
        return self._live[work.episode].invoke(work.method, json.loads(work.arguments))

    def outcome(self, work: Work, value: Any) -> CallOutcome:
        """Check what a method returned. An observation is cleaned and cut here, before it is sent."""
        try:
            return self._checked(work, value)
        except BaseException as error:  # noqa: BLE001 -- of the user's objects
            problem = str(error) if isinstance(error, WrongResultError) else f"returned {_shown(value, 80)}"
        return CallOutcome(index=work.index, text=clean(f"{self._name(work)} {problem}"), error="invalid")

    def _checked(self, work: Work, value: Any) -> CallOutcome:
        """Raises WrongResultError."""
        if work.method == "close":
            return CallOutcome(index=work.index)
        if work.method == "tasks":
            return CallOutcome(index=work.index, text=_rows(value, json.loads(work.arguments)["count"]))
        if work.method == "score":
            return CallOutcome(index=work.index, reward=_number(value))
        if work.method != "step":
            return self._observed(work, value)
        if not isinstance(value, Step):
            raise WrongResultError(f"returned {type(value).__name__}, and a Step is needed")
        done, key = _scalar(value.done), _scalar(value.state_key)
        if not isinstance(done, bool) or not isinstance(key, (str, Integral)):
            raise WrongResultError(f"returned {_shown(value, 80)}; done is True or False, and state_key is text")
        seen = self._observed(work, value.text)
        return msgspec.structs.replace(seen, reward=_number(value.reward), done=done, state_key=_key(str(key)))

    def _observed(self, work: Work, value: Any) -> CallOutcome:
        """Raises WrongResultError: it is not text, or a first message or a teacher's action is too long."""
        if not isinstance(value, str):
            raise WrongResultError(f"returned {type(value).__name__}, and text is needed")
        text = str.__str__(value)  # of a subclass, too
        if work.method not in ("reset", "demonstrate"):
            return _fitted(work, text, self._longest)
        if len(text) > LONGEST_MESSAGE:
            raise WrongResultError(f"returned {len(text):,} characters; more than {LONGEST_MESSAGE:,} are refused")
        return _fitted(work, text, LONGEST_MESSAGE)

    def failed(self, work: Work, error: BaseException | str) -> CallOutcome:
        """What an exception means: in a tool or step the agent's mistake, elsewhere a fault of the environment."""
        said = error if isinstance(error, str) else exception_text(error)
        if isinstance(error, AgentMistake):
            with suppress(Exception):  # of a subclass
                said = str(error)  # without the type
        found = _fitted(work, said, self._longest)
        text = ADDRESS.sub("0x…", found.text)  # equal when it is repeated
        if work.method in OWN_METHODS or isinstance(error, UserError):
            text = f"{self._name(work)} raised {text}"
            tail = "" if isinstance(error, str) else raised_at(error)  # a text has it
            return CallOutcome(index=work.index, text=text, tail=clean(tail), error="invalid")
        return msgspec.structs.replace(found, text=text, tail=ADDRESS.sub("0x…", found.tail), error="raised")

    def _name(self, work: Work) -> str:
        return f"{self._environment.__name__}.{work.method}"


def _closed(environment: Environment) -> Awaitable[None] | None:
    """Close an environment, and then its sandbox."""
    result = environment.close()
    if not inspect.isawaitable(result):
        environment.close_sandbox()
        return None

    async def finished() -> None:
        await result
        environment.close_sandbox()

    return finished()


def _rows(value: Any, count: int) -> str:
    """Tasks as JSON.

    Raises:
        WrongResultError: they are not rows.
    """
    if not isinstance(value, Iterable):
        raise WrongResultError(f"returned {type(value).__name__} instead of a list of tables")
    rows = list(islice(value, count))
    for row in rows:
        if not isinstance(row, Mapping):
            raise WrongResultError(f"returned {type(row).__name__} instead of a table")
    if not rows:
        raise WrongResultError("returned no rows")
    try:
        text = json.dumps([dict(row) for row in rows], default=_scalar_of_json, ensure_ascii=False)
        text.encode()  # fails for lone surrogates
    except (TypeError, ValueError) as error:
        raise WrongResultError(f"returned a row that JSON cannot express: {exception_text(error)}") from None
    return text


def _scalar_of_json(value: Any) -> Any:
    if (scalar := _scalar(value)) is not value:
        return scalar
    raise TypeError(f"{type(value).__name__} is not a type of JSON")


def _fitted(work: Work, text: str, longest: int) -> CallOutcome:
    """A text of any length, cleaned, and cut to `longest` characters."""
    cut = max(0, len(text) - longest)
    parts = [text[: (longest + 1) // 2], text[len(text) - longest // 2 :]] if cut else [text, ""]
    head, tail = map(clean, parts)
    return CallOutcome(index=work.index, text=head, tail=tail, cut=cut, cleaned=[head, tail] != parts)


def _key(key: str) -> str:
    """A state key that can be stored: equal ones stay equal, and different ones different."""
    if len(key) <= LONGEST_KEY and not UNCLEAN.search(key):
        return key
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _scalar(value: Any) -> Any:
    """A scalar of NumPy, torch or JAX as Python's; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _number(value: Any) -> float:
    """Raises WrongResultError: it is not a finite number."""
    number = _scalar(value)
    try:
        finite = isinstance(number, Real) and math.isfinite(float(number))
    except OverflowError:
        finite = False
    if not finite:
        raise WrongResultError(f"returned the reward {_shown(value, 40)}, and a finite number is needed")
    return float(number)


def _shown(value: Any, longest: int) -> str:
    """The start of its repr."""
    try:
        return repr(value)[:longest]
    except BaseException:  # noqa: BLE001 -- of the user's class, or of an integer with too many digits
        return f"<{type(value).__name__}>"
