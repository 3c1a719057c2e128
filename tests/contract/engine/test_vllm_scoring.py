"""Frozen models in vLLM give the logprobs and scores of torch. Run by `make test-vllm`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.actors_here import ActorHere
from tests.contract.engine.engines import HAS_VLLM, MODELS, model
from tests.frozen_scorers import named, tokens
from tests.model_folders import save_folder
from tests.processes import command_lines
from tidemill.config.schema import RunSpec
from tidemill.core.errors import ScorerLost
from tidemill.core.protocols import FrozenScorer
from tidemill.core.records import ModelScores, unpack_logprobs
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import reward_head, save_head
from tidemill.runtime.cluster.ray_frozen_scorer import FrozenScorerActor, FrozenScorerPlan
from tidemill.runtime.cluster.wire import invoke

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this"),
    pytest.mark.timeout(300),
]
CONTEXT, PROMPT = 96, 30
LENGTHS = (31, 40, 57, CONTEXT)
FAMILIES = [name for name in MODELS if name not in ("qwen3_moe", "large_vocabulary")]
RANKS = {"nine_heads": 3}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with a reward head beside them, by name."""
    made = {}
    for name in FAMILIES:
        weights = model(name, 0)
        folder = save_folder(weights, tmp_path_factory.mktemp("scoring") / name)
        digest = load_codec(folder).vocabulary_digest
        head = reward_head(weights.config.hidden_size)
        save_head(folder, head, kind="reward_model", pooling="last_token", vocabulary_digest=digest)
        made[name] = folder
    return made


def plan(
    folder: Path, role: str, *, engine: str, ranks: int = 1, temperature: float = 1.0, bf16: bool = False
) -> FrozenScorerPlan:
    spec = RunSpec.model_validate(
        {
            "runtime": "ray",
            "model": {"source": str(folder)},
            "algorithm": {"kl_beta": 0.1},
            "placement": {"reference": "actor", "scoring_engine": engine, "actor_tensor_parallel": ranks},
            "sampling": {"temperature": temperature, "max_new_tokens": CONTEXT - PROMPT},
            "engine": {"prefill_chunk_tokens": 48},  # the longest samples are computed in chunks
            "trainer": {"device": "cpu", "precision": "bf16" if bf16 else "fp32"},
        }
    )
    reward_model = str(folder) if role == "reward" else ""
    return FrozenScorerPlan(spec=spec.model_dump_json(), threads=1, reward_model=reward_model, prompt_tokens=PROMPT)


@asynccontextmanager
async def actor(given: FrozenScorerPlan) -> AsyncIterator[ActorHere]:
    started = FrozenScorerActor()
    await invoke(ActorHere(started), 60.0, FrozenScorerActor.start_frozen_scorer, given)
    yield ActorHere(started)
    assert started.frozen_scorer is not None
    await started.frozen_scorer.close()
    del started
    gc.collect()  # the engine and its cache


async def score(scorer: ActorHere, index: int) -> ModelScores:
    return await invoke(scorer, 60.0, FrozenScorer.score, named(index), tokens(LENGTHS[index], seed=index), PROMPT)


async def all_scores(given: FrozenScorerPlan) -> list[np.ndarray[Any, Any]]:
    async with actor(given) as scorer:
        found = await asyncio.gather(*(score(scorer, index) for index in range(len(LENGTHS))))
    assert [each.tokens_late for each in found] == list(LENGTHS)
    return [np.array(unpack_logprobs(each.values)) for each in found]


@pytest.mark.parametrize(
    ("family", "role", "ranks", "temperature"),
    [
        ("tied", "reference", 1, 0.7),
        ("tied", "reward", 1, 1.0),
        ("untied", "reference", 2, 0.7),
        ("untied", "reward", 2, 1.0),
        *(pytest.param(name, "reference", RANKS.get(name, 2), 1.0, marks=SLOW) for name in FAMILIES),
        *(pytest.param(name, "reward", RANKS.get(name, 2), 1.0, marks=SLOW) for name in FAMILIES if name != "untied"),
    ],
)
async def test_scores_equal_those_of_torch(
    folders: dict[str, Path], family: str, role: str, ranks: int, temperature: float
) -> None:
    folder = folders[family]
    expected = await all_scores(plan(folder, role, engine="embedded", temperature=temperature))
    found = await all_scores(plan(folder, role, engine="vllm", ranks=ranks, temperature=temperature))
    assert [len(each) for each in found] == [1 if role == "reward" else length - PROMPT for length in LENGTHS]
    differences = [float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True)]
    print(f"{family} {role}, {ranks} ranks, T = {temperature}: largest difference {max(differences):.1e}")
    assert max(differences) < 5e-5


@pytest.mark.parametrize("role", ["reference", "reward"])
async def test_bf16_differs_from_torch_as_much_as_torch_from_fp32(folders: dict[str, Path], role: str) -> None:
    folder = folders["tied"]
    exact = await all_scores(plan(folder, role, engine="embedded"))
    torch_s, vllm_s = [await all_scores(plan(folder, role, engine=each, bf16=True)) for each in ("embedded", "vllm")]

    def mean_difference(found: list[np.ndarray[Any, Any]]) -> float:
        return float(np.abs(np.concatenate(found) - np.concatenate(exact)).mean())

    print(f"{role}, bf16 to fp32, mean: vLLM {mean_difference(vllm_s):.1e}, torch {mean_difference(torch_s):.1e}")
    assert mean_difference(vllm_s) < 2 * mean_difference(torch_s)


async def test_a_rank_that_dies_loses_the_scorer_and_leaves_no_process(folders: dict[str, Path]) -> None:
    async with actor(plan(folders["tied"], "reference", engine="vllm", ranks=2)) as scorer:
        ranks = [each.pid for each in scorer._actor.frozen_scorer._scorer._watch._ranks]  # type: ignore[attr-defined]
        assert len(command_lines(ranks)) == 2
        await score(scorer, 0)
        os.kill(ranks[1], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ScorerLost, match="vLLM failed: rank 1 of 2 of vLLM ended"):
                await score(scorer, 1)
    assert not command_lines(ranks)
