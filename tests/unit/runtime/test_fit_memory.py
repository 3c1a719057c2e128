"""Microbatches and recomputed activations by the memory of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.qwen_shapes import SHAPES, config_fields
from tidemill.config.learning import Checkpointing
from tidemill.config.schema import RunSpec
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.process_memory import Models, needs
from tidemill.runtime.fit_memory import USABLE, fitted

WORK: dict[str, Any] = {"batch": {"prompts": 64, "group_size": 8}, "sampling": {"max_new_tokens": 512}}


def models(name: str) -> Models:
    return Models(policy=shape_of_config(config_fields(SHAPES[name]), source=name))


def spec_of(**sections: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({**WORK, **{name: {**WORK.get(name, {}), **keys} for name, keys in sections.items()}})


def chosen(spec: RunSpec) -> tuple[int, Checkpointing]:
    return spec.batch.microbatch_tokens, spec.trainer.activation_checkpointing


@pytest.mark.parametrize(
    ("name", "memory_gb", "expected"),
    [
        ("0.6B", 16, (2048, True)),  # 10.7 GB of states: nothing fits, and the least is taken
        ("0.6B", 24, (8192, True)),
        ("0.6B", 40, (4096, False)),
        ("0.6B", 141, (16_384, False)),
        ("1.7B", 80, (4096, False)),
        ("4B", 141, (4096, "selective")),
    ],
)
def test_the_largest_microbatch_with_the_least_recomputation_that_fits(
    name: str, memory_gb: float, expected: tuple[int, Checkpointing]
) -> None:
    found = fitted(spec_of(), models(name), "rl", gpu_bytes=memory_gb * 1e9)
    assert chosen(found) == expected
    need = needs(found, models(name), "rl", on_gpu=True, alone=False).gpu
    assert need is not None
    assert (need.at_full_length <= USABLE * memory_gb * 1e9) == (expected[0] > 2048)
    assert fitted(found, models(name), "rl", gpu_bytes=1e9) == found  # a chosen number stays


def test_configured_values_stay() -> None:
    configured = spec_of(batch={"microbatch_tokens": 300}, trainer={"activation_checkpointing": "selective"})
    assert chosen(fitted(configured, models("0.6B"), "rl", gpu_bytes=1e9)) == (300, "selective")
    tokens_only = spec_of(batch={"microbatch_tokens": 300})
    assert chosen(fitted(tokens_only, models("0.6B"), "rl", gpu_bytes=80e9)) == (300, False)


def test_without_a_gpu_or_a_known_model_the_choice_is_fixed() -> None:
    assert chosen(fitted(spec_of(), models("0.6B"), "rl", gpu_bytes=None)) == (2048, False)
    assert chosen(fitted(spec_of(), None, "rl", gpu_bytes=80e9)) == (2048, True)


def test_long_prompts_of_a_small_batch_fill_the_microbatches() -> None:
    """Their lengths are unknown when the choice is made; 4 prompts of any length may be followed by 32 tokens each."""
    small = spec_of(batch={"prompts": 4, "group_size": 2}, sampling={"max_new_tokens": 16})
    assert chosen(fitted(small, models("0.6B"), "rl", gpu_bytes=24e9)) != (16_384, False)
