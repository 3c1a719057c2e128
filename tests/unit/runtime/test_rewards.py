"""Reward models as rewards: loaded once, run on the given thread, checked before generation starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from tests.char_codec import make_prompt, make_trajectory
from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, llama
from tidemill.config.schema import RunSpec
from tidemill.core.records import Reward, Trajectory
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import load_reward_model, reward_head, save_head
from tidemill.runtime.frozen_scorers import (
    FrozenScorers,
    check_reward_models,
    local_reward_model,
    model_rewards,
    model_scores,
)
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.trainer.scoring import reward_scores

T = TypeVar("T")
PROMPT = make_prompt("5+7=", "12")


class CountingCompute:
    """Runs calls immediately, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, function: Callable[[], T]) -> T:
        self.calls += 1
        return function()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_folder(llama(), tmp_path_factory.mktemp("reward") / "model")
    digest = load_codec(made).vocabulary_digest
    save_head(made, reward_head(HIDDEN), kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    return made


def spec_of(folder: Path, source: Path | None = None) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"source": str(source or folder)},
            "scoring": {"rewards": [{"kind": "model", "model": str(folder)}]},
            "trainer": {"device": "cpu"},
        }
    )


def sample(text: str) -> RewardInput:
    trajectory = make_trajectory(PROMPT, text)
    return RewardInput(
        prompt=PROMPT, completion=text, completion_tokens=len(text), sample_id=trajectory.sample_id,
        token_ids=np.frombuffer(trajectory.token_ids, np.int32).tobytes(),
    )  # fmt: skip


async def test_samples_that_finish_together_are_scored_together_on_the_given_thread(folder: Path) -> None:
    spec, compute = spec_of(folder), CountingCompute()
    scores = model_rewards(spec, compute, FrozenScorers())(spec.scoring.rewards[0])
    samples = [sample(text) for text in ("12", "7", "12 or so")]
    found = await asyncio.gather(*map(scores, samples))
    assert compute.calls == 1
    plain = load_reward_model(folder, device=torch.device("cpu"))
    assert found == reward_scores(plain, [each.token_ids for each in samples], budget=2048)
    await scores.close()  # leaves the caller's thread open
    await scores(samples[0])


async def test_a_batch_invariant_score_does_not_depend_on_the_batch(folder: Path) -> None:
    spec = RunSpec.model_validate(spec_of(folder).model_dump() | {"engine": {"batch_invariant": True}})
    samples = [sample(text) for text in ("12", "7", "12 or so", "1", "123456789", "9+8=17")]
    alone = model_rewards(spec, CountingCompute(), FrozenScorers())(spec.scoring.rewards[0])
    expected = [await alone(each) for each in samples]
    together = model_rewards(spec, CountingCompute(), FrozenScorers())(spec.scoring.rewards[0])
    assert await asyncio.gather(*map(together, samples)) == expected  # bit for bit


async def test_without_a_thread_a_reward_model_starts_one_and_ends_it(folder: Path) -> None:
    spec = spec_of(folder)
    scores = model_rewards(spec, None, FrozenScorers())(spec.scoring.rewards[0])
    await scores(sample("12"))
    assert "tidemill-reward" in {thread.name for thread in threading.enumerate()}
    await scores.close()
    with pytest.raises(RuntimeError, match="closed"):
        await scores(sample("12"))


async def test_a_model_of_single_samples_gives_the_same_scores(folder: Path) -> None:
    spec = spec_of(folder)
    model = local_reward_model(spec, folder)
    scores = model_rewards(spec, CountingCompute(), FrozenScorers(rewards={folder: model}))(spec.scoring.rewards[0])
    samples = [sample(text) for text in ("12", "7", "12 or so")]
    found = [await scores(each) for each in samples]
    plain = load_reward_model(folder, device=torch.device("cpu"))
    assert found == pytest.approx(reward_scores(plain, [each.token_ids for each in samples], budget=2048), abs=1e-5)
    assert model.take_counts() == (0, len("5+7=") + 2 + 1 + 8)  # the prompt once
    await scores.close()
    assert await scores(samples[0]) == found[0]  # closing the reward leaves the model open
    await model.close()


def test_a_model_named_twice_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []

    def counted(path: Path, **options: object) -> object:
        loads.append(path)
        return load_reward_model(path, device=torch.device("cpu"))

    monkeypatch.setattr("tidemill.runtime.frozen_scorers.load_reward_model", counted)
    spec = spec_of(folder)
    rewards = model_rewards(spec, CountingCompute(), FrozenScorers())
    rewards(spec.scoring.rewards[0])
    rewards(spec.scoring.rewards[0])
    assert loads == [folder]


def test_a_run_without_reward_models_resolves_nothing() -> None:
    def never(text: str) -> None:
        raise AssertionError(text)

    check_reward_models(RunSpec.model_validate({"model": {"source": "no/such-model"}}), progress=never)


def test_a_reward_model_with_the_same_tokenizer_passes(folder: Path) -> None:
    check_reward_models(spec_of(folder), progress=lambda _: None)
    check_reward_models(spec_of(folder, Path("no/such-model")), progress=lambda _: None, policy_folder=folder)


def test_model_scores_come_from_the_components_of_samples() -> None:
    def judged(reward: Reward | None) -> Trajectory:
        made = make_trajectory(PROMPT, "12")
        return Trajectory(**{name: getattr(made, name) for name in made.__struct_fields__} | {"reward": reward})

    samples = [
        judged(Reward(value=1.0, components={"exact": 1.0, "model": 2.5, "modelled": 1.0})),
        judged(Reward(value=0.0, components={"exact": 0.0}, valid=False, reason="reward model: late")),
        judged(None),
    ]
    scores = model_scores(samples)
    assert list(scores) == ["model"]
    assert [(each.value, each.valid) for each in scores["model"]] == [(2.5, True), (0.0, False), (0.0, False)]
    assert scores["model"][1].reason == "reward model: late"
