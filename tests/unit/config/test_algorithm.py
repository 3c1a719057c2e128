from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS, AlgorithmConfig, CorrectionConfig, CriticConfig
from tidemill.config.issues import ConfigError
from tidemill.config.load import from_toml, load_spec
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml


def refused(build: Any, **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        build.model_validate(fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("grpo", {}),
        ("dr_grpo", {"advantage": "dr_grpo", "normalize": "constant"}),
        ("rloo", {"advantage": "rloo", "normalize": "constant", "kl_in": "reward"}),
        ("dapo", {"clip_high": 0.28, "normalize": "token", "dynamic_sampling": True}),
        (
            "gspo",
            {
                "loss": "gspo",
                "clip_low": 0.0003,
                "clip_high": 0.0004,
                "correction": {"kind": "sequence_tis", "low": None, "high": 2.0},
            },
        ),
        ("cispo", {"loss": "cispo", "clip_high": 5.0, "normalize": "token"}),
        ("ppo", {"advantage": "gae", "whiten": True, "normalize": "token", "kl_in": "reward", "kl_beta": 0.01}),
    ],
)
def test_a_preset_sets_what_was_not_given(name: str, differs: dict[str, Any]) -> None:
    plain, named = AlgorithmConfig().model_dump(), AlgorithmConfig.model_validate({"name": name}).model_dump()
    assert {key: value for key, value in named.items() if plain[key] != value and key != "name"} == differs


def test_every_preset_is_a_name_and_valid() -> None:
    assert AlgorithmConfig.model_fields["name"].annotation.__args__ == tuple(PRESETS)  # type: ignore[union-attr]
    for name in PRESETS:
        assert AlgorithmConfig(name=name).changed_from_preset() == []


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({"loss": "gspo"}, (3e-4, 4e-4)),
        ({"loss": "gspo", "clip_high": 0.01}, (3e-4, 0.01)),
        ({"loss": "cispo"}, (0.2, 5.0)),
        ({"name": "dapo", "loss": "ppo_clip"}, (0.2, 0.28)),
        ({"name": "dapo", "loss": "gspo", "normalize": "sample"}, (3e-4, 4e-4)),
        ({"name": "gspo", "loss": "ppo_clip"}, (0.2, 0.2)),
        ({"name": "cispo", "loss": "ppo_clip"}, (0.2, 0.2)),
    ],
)
def test_a_loss_brings_its_own_limits(given: dict[str, Any], limits: tuple[float, float]) -> None:
    algorithm = AlgorithmConfig.model_validate(given)
    assert (algorithm.clip_low, algorithm.clip_high) == limits


@pytest.mark.parametrize(
    ("given", "correction"),
    [
        ({"loss": "gspo"}, ("sequence_tis", None, 2.0)),
        ({"name": "gspo", "correction": {"high": 4}}, ("sequence_tis", None, 4.0)),
        ({"name": "gspo", "correction": {"kind": "icepop", "high": 4}}, ("icepop", 0.5, 4.0)),
        ({"name": "gspo", "loss": "ppo_clip"}, ("tis", None, 2.0)),
        ({"name": "gspo", "loss": "ppo_clip", "correction": {"high": 4}}, ("tis", None, 4.0)),
    ],
)
def test_gspo_corrects_whole_sequences_by_default(given: dict[str, Any], correction: tuple[Any, ...]) -> None:
    found = AlgorithmConfig.model_validate(given).correction
    assert (found.kind, found.low, found.high) == correction


def test_explicit_keys_win_whichever_layer_they_come_from(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[algorithm]\nname = "dapo"\nclip_low = 0.1\n')
    spec = load_spec([f"@{recipe}", "--algorithm.normalize=sample"])
    algorithm = spec.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.normalize) == (0.1, 0.28, "sample")
    assert algorithm.changed_from_preset() == ["normalize", "clip_low"]


def test_a_written_run_shows_every_value_and_reads_back() -> None:
    spec = RunSpec.model_validate({"algorithm": {"name": "gspo", "correction": {"kind": "icepop", "high": 4}}})
    text = to_toml(spec)
    assert "clip_low = 0.0003" in text
    assert '[algorithm.correction]\nkind = "icepop"\nlow = 0.5\nhigh = 4.0' in text
    assert from_toml(text) == spec


def test_no_preset_sets_a_key_that_may_be_unset() -> None:
    """A written configuration says "not set" in a comment, and reading it back would take the preset's value."""
    for preset in PRESETS.values():
        for key in preset.settings:
            assert type(None) not in getattr(AlgorithmConfig.model_fields[key].annotation, "__args__", ())


def test_an_unknown_name_is_suggested_for() -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(["--algorithm.name=gsop"])
    assert str(caught.value).endswith('was given "gsop" (command line); did you mean "gspo"?')


@pytest.mark.parametrize("kind", CORRECTION_LIMITS)
def test_limits_are_filled_in_by_kind(kind: str) -> None:
    filled = CorrectionConfig.model_validate({"kind": kind, "low": None})
    assert (filled.low, filled.high) == CORRECTION_LIMITS[kind]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "tis", "low": 0.5}, 'low = 0.5 means nothing to kind = "tis"; leave it out (none)'),
        ({"kind": "none", "high": 2.0}, 'high = 2 means nothing to kind = "none"'),
        ({"kind": "icepop", "low": 1.5}, "do not enclose 1"),
        ({"kind": "clip_range", "high": 0.9}, "choose low < 1 < high"),
        ({"kind": "tis", "high": 0.9}, "high = 0.9 is below 1"),
    ],
)
def test_correction_faults(fields: dict[str, Any], says: str) -> None:
    assert says in refused(CorrectionConfig, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss": "gspo", "normalize": "token"}, 'set normalize = "sample"'),
        ({"loss": "cispo", "clip_high": 0.2}, "leave clip_high out, which takes 5"),
        ({"name": "gspo", "dual_clip": 3.0}, 'dual_clip is only for loss = "ppo_clip"'),
        ({"kl_target": 0.1}, "give kl_beta a start"),
        ({"kl_ratio": True, "kl_in": "reward"}, "set one of them"),
        ({"critic_warmup_steps": 3}, 'set advantage = "gae"'),
        ({"clip_low": 1.0}, "less than 1"),
    ],
)
def test_algorithm_faults(fields: dict[str, Any], says: str) -> None:
    assert says in refused(AlgorithmConfig, **fields)


def test_a_shared_critic_has_no_weights_of_its_own() -> None:
    assert 'set kind = "own" or leave it out' in refused(CriticConfig, kind="shared", source="char")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch": {"group_size": 1}}, 'algorithm.advantage = "grpo" compares the samples of a group'),
        (
            {"algorithm": {"overlong_buffer_tokens": 65}, "sampling": {"max_new_tokens": 64}},
            "overlong_buffer_tokens = 65 is more than sampling.max_new_tokens = 64",
        ),
    ],
)
def test_faults_across_sections(fields: dict[str, Any], says: str) -> None:
    assert says in refused(RunSpec, **fields)
    assert RunSpec.model_validate({"batch": {"group_size": 1}, "algorithm": {"name": "ppo"}}).batch.group_size == 1


def test_a_head_that_learns_alone_learns_faster() -> None:
    rates = [CriticConfig.model_validate(given).learning_rate for given in ({}, {"kind": "own"}, {"kind": "shared"})]
    assert rates == [1e-5, 1e-5, 1e-3]
    assert CriticConfig(kind="shared", learning_rate=1e-4).learning_rate == 1e-4


def test_a_critics_folder_starts_at_its_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[algorithm]\nname = "ppo"\n[critic]\nsource = "./reward"\n')
    assert load_spec([f"@{recipe}"]).critic.source == str(tmp_path / "reward")
