from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters import teach
from tidemill.config.load import load_spec
from tidemill.core.errors import UserError
from tidemill.jobs.model_evaluation import evaluate
from tidemill.models.builtin import build_char_model
from tidemill.models.codec import load_codec
from tidemill.models.lora import frozen_parameters, learned_parameters
from tidemill.models.reward_model import reward_head, save_head
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle, reference_and_critic
from tidemill.trainer.critic import ModelCritic, TrunkCritic

SMALL = ("--model.source=char", "--model.char.hidden_size=16", "--model.char.layers=1", "--model.char.heads=2")


def parts(*args: str) -> ModelBundle:
    return load_model_bundle(load_spec([*SMALL, "--trainer.threads=1", *args]), progress=lambda _: None)


def test_an_algorithm_without_values_has_no_critic() -> None:
    assert reference_and_critic(parts(), progress=lambda _: None) == (None, None)


def test_a_shared_critic_reads_the_policys_states() -> None:
    made = parts("--algorithm.name=ppo", "--critic.kind=shared")
    _, critic = reference_and_critic(made, progress=lambda _: None)
    assert isinstance(critic, TrunkCritic)
    assert critic.model is made.model


def test_a_separate_critic_starts_from_the_policy_with_output_0() -> None:
    made = parts("--algorithm.name=ppo")
    _, critic = reference_and_critic(made, progress=lambda _: None)
    assert isinstance(critic, ModelCritic)
    assert critic.model is not made.model
    for ours, theirs in zip(critic.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    assert not critic.head.weight.any()


def test_a_critic_from_a_reward_model_takes_its_head(tmp_path: Path) -> None:
    char = parts().spec.model.char
    build_char_model(char, tmp_path)
    digest = load_codec(tmp_path).vocabulary_digest
    judging = reward_head(char.hidden_size, seed=3)
    save_head(tmp_path, judging, kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    made, told = parts("--algorithm.name=ppo", f"--critic.source={tmp_path}"), list[str]()
    _, critic = reference_and_critic(made, progress=told.append)
    assert isinstance(critic, ModelCritic)
    assert torch.equal(critic.head.weight, judging.weight)
    assert f"the reward model {tmp_path}" in told[-1]
    assert {id(p) for p in critic.head.parameters()} < {id(p) for p in critic.optimizer.param_groups[-1]["params"]}

    save_head(tmp_path, judging, kind="value_model", pooling="every_token", vocabulary_digest="")
    _, critic = reference_and_critic(made, progress=told.append)
    assert isinstance(critic, ModelCritic)
    assert not critic.head.weight.any()  # the folder has no head

    save_head(tmp_path, reward_head(8), kind="reward_model", pooling="last_token", vocabulary_digest=digest)
    with pytest.raises(UserError, match="the head has hidden size 8, and the model 16"):
        reference_and_critic(made, progress=told.append)


def test_a_missing_source_is_reported_under_its_own_key() -> None:
    made = parts("--algorithm.name=ppo", "--critic.source=nowhere/x")
    with pytest.raises(UserError, match="nowhere/x") as caught:
        reference_and_critic(made, progress=lambda _: None)
    assert caught.value.where == "critic.source"
    spec = load_spec([*SMALL, "--eval.prompts=1", "--sampling.max_new_tokens=1", "--trainer.threads=1"])
    with pytest.raises(UserError, match="nowhere/x") as caught:
        evaluate(spec, compare="nowhere/x")
    assert caught.value.where == "eval.compare_with"


def test_with_an_adapter_the_critic_has_another_adapter_over_the_same_weights(tmp_path: Path) -> None:
    made = parts("--algorithm.name=ppo", "--model.lora.rank=2", "--algorithm.kl_beta=0.1")
    (_, critic), reference = reference_and_critic(made, progress=lambda _: None), made.reference()
    assert isinstance(critic, ModelCritic)
    assert reference is not None
    base = {id(parameter) for parameter in reference.parameters()}
    assert {id(parameter) for parameter in frozen_parameters(critic.model).values()} == base
    mine, its = (learned_parameters(model) for model in (made.model, critic.model))
    assert not {id(p) for p in mine.values()} & {id(p) for p in its.values()}
    trained = {id(p) for group in critic.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in [*its.values(), *critic.head.parameters()]}
    critic.write_state(tmp_path)
    _, again = reference_and_critic(parts("--algorithm.name=ppo", "--model.lora.rank=2"), progress=lambda _: None)
    assert isinstance(again, ModelCritic)
    teach(again.model)
    again.read_state(tmp_path)
    assert weights_digest(again.model) == weights_digest(critic.model)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    made = parts("--algorithm.name=ppo")
    char = made.spec.model.char
    build_char_model(char.model_copy(update={"alphabet": char.alphabet[::-1]}), tmp_path)
    other = parts("--algorithm.name=ppo", f"--critic.source={tmp_path}")
    with pytest.raises(UserError) as caught:
        reference_and_critic(other, progress=lambda _: None)
    assert "another tokenizer than the policy" in str(caught.value)
