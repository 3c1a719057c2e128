"""Reward functions by name or import path; `REWARDS` lists the built-in ones."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import regex

from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError, exception_text
from tidemill.envs.text.batch_rewards import BatchedReward, HttpScorer, Sample
from tidemill.envs.text.prompts import Task, hash_number
from tidemill.envs.text.rows import import_extra
from tidemill.envs.text.user_calls import CallTimeout, call_blocking

WHERE_FUNCTION = "scoring.rewards.function"
IMPORT_DEADLINE_S = 300.0
"""Long, because a module may load a model on import."""
SIGNATURE = "function(prompt: str, completion: str, answer: str, metadata: dict) -> float"


def import_function(path: str) -> Callable[..., Any]:
    """Import the function and check that it takes (prompt, completion, answer, metadata) by position.

    Raises:
        UserError: it cannot be imported within `IMPORT_DEADLINE_S`, does not exist, or has another signature.
    """
    try:
        return call_blocking(lambda: _import_function(path), timeout_s=IMPORT_DEADLINE_S)
    except CallTimeout:
        what = f"importing {path.rpartition(':')[0]} takes longer than {IMPORT_DEADLINE_S:g} s"
        hint = "move slow initialization from the import to the first call"
        raise UserError(what, where=WHERE_FUNCTION, hint=hint) from None


def _import_function(path: str) -> Callable[..., Any]:
    source, _, name = path.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        hint = "correct the module"
        if isinstance(error, ModuleNotFoundError) and str(error.name) in source:
            hint = "install the package, or give a file: path/file.py:function"
        raise UserError(f"cannot import {source}: {exception_text(error)}", where=WHERE_FUNCTION, hint=hint) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [key for key in vars(module) if callable(getattr(module, key))], n=1)
        hint = f"did you mean {source}:{close[0]}?" if close else f"define {name} in it"
        raise UserError(f"{source} has no function {name}", where=WHERE_FUNCTION, hint=hint)
    _check_signature(function, path)
    return function


def source_file(path: str) -> Path | None:
    """The file that holds the function, found without importing anything, including parent packages; None if the module
    is missing or built in."""
    source, _, _ = path.rpartition(":")
    if source.endswith(".py"):
        return Path(source)
    folders: list[str] | None = None  # None searches the import path
    spec: ModuleSpec | None = None
    parts = source.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, folders))), None)
        folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"no file {file}", where=WHERE_FUNCTION, hint="paths are relative to the working directory")
    name = f"tidemill_reward_{file.stem}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_signature(function: Callable[..., Any], path: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind("prompt", "completion", "answer", {})
    except TypeError as error:
        raise UserError(
            f"{path} takes {signature}", where=WHERE_FUNCTION, hint=f"it is called as {SIGNATURE}"
        ) from error


WHERE = "scoring.rewards"
REGEX_DEADLINE_S = 60.0  # the scorer gives up on a sample earlier; this ends the search itself
NUMBER = re.compile(
    r"(?:(?<![0-9.)])[-+])?"  # a sign, not a subtraction
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3})?"
)


RewardFunction: TypeAlias = Callable[[Sample], Any]
"""Returns a number, or an awaitable of one; may raise."""


class QueuedReward(Protocol):
    """A reward that queues its samples; it gets every sample at once, concurrently with the other rewards."""

    async def __call__(self, sample: Sample) -> float: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward ready to call. `inline` rewards take microseconds and run on the event loop, others in a thread."""

    name: str
    weight: float
    function: RewardFunction
    inline: bool
    scores: QueuedReward | None = None  # the same function if it queues its samples
    timeout_s: float | None = None  # overrides the scorer's
    correct_at_one: bool = False  # 1 means correct and any lower value incorrect


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Inputs for building rewards, besides their configuration."""

    task: Task
    seed: int
    stop_strings: tuple[str, ...]
    open_model: Callable[[RewardConfig], QueuedReward] | None = None  # scores with a reward model, if available


def until_stop(completion: str, stop_strings: Sequence[str]) -> str:
    """The completion up to its first stop string, which is removed."""
    cuts = [completion.find(stop) for stop in stop_strings if stop and stop in completion]
    return completion[: min(cuts)] if cuts else completion


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text: sign, digits (commas between thousands allowed), fraction, exponent.

    A minus directly after a digit, a point or a closing bracket is a subtraction, not a sign.
    """
    found = NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _exact(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if the completion up to the first stop string equals the answer, ignoring surrounding white space; else 0."""

    def exact(sample: Sample) -> float:
        return float(until_stop(sample.completion, context.stop_strings).strip() == sample.prompt.answer.strip())

    return exact


def _numeric(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if the last number before the first stop string equals the answer's last number (12 = 12.0); else 0."""

    def numeric(sample: Sample) -> float:
        expected = last_number(sample.prompt.answer)
        if expected is None:
            raise ValueError(f"the answer {sample.prompt.answer[:40]!r} contains no number")
        return float(last_number(until_stop(sample.completion, context.stop_strings)) == expected)

    return numeric


def _math_verify(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if math-verify finds the completion's mathematical expression equal to the answer's; else 0."""
    package = import_extra("math_verify", package="math-verify", needed_by="the reward math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off

    def parse(text: str) -> Any:
        return package.parse(text, parsing_timeout=None)  # its timeouts use signals, which only work in the main thread

    def math_verify(sample: Sample) -> float:
        answer = sample.prompt.answer
        expected = parse(f"${answer}$" if "\\" in answer and "$" not in answer else answer)
        if not expected:
            raise ValueError(f"math-verify finds no expression in the answer {answer[:40]!r}")
        return float(package.verify(expected, parse(sample.completion), timeout_seconds=None))

    return math_verify


def _regex(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if the pattern is found anywhere in the completion; else 0.

    The `regex` package is used because it can time out and releases the interpreter lock; with the standard
    library, a pattern that backtracks exponentially would block the process.
    """
    pattern = regex.compile(config.pattern)
    return lambda sample: float(
        pattern.search(sample.completion, timeout=REGEX_DEADLINE_S, concurrent=True) is not None
    )


def _length(config: RewardConfig, context: Context) -> RewardFunction:
    """1 at the target number of completion tokens T, falling linearly to 0 at 0 and at 2T: max(0, 1 - |t - T| / T)."""
    target = config.target_tokens
    return lambda sample: max(0.0, 1 - abs(sample.completion_tokens - target) / target)


def _task(config: RewardConfig, context: Context) -> RewardFunction:
    """The score of the task's own scorer."""
    check = context.task.check
    if check is None:
        raise UserError(
            "this task has no scorer",
            where=WHERE,
            hint='compare with the answer: reward kind "exact" or "numeric"',
        )
    return lambda sample: check(sample.completion, sample.prompt)


def _random(config: RewardConfig, context: Context) -> RewardFunction:
    """0 or 1 with equal probability, from run seed and sample id: a control that cannot be learned."""
    return lambda sample: float(hash_number("random reward", context.seed, sample.sample_id.key) % 2)


def _python(config: RewardConfig, context: Context) -> RewardFunction:
    """The user's function of (prompt, completion, answer, metadata). Each call gets its own copy of the metadata."""
    function = import_function(config.function)

    def call(sample: Sample) -> Any:
        prompt = sample.prompt
        return function(prompt.text, sample.completion, prompt.answer, deepcopy(prompt.metadata))

    return call


def _model(config: RewardConfig, context: Context) -> RewardFunction:
    """The score of a reward model for the token ids of prompt and completion."""
    if context.open_model is None:
        raise UserError("reward models are not available here", where=WHERE, hint='serve it and use kind = "http"')
    return context.open_model(config)


def _http(config: RewardConfig, context: Context) -> RewardFunction:
    """The score of a server for prompt and completion as text."""
    first_try_s = config.longest_wait_s / max(2, config.retries + 1)
    return BatchedReward(HttpScorer(config), most=config.batch, overtake_s=first_try_s)


REWARDS: dict[str, Callable[[RewardConfig, Context], RewardFunction]] = {
    "exact": _exact,
    "numeric": _numeric,
    "math_verify": _math_verify,
    "regex": _regex,
    "length": _length,
    "task": _task,
    "random": _random,
    "python": _python,
    "model": _model,
    "http": _http,
}
INLINE = frozenset({"exact", "numeric", "length", "random"})
QUEUED = frozenset({"model", "http"})
CORRECT_AT_ONE = frozenset({"exact", "numeric", "math_verify", "regex", "task"})


def build_rewards(configs: Sequence[RewardConfig], context: Context) -> tuple[NamedReward, ...]:
    """The configured rewards, named by kind or, for Python functions, by function; repeated names get a number.

    Raises:
        UserError: a reward cannot work; raised before any sample is generated.
    """
    rewards: dict[str, NamedReward] = {}
    for config in configs:
        base = config.function.rpartition(":")[2] if config.kind == "python" else config.kind
        name, number = base, 2
        while name in rewards:
            name, number = f"{base}_{number}", number + 1
        function = REWARDS[config.kind](config, context)
        scores: QueuedReward | None = function if config.kind in QUEUED else None  # type: ignore[assignment]
        rewards[name] = NamedReward(
            name=name,
            weight=config.weight,
            function=function,
            inline=config.kind in INLINE,
            scores=scores,
            timeout_s=config.longest_wait_s if scores else None,
            correct_at_one=config.kind in CORRECT_AT_ONE,
        )
    return tuple(rewards.values())
