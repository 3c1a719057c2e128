"""Reward functions by name or import path; `BUILT_IN` lists the built-in ones."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import regex

from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.data.prompts import Task, hash_number
from tidemill.data.row_files import import_extra
from tidemill.extensions.calls import CallError, UserCalls
from tidemill.extensions.function_pool import FunctionProcesses, is_async
from tidemill.extensions.portable import AVAILABLE, Target, UnportableError, target_of
from tidemill.extensions.registry import resolve
from tidemill.extensions.results import Score, finite, place_of
from tidemill.scoring.batch_rewards import BatchedReward, HttpScorer, RewardInput
from tidemill.scoring.code_tests import COLUMN, GRACE_S, CodeTests
from tidemill.scoring.judge import JudgeReward
from tidemill.scoring.package_checks import PackageReward
from tidemill.scoring.user_rewards import WHERE as WHERE_FUNCTION
from tidemill.scoring.user_rewards import BatchFunction, FunctionCaller, SampleReward, ThreadFunction, UserReward

WHERE = "scoring.rewards"
LONGEST_QUEUE_S = 3600.0
NUMBER = re.compile(
    r"(?:(?<![0-9.)])[-+])?"  # a sign, not a subtraction
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3})?"
)


RewardFunction: TypeAlias = Callable[[RewardInput], Any]
"""Returns what `NamedReward.value` converts, or an awaitable of it; may raise."""


class QueuedReward(Protocol):
    """A reward that queues its samples; it gets every sample at once, concurrently with the other rewards."""

    async def __call__(self, sample: RewardInput) -> Any: ...

    async def close(self) -> None: ...


def number(result: Any) -> Score:
    """A score without named components."""
    return finite(result), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward ready to call. `inline` rewards take microseconds and run on the event loop. The others are called by
    `scores`, or on a thread if there is none."""

    name: str
    weight: float
    function: RewardFunction
    inline: bool
    scores: QueuedReward | None = None  # the same function if it queues its samples
    value: Callable[[Any], Score] = number  # raises CallError for a result that is no score
    timeout_s: float | None = None  # overrides the scorer's
    queues: bool = True  # `timeout_s` includes the time in the queue of `scores`; else `scores` keeps the deadline
    correct_at: float | None = None  # a score from which a sample is correct; None: it does not tell
    judges: bool = False  # tells correctness in a sum, too
    gold: bool = False  # only measured: its failure does not make a sample invalid
    needs_answer: bool = False  # not called for samples of rows without an answer, which it makes invalid
    place: str = ""  # file and line of a function of the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Inputs for building rewards, besides their configuration."""

    task: Task
    seed: int
    stop_strings: tuple[str, ...]
    timeout_s: float = 10.0  # of one sample, as `scoring.timeout_s`
    concurrency: int = 8  # as `scoring.concurrency`
    calls: UserCalls = field(default_factory=UserCalls)  # runs functions that stay in this process
    processes: FunctionProcesses = field(default_factory=lambda: FunctionProcesses(1))  # run the others
    warn: Callable[[str], None] = lambda _: None  # gets a message for every function that stays in this process
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)  # for rewards that run programs
    open_model: Callable[[RewardConfig], QueuedReward] | None = None  # scores with a reward model, if available
    judge_folder: Path | None = None  # verdicts and costs of judges


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

    def exact(sample: RewardInput) -> float:
        return float(until_stop(sample.completion, context.stop_strings).strip() == sample.answer().strip())

    return exact


def _numeric(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if the last number before the first stop string equals the answer's last number (12 = 12.0); else 0."""

    def numeric(sample: RewardInput) -> float:
        expected = last_number(sample.answer())
        if expected is None:
            raise ValueError(f"the answer {sample.answer()[:40]!r} contains no number")
        return float(last_number(until_stop(sample.completion, context.stop_strings)) == expected)

    return numeric


def _regex(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if the pattern is found anywhere in the completion; else 0.

    The `regex` package is used because it can time out and releases the interpreter lock; with the standard
    library, a pattern that backtracks exponentially would block the process.
    """
    pattern = regex.compile(config.pattern)
    timeout_s = context.timeout_s

    def found(sample: RewardInput) -> float:
        try:
            return float(pattern.search(sample.completion, timeout=timeout_s, concurrent=True) is not None)
        except TimeoutError:  # in the words of the scorer, whose own deadline may come first
            raise CallError(f"no result within {timeout_s:g} s") from None

    return found


def _length(config: RewardConfig, context: Context) -> RewardFunction:
    """1 at the target number of completion tokens T, falling linearly to 0 at 0 and at 2T: max(0, 1 - |t - T| / T)."""
    target = config.target_tokens
    return lambda sample: max(0.0, 1 - abs(sample.completion_tokens - target) / target)


def _task(config: RewardConfig, context: Context) -> RewardFunction:
    """The score of the task's own scorer, which runs in the sandbox."""
    check = context.task.check
    if check is None:
        hint = 'compare with the answer: reward kind "exact" or "numeric"'
        raise UserError("this task has no scorer", where=WHERE, hint=hint)
    return PackageReward(check, context.sandbox, timeout_s=context.timeout_s, most=context.concurrency)


def _environment(config: RewardConfig, context: Context) -> RewardFunction:
    """The sum of the rewards that the environment gave to the turns."""
    return lambda sample: math.fsum(turn.reward for turn in sample.turns)


def _random(config: RewardConfig, context: Context) -> RewardFunction:
    """0 or 1 with equal probability, from run seed and sample id: a control that cannot be learned."""
    return lambda sample: float(hash_number("random reward", context.seed, sample.sample_id.key) % 2)


def _tests(config: RewardConfig, context: Context) -> RewardFunction:
    """1 if the program passes the tests of its row; else 0."""
    if COLUMN not in context.task.columns:
        hint = f'add a column "{COLUMN}" to its rows, or name it in task.columns'
        raise UserError(f'the reward "tests" needs a column "{COLUMN}"', where=WHERE, hint=hint)
    return CodeTests(config, context.sandbox)


def _model(config: RewardConfig, context: Context) -> RewardFunction:
    """The score of a reward model for the token ids of prompt and completion."""
    if context.open_model is None:
        raise UserError("reward models are not available here", where=WHERE, hint='serve it and use kind = "http"')
    return context.open_model(config)


def _http(config: RewardConfig, context: Context) -> RewardFunction:
    """The score of a server for prompt and completion as text."""
    first_try_s = config.longest_wait_s / max(2, config.retries + 1)
    return BatchedReward(HttpScorer(config), most=config.batch, overtake_s=first_try_s)


def _judge(config: RewardConfig, context: Context) -> RewardFunction:
    """The verdict of a language model, 0 to 1."""
    return JudgeReward(config, context.judge_folder, context.warn)


BUILT_IN: dict[str, Callable[[RewardConfig, Context], RewardFunction]] = {
    "exact": _exact,
    "numeric": _numeric,
    "regex": _regex,
    "length": _length,
    "task": _task,
    "environment": _environment,
    "tests": _tests,
    "random": _random,
    "model": _model,
    "http": _http,
    "judge": _judge,
}
INLINE = frozenset({"exact", "numeric", "length", "environment", "random"})
QUEUED = frozenset({"model", "http", "judge", "task"})
IN_PROCESSES = frozenset({"python", "math_verify"})
MATH_VERIFY = Target(name="math_verify", path="tidemill.scoring.math_answers:math_verify")
COMPARES = frozenset({"exact", "numeric", "math_verify"})
CHECKS_THE_ANSWER = COMPARES | {"task", "tests"}
CORRECT_AT_ONE = CHECKS_THE_ANSWER | {"regex"}
NOT_ABOUT_CORRECTNESS = frozenset({"random", "length", "model"})


def correct_at(config: RewardConfig) -> float | None:
    """The score from which a sample is correct: as configured, as the function declares, or 1 for kinds that compare.

    Raises:
        UserError: the function does not exist.
    """
    if config.correct_at is not None:
        return config.correct_at
    if config.kind == "python":
        declared = resolve(config.function, "reward", where=WHERE_FUNCTION).options.get("correct_at")
        return None if declared is None else float(declared)
    return 1.0 if config.kind in CORRECT_AT_ONE else None


def judges(config: RewardConfig) -> bool:
    """Whether a reward compares with the answer, or declares what is correct."""
    if config.kind in CHECKS_THE_ANSWER:
        return True
    try:
        return config.kind not in NOT_ABOUT_CORRECTNESS | {"regex"} and correct_at(config) is not None
    except UserError:  # reported where the function is called
        return False


def build_rewards(configs: Sequence[RewardConfig], context: Context) -> tuple[NamedReward, ...]:
    """The configured rewards, named as `reward_names`, without those that people give.

    Raises:
        UserError: a reward cannot work, or two have one name; raised before any sample is generated.
    """
    return tuple(
        NamedReward(
            name=name,
            weight=config.weight,
            correct_at=correct_at(config),
            judges=judges(config),
            gold=config.role == "gold",
            **_calls(config, context),
        )
        for name, config in zip(reward_names(configs), configs, strict=True)
        if config.kind != "people"
    )


def reward_names(configs: Sequence[RewardConfig]) -> list[str]:
    """`name` of each reward, or its kind or function; repeated kinds get a number.

    Raises:
        UserError: two have one name.
    """
    names = list[str]()
    for config in configs:
        python = config.kind == "python"
        name = base = config.name or (config.function.rpartition(":")[2] if python else config.kind)
        if base in names and (config.name or python):
            hint = "give each a name of its own: name = ..."
            raise UserError(f"two rewards are named {base}", where=WHERE, hint=hint)
        numbers = itertools.count(2)
        while name in names:
            name = f"{base}_{next(numbers)}"
        names.append(name)
    return names


def _calls(config: RewardConfig, context: Context) -> dict[str, Any]:
    """The fields of a reward that decide about its calls."""
    if config.kind not in IN_PROCESSES:
        function = BUILT_IN[config.kind](config, context)
        queued = function if config.kind in QUEUED else None
        timeout_s = config.longest_wait_s if queued else None
        if config.kind == "tests":  # ends by itself: a program that takes long must not make its sample invalid
            timeout_s = config.longest_wait_s + GRACE_S
        elif config.kind == "task":  # has its deadline for each answer, which begins after the queue
            timeout_s = LONGEST_QUEUE_S
        return {
            "function": function,
            "inline": config.kind in INLINE,
            "scores": queued,
            "timeout_s": timeout_s,
            "needs_answer": config.kind in COMPARES,
        }
    found: dict[str, Any] = {"inline": False, "queues": False, "value": lambda score: score}  # converted where it runs
    caller: FunctionCaller
    scores: QueuedReward
    if config.kind == "math_verify":
        import_extra("math_verify", package="math-verify", needed_by="the reward math_verify")
        if AVAILABLE:
            caller = context.processes.add(MATH_VERIFY, weights={}, together=False, lists=False)
        else:
            caller = ThreadFunction(MATH_VERIFY.load(where=WHERE), {}, context.calls, context.concurrency)
        scores = SampleReward(
            caller,
            lambda sample: {"completion": sample.completion, "answer": sample.answer()},
            timeout_s=context.timeout_s,
        )
        return found | {"function": scores, "scores": scores, "needs_answer": True}
    extension = resolve(config.function, "reward", where=WHERE_FUNCTION)
    reward = UserReward(extension, columns=context.task.columns, weights=config.weights)
    caller = _caller(reward, context)
    if reward.batch:
        batches = BatchFunction(caller, reward, timeout_s=config.longest_wait_s)
        scores = BatchedReward(batches, most=config.batch)
        found["timeout_s"] = config.longest_wait_s
    else:
        scores = SampleReward(caller, reward.arguments, timeout_s=context.timeout_s)
    place = place_of(extension.function)
    return found | {"function": scores, "scores": scores, "needs_answer": reward.needs_answer, "place": place}


def _caller(reward: UserReward, context: Context) -> FunctionCaller:
    """What calls a function: processes, which can be killed, unless it must stay in this one."""
    extension = reward.extension
    process = extension.options.get("process")
    if process is not False:
        try:
            target = target_of(extension.function, extension.path, name=extension.name, copy_shared=process is True)
        except UnportableError as reason:
            place = "in this process, where it cannot be stopped"
            context.warn(f"warning: the reward {extension.name} runs {place}: {reason}")
        else:
            together = is_async(extension.function)
            return context.processes.add(target, weights=reward.weights, together=together, lists=reward.batch)
    return ThreadFunction(extension.function, reward.weights, context.calls, context.concurrency)
