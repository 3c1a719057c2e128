from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tidemill.config.load import load_spec
from tidemill.core.errors import UserError
from tidemill.models.char import build_char_model
from tidemill.runtime.critic import build_critic
from tidemill.runtime.parts import Parts, load_parts
from tidemill.trainer.critic import ModelCritic, TrunkCritic

SMALL = ("--model.source=char", "--model.char.hidden_size=16", "--model.char.layers=1", "--model.char.heads=2")


def parts(*args: str) -> Parts:
    return load_parts(load_spec([*SMALL, "--trainer.threads=1", *args]), progress=lambda _: None)


def test_no_critic_where_none_is_needed() -> None:
    assert build_critic(parts(), progress=lambda _: None) is None


def test_a_shared_one_reads_the_policys_states() -> None:
    made = parts("--algorithm.name=ppo", "--critic.kind=shared")
    critic = build_critic(made, progress=lambda _: None)
    assert isinstance(critic, TrunkCritic)
    assert critic.model is made.model


def test_one_of_its_own_begins_as_the_policy_and_says_nothing_yet() -> None:
    made = parts("--algorithm.name=ppo")
    critic = build_critic(made, progress=lambda _: None)
    assert isinstance(critic, ModelCritic)
    assert critic.model is not made.model
    for ours, theirs in zip(critic.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    assert not critic.head.weight.any()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    made = parts("--algorithm.name=ppo")
    char = made.spec.model.char
    build_char_model(char.model_copy(update={"alphabet": char.alphabet[::-1]}), tmp_path)
    other = parts("--algorithm.name=ppo", f"--critic.source={tmp_path}")
    with pytest.raises(UserError) as caught:
        build_critic(other, progress=lambda _: None)
    assert "another tokenizer than the policy" in str(caught.value)
