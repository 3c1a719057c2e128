"""The stages of the recipes rlhf, guess and calc-tool, without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_here
from tidemill.config.load import RECIPES
from tidemill.config.pipeline import PipelineSpec, load_recipe

RECIPE = f"@{RECIPES / 'rlhf.toml'}"


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


@pytest.mark.parametrize("name", ["guess", "calc-tool"])
def test_agents_start_from_demonstrations(name: str, tmp_path: Path) -> None:
    recipe = f"@{RECIPES / f'{name}.toml'}"
    few = "--task.train_size=40"  # a dry run makes the tasks
    data: dict[str, Any] = run_here("train", recipe, f"--run.dir={tmp_path / 'D'}", few, "--dry-run", "--json").data
    assert [(row["stage"], row["kind"], row["inputs"]) for row in data["plan"]] == [
        ("written", "demonstrations", []),
        ("sft", "sft", ["written"]),
        ("rl", "rl", ["sft"]),
    ]
    assert not (tmp_path / "D").exists()
