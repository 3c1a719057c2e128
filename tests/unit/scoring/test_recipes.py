"""The example data and the example reward are what their recipes say."""

from __future__ import annotations

import pytest

from tests.char_codec import CharCodec, make_trajectory
from tests.sandboxes import need_bubblewrap
from tidemill.config.load import RECIPES, load_spec
from tidemill.data.build_task import build_task
from tidemill.scoring.scorer import build_scorer


@pytest.mark.parametrize("name", ["jsonl", "reasoning-gym"])
async def test_every_right_answer_of_a_recipe_earns_all_there_is(name: str) -> None:
    if name == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
        need_bubblewrap()
    spec = load_spec([f"@{RECIPES / name}.toml"])
    task = build_task(spec.task, codec=CharCodec(), batch_prompts=8, seed=0, chat_template=False)
    scorer = build_scorer(spec.scoring, task=task, seed=0, stop_strings=spec.sampling.stop)
    best = sum(reward.weight for reward in spec.scoring.rewards)
    assert task.held_out_size >= 16
    for prompt in task.source.held_out():
        right = await scorer.score(prompt, make_trajectory(prompt, f" {prompt.answer}\n"))
        wrong = await scorer.score(prompt, make_trajectory(prompt, " ?\n"))
        assert right.value == pytest.approx(best)
        assert wrong.value == 0.0
    await scorer.close()
