"""Rewards that are functions of the user: their arguments by name, per sample or per batch, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Prompt, unpack_tokens
from tidemill.envs.text.batch_rewards import Sample
from tidemill.envs.text.prompts import ANSWER
from tidemill.extensions.calls import CallError, UserCalls
from tidemill.extensions.registry import Extension
from tidemill.extensions.signature import Wanted, check_offered, wanted_arguments

WHERE = "scoring.rewards.function"
STANDARD = ("prompt", "messages", "completion", "token_ids", "answer", "metadata", "step", "seed")
"""What a reward can take by name, besides the columns of the data."""
LARGEST = 1e18
"""Largest absolute reward: its square must fit float32, for standard deviations."""
TOO_LARGE = "and no reward may be larger than 1e18"


class UserReward:
    """A user function of one sample, or of lists if it is decorated with `batch=True`.

    Args:
        columns: columns that some rows of the data have.
        weights: factors of the named components that the function returns; empty for 1 each.

    Raises:
        UserError: the function takes something that does not exist, or a column has the name of a standard argument.
    """

    def __init__(self, extension: Extension, *, columns: Sequence[str], weights: Mapping[str, float]) -> None:
        self.extension = extension
        self.weights = dict(weights or extension.options.get("weights") or {})
        self.batch = bool(extension.options.get("batch"))
        called = f"{extension.name}(completion, answer, metadata)"
        self._wanted: Wanted = wanted_arguments(extension.function, called=called, where=WHERE)
        check_offered(self._wanted, (*STANDARD, *columns), name=extension.name, where=WHERE)
        self.needs_answer = ANSWER in self._wanted.required
        self._columns = tuple(columns)
        self._required = dict.fromkeys(name for name in columns if name in self._wanted.required)
        hidden = [name for name in columns if name in STANDARD and name in self._wanted.names]
        if hidden:
            what = f"the data has a column `{hidden[0]}`, and {extension.name} takes the argument of that name"
            raise UserError(what, where=WHERE, hint="rename the column with task.columns, or in the data")

    def one(self, sample: Sample) -> Any:
        """Call the function for one sample; the result may be awaitable."""
        return self.extension.function(**self._wanted.choose(self._required | _arguments(sample)))

    def many(self, samples: Sequence[Sample]) -> Any:
        """Call the function with one list per argument; the result may be awaitable."""
        rows = [dict.fromkeys(self._columns) | _arguments(sample) for sample in samples]
        shared = [name for name in rows[0] if all(name in row for row in rows)]
        return self.extension.function(**self._wanted.choose({name: [row[name] for row in rows] for name in shared}))

    def value(self, result: Any) -> Score:
        """Raises CallError: the result is not a number, a table of numbers or None."""
        return score_of(result, self.weights)


Score = tuple[float, dict[str, float]] | None
"""The value and its named components; None if the reward does not apply to the sample."""


def score_of(result: Any, weights: Mapping[str, float]) -> Score:
    """The score that a reward function returned: a number, a table of named numbers, or None.

    Args:
        weights: factors of the named numbers; empty for their plain sum.

    Raises:
        CallError: it is something else, or not finite.
    """
    if result is None:
        return None
    if not isinstance(result, Mapping):
        return finite(result), {}
    if not result:
        raise CallError("ValueError: returned an empty table; return None if the reward does not apply")
    parts = {str(name): finite(each, of=f"{name} = ") for name, each in result.items()}
    if weights and (missing := [name for name in parts if name not in weights]):
        raise CallError(f"ValueError: returned {missing[0]!r}, which has no weight (weights: {', '.join(weights)})")
    return math.fsum(weights.get(name, 1.0) * each for name, each in parts.items()), parts


def finite(result: Any, *, of: str = "") -> float:
    """
    Raises:
        CallError: the result is not a finite number within `LARGEST`.
    """
    if isinstance(result, str | bytes) or not hasattr(type(result), "__float__"):
        raise CallError(exception_text(TypeError(f"returned {of}{result!r:.60}, which is not a number")))
    value = float(result)
    if not math.isfinite(value):
        raise CallError(f"ValueError: returned {of}{value}, which is not finite")
    if abs(value) > LARGEST:
        raise CallError(f"ValueError: returned {of}{value:g}, {TOO_LARGE}")
    return value


class BatchFunction:
    """Implements `batch_rewards.BatchScorer` with a user function of lists.

    Args:
        calls: runs the function.
    """

    def __init__(self, reward: UserReward, calls: UserCalls, *, timeout_s: float) -> None:
        self._reward, self._calls, self._timeout_s = reward, calls, timeout_s

    async def score_batch(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """Raises CallError: the function raised, or did not return one result per sample."""
        return await self._calls.call(
            lambda: self._reward.many(samples), convert=self._converted(len(samples)), timeout_s=self._timeout_s
        )

    async def close(self) -> None:
        pass

    def _converted(self, count: int) -> Callable[[Any], list[Any]]:
        def convert(result: Any) -> list[Any]:
            if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
                raise CallError(f"TypeError: returned a {type(result).__name__} instead of one reward per sample")
            if len(result) != count:
                raise CallError(f"ValueError: returned {len(result)} rewards for {count} samples")
            return [self._each(each) for each in result]

        return convert

    def _each(self, result: Any) -> Any:
        try:
            return self._reward.value(result)
        except CallError as error:
            return error


def _arguments(sample: Sample) -> dict[str, Any]:
    """Every argument that a reward can take, by name; a copy, so that the function may change it."""
    prompt: Prompt = sample.prompt
    metadata = deepcopy(prompt.metadata)
    return {
        **metadata,
        "prompt": prompt.text,
        "messages": [{"role": each.role, "content": each.content} for each in prompt.messages],
        "completion": sample.completion,
        "token_ids": unpack_tokens(sample.token_ids)[sample.prompt_tokens :],
        "answer": prompt.answer,
        "metadata": metadata,
        "step": sample.step,
        "seed": sample.sample_id.key,
    }
