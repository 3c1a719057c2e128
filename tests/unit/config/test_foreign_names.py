from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.config_issues import issues_of
from tidemill.config.foreign_names import explained, foreign_names, ours_of
from tidemill.config.keys import all_keys
from tidemill.config.load import load_spec
from tidemill.config.pipeline import load_overridden, load_recipe


def test_each_name_stands_once_in_its_place_and_has_keys_or_a_reason() -> None:
    keys = {key.dotted for key in all_keys()}
    rows = foreign_names()
    assert [(row.name, key) for row in rows for key in row.ours if key not in keys] == []
    assert [row.name for row in rows if not row.ours and not row.note] == []
    assert len({(row.framework, row.place, row.name) for row in rows}) == len(rows)
    assert {row.framework for row in rows} == {"TRL", "verl", "OpenRLHF", "prime-rl"}


def test_every_option_of_trl_is_in_the_table() -> None:
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    for config in ("GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "RewardConfig", "ModelConfig"):
        options = {field.name for field in dataclasses.fields(getattr(trl, config))}
        assert options, config
        known = {row.name for row in foreign_names() if row.place == "TrainingArguments" or config in row.place}
        if config in ("RLOOConfig", "SFTConfig", "DPOConfig", "RewardConfig"):  # what all trainers of TRL have
            known |= {row.name for row in foreign_names() if row.place == "GRPOConfig"}
        assert options - known == set(), config
    assert inherited - {row.name for row in foreign_names() if row.place == "TrainingArguments"} == set()


@pytest.mark.parametrize(
    ("name", "framework", "keys"),
    [
        ("num_generations", "TRL", ["batch.group_size"]),
        ("--num-generations", "TRL", ["batch.group_size"]),
        ("batch.num_generations", "TRL", ["batch.group_size"]),
        ("max_completion_length", "TRL", ["sampling.max_new_tokens"]),
        ("epsilon", "TRL", ["algorithm.clip_low", "algorithm.clip_high"]),
        ("vllm_model_impl", "TRL", []),
        ("rollout.n", "verl", ["batch.group_size"]),
        ("actor_rollout_ref.rollout.n", "verl", ["batch.group_size"]),
        ("+actor_rollout_ref.actor.kl_loss_coef", "verl", ["algorithm.kl_beta"]),
        (
            "actor_rollout_ref.ref.fsdp_config.forward_prefetch",
            "verl",
            ["placement.reference"],
        ),  # actor_rollout_ref.ref.*
        ("kl_coef", "TRL", ["algorithm.kl_beta"]),
        ("algo.kl.init_coef", "OpenRLHF", ["algorithm.kl_beta"]),
        ("target_kl", "TRL", ["algorithm.kl_stop"]),  # of PPOConfig: stops early; `target` adapts the coefficient
        ("prompt_data", "OpenRLHF", ["task.path"]),
        ("reward.custom_reward_function.path", "verl", ["scoring.rewards[].function"]),
        ("config.data.max_prompt_length", "verl", ["task.max_prompt_tokens"]),
        ("n_samples_per_prompt", "OpenRLHF", ["batch.group_size"]),
        ("orchestrator.group_size", "prime-rl", ["batch.group_size"]),
    ],
)
def test_ours_of(name: str, framework: str, keys: list[str]) -> None:
    first = ours_of(name)[0]
    assert (first.framework, list(first.ours)) == (framework, keys)


def test_ours_of_unknown_and_uncertain_names() -> None:
    assert ours_of("banana") == ()
    assert ours_of("lr", certain=True) == ()  # only the end of verl's actor_rollout_ref.actor.optim.lr and others
    assert {row.framework for row in ours_of("lr")} == {"verl", "OpenRLHF", "prime-rl"}
    assert {row.framework for row in ours_of("lr", framework="OpenRLHF")} == {"OpenRLHF"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_generations", "TRL's num_generations is batch.group_size"),
        ("rollout.n", "verl's rollout.n is batch.group_size"),
        ("beta", "TRL's beta is algorithm.kl_beta (GRPOConfig) or preference.beta (DPOConfig)"),
        ("num_iterations", "TRL's num_iterations is batch.epochs: passes over each batch"),
        ("tf32", "TRL's tf32 has no counterpart: set it in PyTorch: torch.set_float32_matmul_precision"),
        (
            "lr",
            "verl's actor.optim.lr is optimizer.learning_rate; verl's critic.optim.lr is critic.learning_rate",
        ),
    ],
)
def test_explained(name: str, text: str) -> None:
    assert explained(ours_of(name)) == text


@pytest.mark.parametrize(
    ("args", "key", "hint"),
    [
        ("--num_generations 8", "num_generations", "TRL's num_generations is batch.group_size"),
        ("--max-completion-length=9", "max-completion-length", "is sampling.max_new_tokens"),
        ("--batch.num_generations 8", "batch.num_generations", "is batch.group_size"),
        ("--use_vllm", "--use_vllm", "TRL's use_vllm is engine.kind"),
        ("--rollout.n 8", "rollout.n", "verl's rollout.n is batch.group_size"),
        ("--critic.optim.lr 1e-5", "critic.optim.lr", "is critic.learning_rate"),
        ("--trainer.total_epochs 3", "trainer.total_epochs", "verl's trainer.total_epochs is trainer.steps: epochs"),
        ("--actor.adam.lr 1", "actor.adam.lr", "OpenRLHF's actor.adam.lr is optimizer.learning_rate"),
        ("--ckpt.interval 3", "ckpt.interval", "is checkpoint.every_steps"),
        ("--lr 1e-5", "lr", "is optimizer.learning_rate"),
        ("rollout.n=8", "rollout.n=8", "verl's rollout.n is batch.group_size"),
        ("batch.prompts=8", "batch.prompts=8", "write --batch.prompts=8"),
        # The name is one of Tidemill's, or misspelt: the usual suggestion.
        ("--learning_rate 1e-5", "learning_rate", "did you mean optimizer.learning_rate?"),
        ("--batch.group_szie 8", "batch.group_szie", "did you mean batch.group_size?"),
        ("--name mine", "name", "did you mean run.name?"),
        ("--zzz 1", "zzz", "`tidemill train --help-all` lists every key"),
    ],
)
def test_unknown_keys_of_other_frameworks(args: str, key: str, hint: str) -> None:
    (issue,) = issues_of(lambda: load_spec(args.split()))
    assert issue.key == key
    assert hint in issue.hint


def test_a_section_of_another_framework_is_explained_key_by_key(tmp_path: Path) -> None:
    recipe = tmp_path / "verl.toml"
    recipe.write_text("[actor_rollout_ref.rollout]\nn = 8\ntemperature = 1.0\n", encoding="utf-8")
    first, second = issues_of(lambda: load_recipe([f"@{recipe}"]))
    assert first.line == f"actor_rollout_ref.rollout.n: unknown key ({recipe}:2); verl's rollout.n is batch.group_size"
    assert (second.source, second.hint) == (f"{recipe}:3", "did you mean sampling.temperature?")


def test_overrides_from_python_and_stages() -> None:
    (issue,) = issues_of(lambda: load_overridden(None, {"num_generations": 8}))
    assert issue.hint == "TRL's num_generations is batch.group_size"
    (issue,) = issues_of(lambda: load_overridden("rlhf", {"per_device_train_batch_size": 8}))
    assert "TRL's per_device_train_batch_size is batch.prompts and supervised.minibatch_tokens" in issue.hint
