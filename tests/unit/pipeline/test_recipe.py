"""The stages of recipes/rlhf.toml, without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.commands import run_here
from tidemill.config.pipeline import PipelineSpec, load_recipe

RECIPE = f"@{Path(__file__).parents[3] / 'recipes' / 'rlhf.toml'}"


def test_the_stages_of_rlhf(tmp_path: Path) -> None:
    data: dict[str, Any] = run_here("train", RECIPE, f"--run.dir={tmp_path / 'D'}", "--dry-run", "--json").data
    assert [(row["stage"], row["kind"], row["action"], row["inputs"]) for row in data["plan"]] == [
        ("written", "demonstrations", "run", []),
        ("sft", "sft", "wait", ["written"]),
        ("pairs", "pairs", "wait", ["sft"]),
        ("other_pairs", "pairs", "wait", ["sft"]),
        ("rm", "reward_model", "wait", ["sft", "pairs", "other_pairs"]),
        ("ppo", "rl", "wait", ["sft", "rm"]),
        ("measure", "eval", "wait", ["ppo", "rm", "sft"]),
    ]
    assert not (tmp_path / "D").exists()


def test_ppo_has_four_models() -> None:
    recipe = load_recipe([RECIPE])
    assert isinstance(recipe, PipelineSpec)
    ppo = next(stage.spec for stage in recipe.stages if stage.name == "ppo")
    assert ppo.model.source == "stage:sft"
    assert ppo.algorithm.advantage == "gae"  # needs a critic
    assert ppo.critic.kind == "shared"
    assert ppo.algorithm.kl_beta > 0  # needs a reference
    assert [(reward.kind, reward.model) for reward in ppo.scoring.rewards] == [("model", "stage:rm")]
