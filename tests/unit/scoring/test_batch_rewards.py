"""Rewards that judge several samples at once: what queues up goes together, and a fault stays with its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.char_codec import CharCodec, make_prompt, make_trajectory
from tidemill.config.task import ArithmeticTask, RewardConfig, ScoringConfig
from tidemill.core.errors import ScorerLost, UserError
from tidemill.core.records import Reward
from tidemill.data.build_task import build_task
from tidemill.scoring.batch_rewards import BatchedReward, BatchScorer, RewardInput
from tidemill.scoring.scorer import RewardScorer, build_scorer, evaluation_scoring

TASK = build_task(ArithmeticTask(), codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)
PROMPT = make_prompt("5+7=", "12")


class LengthJudge:
    """The completion's length as score; holds each batch until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Semaphore(0)
        self.fault: Exception | None = None
        self.short = False
        self.closed = False

    async def score_batch(self, samples: Sequence[RewardInput]) -> Sequence[float | Exception]:
        self.batches.append([sample.completion for sample in samples])
        await self.gate.acquire()
        if self.fault:
            raise self.fault
        scores: list[float | Exception] = [
            ValueError("odd") if sample.completion == "bad" else float(len(sample.completion)) for sample in samples
        ]
        return scores[1:] if self.short else scores

    async def close(self) -> None:
        self.closed = True


def scorer(judge: BatchScorer, *others: RewardConfig, timeout_s: float = 5.0, batch: int = 64) -> RewardScorer:
    config = RewardConfig(kind="model", model="folder", batch=batch, timeout_s=timeout_s, weight=0.5)
    scoring = ScoringConfig(rewards=(*others, config), concurrency=1)
    return build_scorer(scoring, task=TASK, seed=0, open_model=lambda reward: BatchedReward(judge, most=reward.batch))


async def ask(subject: RewardScorer, completion: str) -> Reward:
    return await subject.score(PROMPT, make_trajectory(PROMPT, completion))


async def settled(judge: LengthJudge, batches: int) -> None:
    async with asyncio.timeout(5):
        while len(judge.batches) < batches:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_samples_queued_during_a_batch_form_the_next_batch() -> None:
    judge = LengthJudge()
    subject = scorer(judge, batch=3)
    first = [asyncio.create_task(ask(subject, "a"))]
    await settled(judge, 1)
    rest = [asyncio.create_task(ask(subject, "b" * n)) for n in (2, 3, 4, 5)]
    await asyncio.sleep(0)
    judge.gate.release()
    assert (await first[0]).value == 0.5  # known before the others: nobody waits for a batch to fill
    judge.gate.release()
    judge.gate.release()
    assert [(await each).value for each in rest] == [1.0, 1.5, 2.0, 2.5]
    # one alone, then as many as are allowed although `concurrency` is 1, then the rest
    assert judge.batches == [["a"], ["bb", "bbb", "bbbb"], ["bbbbb"]]
    await subject.close()
    assert judge.closed


async def test_samples_that_finish_in_one_moment_go_together_and_add_to_other_rewards() -> None:
    judge = LengthJudge()
    judge.gate.release()
    subject = scorer(judge, RewardConfig(kind="exact", weight=2.0))
    one, other = await asyncio.gather(ask(subject, "12"), ask(subject, "130"))
    assert judge.batches == [["12", "130"]]
    # 2 · 1 + 0.5 · 2 and 2 · 0 + 0.5 · 3
    assert one == Reward(value=3.0, components={"exact": 1.0, "model": 2.0}, correct=True)
    assert other == Reward(value=1.5, components={"exact": 0.0, "model": 3.0}, correct=False)
    assert list(one.components) == ["exact", "model"]


async def test_the_judge_sees_the_tokens_as_they_were_generated() -> None:
    seen: list[bytes] = []

    class Seeing(LengthJudge):
        async def score_batch(self, samples: Sequence[RewardInput]) -> Sequence[float | Exception]:
            seen.extend(sample.token_ids for sample in samples)
            return [0.0] * len(samples)

    await ask(scorer(Seeing()), "12")
    assert seen == [make_trajectory(PROMPT, "12").token_ids]


async def test_faults_stay_with_their_samples() -> None:
    judge = LengthJudge()
    subject = scorer(judge)
    judge.gate.release()
    good, bad = await asyncio.gather(ask(subject, "12"), ask(subject, "bad"))
    assert good.valid
    assert (bad.valid, bad.value) == (False, 0.0)
    assert "reward model: ValueError: odd" in bad.reason
    judge.fault = RuntimeError("out of order")
    judge.gate.release()
    both = await asyncio.gather(ask(subject, "12"), ask(subject, "13"))
    assert [each.valid for each in both] == [False, False]
    assert "out of order" in both[0].reason
    judge.fault, judge.short = None, True
    judge.gate.release()
    assert "0 scores for 1 samples" in (await ask(subject, "12")).reason
    judge.short = False
    judge.gate.release()
    assert (await ask(subject, "12")).valid


async def test_a_sample_past_its_deadline_is_invalid_and_is_not_judged_later() -> None:
    judge = LengthJudge()
    subject = scorer(judge, timeout_s=0.05)
    held = asyncio.create_task(ask(subject, "held"))
    await settled(judge, 1)
    late = await ask(subject, "late")
    assert "no result within 0.05 s" in late.reason
    assert not (await held).valid
    judge.gate.release()
    judge.gate.release()
    assert (await ask(subject, "next")).valid
    assert judge.batches == [["held"], ["next"]]


async def test_closing_cancels_the_batches_being_scored() -> None:
    judge = LengthJudge()
    subject = scorer(judge)
    held = asyncio.create_task(ask(subject, "held"))
    await settled(judge, 1)
    await subject.close()
    assert not (await held).valid


def test_without_a_place_for_models_there_are_none() -> None:
    scoring = ScoringConfig(rewards=(RewardConfig(kind="model", model="folder"),))
    with pytest.raises(UserError, match="reward models are not available here"):
        build_scorer(scoring, task=TASK, seed=0)


def test_evaluation_measures_correctness_and_adds_the_reward_model() -> None:
    model, exact = RewardConfig(kind="model", model="folder"), RewardConfig(kind="exact", weight=3.0)
    for rewards in ((model,), (model, exact), (exact, model)):
        found = evaluation_scoring(ScoringConfig(rewards=rewards), task=TASK).rewards
        assert [(each.kind, each.weight) for each in found] == [("exact", 1.0), ("model", 0.0)]


async def test_a_model_that_is_gone_for_good_is_no_fault_of_a_sample() -> None:
    judge = LengthJudge()
    judge.fault = ScorerLost("the reward model died again and again")
    subject = scorer(judge)
    judge.gate.release()
    with pytest.raises(ScorerLost, match="died again and again"):
        await ask(subject, "any")
    await subject.close()
