"""Functions of the user as advantages and losses: what they get, what they may return, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.algos.user_functions import UserAdvantage, UserLoss, user_advantage, user_loss
from tidemill.core.errors import UserError

SOURCE = """
import numpy as np
import torch
import tidemill as tm

def centred(rewards, valid):
    out = torch.zeros(len(rewards))
    out[valid] = rewards[valid] - rewards[valid].mean()
    return out

def by_token(rewards, lengths):
    return [np.full(int(length), float(reward)) for reward, length in zip(rewards, lengths)]

def scaled(rewards, step):
    return [float(reward) * step for reward in rewards]

@tm.advantage(scope="batch")
def whole(rewards, group):
    return rewards - rewards.mean()

def of_group(rewards, group):
    return rewards

def pull(logprobs, advantages, mask):
    return -logprobs * advantages * mask

def close(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

RESULT = None

def given(rewards):
    return RESULT

def given_loss(logprobs):
    return RESULT

def fails(rewards):
    raise KeyError("no such reward")
"""
REWARDS = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
VALID = torch.tensor([True, False, True])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def advantages(found: UserAdvantage, **more: Any) -> list[Any]:
    return found(lengths=[2, 1, 3], rewards=REWARDS, valid=VALID, **{"step": 4, "group": torch.zeros(3)} | more)


def returning(function: UserAdvantage | UserLoss, result: Any) -> None:
    function.extension.function.__globals__["RESULT"] = result


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("centred", [-0.5, 0.0, 0.5]),  # the mean of 1 and 2 is 1.5
        ("scaled", [4.0, 0.0, 8.0]),
        ("whole", [0.0, -1.0, 1.0]),
    ],
)
def test_a_number_per_sample(file: Path, name: str, expected: list[float]) -> None:
    assert advantages(user_advantage(f"{file}:{name}")) == expected
    assert torch.get_default_dtype() == torch.float32


def test_an_array_per_sample_has_a_number_per_token(file: Path) -> None:
    found = advantages(user_advantage(f"{file}:by_token"))
    assert [row.tolist() for row in found] == [[1.0, 1.0], [0.0], [2.0, 2.0, 2.0]]


def test_only_a_batch_has_groups(file: Path) -> None:
    assert user_advantage(f"{file}:whole").scope == "batch"
    assert user_advantage(f"{file}:centred").scope == "group"
    with pytest.raises(UserError, match="group"):
        user_advantage(f"{file}:of_group")


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "None, for 3 samples"),
        (torch.tensor(1.0), "for 3 samples"),
        ([1.0, 2.0], "2 values for 3 samples"),
        ([1.0, float("nan"), 2.0], "not finite"),
        (["a", "b", "c"], "for a sample"),
        ([np.zeros(2), np.zeros(2), np.zeros(3)], r"shape \[2\] for a sample of 1 tokens"),
        ([np.array([np.inf, 0.0]), 0.0, 0.0], "not finite"),
    ],
)
def test_other_results_of_an_advantage_are_refused(file: Path, result: Any, says: str) -> None:
    found = user_advantage(f"{file}:given")
    returning(found, result)
    with pytest.raises(UserError, match=says) as caught:
        advantages(found)
    assert caught.value.where is not None
    assert caught.value.where.startswith("algorithm.advantage")


def test_a_value_of_bfloat16_is_a_number(file: Path) -> None:
    found = user_advantage(f"{file}:given")
    returning(found, [torch.tensor(0.5, dtype=torch.bfloat16), 1, np.float32(2)])
    assert advantages(found) == [0.5, 1.0, 2.0]


def test_an_error_of_the_function_names_it(file: Path) -> None:
    with pytest.raises(UserError, match="fails"):
        advantages(user_advantage(f"{file}:fails"))


def test_a_loss_has_a_value_and_a_gradient_per_token(file: Path) -> None:
    found = user_loss(f"{file}:pull", "loss", where="algorithm.loss", has_reference=False)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = found({"logprobs": logprobs, "advantages": torch.tensor([3.0, 1.0]), "mask": torch.tensor([1.0, 0.0])})
    assert loss.tolist() == [3.0, 0.0]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-3.0, 0.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda logprobs: 1.0, "returned"),
        (lambda logprobs: logprobs[:1], "returned"),
        (lambda logprobs: logprobs.detach(), "no gradient"),
        (lambda logprobs: logprobs * float("nan"), "not finite"),
    ],
)
def test_other_results_of_a_loss_are_refused(file: Path, make: Any, says: str) -> None:
    found = user_loss(f"{file}:given_loss", "loss_term", where="algorithm.loss_terms", has_reference=False)
    logprobs: Tensor = torch.tensor([-1.0, -2.0], requires_grad=True)
    returning(found, make(logprobs))
    with pytest.raises(UserError, match=says):
        found({"logprobs": logprobs})


def test_a_loss_that_needs_a_reference_is_refused_without_one(file: Path) -> None:
    with pytest.raises(UserError, match="no reference model"):
        user_loss(f"{file}:close", "loss_term", where="algorithm.loss_terms", has_reference=False)
    assert user_loss(f"{file}:close", "loss_term", where="", weight=0.5, has_reference=True).weight == 0.5
