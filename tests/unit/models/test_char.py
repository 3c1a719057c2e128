"""The character-level model: its size, its reproducibility, its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill.config.model import CharModelConfig
from tidemill.models.auto import quiet
from tidemill.models.builtin import build_char_model
from tidemill.models.catalog import content_key
from tidemill.models.weights_digest import weights_digest

SMALL = CharModelConfig(alphabet="01+=\n", hidden_size=32, layers=2, heads=2, context=16)


def built(config: CharModelConfig, folder: Path) -> Path:
    folder.mkdir()
    build_char_model(config, folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    with quiet():
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


def test_parameter_count_by_hand(tmp_path: Path) -> None:
    # 8/3 of 32 is 85.3, up to a multiple of 32: 96. Vocabulary 5 + 2.
    # Embedding 7·32 = 224; a layer 4·32² + 3·32·96 + 2·32 = 4096 + 9216 + 64 = 13376; last norm 32.
    # 224 + 2·13376 + 32 = 27008
    assert SMALL.intermediate_size == 96
    assert SMALL.parameters == 27008
    assert sum(p.numel() for p in load(built(SMALL, tmp_path / "m")).parameters()) == 27008


def test_the_default_has_about_0_8_million_parameters() -> None:
    # 47·128 + 4·(4·128² + 3·128·352 + 2·128) + 128 = 6016 + 4·200960 + 128 = 809984
    assert CharModelConfig().intermediate_size == 352
    assert CharModelConfig().parameters == 809_984


def test_equal_configurations_give_equal_bytes_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = built(SMALL, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = built(SMALL, tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_initial_weights_are_the_same_on_every_machine(tmp_path: Path) -> None:
    # Recorded once; a change means that old and new runs of a seed are different runs: raise BUILDER_VERSION with it.
    assert weights_digest(load(built(SMALL, tmp_path / "m"))) == "6cb1212147bccf7ff2de5c68e9403aea"


def test_the_seed_changes_every_matrix(tmp_path: Path) -> None:
    one = dict(load(built(SMALL, tmp_path / "a")).named_parameters())
    two = dict(load(built(SMALL.model_copy(update={"seed": 1}), tmp_path / "b")).named_parameters())
    for name, parameter in one.items():
        assert torch.equal(parameter, two[name]) == (parameter.dim() == 1), name


def test_untrained_choices_are_close_to_uniform(tmp_path: Path) -> None:
    model = load(built(CharModelConfig(), tmp_path / "m"))
    ids = torch.arange(2, 47)[None]
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert entropy > 0.95 * torch.tensor(47.0).log()


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"alphabet": "+01=\n"}, {"hidden_size": 64}, {"layers": 3}, {"heads": 4}, {"context": 32}]
)
def test_every_field_is_part_of_the_name(change: dict[str, object]) -> None:
    assert content_key(SMALL) == content_key(SMALL.model_copy())
    assert content_key(SMALL.model_copy(update=change)) != content_key(SMALL)


def test_one_token_per_character_and_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built(SMALL, tmp_path / "m"))
    # <pad> 0, <eos> 1, then the alphabet in its order: 0→2 1→3 +→4 =→5 \n→6
    assert tokenizer("10+1=\n").input_ids == [3, 2, 4, 3, 5, 6]
    assert tokenizer.decode([3, 2, 4, 3, 5, 6, 1, 0]) == "10+1=\n<eos><pad>"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 7)
