"""What each built-in reward gives, worked out by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.char_codec import CharCodec, make_prompt
from tidemill.config.task import ArithmeticTask, RewardConfig
from tidemill.core.errors import UserError
from tidemill.core.records import SampleId
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task
from tidemill.extensions.calls import CallError
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.scoring.builtin_rewards import (
    BUILT_IN,
    IN_PROCESSES,
    INLINE,
    Context,
    build_rewards,
    last_number,
    until_stop,
)

TASK = build_task(ArithmeticTask(), codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)


def sample(completion: str, answer: str = "12", index: int = 0) -> RewardInput:
    sample_id = SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=index)
    prompt = make_prompt("5+7=", answer, level=3)
    return RewardInput(prompt=prompt, completion=completion, completion_tokens=len(completion), sample_id=sample_id)


def value(
    completion: str, answer: str = "12", *, stops: tuple[str, ...] = ("\n",), task: Task = TASK, **config: Any
) -> Any:
    context = Context(task=task, seed=0, stop_strings=stops)
    (reward,) = build_rewards([RewardConfig(**config)], context)
    return reward.function(sample(completion, answer))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("12", 1),
        ("12\n", 1),  # the stop string stays part of a completion and is not part of the answer
        (" 12 \n", 1),
        ("12\n4+4=8", 1),  # nothing after the first stop string counts
        ("\n12", 0),  # the answer is what stands before it: nothing
        ("12.0", 0),  # exact is about characters
        ("012", 0),
        ("It is 12", 0),
        ("", 0),
    ],
)
def test_exact(completion: str, expected: float) -> None:
    assert value(completion, kind="exact") == expected


def test_exact_without_stop_strings_compares_all_lines() -> None:
    assert value("\na\nb\n", "a\nb", stops=(), kind="exact") == 1
    assert value("a\nb\nc", "a\nb", stops=(), kind="exact") == 0


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert until_stop("one END two\nthree", ("\n", "END")) == "one "
    assert until_stop("one", ("\n", "")) == "one"


def test_a_pattern_that_is_late_says_so_in_the_words_of_the_scorer() -> None:
    context = Context(task=TASK, seed=0, stop_strings=(), timeout_s=0.05)
    (reward,) = build_rewards([RewardConfig(kind="regex", pattern="(1|11)+$")], context)
    with pytest.raises(CallError, match=r"^no result within 0\.05 s$"):
        reward.function(sample("1" * 60 + "="))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", "12"),
        ("12.0", "12"),
        ("so 3 + 4 = 7.", "7"),
        ("-4", "-4"),
        ("= \u22124", "-4"),  # a typographic minus
        ("5-3", "3"),  # a subtraction, not a sign
        ("(5)-3", "3"),
        ("$1,234.50", "1234.5"),
        ("1,234,567", "1234567"),
        ("1,2345", "2345"),  # not thousands
        ("1, 2, 3", "3"),
        (".5", "0.5"),
        ("1e3", "1000"),
        ("-2.5E-2", "-0.025"),
        ("+7", "7"),
        ("#### 72", "72"),
        ("12 apples", "12"),
        ("x2y", "2"),
    ],
)
def test_last_number(text: str, expected: str) -> None:
    assert last_number(text) == Decimal(expected)


@pytest.mark.parametrize("text", ["", "none", "-", ",", ".", "٣"])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("12.0\n99", "12", 1),  # 99 stands after the stop string
        ("5 + 7 = 12", "12.00", 1),
        ("twelve", "12", 0),
        ("1,000", "#### 1000", 1),
        ("1000000000001", "1000000000000", 0),  # exact also where floats would round: 10^12 + 1 is not 10^12
        ("9007199254740993", "9007199254740992", 0),  # 2^53 + 1 and 2^53 are one float
    ],
)
def test_numeric(completion: str, answer: str, expected: float) -> None:
    assert value(completion, answer, kind="numeric") == expected


def test_an_answer_without_a_number_is_a_fault_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="'none' contains no number"):
        value("12", "none", kind="numeric")


def test_a_number_of_a_hundred_thousand_digits_is_compared_in_no_time() -> None:
    assert value("9" * 100_000, "9" * 100_000, kind="numeric") == 1


def test_regex_searches_the_whole_completion() -> None:
    assert value("a\n<answer>12</answer>", kind="regex", pattern=r"<answer>\d+</answer>") == 1
    assert value("12", kind="regex", pattern="^1$") == 0


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 0.25), (3, 0.75), (4, 1), (5, 0.75), (8, 0), (20, 0)])
def test_length(tokens: int, expected: float) -> None:
    # Target 4: 1 - |t - 4| / 4, never below 0.
    assert value("x" * tokens, kind="length", target_tokens=4) == expected


def test_random_is_a_fair_coin_that_falls_the_same_way_again() -> None:
    def tosses(seed: int) -> list[float]:
        (reward,) = build_rewards([RewardConfig(kind="random")], Context(task=TASK, seed=seed, stop_strings=()))
        return [reward.function(sample("x", index=index)) for index in range(1000)]

    assert tosses(0) == tosses(0) != tosses(1)
    assert set(tosses(0)) == {0.0, 1.0}
    assert abs(sum(tosses(0)) - 500) < 64  # four standard deviations of sqrt(1000)/2 = 15.8


def test_task_without_a_checker_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="this task has no scorer"):
        value("12", kind="task")


def test_a_missing_extra_comes_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError) as caught:
        value("3", "4", kind="math_verify")
    assert "math-verify" in caught.value.what
    assert 'pip install "math-verify[' in caught.value.hint


def test_python_functions_get_plain_values_which_they_may_change(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(prompt, completion, answer, metadata):\n"
        "    metadata['words'].append(completion)\n"
        "    given = [type(each).__name__ for each in (prompt, completion, answer, metadata)]\n"
        "    return len(metadata['words']) + 10 * (given == ['str', 'str', 'str', 'dict'])\n"
    )
    prompt = msgspec.structs.replace(sample("x").prompt, metadata={"words": ["kept"]})
    config = RewardConfig(kind="python", function=f"{file}:score")

    async def call_three_times() -> list[Any]:
        context = Context(task=TASK, seed=0, stop_strings=())
        (reward,) = build_rewards([config], context)
        try:
            return [await reward.function(dataclasses.replace(sample("x"), prompt=prompt)) for _ in range(3)]
        finally:
            await context.processes.close()

    assert asyncio.run(call_three_times()) == [(12.0, {})] * 3
    assert prompt.metadata == {"words": ["kept"]}


def test_rewards_of_one_kind_get_names_of_their_own() -> None:
    configs = [RewardConfig(kind="regex", pattern=pattern) for pattern in "abc"]
    rewards = build_rewards(configs, Context(task=TASK, seed=0, stop_strings=()))
    assert [reward.name for reward in rewards] == ["regex", "regex_2", "regex_3"]
    assert [reward.function(sample("c")) for reward in rewards] == [0, 0, 1]


def test_every_configurable_kind_has_a_row() -> None:
    kinds = set(RewardConfig.model_fields["kind"].annotation.__args__)  # type: ignore[union-attr]
    assert {*BUILT_IN, *IN_PROCESSES, "people"} == kinds
    assert kinds > INLINE
