"""Built-in rewards for `tidemill.train(rewards=[...])`.

Each function returns a reward with its settings. All take `weight` (the factor in the sum), `name` (in metrics and
samples) and `role` ("gold" with weight 0 is only measured).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tidemill.api.entry import entry_point
from tidemill.api.run import Run
from tidemill.core.errors import UserError
from tidemill.extensions.registry import Extension, given_function

Role = Literal["reward", "gold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward and its settings, as in `scoring.rewards` of a recipe."""

    settings: dict[str, Any]
    extension: Extension | None = None


@entry_point
def exact(*, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """1 if the completion equals the answer, else 0."""
    return _reward("exact", weight, name, role)


@entry_point
def numeric(*, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """1 if the last number of the completion equals the answer's, else 0."""
    return _reward("numeric", weight, name, role)


@entry_point
def math_verify(*, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """1 if math-verify finds completion and answer equal, else 0. Needs the extra `tasks`."""
    return _reward("math_verify", weight, name, role)


@entry_point
def regex(pattern: str, *, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """1 if the pattern is found in the completion, else 0."""
    return _reward("regex", weight, name, role, pattern=pattern)


@entry_point
def length(target_tokens: int, *, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """1 at the target number of completion tokens, falling linearly to 0 at 0 and at twice the target."""
    return _reward("length", weight, name, role, target_tokens=target_tokens)


@entry_point
def task(*, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """The score of the task's own scorer."""
    return _reward("task", weight, name, role)


@entry_point
def tests(
    *, with_prompt: bool = False, partial: bool = False, weight: float = 1.0, name: str = "", role: Role = "reward"
) -> Reward:
    """1 if the completion, a Python program, passes the tests of its row in the sandbox, else 0.

    Args:
        with_prompt: the program is the prompt followed by the completion.
        partial: the share of tests passed instead.
    """
    return _reward("tests", weight, name, role, with_prompt=with_prompt, partial=partial)


@entry_point
def random(*, weight: float = 1.0, name: str = "", role: Role = "reward") -> Reward:
    """0 or 1 at random: a control that cannot be learned."""
    return _reward("random", weight, name, role)


@entry_point
def model(
    folder: str | Path | Run, *, batch: int = 64, weight: float = 1.0, name: str = "", role: Role = "reward"
) -> Reward:
    """The score of a reward model.

    Args:
        folder: of the reward model; or a run of `tidemill.reward_model`.
        batch: largest number of samples per forward pass.

    Raises:
        UserError: the run is of another kind, or has no checkpoint.
    """
    if isinstance(folder, Run):
        if folder.kind != "reward_model":
            what, hint = f"a run of kind {folder.kind} has no reward model", "give a run of tidemill.reward_model"
            raise UserError(what, where=str(folder.path), hint=hint)
        if not folder.checkpoints:
            raise UserError("the run has no checkpoint", where=str(folder.path), hint="train at least one step")
        folder = folder.path  # not its checkpoint: a resumed run keeps that of its first session
    path = str(folder.expanduser().absolute()) if isinstance(folder, Path) else folder
    return _reward("model", weight, name, role, model=path, batch=batch)


@entry_point
def http(
    url: str, *, auth_env: str = "", batch: int = 64, weight: float = 1.0, name: str = "", role: Role = "reward"
) -> Reward:
    """The score of a server; see `scoring.rewards.url` for the protocol."""
    return _reward("http", weight, name, role, url=url, auth_env=auth_env, batch=batch)


@entry_point
def judge(
    url: str,
    judge_model: str,
    *,
    rubric: str = "",
    weight: float = 1.0,
    name: str = "",
    role: Role = "reward",
    **settings: Any,
) -> Reward:
    """The grade of a language model, 0 to 1.

    Args:
        url: base URL of an API like OpenAI's, for example of `tidemill serve`: `http://127.0.0.1:8000/v1`.
        judge_model: the model's name there.
        rubric: what a good response is.
        settings: other keys of the reward, such as auth_env, both_orders, most_calls.
    """
    return _reward("judge", weight, name, role, url=url, judge_model=judge_model, rubric=rubric, **settings)


@entry_point
def function(
    given: Callable[..., Any] | str,
    *,
    weights: dict[str, float] | None = None,
    batch: int = 64,
    timeout_s: float = 0.0,
    correct_at: float | None = None,
    weight: float = 1.0,
    name: str = "",
    role: Role = "reward",
) -> Reward:
    """A reward function with settings: `rewards.function(right, weight=0.5)`.

    Args:
        given: a function (see `tidemill.reward`), or `path/file.py:function`.
        weights: factors of the named numbers that it returns.
        batch: largest number of samples per call of a function decorated with `batch=True`.
        timeout_s: of a call of such a function; 0 for 60 s.
        correct_at: the score from which a sample counts as correct; by default what the function's decorator declares.

    Raises:
        UserError: it is not a function, or has no identity.
    """
    extension = None if isinstance(given, str) else given_function(given, "reward", where="rewards")
    ref = given if isinstance(given, str) else extension.ref if extension else ""
    settings = {
        "function": ref,
        "weights": weights or {},
        "batch": batch,
        "timeout_s": timeout_s,
        "correct_at": correct_at,
    }
    made = _reward("python", weight, name, role, **settings)
    return Reward(settings=made.settings, extension=extension)


def _reward(kind: str, weight: float, name: str, role: Role, **settings: Any) -> Reward:
    return Reward(settings={"kind": kind, "weight": weight, "name": name, "role": role, **settings})
