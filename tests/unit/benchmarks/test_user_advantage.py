"""The benchmark of a user's advantage function fails if the function, or what it is given, made no difference."""

from __future__ import annotations

import pytest

from benchmarks.user_advantage import PROMPTS, check_sides
from tests.unit.benchmarks.test_subjects import side

USERS = {"user_function": 1.0, "groups_without_signal": 0.0, "grad_norm": 0.5}
BUILT_IN = USERS | {"user_function": 0.0}


def test_sides_that_differ_in_the_function_alone_pass() -> None:
    check_sides(side(USERS), side(BUILT_IN))


@pytest.mark.parametrize(
    ("users", "built_in", "why"),
    [
        (BUILT_IN, BUILT_IN, "was not called"),
        (USERS, USERS, "was not called"),
        (USERS | {"groups_without_signal": PROMPTS}, BUILT_IN, "user's function: 8 groups of a step have no signal"),
        (USERS, BUILT_IN | {"grad_norm": 0.25}, "different gradient norms"),
    ],
)
def test_planted_breaks_fail(users: dict[str, float], built_in: dict[str, float], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        check_sides(side(USERS, users), side(BUILT_IN, built_in))
