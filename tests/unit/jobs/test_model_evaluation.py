"""Evaluation metrics, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from tests.char_codec import make_prompt, make_trajectory
from tests.trajectories import agent_trajectory
from tidemill.cli.evaluate import figures as eval_figures
from tidemill.controller.entries import EvalResult, Evaluated
from tidemill.controller.evaluation import eval_result
from tidemill.core.records import PolicyVersion, Prompt, Reward, SourceRun, Trajectory
from tidemill.jobs.model_evaluation import ModelEvaluation, comparison, figures
from tidemill.pipeline.stage_kinds import evaluation_headline
from tidemill.telemetry.statistics import wilson_interval

PROMPTS = tuple(make_prompt(f"{number}+0=", str(number)) for number in range(4))


def answered(prompt: Prompt, completion: str, index: int = 0) -> Trajectory:
    right = completion == prompt.answer
    reward = Reward(value=float(right), correct=right)
    return msgspec.structs.replace(make_trajectory(prompt, completion, index=index), reward=reward)


def measured(
    greedy: Sequence[str], drawn: Sequence[str] = (), scores: dict[str, tuple[Reward, ...]] | None = None
) -> ModelEvaluation:
    """One greedy completion per prompt, and one sample per character of a word."""
    samples = tuple(answered(prompt, text) for prompt, text in zip(PROMPTS, greedy, strict=True))
    right = sum(sample.text == prompt.answer for sample, prompt in zip(samples, PROMPTS, strict=True))
    result = EvalResult(
        name="held_out",
        step=0,
        version=PolicyVersion(number=0, digest="ab"),
        reward_mean=right / 4,
        greedy_accuracy=right / 4,
        n=4,
        invalid=0,
        truncated_fraction=0.0,
        completion_tokens_mean=1.0,
        duration_s=1.0,
    )
    groups = tuple(
        tuple(answered(prompt, text, index) for index, text in enumerate(word))
        for prompt, word in zip(PROMPTS, drawn, strict=False)
    )
    return ModelEvaluation(
        model="m",
        prompts=PROMPTS,
        greedy=Evaluated(result=result, samples=samples),
        drawn=groups,
        scores=scores or {},
    )


def test_greedy_figures() -> None:
    found = figures(measured(["0", "1", "9", "99"]), ks=())
    assert (found["greedy_accuracy"], found["n"]) == (0.5, 4)
    assert found["greedy_accuracy_interval"] == found["reward_mean_interval"] == list(wilson_interval(0.5, 4))
    assert found["completion_tokens"]["mean"] == 1.25
    # Tokens 0 1 9 9 9: three of five differ; one pair, 99.
    assert (found["distinct_1"], found["distinct_2"]) == (0.6, 1.0)
    assert "drawn" not in found and "scores" not in found
    assert found["samples"][2] == {"prompt": "2+0=", "completion": "9", "answer": "2", "reward": 0.0, "correct": False}


def graded(values: Sequence[float | None], drawn: Sequence[Sequence[float]] = ()) -> ModelEvaluation:
    """Greedy completions with these rewards (None is invalid), and samples of each prompt."""

    def with_reward(sample: Trajectory, value: float | None) -> Trajectory:
        reward = Reward(value=0.0, valid=False) if value is None else Reward(value=value)
        return msgspec.structs.replace(sample, reward=reward)

    plain = measured(["1"] * 4, ["1" * len(each) for each in drawn])
    samples = tuple(with_reward(sample, value) for sample, value in zip(plain.greedy.samples, values, strict=True))
    groups = tuple(
        tuple(map(with_reward, of_prompt, rewards)) for of_prompt, rewards in zip(plain.drawn, drawn, strict=True)
    )
    result = eval_result("held_out", 0, plain.greedy.result.version, samples, 1.0)
    return replace(plain, greedy=Evaluated(result=result, samples=samples), drawn=groups)


def test_graded_rewards_have_no_accuracy_and_no_pass_at_k() -> None:
    found = figures(graded([0.9, 0.5, None, 0.1], [[0.2, 0.4], [1.0, 0.5], [0.0, 0.0], [1.5, 0.5]]), ks=(1, 2))
    assert found["reward_mean"] == pytest.approx(0.5)
    low, high = found["reward_mean_interval"]
    assert 0.1 <= low < 0.5 < high <= 0.9
    assert "greedy_accuracy" not in found and "greedy_accuracy_interval" not in found
    assert found["drawn"]["pass_at"] == {}
    assert found["drawn"]["reward_mean"]["value"] == pytest.approx((0.3 + 0.75 + 0.0 + 1.0) / 4)
    assert [(each["reward"], each["correct"]) for each in found["samples"]] == [
        (0.9, None), (0.5, None), (None, None), (0.1, None)
    ]  # fmt: skip


def test_equal_graded_rewards_have_no_interval() -> None:
    found = figures(graded([0.5] * 4, [[0.5], [0.5], [0.5], [0.5]]), ks=())
    assert (found["reward_mean"], found["reward_mean_interval"]) == (0.5, None)
    assert found["drawn"]["reward_mean"] == {"value": 0.5, "low": None, "high": None}
    assert "0.5 (no interval: no two values differ)" in eval_figures(found)
    assert "no interval: no two values differ; n = 4" in evaluation_headline(found)
    same = comparison(graded([0.5] * 4), graded([0.75] * 4))["figures"]["reward_mean"]
    assert same["difference"] == {"value": 0.25, "low": None, "high": None}


def test_graded_rewards_are_compared_by_their_mean() -> None:
    found = comparison(graded([0.5, 0.5, None, 0.5]), graded([0.9, 0.4, 0.8, 0.6]))["figures"]
    assert "greedy_accuracy" not in found
    # The prompt without a valid reward is left out: 0.9, 0.4, 0.6 against 0.5 three times.
    reward = found["reward_mean"]
    assert (reward["n"], reward["higher"], reward["lower"]) == (3, 2, 1)
    assert (reward["other"], reward["this"]) == pytest.approx((0.5, 1.9 / 3))


def test_drawn_figures() -> None:
    # Right of three samples: 3, 1, 0, 0.
    found = figures(measured(["0", "1", "2", "3"], ["000", "123", "445", "555"]), ks=(1, 2, 3))["drawn"]
    values = {k: figure["value"] for k, figure in found["pass_at"].items()}
    # pass@1: (1 + 1/3) / 4; pass@2: (1 + (1 - C(2,2)/C(3,2))) / 4 = (1 + 2/3) / 4; pass@3: 2 / 4
    assert values == pytest.approx({"1": 1 / 3, "2": 5 / 12, "3": 0.5})
    assert found["samples_per_prompt"] == 3
    # Within prompts 1/3, 3/3, 2/3 and 1/3 of the tokens differ; over all, 0 1 2 3 4 5 are six of twelve.
    assert found["distinct_1_in_prompt"] == pytest.approx(7 / 12)
    assert found["distinct_1"] == 0.5
    assert math.isnan(found["distinct_2"]) and math.isnan(found["distinct_2_in_prompt"])  # no completion has two


def test_invalid_scores_are_left_out_and_counted() -> None:
    rewards = (Reward(value=1.0), Reward(value=3.0), Reward(value=9.0, valid=False), Reward(value=2.0))
    found = figures(measured(["0"] * 4, scores={"liked": rewards}), ks=())["scores"]["liked"]
    assert (found["value"], found["invalid"]) == (2.0, 1)
    assert 1.0 <= found["low"] < 2.0 < found["high"] <= 3.0


def test_a_comparison_is_paired_by_prompt() -> None:
    no, yes = Reward(value=0.0), Reward(value=1.0)
    bad = Reward(value=7.0, valid=False)
    other = measured(["0", "9", "9", "99"], ["00", "98", "98", "98"], {"liked": (no, no, bad, no)})
    this = measured(["9", "1", "2", "3"], ["00", "11", "28", "98"], {"liked": (yes, no, yes, yes)})
    found = comparison(other, this)["figures"]
    # One right answer was lost, three were won: 2 · (C(4,0) + C(4,1)) / 2^4 = 10 / 16.
    greedy = found["greedy_accuracy"]
    assert found["reward_mean"] == greedy
    assert (greedy["other"], greedy["this"], greedy["higher"], greedy["lower"]) == (0.25, 0.75, 3, 1)
    assert greedy["p_value"] == 0.625
    assert greedy["difference"]["value"] == 0.5
    # Shares of right samples: 1, 0, 0, 0 and 1, 1, 1/2, 0; two higher, none lower: 2 / 2^2.
    drawn = found["drawn_accuracy"]
    assert (drawn["other"], drawn["this"], drawn["higher"], drawn["lower"]) == (0.25, 0.625, 2, 0)
    assert drawn["p_value"] == 0.5
    assert found["drawn_reward_mean"] == drawn
    # The pair with an invalid score is left out.
    assert (found["liked"]["n"], found["liked"]["higher"]) == (3, 2)
    assert (found["completion_tokens"]["higher"], found["completion_tokens"]["lower"]) == (0, 1)


def test_agents_are_measured_by_generated_tokens_and_show_their_turns() -> None:
    agent = agent_trajectory([1], [("action", [2]), ("observation", [7, 8, 9]), ("action", [2])], [0.0, 1.0])
    agent = msgspec.structs.replace(agent, episode_end="done", sources=(SourceRun(source="e/w", start=0, end=5),))
    plain = measured(["0", "1", "2", "3"])
    evaluation = Evaluated(result=plain.greedy.result, samples=(agent, *plain.greedy.samples[1:]))
    found = figures(replace(plain, greedy=evaluation), ks=())
    # Generated: 2 2 and one token of each other prompt, which all differ from 2; observations would be 3 more.
    assert found["completion_tokens"]["max"] == 2
    assert found["distinct_1"] == 4 / 5
    first, second, *_ = found["samples"]
    assert [(turn["start"], turn["end"], turn["segments"][0]["worker"]) for turn in first["turns"]] == [
        (0, 1, "e/w"),
        (4, 5, "e/w"),
    ]
    assert first["episode_end"] == "done" and "turns" not in second
