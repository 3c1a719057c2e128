"""Rewards that are functions of the user: their arguments by name, per sample or per batch, and their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, unpack_tokens
from tidemill.data.prompts import ANSWER
from tidemill.extensions.calls import CallError, UserCalls
from tidemill.extensions.function_pool import Scores
from tidemill.extensions.function_process import scores_of
from tidemill.extensions.registry import Extension
from tidemill.extensions.results import Score, placed
from tidemill.extensions.signature import Wanted, check_offered, wanted_arguments
from tidemill.scoring.batch_rewards import RewardInput

WHERE = "scoring.rewards.function"
STANDARD = ("prompt", "messages", "completion", "token_ids", "answer", "metadata", "step", "seed")
"""What a reward can take by name, besides the columns of the data."""
OTHER_NAMES = {
    "response": "completion",
    "completion_ids": "token_ids",
    "solution": "answer",
    "ground_truth": "answer",
    "target": "answer",
    "label": "answer",
}
"""Arguments of other libraries' rewards, by ours."""


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
        # The functions of TRL take `completions`.
        cure = "" if self.batch else "it scores one completion; with @tm.reward(batch=True) each of these is a list"
        name = placed(extension.name, extension.function)
        check_offered(self._wanted, (*STANDARD, *columns), name=name, where=WHERE, meant=OTHER_NAMES, cure=cure)
        self.needs_answer = ANSWER in self._wanted.required
        self._columns = tuple(columns)
        self._required = dict.fromkeys(name for name in columns if name in self._wanted.required)
        hidden = [name for name in columns if name in STANDARD and name in self._wanted.names]
        if hidden:
            what = f"the data has a column `{hidden[0]}`, and {extension.name} takes the argument of that name"
            raise UserError(what, where=WHERE, hint="rename the column with task.columns, or in the data")

    def arguments(self, sample: RewardInput) -> dict[str, Any]:
        """What the function takes of a sample."""
        return self._wanted.choose(self._required | _arguments(sample))

    def lists(self, samples: Sequence[RewardInput]) -> dict[str, list[Any]]:
        """What a function of lists takes: one entry for each sample."""
        rows = [dict.fromkeys(self._columns) | _arguments(sample) for sample in samples]
        shared = [name for name in rows[0] if all(name in row for row in rows)]
        return self._wanted.choose({name: [row[name] for row in rows] for name in shared})


class FunctionCaller(Protocol):
    """Calls a user function: `ProcessFunction`, or `ThreadFunction` for one that must stay in this process."""

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float, count: int = 0) -> Scores:
        """Its scores, one for each sample. Raises CallError, CallTimeout: see `ProcessFunction.call`."""


class ThreadFunction:
    """Calls a user function on threads of this process.

    Args:
        most: calls at the same time.
    """

    def __init__(self, function: Callable[..., Any], weights: Mapping[str, float], calls: UserCalls, most: int) -> None:
        self._function, self._weights, self._calls = function, weights, calls
        self._turns = asyncio.Semaphore(most)

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float, count: int = 0) -> Scores:
        async with self._turns:
            return await self._calls.call(
                lambda: self._function(**deepcopy(dict(arguments))),  # which it may change
                convert=lambda result: scores_of(result, count, self._weights),
                timeout_s=timeout_s,
                watched=True,
            )


class SampleReward:
    """Implements `rewards.QueuedReward` with a function of one sample."""

    def __init__(
        self, caller: FunctionCaller, arguments: Callable[[RewardInput], Mapping[str, Any]], *, timeout_s: float
    ) -> None:
        self._caller, self._arguments, self._timeout_s = caller, arguments, timeout_s

    async def __call__(self, sample: RewardInput) -> Score:
        (score,) = await self._caller.call(self._arguments(sample), timeout_s=self._timeout_s)
        if isinstance(score, str):
            raise CallError(score)
        return score

    async def close(self) -> None:
        pass


class BatchFunction:
    """Implements `batch_rewards.BatchScorer` with a function of lists."""

    def __init__(self, caller: FunctionCaller, reward: UserReward, *, timeout_s: float) -> None:
        self._caller, self._reward, self._timeout_s = caller, reward, timeout_s

    async def score_batch(self, samples: Sequence[RewardInput]) -> Sequence[Any]:
        """Raises CallError: the function raised, or did not return one result per sample."""
        arguments = self._reward.lists(samples)
        scores = await self._caller.call(arguments, timeout_s=self._timeout_s, count=len(samples))
        return [CallError(each) if isinstance(each, str) else each for each in scores]

    async def close(self) -> None:
        pass


def _arguments(sample: RewardInput) -> dict[str, Any]:
    """Every argument that a reward can take, by name."""
    prompt: Prompt = sample.prompt
    return {
        **prompt.metadata,
        "prompt": prompt.text,
        "messages": [{"role": each.role, "content": each.content} for each in prompt.messages],
        "completion": sample.completion,
        "token_ids": unpack_tokens(sample.token_ids)[sample.prompt_tokens :],
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "step": sample.step,
        "seed": sample.sample_id.key,
    }
