"""Samples that wait for vLLM together are computed together, without vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.frozen_scorers import named, tokens
from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.config.schema import RunSpec
from tidemill.core.errors import ScorerLost, UserError
from tidemill.core.records import LogprobBuffer, TokenBuffer, count, pack_logprobs, unpack_logprobs
from tidemill.rollout.engines.vllm.scoring import VllmScorer
from tidemill.runtime import vllm_scorers
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.vllm_scorers import VllmFrozenScorer, check_vllm_scoring


class Scorer(VllmScorer):
    """Ends a sample in the second step after it was added; its score is its length."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails, self._steps = fails, 0
        self._inside: dict[str, tuple[int, int]] = {}
        self.most = 0  # samples in a step

    def add(self, token_ids: TokenBuffer, prompt_tokens: int) -> str:
        name = f"sample {len(self._inside)} of step {self._steps}"
        self._inside[name] = count(token_ids), self._steps + 2
        return name

    def step(self) -> dict[str, LogprobBuffer]:
        if self._fails:
            raise RuntimeError("rank 1 of 2 of vLLM ended")
        self._steps += 1
        self.most = max(self.most, len(self._inside))
        ended = {name: length for name, (length, end) in self._inside.items() if end <= self._steps}
        self._inside = {name: each for name, each in self._inside.items() if name not in ended}
        return {name: pack_logprobs([float(length)]) for name, length in ended.items()}

    def close(self) -> None:
        """Nothing runs."""

    def _params(self) -> Any:
        raise NotImplementedError

    def _result(self, output: Any, prompt_tokens: int) -> LogprobBuffer:
        raise NotImplementedError


async def test_samples_are_scored_together_and_again_later() -> None:
    vllm = Scorer()
    scorer = VllmFrozenScorer(vllm, ComputeThread())
    for _ in range(2):
        found = await asyncio.gather(*(scorer.score(named(index), tokens(9 + index), 5) for index in range(4)))
        assert [unpack_logprobs(each.values) for each in found] == [[9.0], [10.0], [11.0], [12.0]]
    assert vllm.most > 1
    assert scorer.take_counts() == (0, 2 * (9 + 10 + 11 + 12))
    await scorer.close()


async def test_a_caller_that_is_gone_does_not_stop_the_others() -> None:
    scorer = VllmFrozenScorer(Scorer(), ComputeThread())
    gone = asyncio.create_task(scorer.score(named(0), tokens(9), 5))
    other = asyncio.create_task(scorer.score(named(1), tokens(12), 5))
    await asyncio.sleep(0)
    gone.cancel()
    assert unpack_logprobs((await other).values) == [12.0]
    await scorer.close()


async def test_a_failure_loses_the_scorer_for_every_sample() -> None:
    scorer = VllmFrozenScorer(Scorer(fails=True), ComputeThread())
    found = await asyncio.gather(
        *(scorer.score(named(index), tokens(9), 5) for index in range(3)), return_exceptions=True
    )
    assert [str(each) for each in found] == ["vLLM failed: rank 1 of 2 of vLLM ended"] * 3
    with pytest.raises(ScorerLost):
        await scorer.score(named(4), tokens(9), 5)
    await scorer.close()


def test_a_family_that_was_not_tested_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_scorers, "check_version", lambda **_: None)
    folder = save_folder(llama(), tmp_path / "model")
    given = {"runtime": "ray", "algorithm": {"kl_beta": 0.1}, "placement": {"scoring_engine": "vllm"}}
    spec = RunSpec.model_validate(given | {"placement": {"scoring_engine": "vllm", "reference": "actor"}})
    check_vllm_scoring(spec, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "gpt2"'))
    with pytest.raises(UserError, match="vLLM workers do not support gpt2") as refused:
        check_vllm_scoring(spec, folder)
    assert "placement.scoring_engine" in refused.value.hint
    check_vllm_scoring(RunSpec.model_validate(given), folder)  # the reference is in the trainer
