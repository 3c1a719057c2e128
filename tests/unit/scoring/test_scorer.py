"""The scorer: sums, faults that stay with their sample, deadlines, and a process that can end."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_fields

import tidemill as tm
from tests.char_codec import CharCodec, make_prompt, make_trajectory
from tidemill.config.task import ArithmeticTask, RewardConfig, ScoringConfig
from tidemill.core.records import Reward, SampleId, Turn
from tidemill.data.build_task import build_task
from tidemill.data.prompts import PackageCheck, RowFigures
from tidemill.extensions.calls import MAX_HANGING
from tidemill.scoring import builtin_rewards as rewards_module
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.scoring.builtin_rewards import NamedReward
from tidemill.scoring.scorer import RewardScorer, build_scorer, evaluation_scoring

TASK = build_task(ArithmeticTask(), codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)
PROMPT = make_prompt("5+7=", "12")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def named(name: str, function: Callable[..., Any], weight: float = 1.0) -> NamedReward:
    return NamedReward(name=name, weight=weight, function=function, inline=False)


def scorer(*functions: Callable[..., Any], timeout_s: float = 10.0, concurrency: int = 4) -> RewardScorer:
    rewards = tuple(named(f"reward{number}", function) for number, function in enumerate(functions))
    return RewardScorer(rewards, timeout_s=timeout_s, concurrency=concurrency)


async def scored(scorer: RewardScorer, completion: str = "12\n", index: int = 0) -> Reward:
    return await scorer.score(PROMPT, make_trajectory(PROMPT, completion, index=index))


async def test_weighted_rewards_are_summed_and_kept_apart() -> None:
    scoring = ScoringConfig(
        rewards=(
            RewardConfig(kind="exact", weight=2.0),
            RewardConfig(kind="length", target_tokens=4, weight=-0.5),
            RewardConfig(kind="regex", pattern="9"),
        )
    )
    reward = await scored(build_scorer(scoring, task=TASK, seed=0))
    # 3 tokens against a target of 4: 0.75. 2·1 - 0.5·0.75 + 1·0 = 1.625.
    assert reward == Reward(value=1.625, components={"exact": 1.0, "length": 0.75, "regex": 0.0}, correct=True)


EXACT, NUMERIC = RewardConfig(kind="exact"), RewardConfig(kind="numeric", weight=0.5)
LENGTH = RewardConfig(kind="length", target_tokens=3)


@pytest.mark.parametrize(
    ("rewards", "completion", "correct"),
    [
        ((EXACT,), "12\n", True),
        ((EXACT,), "13\n", False),
        ((EXACT, RewardConfig(kind="random", weight=0.0)), "12\n", True),  # what counts nothing decides nothing
        ((EXACT, LENGTH), "12\n", True),  # in a sum, the one that compares with the answer
        ((LENGTH, NUMERIC), "13\n", False),
        ((EXACT, RewardConfig(kind="regex", pattern="1")), "13\n", False),
        ((EXACT, NUMERIC), "12\n", None),  # two can contradict each other
        ((EXACT.model_copy(update={"weight": -1.0}), LENGTH), "12\n", None),
        ((NUMERIC,), "12\n", True),
        ((NUMERIC,), "13\n", False),
        ((LENGTH,), "12\n", None),
    ],
)
async def test_only_a_comparison_with_the_answer_decides_whether_it_is_right(
    rewards: tuple[RewardConfig, ...], completion: str, correct: bool | None
) -> None:
    built = build_scorer(ScoringConfig(rewards=rewards), task=TASK, seed=0)
    assert (await scored(built, completion)).correct is correct


class FixedCheck:
    """Takes the place of the program in a sandbox."""

    async def __call__(self, sample: RewardInput) -> float:
        return 1.0 if "12" in sample.completion else 0.25

    async def close(self) -> None:
        pass


async def test_part_of_a_reward_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "PackageReward", lambda *arguments, **settings: FixedCheck())
    task = replace(TASK, check=PackageCheck(package="p", entry=lambda _: b"", answer=str))
    built = build_scorer(ScoringConfig(rewards=(RewardConfig(kind="task"),)), task=task, seed=0)
    assert await scored(built, "13\n") == Reward(value=0.25, components={"task": 0.25}, correct=False)
    assert await scored(built, "12\n") == Reward(value=1.0, components={"task": 1.0}, correct=True)


@pytest.mark.parametrize("grade", [0.0, 0.9, 1.0, 1.5])
async def test_a_function_does_not_tell_whether_an_answer_is_right(grade: float) -> None:
    reward = await scored(scorer(lambda _: grade))
    assert (reward.value, reward.correct) == (grade, None)


@tm.reward(correct_at=0.8)
def declared(completion: str) -> float:
    return 0.9 if "12" in completion else 0.5


PYTHON = RewardConfig(kind="python", function=f"{__name__}:declared", weight=2.0)


@pytest.mark.parametrize(
    ("reward", "right", "wrong"),
    [
        (PYTHON, True, False),
        (PYTHON.model_copy(update={"correct_at": 0.95}), False, False),  # the configuration precedes the decorator
        (LENGTH.model_copy(update={"correct_at": 1.0}), True, True),
    ],
)
async def test_a_reward_declares_what_is_correct(reward: RewardConfig, right: bool, wrong: bool) -> None:
    built = build_scorer(ScoringConfig(rewards=(reward,)), task=TASK, seed=0)
    assert [(await scored(built, completion)).correct for completion in ("12\n", "13\n")] == [right, wrong]
    await built.close()


def test_a_reward_that_declares_what_is_correct_is_the_one_that_evaluates() -> None:
    found = evaluation_scoring(ScoringConfig(rewards=(LENGTH, PYTHON)), task=TASK).rewards
    assert found == (PYTHON.model_copy(update={"weight": 1.0}),)


@pytest.mark.parametrize(("outcome", "correct"), [(1.0, True), (0.25, False)])
async def test_the_reward_that_a_client_reports_is_that_of_the_environment(outcome: float, correct: bool) -> None:
    declares = ScoringConfig(rewards=(RewardConfig(kind="environment", correct_at=1.0),))
    made = build_scorer(declares, task=TASK, seed=0)
    reward = await made.score(PROMPT, replace_fields(make_trajectory(PROMPT, "12"), outcome=outcome))
    assert (reward.value, reward.correct) == (outcome, correct)


async def test_stop_strings_of_the_run_replace_those_of_the_task() -> None:
    scoring = ScoringConfig()
    assert (await scored(build_scorer(scoring, task=TASK, seed=0), "12\nx")).value == 1
    assert (await scored(build_scorer(scoring, task=TASK, seed=0, stop_strings=("x",)), "12\nx")).value == 1
    assert (await scored(build_scorer(scoring, task=TASK, seed=0, stop_strings=()), "12\nx")).value == 0


async def test_inline_rewards_take_no_thread() -> None:
    before = threading.active_count()
    built = build_scorer(ScoringConfig(), task=TASK, seed=0)
    await asyncio.gather(*(scored(built) for _ in range(20)))
    assert threading.active_count() == before


async def test_sync_and_async_rewards_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent(
            """
            import asyncio, threading

            def plain(prompt, completion, answer, metadata):
                return float(threading.current_thread() is threading.main_thread())

            async def later(prompt, completion, answer, metadata):
                await asyncio.sleep(0)
                return 3

            def handed_on(prompt, completion, answer, metadata):
                return later(prompt, completion, answer, metadata)

            class Judge:
                async def __call__(self, prompt, completion, answer, metadata):
                    return 5

            judge = Judge()
            """
        )
    )
    names = ("plain", "later", "handed_on", "judge")
    scoring = ScoringConfig(rewards=tuple(RewardConfig(kind="python", function=f"{file}:{name}") for name in names))
    built = build_scorer(scoring, task=TASK, seed=0)
    assert (await scored(built)).components == {"plain": 1.0, "later": 3.0, "handed_on": 3.0, "judge": 5.0}
    await built.close()


async def test_a_fault_is_reported_with_reward_type_message_and_sample() -> None:
    def fails(sample: object) -> float:
        raise KeyError("no\nsuch key")

    async def fails_later(sample: object) -> float:
        raise ZeroDivisionError("division by zero")

    def fine(sample: object) -> float:
        return 1.0

    built = scorer(fails, fine, fails_later)
    reward = await scored(built, index=5)
    assert (reward.valid, reward.value, reward.components) == (False, 0.0, {"reward1": 1.0})
    assert re.sub(r":[0-9]+ in", ":1 in", reward.reason) == (
        "reward reward0: KeyError: 'no\\nsuch key' (test_scorer.py:1 in fails); "
        "reward reward2: ZeroDivisionError: division by zero (test_scorer.py:1 in fails_later) "
        "(sample train p epoch 0 index 5)"
    )
    await built.close()


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (float("nan"), "not finite"),
        (float("-inf"), "not finite"),
        (None, "not a number"),
        ("1.0", "not a number"),
        ([1.0], "not a number"),
        (10**400, "OverflowError"),
        (-1e308, "returned -1e+308, and no reward may be larger than 1e18"),
    ],
)
async def test_a_result_that_is_not_a_finite_number_is_invalid(result: object, fault: str) -> None:
    built = scorer(lambda sample: result)
    reward = await scored(built)
    assert not reward.valid
    assert fault in reward.reason
    await built.close()


async def test_weights_that_make_rewards_huge_make_them_invalid() -> None:
    rewards = (named("small", lambda sample: 1.0), named("large", lambda sample: 1e18, weight=1e300))
    reward = await scored(RewardScorer(rewards, timeout_s=10.0, concurrency=4))
    assert (reward.valid, reward.components) == (False, {"small": 1.0, "large": 1e18})
    assert "the weighted rewards are 1, inf, and no reward may be larger than 1e18" in reward.reason


@pytest.mark.parametrize(("result", "expected"), [(True, 1.0), (3, 3.0), (-0.5, -0.5)])
async def test_numbers_of_other_types_count(result: object, expected: float) -> None:
    built = scorer(lambda sample: result)
    assert await scored(built) == Reward(value=expected, components={"reward0": expected})
    await built.close()


async def test_a_reward_that_calls_exit_does_not_end_the_run() -> None:
    def leaves(sample: object) -> float:
        sys.exit(4)

    async def leaves_later(sample: object) -> float:
        sys.exit(4)

    async def gives_up(sample: object) -> float:
        raise asyncio.CancelledError

    built = scorer(leaves, leaves_later, gives_up)
    reward = await scored(built)
    assert reward.reason.count("SystemExit: 4") == 2
    assert "it was cancelled" in reward.reason
    await built.close()


async def test_a_hanging_reward_times_out_and_others_go_on(gate: threading.Event) -> None:
    def hangs_on_the_first(sample: Any) -> float:
        if sample.sample_id.index == 0:
            gate.wait()
        return 1.0

    built = scorer(hangs_on_the_first, timeout_s=0.3, concurrency=1)
    rewards = await asyncio.gather(*(scored(built, index=index) for index in range(4)))
    assert [reward.valid for reward in rewards] == [False, True, True, True]
    assert rewards[0].reason == "reward reward0: no result within 0.3 s (sample train p epoch 0 index 0)"
    await built.close()


async def test_an_async_reward_past_its_deadline_is_cancelled() -> None:
    cancelled = threading.Event()

    async def slow(sample: object) -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return 1.0

    built = scorer(slow, timeout_s=0.05)
    assert "no result within 0.05 s" in (await scored(built)).reason
    assert await asyncio.to_thread(cancelled.wait, 10)
    await built.close()


async def test_a_number_that_blocks_its_conversion_leaves_the_loop_running(gate: threading.Event) -> None:
    class Blocks:
        def __float__(self) -> float:
            gate.wait(20)
            return 1.0

    async def judged() -> Reward:
        return await scored(built)

    built = scorer(lambda sample: Blocks(), timeout_s=0.3)
    judging = asyncio.create_task(judged())
    await asyncio.sleep(0.1)
    assert not judging.done()  # the loop came back here while the conversion blocks
    assert "no result within 0.3 s" in (await judging).reason
    await built.close()


async def test_a_result_whose_repr_raises_or_is_no_text_is_invalid() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise KeyError("name")

    class Half:
        def __repr__(self) -> str:
            return "\ud800"

    built = scorer(lambda sample: Silent(), lambda sample: Half())
    reason = (await scored(built)).reason
    assert "reward reward0: KeyError: 'name'" in reason
    assert "reward reward1: TypeError: returned \\ud800, which is not a number" in reason
    await built.close()


async def test_a_reward_that_hangs_for_every_sample_fails_fast_in_the_end(gate: threading.Event) -> None:
    built = scorer(lambda sample: gate.wait(), timeout_s=0.01, concurrency=16)
    rewards = await asyncio.gather(*(scored(built, index=index) for index in range(MAX_HANGING + 20)))
    assert not any(reward.valid for reward in rewards)
    assert any("earlier calls still hang" in reward.reason for reward in rewards)
    await built.close()


async def test_the_time_a_sample_waits_for_its_turn_is_not_the_rewards_time() -> None:
    built = scorer(lambda sample: time.sleep(0.1), lambda sample: 1.0, timeout_s=0.9, concurrency=1)
    rewards = await asyncio.gather(*(scored(built) for _ in range(12)))  # 1.2 s one after the other
    assert not any("no result within" in reward.reason for reward in rewards)
    await built.close()


async def test_no_more_samples_at_once_than_allowed() -> None:
    running, most = 0, 0

    async def counts(sample: object) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return 0.0

    built = scorer(counts, concurrency=3)
    await asyncio.gather(*(scored(built) for _ in range(20)))
    assert most == 3
    await built.close()


HANGING = {
    "sleeps": "def hangs(sample):\n    time.sleep(3600)",
    "swallows_cancellation": """
async def hangs(sample):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
""",
    "blocks_its_loop": "async def hangs(sample):\n    time.sleep(3600)",
}


@pytest.mark.parametrize("kind", sorted(HANGING))
def test_a_process_with_a_hanging_reward_ends(kind: str) -> None:
    script = """
        async def main():
            reward = NamedReward(name="hangs", weight=1.0, function=hangs, inline=False)
            scorer = RewardScorer((reward,), timeout_s=0.1, concurrency=2)
            prompt = make_prompt()
            print((await scorer.score(prompt, make_trajectory(prompt, "x"))).reason)
            await scorer.close()

        asyncio.run(main())
    """
    imports = """
        import asyncio, time
        from tests.char_codec import make_prompt, make_trajectory
        from tidemill.scoring.builtin_rewards import NamedReward
        from tidemill.scoring.scorer import RewardScorer
    """
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(map(textwrap.dedent, (imports, HANGING[kind], script)))],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "no result within 0.1 s" in done.stdout


@pytest.mark.parametrize("kind", ["exact", "numeric", "math_verify"])
@pytest.mark.parametrize("completion", ["", "None", "12"])
async def test_a_missing_answer_makes_the_sample_invalid(kind: Any, completion: str) -> None:
    built = build_scorer(ScoringConfig(rewards=(RewardConfig(kind=kind), LENGTH)), task=TASK, seed=0)
    prompt = replace_fields(PROMPT, answer=None)
    reward = await built.score(prompt, make_trajectory(prompt, completion))
    assert (reward.valid, reward.value) == (False, 0.0)
    assert f"reward {kind}: ValueError: the row has no answer" in reward.reason
    await built.close()


@pytest.mark.parametrize(("completion", "value"), [("", 1.0), ("None", 0.0)])
async def test_an_empty_answer_is_an_answer(completion: str, value: float) -> None:
    prompt = replace_fields(PROMPT, answer="")
    built = build_scorer(ScoringConfig(rewards=(EXACT,)), task=TASK, seed=0)
    assert (await built.score(prompt, make_trajectory(prompt, completion))).value == value


async def test_evaluation_of_a_control_run_still_measures() -> None:
    control = ScoringConfig(rewards=(RewardConfig(kind="random"),))
    built = build_scorer(evaluation_scoring(control, task=TASK), task=TASK, seed=0)
    assert [(await scored(built, completion)).value for completion in ("12\n", "13\n")] == [1.0, 0.0]


def test_evaluation_asks_the_first_reward_that_compares_with_the_answer_and_no_other() -> None:
    # Trained on 0.5·numeric + 1·regex a wrong answer in the right form earns 1; measured it must be wrong.
    mixed = ScoringConfig(
        rewards=(
            RewardConfig(kind="regex", pattern="[0-9]"),
            RewardConfig(kind="numeric", weight=0.5),
            RewardConfig(kind="exact", weight=3.0),
        )
    )
    assert evaluation_scoring(mixed, task=TASK).rewards == (RewardConfig(kind="numeric"),)
    gold = RewardConfig(kind="exact", role="gold", weight=0.0, name="truth")
    measured = evaluation_scoring(ScoringConfig(rewards=(RewardConfig(kind="python", function="a:b"), gold)), task=TASK)
    assert measured.rewards == (RewardConfig(kind="exact", name="truth"),)


def test_evaluation_without_such_a_reward_keeps_those_that_may_tell_right_from_wrong() -> None:
    own = RewardConfig(kind="python", function="a:b", weight=2.0)
    shaped = ScoringConfig(rewards=(own, RewardConfig(kind="length", target_tokens=3), RewardConfig(kind="random")))
    assert evaluation_scoring(shaped, task=TASK).rewards == (own,)


@pytest.mark.parametrize("own", [RewardConfig(kind="model", model="folder", weight=2.0), LENGTH])
@pytest.mark.parametrize(("answers", "uses_own"), [(0, True), (4, True), (5, False), (10, False)])
def test_evaluation_without_answers_asks_the_rewards_of_the_run(
    own: RewardConfig, answers: int, uses_own: bool
) -> None:
    task = replace(TASK, held_out_rows=RowFigures(rows=10, repeated=0, filled={"answer": answers}))
    scoring = ScoringConfig(rewards=(own,))
    assert (evaluation_scoring(scoring, task=task) == scoring) is uses_own


async def test_the_random_reward_is_the_samples_own() -> None:
    control = ScoringConfig(rewards=(RewardConfig(kind="random"),))
    first, second = (build_scorer(control, task=TASK, seed=0) for _ in range(2))
    tossed = [(await scored(first, "a", index=index)).value for index in range(16)]
    assert tossed == [(await scored(second, "b", index=index)).value for index in range(16)]
    assert set(tossed) == {0.0, 1.0}
    assert SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0).key


async def test_a_pattern_that_backtracks_for_ages_costs_its_sample_and_leaves_the_loop_running() -> None:
    config = ScoringConfig(rewards=(RewardConfig(kind="regex", pattern="(1|11)+$"),), timeout_s=0.2)
    subject = build_scorer(config, task=TASK, seed=0)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    reward = await scored(subject, "1" * 60 + "=")
    ticking.cancel()
    await subject.close()
    assert not reward.valid and "0.2 s" in reward.reason
    assert ticks > 3


async def test_rewards_read_the_last_turn_and_the_turns_own_rewards() -> None:
    """The tool's number is not the agent's answer."""
    rewards = (RewardConfig(kind="numeric"), RewardConfig(kind="environment", weight=2.0))
    made = build_scorer(ScoringConfig(rewards=rewards), task=TASK, seed=0)
    turns = (
        Turn(start=0, end=2, text="call", observation="12", reward=0.25),
        Turn(start=4, end=6, text="it is 13", reward=0.5),
    )
    agent = replace_fields(make_trajectory(PROMPT, "call12it is 13"), turns=turns)
    reward = await made.score(PROMPT, agent)
    assert reward.components == {"numeric": 0.0, "environment": 0.75}
    assert reward.value == 1.5
    right = replace_fields(agent, turns=(turns[0], msgspec.structs.replace(turns[1], text="it is 12")))
    assert (await made.score(PROMPT, right)).value == 2.5
    await made.close()


async def test_a_fault_has_no_reward_and_a_failure_the_environments() -> None:
    made = scorer(lambda sample: 1.0)
    agent = make_trajectory(PROMPT, "12")
    fault = await made.score(PROMPT, replace_fields(agent, fault="lost"))
    assert (fault.valid, fault.reason) == (False, "lost")
    failure = await made.score(PROMPT, replace_fields(agent, outcome=-1.0))
    assert (failure.valid, failure.value) == (True, -1.0)
    await made.close()
