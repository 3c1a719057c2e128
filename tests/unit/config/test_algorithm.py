from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.config_issues import issues_of, section_issue
from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS, AlgorithmConfig, CorrectionConfig, CriticConfig
from tidemill.config.base import Config
from tidemill.config.load import from_toml, load_spec
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml


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
def test_a_preset_sets_the_defaults(name: str, differs: dict[str, Any]) -> None:
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
def test_a_loss_has_its_own_clip_range(given: dict[str, Any], limits: tuple[float, float]) -> None:
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


def test_explicit_keys_override_the_preset_in_every_layer(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[algorithm]\nname = "dapo"\nclip_low = 0.1\n')
    spec = load_spec([f"@{recipe}", "--algorithm.normalize=sample"])
    algorithm = spec.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.normalize) == (0.1, 0.28, "sample")
    assert algorithm.changed_from_preset() == ["normalize", "clip_low"]


def test_a_written_run_has_every_value_and_parses_back() -> None:
    spec = RunSpec.model_validate({"algorithm": {"name": "gspo", "correction": {"kind": "icepop", "high": 4}}})
    text = to_toml(spec)
    assert "clip_low = 0.0003" in text
    assert '[algorithm.correction]\nkind = "icepop"\nlow = 0.5\nhigh = 4.0' in text
    assert from_toml(text) == spec


def test_no_preset_sets_a_key_that_may_be_unset() -> None:
    """config.toml omits unset keys, so that loading it would take the preset's value."""
    for preset in PRESETS.values():
        for key in preset.settings:
            assert type(None) not in getattr(AlgorithmConfig.model_fields[key].annotation, "__args__", ())


def test_a_misspelt_name_gets_a_suggestion() -> None:
    (issue,) = issues_of(lambda: load_spec(["--algorithm.name=gsop"]))
    assert issue.key == "algorithm.name"
    assert issue.hint == "did you mean gspo?"


@pytest.mark.parametrize("kind", CORRECTION_LIMITS)
def test_default_limits_depend_on_the_kind(kind: str) -> None:
    filled = CorrectionConfig.model_validate({"kind": kind, "low": None})
    assert (filled.low, filled.high) == CORRECTION_LIMITS[kind]  # type: ignore[index]


CASES: list[tuple[type[Config], dict[str, Any], str, str]] = [  # section, values, part of `what`, part of `hint`
    (CorrectionConfig, {"kind": "tis", "low": 0.5}, 'low = 0.5 has no meaning for kind = "tis"', "leave it out"),
    (CorrectionConfig, {"kind": "none", "high": 2.0}, 'high = 2 has no meaning for kind = "none"', "leave it out"),
    (CorrectionConfig, {"kind": "icepop", "low": 1.5}, "low = 1.5", "low < 1 < high"),
    (CorrectionConfig, {"kind": "clip_range", "high": 0.9}, "high = 0.9", "low < 1 < high"),
    (CorrectionConfig, {"kind": "tis", "high": 0.9}, "high = 0.9 is below 1", "at least 1"),
    (AlgorithmConfig, {"loss": "gspo", "normalize": "token"}, 'normalize = "token"', 'normalize = "sample"'),
    (AlgorithmConfig, {"loss": "cispo", "clip_high": 0.2}, "clip_high = 0.2", "leave clip_high out"),
    (AlgorithmConfig, {"name": "gspo", "dual_clip": 3.0}, 'dual_clip is only for loss = "ppo_clip"', "leave"),
    (AlgorithmConfig, {"kl_target": 0.1}, "kl_beta is 0", "set kl_beta"),
    (AlgorithmConfig, {"kl_ratio": True, "kl_in": "reward"}, 'kl_in is "reward"', "change one of them"),
    (CriticConfig, {"kind": "shared", "source": "char"}, 'kind is "shared"', 'kind = "own"'),
    (RunSpec, {"batch": {"group_size": 1}}, 'algorithm.advantage = "grpo"', "group_size to 2"),
    (
        RunSpec,
        {"algorithm": {"overlong_buffer_tokens": 65}, "sampling": {"max_new_tokens": 64}},
        "algorithm.overlong_buffer_tokens = 65 is more than sampling.max_new_tokens = 64",
        "lower it",
    ),
]


@pytest.mark.parametrize(("section", "fields", "what", "hint"), CASES)
def test_contradictory_values_are_refused(section: type[Config], fields: dict[str, Any], what: str, hint: str) -> None:
    issue = section_issue(section, **fields)
    assert what in issue.what
    assert hint in issue.hint


def test_clip_low_is_below_1() -> None:
    with pytest.raises(ValidationError):
        AlgorithmConfig(clip_low=1.0)


def test_gae_accepts_groups_of_one_sample() -> None:
    assert RunSpec.model_validate({"batch": {"group_size": 1}, "algorithm": {"name": "ppo"}}).batch.group_size == 1


def test_the_default_learning_rate_of_a_shared_critic_is_higher() -> None:
    rates = [CriticConfig.model_validate(given).learning_rate for given in ({}, {"kind": "own"}, {"kind": "shared"})]
    assert rates == [1e-5, 1e-5, 1e-3]
    assert CriticConfig(kind="shared", learning_rate=1e-4).learning_rate == 1e-4


def test_a_critics_folder_starts_at_its_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[algorithm]\nname = "ppo"\n[critic]\nsource = "./reward"\n')
    assert load_spec([f"@{recipe}"]).critic.source == str(tmp_path / "reward")
