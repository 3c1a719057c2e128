"""Evaluation with several kinds of scorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.evaluate import figures
from tidemill.config.load import load_spec
from tidemill.config.schema import RunConfig
from tidemill.core.records import Prompt, Reward, Trajectory
from tidemill.jobs.model_evaluation import evaluate


class Likes:
    """Implements core.protocols.Scorer: the score is the number of tokens."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=float(trajectory.completion_length))

    async def close(self) -> None:
        raise AssertionError("the owner closes it")


def test_another_scorer_can_score_the_answers(session_cache: object) -> None:
    spec = load_spec(
        ["--model.source=char", "--task.shots=0", "--sampling.max_new_tokens=3", "--eval.prompts=8",
         "--trainer.threads=1"], purpose="eval"
    )  # fmt: skip
    found = evaluate(spec, scorers={"tokens": Likes()}, compare="char")
    assert found["scores"]["tokens"]["value"] == pytest.approx(found["completion_tokens"]["mean"])
    assert found["compared_with"]["weights_digest"] == found["weights_digest"]
    same = found["compared_with"]["figures"]["tokens"]
    assert (same["n"], same["higher"], same["lower"], same["p_value"]) == (8, 0, 0, 1.0)


def evaluated(reward: str, *more: str) -> tuple[dict[str, Any], str]:
    """Results of `tidemill eval` with a reward function, as data and as text."""
    spec = load_spec(
        ["--model.source=char", "--task.shots=0", "--sampling.max_new_tokens=3", "--eval.prompts=8",
         "--eval.samples_per_prompt=2", "--trainer.threads=1", f"--scoring.rewards=[{reward}]", *more], purpose="eval"
    )  # fmt: skip
    found = evaluate(spec, compare="char")
    return found, figures(found)


@pytest.mark.parametrize("grade", [0.9, 1.5])
def test_a_graded_reward_has_a_mean_and_no_accuracy(session_cache: object, tmp_path: Path, grade: float) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(f"def score(prompt, completion, answer, metadata):\n    return {grade}\n", encoding="utf-8")
    found, text = evaluated(f'{{kind = "python", function = "{judge}:score"}}')
    assert found["reward_mean"] == pytest.approx(grade)
    assert found["drawn"]["reward_mean"]["value"] == pytest.approx(grade)
    assert found["drawn"]["pass_at"] == {}
    assert found["compared_with"]["figures"]["reward_mean"]["this"] == pytest.approx(grade)
    assert "greedy_accuracy" not in found and "greedy_accuracy" not in found["compared_with"]["figures"]
    assert f"reward_mean             {grade} (no interval: no two values differ)" in text
    assert "accuracy" not in text


def test_a_binary_reward_has_a_mean_and_an_accuracy(session_cache: object) -> None:
    found, text = evaluated('{kind = "exact"}')
    right = sum(sample["correct"] for sample in found["samples"])
    assert found["reward_mean"] == found["greedy_accuracy"] == right / 8
    assert set(found["drawn"]["pass_at"]) == {"1", "2"}
    assert {"reward_mean", "greedy_accuracy", "drawn_reward_mean", "drawn_accuracy"} <= set(
        found["compared_with"]["figures"]
    )
    assert "greedy_accuracy " in text and "reward_mean " in text


def test_answers_from_before_a_stop_are_reused(
    session_cache: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(
        ["--model.source=char", "--task.shots=0", "--sampling.max_new_tokens=3", "--eval.prompts=8",
         "--eval.samples_per_prompt=2", "--trainer.threads=1"], purpose="eval"
    )  # fmt: skip
    found = evaluate(spec, answers=tmp_path / "answers.jsonl")

    async def asked(**_: object) -> None:
        raise AssertionError("answered before")

    monkeypatch.setattr("tidemill.jobs.batch_generation.evaluate", asked)
    monkeypatch.setattr("tidemill.jobs.batch_generation.draw", asked)
    assert evaluate(spec, answers=tmp_path / "answers.jsonl") == found
    with pytest.raises(AssertionError, match="answered before"):  # another seed draws other samples
        evaluate(spec.model_copy(update={"run": RunConfig(seed=1)}), answers=tmp_path / "answers.jsonl")
