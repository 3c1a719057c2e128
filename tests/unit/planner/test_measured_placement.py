"""A measured step and a measured batch are predicted by the placement that has their rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.formulas import check_figures
from tests.gpu_rows import QWEN3, engine_row, train_step_row, write_rows
from tests.unit.planner.test_placement import QUESTION, SPOT, best_engine, offer
from tidemill.hardware.completion_lengths import log_normal_of_mean
from tidemill.hardware.engine_profile import (
    EngineEfficiency,
    Rollout,
    engine_profile,
    generation_s,
    rollout_of,
    steady_tokens_per_s,
)
from tidemill.hardware.gpu_catalog import Catalog, Gpu, Machine
from tidemill.hardware.measured_rows import Efficiencies, measured_efficiencies
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.trainer_profile import TrainerEfficiency, learning_passes, trainer_profile
from tidemill.planner.placement.estimate import Engine, Placement, Side, estimate
from tidemill.planner.placement.search import derive, plan_placement
from tidemill.planner.placement.training import Group, Offer, PlacementQuestion, Training, best_training

DEVICE = Gpu(
    name="acme-x1-96gb",
    title="ACME X1",
    memory_bytes=96e9,
    bandwidth_bytes_per_s=2e12,
    flops_per_s={"bf16": 5e14},
    interconnect="none",
    link_bytes_per_s=1e11,
    gpus_per_machine=1,
    source="made up",
)
MACHINE = Machine(
    name="one", gpu=DEVICE.name, gpus=1, network_gbit_per_s=100, priced="now", price_source="me", usd_per_hour=1.0
)
CATALOG = Catalog(gpus={DEVICE.name: DEVICE}, machines={"one": MACHINE})
ONE = Offer(machine=MACHINE, gpu=DEVICE, count=1)
SHAPE = shape_of_config(QWEN3, source="")
TRUE_TRAINER, TRUE_ENGINE = TrainerEfficiency(compute=0.31), EngineEfficiency(bandwidth=0.56, compute=0.42)


def batch(samples: int) -> Rollout:
    """As the scripts make it: groups of 8, prompts and completions of 512 tokens."""
    lengths = log_normal_of_mean(512, sigma=0, limit=512)
    return rollout_of(lengths, samples=samples, group_size=8, prompt_tokens=512)


def step_s() -> float:
    """A step of 32 samples on the device: 4 prompts and 32 completions."""
    profile = trainer_profile(SHAPE, DEVICE, gpus=1, efficiency=TRUE_TRAINER)
    passes = learning_passes(recompute=True)
    return profile.step_s(4 * 512 + 32 * 512, 1024, passes=passes, microbatch=16_384)


def batch_s() -> float:
    """256 samples on the device."""
    return generation_s(engine_profile(SHAPE, DEVICE, slots=256, efficiency=TRUE_ENGINE), batch(256), 256)


def measured(folder: Path) -> dict[str, Efficiencies]:
    files = [
        write_rows(folder / "gpu_train_step.json", train_step_row(step_s()), device="ACME X1"),
        write_rows(folder / "gpu_engine.json", engine_row(batch_s()), device="ACME X1"),
    ]
    return measured_efficiencies(files, CATALOG, shape=SHAPE, gpus=[DEVICE])[0]


def question(efficiencies: dict[str, Efficiencies], samples: int) -> PlacementQuestion:
    return PlacementQuestion(
        algorithm="dr_grpo",
        shape=SHAPE,
        offers=(ONE,),
        rollout=batch(samples),
        longest=1024,
        efficiencies=efficiencies,
    )


def test_the_measured_step_is_predicted(tmp_path: Path) -> None:
    training = best_training(question(measured(tmp_path), 32), Group(members=((ONE, 1),)))
    assert isinstance(training, Training)
    assert training.seconds == pytest.approx(step_s(), rel=0.01)
    assumed = best_training(question({}, 32), Group(members=((ONE, 1),)))
    assert isinstance(assumed, Training)
    assert assumed.seconds < 0.7 * step_s()


def test_the_measured_tokens_per_second_are_predicted(tmp_path: Path) -> None:
    asked = question(measured(tmp_path), 256)
    engine = best_engine(asked, ONE, samples_per_gpu=256)
    assert isinstance(engine, Engine)
    rate = engine_row(batch_s())["tokens_per_s"]
    assert steady_tokens_per_s(engine.profile, asked.rollout) == pytest.approx(rate, rel=0.01)
    assert 256 * 512 / generation_s(engine.profile, asked.rollout, 256) == pytest.approx(rate, rel=0.01)


def test_the_sheet_names_measured_and_assumed_efficiencies(tmp_path: Path) -> None:
    asked = question(measured(tmp_path), 32)
    training = best_training(asked, Group(members=((ONE, 1),)))
    engine = best_engine(asked, ONE, samples_per_gpu=32)
    assert isinstance(training, Training)
    assert isinstance(engine, Engine)
    placement = Placement(training=training, shared=Side(engines=((engine, 1.0),)))
    figures = {figure.name: figure for figure in derive(asked, placement).figures}
    assert check_figures(figures.values()) >= 8
    assert figures["forward_token_s"].inputs["efficiency"] == pytest.approx(0.31)
    step = f"the efficiency is measured: {tmp_path}/gpu_train_step.json, ACME X1, row 1 (1.7B, shared)"
    assert figures["forward_token_s"].source.endswith(step)
    assert figures["attention_pair_s"].source.endswith(step)
    weights = figures["shared.one.weights_s"]
    assert weights.inputs["efficiency"] == pytest.approx(0.56)
    assert weights.source.endswith(f"measured: {tmp_path}/gpu_engine.json, ACME X1, row 1 (1.7B, vllm)")
    assert figures["training_s"].value == estimate(asked, placement).training_s
    plan = {figure.name: figure for figure in plan_placement(QUESTION).figures}
    assert plan["forward_token_s"].source.endswith("the efficiency is assumed")


def test_efficiencies_are_those_of_their_gpu_only() -> None:
    slow = Efficiencies(trainer=TrainerEfficiency(compute=0.1, source="measured"))
    asked = msgspec.structs.replace(QUESTION, efficiencies={"a100-80gb": slow})
    a100, h100 = offer("aws-p4de.24xlarge", 1), offer("rlboost-8xh100", 1)
    assert asked.efficiencies_on(h100.gpu) == asked.efficiencies_on(SPOT.gpu) == Efficiencies()
    assert asked.efficiencies_on(a100.gpu) == slow
