"""Reward functions of the user: what they can take and return, per sample and per batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.char_codec import CharCodec, make_prompt, make_trajectory
from tidemill.config.task import FileTask, RewardConfig, ScoringConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, Reward
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task
from tidemill.extensions.registry import Extension, Mark, given_function, mark, provide
from tidemill.scoring.scorer import build_scorer

PROMPT = make_prompt("5+7=", "12", level=3)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Rows with the column `level`."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [f'{{"prompt": "{a}+7=", "answer": "{a + 7}", "level": 3}}' for a in range(10)]
    path.write_text("\n".join(rows))
    return build_task(FileTask(kind="file", path=path), codec=CharCodec(), batch_prompts=2, seed=0, chat_template=False)


def given(function: Callable[..., Any]) -> Extension:
    return given_function(function, "reward", where="rewards")


def mark_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    return mark(function, Mark(kind="reward", options={"batch": True}))


def scored(
    task: Task,
    *functions: Callable[..., Any],
    completions: tuple[str, ...] = ("12",),
    prompts: tuple[Prompt, ...] = (PROMPT,),
    **config: Any,
) -> list[Reward]:
    """The rewards of completions of each prompt, from functions that are given as objects."""

    async def score() -> list[Reward]:
        scorer = build_scorer(ScoringConfig(rewards=configs, timeout_s=5), task=task, seed=0)
        try:
            made = [(prompt, make_trajectory(prompt, completion)) for prompt in prompts for completion in completions]
            return list(await asyncio.gather(*(scorer.score(*each) for each in made)))
        finally:
            await scorer.close()

    extensions = [given(function) for function in functions]
    configs = tuple(RewardConfig(kind="python", function=each.ref, **config) for each in extensions)
    provide(extensions)
    return asyncio.run(score())


def test_a_function_takes_what_its_signature_names(task: Task) -> None:
    seen: dict[str, Any] = {}

    def right(
        completion: str, answer: str, level: int, step: int, *, prompt: str, seed: int, missing: int = 4
    ) -> float:
        seen.update(locals())
        return float(completion == answer)

    assert scored(task, right)[0].value == 1.0
    sample_seed = make_trajectory(PROMPT, "12").sample_id.key
    expected = {"completion": "12", "answer": "12", "level": 3, "prompt": "5+7=", "seed": sample_seed, "missing": 4}
    assert {name: seen[name] for name in expected} == expected


def test_keyword_arguments_hold_everything(task: Task) -> None:
    names: list[str] = []

    def score(**rest: Any) -> float:
        names.extend(rest)
        return 0.0

    scored(task, score)
    assert {"prompt", "messages", "completion", "token_ids", "answer", "metadata", "step", "seed", "level"} == set(
        names
    )


def test_a_table_gives_named_numbers_and_their_sum(task: Task) -> None:
    def score(completion: str) -> dict[str, float]:
        return {"right": 1.0, "short": 0.25}

    (reward,) = scored(task, score)
    assert reward.value == 1.25
    assert reward.components == {"score": 1.25, "score/right": 1.0, "score/short": 0.25}
    (weighted,) = scored(task, score, weights={"right": 2.0, "short": 4.0}, weight=0.5)
    assert weighted.value == 0.5 * (2.0 + 1.0)


def test_none_leaves_a_reward_out_of_the_sum(task: Task) -> None:
    def absent(completion: str) -> None:
        return None

    def half(completion: str) -> float:
        return 0.5

    (reward,) = scored(task, absent, half)
    assert (reward.value, reward.valid, reward.components) == (0.5, True, {"half": 0.5})
    (invalid,) = scored(task, absent)
    assert not invalid.valid
    assert "no reward applies" in invalid.reason


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batch_function_gets_lists(task: Task, asynchronous: bool) -> None:
    sizes: list[int] = []

    def scores(completion: list[str], answer: list[str]) -> list[float | None]:
        sizes.append(len(completion))
        return [None if each == "?" else float(each == right) for each, right in zip(completion, answer, strict=True)]

    async def later(completion: list[str], answer: list[str]) -> list[float | None]:
        await asyncio.sleep(0)
        return scores(completion, answer)

    function = mark(later if asynchronous else scores, Mark(kind="reward", options={"batch": True}))
    rewards = scored(task, function, completions=("12", "13", "?"))
    assert [(each.value, each.valid) for each in rewards] == [(1.0, True), (0.0, True), (0.0, False)]
    assert sizes == [3]


def test_a_gold_reward_is_measured_and_never_invalidates(task: Task) -> None:
    def half(completion: str) -> float:
        return 0.5

    def gold(completion: str) -> float:
        if completion == "bad":
            raise RuntimeError("no")
        return 1.0

    extensions = [given(half), given(gold)]
    configs = (
        RewardConfig(kind="python", function=extensions[0].ref),
        RewardConfig(kind="python", function=extensions[1].ref, role="gold", weight=0.0),
    )

    async def score(completion: str) -> Reward:
        scorer = build_scorer(ScoringConfig(rewards=configs), task=task, seed=0)
        try:
            return await scorer.score(PROMPT, make_trajectory(PROMPT, completion))
        finally:
            await scorer.close()

    provide(extensions)
    assert asyncio.run(score("good")) == Reward(value=0.5, components={"half": 0.5, "gold": 1.0})
    assert asyncio.run(score("bad")) == Reward(value=0.5, components={"half": 0.5})


def faulty() -> Iterator[tuple[Any, str]]:
    yield "text", "returned 'text', which is not a number"
    yield {}, "returned an empty table"
    yield {"a": "b"}, "returned a = 'b', which is not a number"
    yield float("nan"), "not finite"


@pytest.mark.parametrize(("result", "says"), list(faulty()))
def test_other_results_make_the_sample_invalid(task: Task, result: Any, says: str) -> None:
    def score(completion: str) -> Any:
        return result

    (reward,) = scored(task, score)
    assert not reward.valid
    assert says in reward.reason


@pytest.mark.parametrize(("result", "says"), [([1.0], "returned 1 rewards for 2 samples"), (1.0, "returned a float")])
def test_a_batch_function_returns_one_result_per_sample(task: Task, result: Any, says: str) -> None:
    def score(completion: list[str]) -> Any:
        return result

    function = mark(score, Mark(kind="reward", options={"batch": True}))
    for reward in scored(task, function, completions=("1", "2")):
        assert says in reward.reason


def test_an_argument_that_does_not_exist_is_refused(task: Task) -> None:
    def score(completion: str, answers: str) -> float:
        return 0.0

    with pytest.raises(UserError) as caught:
        scored(task, score)
    assert "`answers`" in caught.value.what
    assert caught.value.hint.startswith("did you mean answer?")
    assert "level" in caught.value.hint


def test_a_column_with_the_name_of_an_argument_is_refused(task: Task, tmp_path: Path) -> None:
    def score(seed: int) -> float:
        return 0.0

    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{a}+7=", "answer": "", "seed": 1}}' for a in range(10)))
    seeded = build_task(
        FileTask(kind="file", path=path), codec=CharCodec(), batch_prompts=2, seed=0, chat_template=False
    )
    with pytest.raises(UserError) as caught:
        scored(seeded, score)
    assert "column `seed`" in caught.value.what


def test_two_rewards_of_one_name_are_refused(task: Task) -> None:
    def score(completion: str) -> float:
        return 0.0

    with pytest.raises(UserError) as caught:
        scored(task, score, score)
    assert caught.value.what == "two rewards are named score"


def test_metadata_is_a_copy(task: Task) -> None:
    def score(metadata: dict[str, Any]) -> float:
        metadata["level"] += 1
        return float(metadata["level"])

    prompt = replace(PROMPT, metadata={"level": 3})
    assert scored(task, score)[0].value == 4.0
    assert prompt.metadata == {"level": 3}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Only one row has the column `level`."""
    path = tmp_path_factory.mktemp("sparse") / "rows.jsonl"
    path.write_text('{"prompt": "5+7=", "answer": "12", "level": 3}\n{"prompt": "5+8=", "answer": "13"}\n')
    return build_task(FileTask(kind="file", path=path), codec=CharCodec(), batch_prompts=1, seed=0, chat_template=False)


def score(completion: str, level: int | None) -> float:
    return -1.0 if level is None else float(level)


def score_defaulted(completion: str, level: int = 5) -> float:
    return float(level)


@mark_batch
def score_batch(completion: list[str], level: list[int | None]) -> list[float]:
    return [score(each, found) for each, found in zip(completion, level, strict=True)]


@pytest.mark.parametrize(("function", "without"), [(score, -1.0), (score_defaulted, 5.0), (score_batch, -1.0)])
def test_a_column_that_a_row_lacks_is_none_or_the_default(
    sparse: Task, function: Callable[..., Any], without: float
) -> None:
    plain = replace(PROMPT, metadata={})
    assert [each.value for each in scored(sparse, function, prompts=(PROMPT, plain))] == [3.0, without]


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def right_defaulted(completion: str, answer: str | None = "x") -> float:
    return float(answer is None)


@mark_batch
def right_batch(completion: list[str], answer: list[str]) -> list[float]:
    return [right(*pair) for pair in zip(completion, answer, strict=True)]


@pytest.mark.parametrize(
    ("function", "valid", "value"), [(right, False, 0.0), (right_batch, False, 0.0), (right_defaulted, True, 1.0)]
)
def test_a_function_that_requires_an_answer_is_not_called_without_one(
    task: Task, function: Callable[..., Any], valid: bool, value: float
) -> None:
    answered, unanswered = scored(task, function, prompts=(PROMPT, replace(PROMPT, answer=None)))
    assert (unanswered.valid, unanswered.value) == (valid, value)
    assert answered.valid
    assert valid or "the row has no answer" in unanswered.reason


def test_functions_on_threads_are_called_at_most_concurrency_at_a_time(task: Task) -> None:
    running: list[int] = []
    most: list[int] = []

    def score(completion: str) -> float:
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()
        return 1.0

    assert all(each.valid for each in scored(task, score, completions=("12",) * 100))
    assert max(most) <= ScoringConfig().concurrency


def test_a_function_that_shares_objects_stays_in_this_process_and_says_so(task: Task) -> None:
    seen: list[str] = []
    warnings: list[str] = []

    def score(completion: str) -> float:
        seen.append(completion)
        return float(len(seen))

    extension = given(score)
    provide([extension])
    configs = (RewardConfig(kind="python", function=extension.ref),)
    build_scorer(ScoringConfig(rewards=configs), task=task, seed=0, warn=warnings.append)
    assert [each.value for each in scored(task, score)] == [1.0]
    assert seen == ["12"]
    assert len(warnings) == 1
    assert "the reward score runs in this process" in warnings[0]
    assert "`seen` (list)" in warnings[0]


@pytest.mark.parametrize(("process", "shared"), [(None, True), (False, True), (True, False)])
def test_process_chooses_where_a_function_runs(task: Task, process: bool | None, shared: bool) -> None:
    seen: list[str] = []

    def score(completion: str) -> float:
        seen.append(completion)
        return 1.0

    assert scored(task, mark(score, Mark(kind="reward", options={"process": process})))[0].value == 1.0
    assert bool(seen) == shared
