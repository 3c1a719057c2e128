"""Scalar heads: their numbers, their folder, and every way in which it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, MODEL_SHAPES, VOCABULARY, llama
from tidemill.config.model import CharModelConfig
from tidemill.core.errors import UserError
from tidemill.models.attention import use_packed_attention
from tidemill.models.builtin import build_char_model
from tidemill.models.codec import load_codec
from tidemill.models.folder import DESCRIPTION, refuse_reward_model
from tidemill.models.reward_model import (
    HEAD,
    RewardModel,
    ScalarHead,
    check_same_vocabulary,
    load_head,
    load_reward_model,
    reward_head,
    save_head,
    sequence_scores,
)
from tidemill.models.tree_forward import TreeForward

CPU = torch.device("cpu")
UP_PROJECTION = "model.layers.0.mlp.up_proj.weight"


def reward_folder(folder: Path, *, kind: str = "reward_model") -> tuple[Path, ScalarHead]:
    save_folder(llama(), folder)
    head = reward_head(HIDDEN, seed=3)
    with torch.no_grad():
        head.bias.fill_(0.25)
    digest = load_codec(folder).vocabulary_digest
    save_head(folder, head, kind=kind, pooling="last_token", vocabulary_digest=digest)  # type: ignore[arg-type]
    return folder, head


def test_the_head_is_a_dot_product_and_a_bias() -> None:
    head = ScalarHead(3)
    hidden = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    assert head(hidden).tolist() == [0.0, 0.0]  # as a value head begins
    with torch.no_grad():
        head.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        head.bias.fill_(0.25)
    # 0.5 - 2 + 6 + 0.25 = 4.75; 0 + 1 + 8 + 0.25 = 9.25
    assert head(hidden).tolist() == [4.75, 9.25]


def test_the_head_stays_in_float32_under_autocast() -> None:
    head, hidden = reward_head(HIDDEN), torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        inside = head(hidden)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, head(hidden))


def test_a_new_reward_head_depends_on_its_seed_only_and_is_small() -> None:
    one, same, other = reward_head(4096), reward_head(4096), reward_head(4096, seed=1)
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)
    # variance 1 / 4097: a deviation of 0.0156, known to about 0.0156 / sqrt(2 · 4096) = 0.0002
    assert float(one.weight.detach().std()) == pytest.approx(0.0156, abs=0.0008)
    assert one.bias.item() == 0.0


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_scores_of_a_tree_equal_those_of_each_sequence_alone(shape: str) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, VOCABULARY, 6)
    sequences = [np.concatenate([prompt, rng.integers(2, VOCABULARY, n)]).astype(np.int32) for n in (1, 4, 9)]
    sequences.append(sequences[2][:8])  # ends inside another one
    model, head = MODEL_SHAPES[shape](), reward_head(HIDDEN)
    plain = []
    for sequence in sequences:
        output = model(torch.from_numpy(sequence)[None].long(), use_cache=False, output_hidden_states=True)
        plain.append(head(output.hidden_states[-1][0, -1:]))
    (gradient,) = torch.autograd.grad(torch.cat(plain).square().sum(), [model.get_parameter(UP_PROJECTION)])
    use_packed_attention(model)
    scores, computed = sequence_scores(TreeForward(model), head, sequences)
    torch.testing.assert_close(scores, torch.cat(plain), rtol=1e-5, atol=1e-5)
    assert computed == 6 + 1 + 4 + 9 - int(sequences[0][6] == sequences[1][6]) - int(sequences[0][6] == sequences[2][6])
    (ours,) = torch.autograd.grad(scores.square().sum(), [model.get_parameter(UP_PROJECTION)])
    torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_a_saved_folder_is_read_back(tmp_path: Path) -> None:
    folder, head = reward_folder(tmp_path)
    loaded = load_reward_model(folder, device=CPU)
    assert isinstance(loaded, RewardModel)
    assert torch.equal(loaded.head.weight, head.weight)
    assert torch.equal(loaded.head.bias, head.bias)
    assert not any(p.requires_grad for p in (*loaded.model.parameters(), *loaded.head.parameters()))
    codec = load_codec(folder)
    assert loaded.description.vocabulary_digest == codec.vocabulary_digest
    check_same_vocabulary(loaded.description, folder, codec, where="scoring.rewards")


def test_a_plain_model_is_not_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a reward model: the folder has no tidemill\.json") as caught:
        load_reward_model(save_folder(llama(), tmp_path), device=CPU)
    assert "stage that trains a reward model" in caught.value.hint


def test_a_reward_model_is_refused_as_policy_but_a_value_model_is_not(tmp_path: Path) -> None:
    folder, _ = reward_folder(tmp_path)
    with pytest.raises(UserError, match="holds a reward model") as caught:
        refuse_reward_model(folder)
    assert caught.value.where == str(folder)
    assert "scoring.rewards" in caught.value.hint
    reward_folder(tmp_path, kind="value_model")  # as a checkpoint with a shared critic
    refuse_reward_model(folder)
    (folder / DESCRIPTION).write_text("[")
    refuse_reward_model(folder)
    refuse_reward_model(tmp_path / "nowhere")


def test_another_kind_of_head_is_refused(tmp_path: Path) -> None:
    folder, _ = reward_folder(tmp_path, kind="value_model")
    with pytest.raises(UserError, match="holds a value model, expected a reward model"):
        load_reward_model(folder, device=CPU)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / HEAD).unlink(), "weight file of the head is missing"),
        (
            lambda folder: (folder / HEAD).write_bytes((folder / HEAD).read_bytes()[:-3]),
            "weight file of the head is damaged",
        ),
        (lambda folder: (folder / DESCRIPTION).write_text("{"), "cannot be read"),
        (lambda folder: (folder / DESCRIPTION).write_text('{"kind": "reward_model"}'), "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: object, words: str) -> None:
    folder, _ = reward_folder(tmp_path)
    assert callable(damage)
    damage(folder)
    with pytest.raises(UserError, match=words) as caught:
        load_head(folder, "reward_model", device=CPU)
    assert str(folder) in caught.value.where


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("format", 9, "the head has format 9"), ("hidden_size", 32, "do not fit its description")],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, field: str, value: int, words: str) -> None:
    folder, _ = reward_folder(tmp_path)
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(description | {field: value}))
    with pytest.raises(UserError, match=words):
        load_head(folder, "reward_model", device=CPU)


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, _ = reward_folder(tmp_path)
    save_head(folder, ScalarHead(7), kind="reward_model", pooling="last_token", vocabulary_digest="")
    with pytest.raises(UserError, match="the head has hidden size 7, and the model 64"):
        load_reward_model(folder, device=CPU)


def test_another_tokenizer_is_refused_with_a_hint(tmp_path: Path) -> None:
    folder, _ = reward_folder(tmp_path / "reward")
    (tmp_path / "policy").mkdir()
    build_char_model(CharModelConfig(hidden_size=16, layers=1, heads=2), tmp_path / "policy")
    description = load_reward_model(folder, device=CPU).description
    with pytest.raises(UserError, match="another tokenizer than the policy") as caught:
        check_same_vocabulary(description, folder, load_codec(tmp_path / "policy"), where="scoring.rewards[0].model")
    assert caught.value.where == "scoring.rewards[0].model"
    assert 'kind = "http"' in caught.value.hint
    (folder / "tokenizer.json").write_bytes((tmp_path / "policy" / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="not the one its head was trained with"):
        check_same_vocabulary(description, folder, load_codec(tmp_path / "policy"), where="")


def test_the_vocabulary_has_one_name_however_its_file_is_written(tmp_path: Path) -> None:
    save_folder(llama(), tmp_path)
    before, file = load_codec(tmp_path).vocabulary_digest, tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=7, sort_keys=True))
    assert load_codec(tmp_path).vocabulary_digest == before
    content["model"]["vocab"]["a"], content["model"]["vocab"]["b"] = 98, 97  # swapped
    file.write_text(json.dumps(content))
    assert load_codec(tmp_path).vocabulary_digest != before
