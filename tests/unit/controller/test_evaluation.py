"""Evaluation: one greedy sample per prompt, scored by the evaluation's scorer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.doubles.engine import FakeCompute, FakeEngine
from tests.doubles.samples import FakeCodec, make_prompt
from tests.doubles.session import FakeScorer, FakeTelemetry
from tests.fabricated_run import make_trajectory
from tests.virtual_time import run_virtual
from tidemill.controller.entries import Evaluated
from tidemill.controller.evaluation import eval_result, evaluate, is_correct
from tidemill.controller.fleet import Fleet
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.core.errors import UserError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import GenerateRequest, PolicyVersion, Prompt, Reward, SamplingParams, Trajectory
from tidemill.rollout.worker import EngineWorker

VERSION = PolicyVersion(number=3, digest="a")


class ByName(FakeScorer):
    """By the prompt's number: correct, half correct, invalid, correct."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return {
            "h0": Reward(value=1.0, correct=True),
            "h1": Reward(value=0.5, correct=False),
            "h2": Reward(value=1.0, valid=False),
            "h3": Reward(value=1.0, correct=True),
        }[prompt.prompt_id]


class ByIndex(FakeScorer):
    """Drawn samples: of h0 only the first is correct, of h1 every one."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        right = prompt.prompt_id == "h1" or trajectory.sample_id.index == 0
        return Reward(value=float(right), correct=right)


async def run(
    prompts: list[Prompt], seen: list[GenerateRequest], scorer: FakeScorer | None = None, **drawn: Any
) -> Evaluated:
    engine = FakeEngine(VERSION)
    submit = engine.submit
    engine.submit = lambda requests: (seen.extend(requests), submit(requests))[1]  # type: ignore[method-assign,func-returns-value]
    worker = EngineWorker(engine, FakeCompute(0.1), clock=LoopClock(), tick_s=0.1)
    fleet = Fleet(worker, slots=3, clock=LoopClock(), telemetry=FakeTelemetry())
    rollout = RolloutContext(
        fleet=fleet,
        ledger=Ledger(None),
        scorer=FakeScorer(),
        codec=FakeCodec(),
        telemetry=FakeTelemetry(),
        clock=LoopClock(),
        stop=asyncio.Event(),
        truncated="masked",
    )
    sampling = SamplingParams(max_new_tokens=5, temperature=0.7, top_k=3, top_p=0.5, stop_strings=("\n",))
    try:
        async with fleet:
            return await evaluate(
                step=3,
                version=VERSION,
                prompts=prompts,
                rollout=rollout,
                scorer=scorer or ByName(),
                sampling=sampling,
                seed=9,
                **drawn,
            )
    finally:
        await worker.close()


def test_accuracy_is_the_share_of_valid_right_answers() -> None:
    seen: list[GenerateRequest] = []
    prompts = [make_prompt(f"h{at}") for at in range(4)]

    evaluation = run_virtual(run(prompts, seen))

    result = evaluation.result
    # h0 and h3 of four are correct; h1 only half, h2's reward failed
    assert (result.greedy_accuracy, result.n, result.invalid) == (0.5, 4, 1)
    # mean of 1, 0.5 and 1; their deviation is sqrt(((1/6)² + (1/3)² + (1/6)²) / 2) = 0.288675, over sqrt(3): 1/6
    assert (result.reward_mean, result.reward_stderr) == pytest.approx((2.5 / 3, 1 / 6))
    assert [sample.sample_id.prompt_id for sample in evaluation.samples] == ["h0", "h1", "h2", "h3"]
    assert result.completion_tokens_mean == sum(s.completion_length for s in evaluation.samples) / 4
    assert result.truncated_fraction == sum(s.truncated for s in evaluation.samples) / 4 > 0
    assert result.duration_s > 0
    assert {(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in seen} == {(0.0, 0, 1.0)}
    assert {(r.sampling.max_new_tokens, r.sampling.stop_strings) for r in seen} == {(5, ("\n",))}
    assert {(r.sample_id.purpose, r.sample_id.run_seed, r.sample_id.index) for r in seen} == {("eval:held_out", 9, 0)}


def test_pass_at_k_of_drawn_samples() -> None:
    seen: list[GenerateRequest] = []
    prompts = [make_prompt("h1"), make_prompt("h0")]

    evaluation = run_virtual(run(prompts, seen, ByIndex(), name="math", samples_per_prompt=3, ks=(1, 2, 3)))

    result = evaluation.result
    # 1 of 3 and 3 of 3 are correct. pass@1: (1/3 + 1) / 2; pass@2: (1 - C(2,2)/C(3,2) + 1) / 2; pass@3: 1.
    assert result.pass_at == pytest.approx({1: 2 / 3, 2: 5 / 6, 3: 1.0})
    assert result.drawn_reward_mean == pytest.approx(2 / 3)
    assert (result.name, result.greedy_accuracy, result.samples_per_prompt) == ("math", 1.0, 3)
    ids = [(one.sample_id.purpose, one.sample_id.prompt_id, one.sample_id.index) for one in evaluation.samples]
    drawn = [("eval:math:drawn", name, index) for name in ("h1", "h0") for index in range(3)]
    assert ids == [("eval:math", "h1", 0), ("eval:math", "h0", 0), *drawn]
    assert {r.sampling.temperature for r in seen if r.sample_id.purpose == "eval:math:drawn"} == {0.7}


def test_graded_rewards_of_drawn_samples_have_a_mean_and_no_pass_at_k() -> None:
    samples = [make_trajectory(make_prompt("1"), "1", reward=Reward(value=value)) for value in (0.25, 0.5)]
    found = eval_result("math", 0, VERSION, samples[:1], 1.0, drawn=[samples], ks=(1, 2))
    assert (found.pass_at, found.drawn_reward_mean, found.samples_per_prompt) == ({}, 0.375, 2)


def test_an_evaluation_without_prompts_is_refused() -> None:
    with pytest.raises(UserError, match="no held-out prompts"):
        run_virtual(run([], []))


def judgement(*rewards: Reward | None) -> tuple[float | None, float | None]:
    """Mean reward and accuracy of samples with these rewards."""
    samples = [make_trajectory(make_prompt(f"{at}"), "1", reward=reward) for at, reward in enumerate(rewards)]
    found = eval_result("held_out", 0, VERSION, samples, 1.0)
    return found.reward_mean, found.greedy_accuracy


@pytest.mark.parametrize("rewards", [[], [5.0, 5.0], [-1.0]])
def test_rewards_that_tell_correctness_need_not_be_shares(rewards: list[float]) -> None:
    right = [Reward(value=value, correct=value > 0) for value in rewards] or [Reward(value=0.0, valid=False)]
    samples = [make_trajectory(make_prompt("1"), "1", reward=reward) for reward in right]
    assert eval_result("held_out", 0, VERSION, samples, 1.0).reward_interval is None  # how far others can be is unknown


def test_graded_rewards_have_a_mean_and_no_accuracy() -> None:
    assert judgement(Reward(value=0.9), Reward(value=0.9)) == (0.9, None)
    assert judgement(Reward(value=1.5), Reward(value=1.5)) == (1.5, None)
    assert judgement(Reward(value=1.0), Reward(value=0.25)) == (0.625, None)
    assert judgement(Reward(value=-3.0), Reward(value=1.0)) == (-1.0, None)
    # A graded reward may happen to give only 0 and 1 at one step.
    assert judgement(Reward(value=1.0), Reward(value=0.0)) == (0.5, None)


def test_correct_rewards_have_an_accuracy() -> None:
    right, wrong = Reward(value=1.0, correct=True), Reward(value=0.0, correct=False)
    assert judgement(right, wrong, wrong, right) == (0.5, 0.5)
    # a sample whose reward failed is incorrect, and not in the mean
    assert judgement(right, Reward(value=0.0, valid=False)) == (1.0, 0.5)


def test_without_a_valid_reward_there_is_no_accuracy() -> None:
    assert judgement(None, Reward(value=1.0, valid=False)) == (None, None)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Reward(value=0.5, correct=True), True),
        (Reward(value=1.0), False),
        (Reward(value=2.0, correct=False), False),
        (Reward(value=1.0, valid=False), False),
        (None, False),
    ],
)
def test_correct(reward: Reward | None, expected: bool) -> None:
    assert is_correct(make_trajectory(make_prompt("1"), "1", reward=reward)) is expected
