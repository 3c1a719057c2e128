"""The rows that the project measured on GPUs, and keeps in the package."""

from __future__ import annotations

import pytest

from benchmarks import measuring
from benchmarks.gpu.kept_rows import written
from tests.gpu_rows import QWEN3
from tidemill.hardware.engine_profile import Rollout, engine_profile, generation_s
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.measured_rows import KEPT, Efficiencies, measured_efficiencies
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters

CATALOG = load_catalog()
H200 = CATALOG.gpu("h200")
QWEN3_600M = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}


def found(shape: ModelShape, *engines: str) -> tuple[Efficiencies | None, tuple[str, ...]]:
    efficiencies, lines = measured_efficiencies((), CATALOG, shape=shape, gpus=[H200], engines=engines)
    return efficiencies.get(H200.name), lines


def test_the_file_is_that_of_the_sessions() -> None:
    assert KEPT.read_text(encoding="utf-8") == written(sorted((measuring.RESULTS / "gpu").glob("*.json")))


def test_the_measured_training_step_by_hand() -> None:
    # 4 prompts and 32 completions of 512 tokens: 18,432 tokens; 4 passes of 2 FLOPs per parameter, and 4 * 28 layers *
    # 2,048 for each of 512 earlier tokens. The update moves 32 bytes of a parameter at 0.7 * 4.8 TB/s, and takes 5 ms.
    shape = shape_of_config(QWEN3, source="")
    measured, (training, engines) = found(shape, "embedded")
    flops = 18_432 * 4 * (2 * shape.parameters + 4 * 28 * 2048 * 512)
    update_s = 32 * shape.parameters / (0.7 * 4.8e12) + 5e-3
    assert measured is not None
    assert measured.trainer.compute == pytest.approx(flops / (1.0873480039999777 - update_s) / 989e12)
    versions = "measured: 2026-11-27, torch 2.11.0, Tidemill 0.1.0 (7f577a57c), NVIDIA H200, row 1"
    assert training == f"h200-141gb: training at 25 % of peak FLOP/s, {versions} (1.7B, shared)"
    assert engines.endswith(f"{versions} (0.6B, embedded)")


def test_the_measured_generation_is_predicted() -> None:
    shape = shape_of_config(QWEN3_600M, source="")
    measured, _ = found(shape, "embedded")
    assert measured is not None
    profile = engine_profile(shape, H200, slots=256, efficiency=measured.engine)
    work = Rollout(samples=256, group_size=8, prompt_tokens=512.0, lengths=(256,))
    assert generation_s(profile, work, 256) == pytest.approx(15.316802768999992)


def test_rows_say_nothing_about_other_sizes_and_engines() -> None:
    large, none = found(shape_of_parameters(8e9), "embedded")
    assert (large, none) == (None, ())
    other, (training, engines) = found(shape_of_parameters(1.7e9), "vllm")
    assert other is not None
    assert "measured: " in training
    assert engines.endswith("assumed (no measured row of vllm)")
    efficiencies, lines = measured_efficiencies(
        (), CATALOG, shape=shape_of_parameters(1.7e9), gpus=[CATALOG.gpu("h100")]
    )
    assert (efficiencies, lines) == ({}, ())
