"""Reader actors without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.actors_here import ActorHere
from tests.frozen_readers import named, tokens
from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, llama
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.protocols import Reader
from tidemill.core.records import Growth, count
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import load_reward_model, reward_head, save_head
from tidemill.runtime.cluster.ray_reader import ReaderActor, ReaderPlan
from tidemill.runtime.cluster.ray_trainer import TrainerActor
from tidemill.runtime.cluster.wire import invoke
from tidemill.trainer.scoring import reward_scores

PROMPT, IDS = 5, tokens(21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_folder(llama(), tmp_path_factory.mktemp("reader") / "model")
    digest = load_codec(made).vocabulary_digest
    save_head(made, reward_head(HIDDEN), kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    return made


def plan(source: Path, reward_model: str = "") -> ReaderPlan:
    spec = RunSpec.model_validate(
        {"model": {"source": str(source)}, "trainer": {"device": "cpu"}, "reading": {"chunk_tokens": 4}}
    )
    return ReaderPlan(spec=spec.model_dump_json(), threads=1, reward_model=reward_model)


async def started(plan: ReaderPlan) -> ReaderActor:
    actor = ReaderActor()
    await invoke(ActorHere(actor), 60.0, ReaderActor.start_reader, plan)
    return actor


async def test_a_reward_model_scores_a_growing_sample(folder: Path) -> None:
    actor = await started(plan(folder, str(folder)))
    here = ActorHere(actor)
    growth = Growth(sample_id=named(0), prompt_tokens=PROMPT, start=0, token_ids=IDS[: 17 * 4])
    await here.tell(Reader.receive, [growth])
    async with asyncio.timeout(10.0):
        while actor.reader._reader.tokens_held < 17:  # type: ignore[union-attr]  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    read = await invoke(here, 60.0, Reader.read, named(0), IDS, PROMPT)
    (expected,) = reward_scores(load_reward_model(folder, device=torch.device("cpu")), [IDS], budget=1000)
    assert torch.frombuffer(bytearray(read.values), dtype=torch.float32).item() == pytest.approx(expected, abs=1e-5)
    assert (read.tokens_ahead, read.tokens_late) == (17, 4)
    await here.tell(Reader.forget, [named(0)])
    assert actor.reader is not None
    await actor.reader.close()


async def test_the_reference_gives_a_logprob_for_every_completion_token(folder: Path) -> None:
    actor = await started(plan(folder))
    read = await invoke(ActorHere(actor), 60.0, Reader.read, named(0), IDS, PROMPT)
    assert count(read.values) == 21 - PROMPT
    assert actor.reader is not None
    await actor.reader.close()


async def test_errors_of_actors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a reward model"):
        await started(plan(folder, str(save_folder(llama(), tmp_path / "plain"))))
    for actor in (ReaderActor(), TrainerActor()):
        with pytest.raises(TidemillError, match="this actor has no reader"):
            await invoke(ActorHere(actor), 60.0, Reader.read, named(0), IDS, PROMPT)
