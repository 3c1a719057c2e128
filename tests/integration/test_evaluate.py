"""Evaluation by more than one judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.config.load import load_spec
from tidemill.config.schema import RunConfig
from tidemill.core.records import Prompt, Reward, Trajectory
from tidemill.runtime.answering import Answering
from tidemill.runtime.answers import Answered
from tidemill.runtime.evaluate import evaluate


class Likes:
    """Implements core.protocols.Scorer: one point a token."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=float(trajectory.completion_length))

    async def close(self) -> None:
        raise AssertionError("whoever made it closes it")


def test_any_scorer_may_judge_too(session_cache: object) -> None:
    spec = load_spec(
        ["--model.source=char", "--task.shots=0", "--sampling.max_new_tokens=3", "--eval.prompts=8",
         "--trainer.threads=1"], purpose="eval"
    )  # fmt: skip
    found = evaluate(spec, scorers={"tokens": Likes()}, compare="char")
    assert found["scores"]["tokens"]["value"] == pytest.approx(found["completion_tokens"]["mean"])
    assert found["compared_with"]["weights_digest"] == found["weights_digest"]
    same = found["compared_with"]["figures"]["tokens"]
    assert (same["n"], same["higher"], same["lower"], same["p_value"]) == (8, 0, 0, 1.0)


def test_what_was_answered_before_a_stop_is_not_asked_again(
    session_cache: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(
        ["--model.source=char", "--task.shots=0", "--sampling.max_new_tokens=3", "--eval.prompts=8",
         "--eval.samples_per_prompt=2", "--trainer.threads=1"], purpose="eval"
    )  # fmt: skip
    found = evaluate(spec, answers=tmp_path / "answers.jsonl")

    async def asked(*_: object) -> Answered:
        raise AssertionError("answered before")

    monkeypatch.setattr(Answering, "_ask_greedily", asked)
    monkeypatch.setattr(Answering, "_draw", asked)
    assert evaluate(spec, answers=tmp_path / "answers.jsonl") == found
    with pytest.raises(AssertionError, match="answered before"):  # another seed draws other samples
        evaluate(spec.model_copy(update={"run": RunConfig(seed=1)}), answers=tmp_path / "answers.jsonl")
