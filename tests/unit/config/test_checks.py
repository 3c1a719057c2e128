from __future__ import annotations

import pytest

from tidemill.config.issues import ConfigError, contradictions, refuse_untrainable
from tidemill.config.learning import BatchConfig
from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.config.schema import EvalConfig, RunSpec, SamplingConfig
from tidemill.config.task import RewardConfig, ScoringConfig


@pytest.mark.parametrize(
    ("spec", "key", "says"),
    [
        (RunSpec(sampling=SamplingConfig(top_p=0.9)), "sampling.top_p", "set sampling.top_p = 1"),
        (RunSpec(sampling=SamplingConfig(top_k=1)), "sampling.top_k", "set sampling.top_k = 0"),
        (RunSpec(sampling=SamplingConfig(temperature=0)), "sampling.temperature", "set it above 0"),
        (
            RunSpec(batch=BatchConfig(microbatch_tokens=63), sampling=SamplingConfig(max_new_tokens=64)),
            "batch.microbatch_tokens",
            "63 tokens cannot hold one completion of sampling.max_new_tokens = 64",
        ),
        (
            RunSpec(scoring=ScoringConfig(rewards=(RewardConfig(kind="exact", weight=0),))),
            "scoring.rewards",
            "give at least one reward a weight",
        ),
    ],
)
def test_training_refuses(spec: RunSpec, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_untrainable(spec)
    (fault,) = caught.value.faults
    assert fault.key == key
    assert says in fault.line
    assert contradictions(spec, "generate") == contradictions(spec, "eval") == contradictions(spec, "read") == []


def test_a_cut_off_distribution_is_refused_with_the_reason() -> None:
    (fault,) = contradictions(RunSpec(sampling=SamplingConfig(top_p=0.9)), "train")
    assert "importance ratios over the whole vocabulary" in fault.what


def test_a_completion_must_leave_room_in_the_char_model() -> None:
    model = ModelConfig(source="char", char=CharModelConfig(context=64))
    full = RunSpec(model=model, sampling=SamplingConfig(max_new_tokens=64))
    room = RunSpec(model=model, sampling=SamplingConfig(max_new_tokens=63), eval=EvalConfig(max_new_tokens=64))
    assert [fault.key for fault in contradictions(full, "generate")] == ["sampling.max_new_tokens"]
    assert contradictions(room, "generate") == []
    assert [fault.key for fault in contradictions(room, "eval")] == ["eval.max_new_tokens"]
    other = RunSpec(model=ModelConfig(char=CharModelConfig(context=64)), sampling=SamplingConfig(max_new_tokens=64))
    assert contradictions(other, "train") == []  # another model's context is not known here


def test_the_default_run_trains() -> None:
    refuse_untrainable(RunSpec())


def test_samples_for_pass_at_k_must_differ() -> None:
    greedy = SamplingConfig(temperature=0)
    (fault,) = contradictions(RunSpec(sampling=greedy, eval=EvalConfig(samples_per_prompt=4)), "eval")
    assert fault.key == "sampling.temperature"
    assert "all 4 samples of a prompt would be the same" in fault.what
    assert contradictions(RunSpec(sampling=greedy), "eval") == []
