"""Actors of frozen models, without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.actors_here import ActorHere
from tests.frozen_scorers import named, tokens
from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, llama
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.protocols import FrozenScorer
from tidemill.core.records import NewTokens, count
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import load_reward_model, reward_head, save_head
from tidemill.runtime.cluster.ray_frozen_scorer import FrozenScorerActor, FrozenScorerPlan
from tidemill.runtime.cluster.ray_trainer import TrainerActor
from tidemill.runtime.cluster.wire import invoke
from tidemill.trainer.scoring import reward_scores

PROMPT, IDS = 5, tokens(21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_folder(llama(), tmp_path_factory.mktemp("frozen") / "model")
    digest = load_codec(made).vocabulary_digest
    save_head(made, reward_head(HIDDEN), kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    return made


def plan(source: Path, reward_model: str = "") -> FrozenScorerPlan:
    spec = RunSpec.model_validate(
        {"model": {"source": str(source)}, "trainer": {"device": "cpu"}, "reading": {"chunk_tokens": 4}}
    )
    return FrozenScorerPlan(spec=spec.model_dump_json(), threads=1, reward_model=reward_model)


async def started(plan: FrozenScorerPlan) -> FrozenScorerActor:
    actor = FrozenScorerActor()
    await invoke(ActorHere(actor), 60.0, FrozenScorerActor.start_frozen_scorer, plan)
    return actor


async def test_a_reward_model_scores_a_growing_sample(folder: Path) -> None:
    actor = await started(plan(folder, str(folder)))
    here = ActorHere(actor)
    added = NewTokens(sample_id=named(0), prompt_tokens=PROMPT, start=0, token_ids=IDS[: 17 * 4])
    await here.tell(FrozenScorer.receive, [added])
    async with asyncio.timeout(10.0):
        while actor.frozen_scorer._scorer.tokens_held < 17:  # type: ignore[union-attr]  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    scores = await invoke(here, 60.0, FrozenScorer.score, named(0), IDS, PROMPT)
    (expected,) = reward_scores(load_reward_model(folder, device=torch.device("cpu")), [IDS], budget=1000)
    assert torch.frombuffer(bytearray(scores.values), dtype=torch.float32).item() == pytest.approx(expected, abs=1e-5)
    assert (scores.tokens_ahead, scores.tokens_late) == (17, 4)
    await here.tell(FrozenScorer.forget, [named(0)])
    assert actor.frozen_scorer is not None
    await actor.frozen_scorer.close()


async def test_the_reference_gives_a_logprob_for_every_completion_token(folder: Path) -> None:
    actor = await started(plan(folder))
    scores = await invoke(ActorHere(actor), 60.0, FrozenScorer.score, named(0), IDS, PROMPT)
    assert count(scores.values) == 21 - PROMPT
    assert actor.frozen_scorer is not None
    await actor.frozen_scorer.close()


async def test_errors_of_actors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a reward model"):
        await started(plan(folder, str(save_folder(llama(), tmp_path / "plain"))))
    for actor in (FrozenScorerActor(), TrainerActor()):
        with pytest.raises(TidemillError, match="this actor has no frozen_scorer"):
            await invoke(ActorHere(actor), 60.0, FrozenScorer.score, named(0), IDS, PROMPT)
