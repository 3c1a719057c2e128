"""Decorators that mark functions as extensions: rewards, advantages, losses, tasks and prompt samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

from tidemill.agents import environment
from tidemill.api.entry import entry_point
from tidemill.core.errors import UserError
from tidemill.extensions.registry import Kind, Mark, mark

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


tool = entry_point(environment.tool)


@overload
def reward(function: FunctionT, /) -> FunctionT: ...
@overload
def reward(
    *,
    batch: bool = False,
    weights: Mapping[str, float] | None = None,
    process: bool | None = None,
    correct_at: float | None = None,
    version: str = "",
) -> Callable[[FunctionT], FunctionT]: ...
@entry_point
def reward(
    function: Any = None,
    /,
    *,
    batch: bool = False,
    weights: Mapping[str, float] | None = None,
    process: bool | None = None,
    correct_at: float | None = None,
    version: str = "",
) -> Any:
    """Mark a function as a reward.

    Its parameters name what it takes: `prompt`, `messages`, `completion`, `token_ids`, `answer`, `metadata`, `step`,
    `seed`, or a column of the data. It returns a number, a dict of named numbers, or None if it does not apply to the
    sample. It may be `async`.

    Args:
        batch: every parameter is a list with one entry per sample, and the function returns a list.
        weights: factors of the named numbers; by default they are summed.
        process: True calls it in processes, which are killed when a call is late; False on threads of this process,
            which cannot be killed. By default in processes, unless it uses objects that a copy in another process does
            not share: open files, locks, models, lists, dicts.
        correct_at: the score from which a sample counts as correct, for accuracy and pass@k: 1.0 if 1 means right.
            Without it a function is assumed to grade, and has a mean reward only.
        version: identifies the function where its source cannot be read; change it with the function.
    """
    options = {"batch": batch, "weights": dict(weights or {}), "process": process, "correct_at": correct_at}
    return _marked("reward", function, version, options)


@overload
def advantage(function: FunctionT, /) -> FunctionT: ...
@overload
def advantage(*, scope: Literal["group", "batch"] = "group", version: str = "") -> Callable[[FunctionT], FunctionT]: ...
@entry_point
def advantage(function: Any = None, /, *, scope: Literal["group", "batch"] = "group", version: str = "") -> Any:
    """Mark a function as an advantage estimator.

    It takes any of `rewards` (float64 tensor [S]), `valid` (bool [S]), `lengths` (int [S], trained tokens), `truncated`
    (bool [S]), `components` (named rewards, float64 [S] each, NaN where absent) and `step`, and returns one advantage
    per sample, or a list with one array per sample (one advantage per token).

    Args:
        scope: "group": S samples of one prompt per call. "batch": all samples of the batch; `group` (int [S]) names the
            group of each, and training starts when the batch is complete.
        version: as for `reward`.
    """
    if scope not in ("group", "batch"):
        raise UserError(f"{scope!r} is not a scope", where="tidemill.advantage", hint='use "group" or "batch"')
    return _marked("advantage", function, version, {"scope": scope})


@overload
def loss(function: FunctionT, /) -> FunctionT: ...
@overload
def loss(*, version: str = "") -> Callable[[FunctionT], FunctionT]: ...
@entry_point
def loss(function: Any = None, /, *, version: str = "") -> Any:
    """Mark a function as a policy loss, which replaces the built-in one; parameters and result as for `loss_term`.

    The off-policy correction multiplies its result, and also `clip_low` and `clip_high` can be taken.
    """
    return _marked("loss", function, version, {})


@overload
def loss_term(function: FunctionT, /) -> FunctionT: ...
@overload
def loss_term(*, version: str = "") -> Callable[[FunctionT], FunctionT]: ...
@entry_point
def loss_term(function: Any = None, /, *, version: str = "") -> Any:
    """Mark a function as a term that is added to the policy loss.

    It takes any of `logprobs` (with gradient), `proximal_logprobs`, `rollout_logprobs`, `ref_logprobs` (with a
    reference model), `advantages`, `mask` (False where the correction dropped the token), `sample_index` and `step`:
    tensors [T] over the trained tokens of several samples. It returns the loss of each token, float [T].
    """
    return _marked("loss_term", function, version, {})


@overload
def task(function: FunctionT, /) -> FunctionT: ...
@overload
def task(*, version: str = "") -> Callable[[FunctionT], FunctionT]: ...
@entry_point
def task(function: Any = None, /, *, version: str = "") -> Any:
    """Mark a function as a task: it returns a list of rows, or a dict with the lists `train` and `held_out`.

    A row is a dict with `prompt` or `messages`, and may have `answer`, `tools` and other columns.
    """
    return _marked("task", function, version, {})


@overload
def prompt_sampler(function: FunctionT, /) -> FunctionT: ...
@overload
def prompt_sampler(*, version: str = "") -> Callable[[FunctionT], FunctionT]: ...
@entry_point
def prompt_sampler(function: Any = None, /, *, version: str = "") -> Any:
    """Mark a function as a prompt sampler (a curriculum).

    It takes any of `step`, `seed`, `count` (prompts to select), `rows` (dicts with prompt, answer and columns) and
    `results` (mean rewards by row index, one list entry per earlier visit), and returns `count` different indices of
    `rows`.
    """
    return _marked("prompt_sampler", function, version, {})


def _marked(kind: Kind, function: Any, version: str, options: dict[str, Any]) -> Any:
    found = Mark(kind=kind, version=version, options=options)
    return mark(function, found) if function is not None else lambda given: mark(given, found)
