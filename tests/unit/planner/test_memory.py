from __future__ import annotations

from typing import get_args

import pytest

from tests.formulas import check_figures
from tidemill.config.algorithm import PRESETS
from tidemill.config.pipeline import StageKind
from tidemill.core.errors import UserError
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.planner.memory.memory_plan import plan_memory
from tidemill.planner.memory.per_gpu import Fit, rounded_up, usable
from tidemill.planner.memory.states import ROLES, WHOLE_BATCH, Holding, Load, MemoryQuestion, Parallel

GPU = load_catalog().gpu("h100-80gb")
# 70 layers of 8 * 1000 * 1000 parameters and two matrices of 1000 * 20,000: 600e6
SHAPE = ModelShape(
    parameters=600e6, layers=70, hidden=1000, heads=10, kv_heads=2, head_dim=100, intermediate=2000, vocab=20_000
)
QUESTION = MemoryQuestion(algorithm="grpo", shape=SHAPE, gpu=GPU)


def test_which_estimators_whiten_over_the_batch() -> None:
    assert set(WHOLE_BATCH) == {name for name, preset in PRESETS.items() if preset.settings.get("whiten")}


def test_every_algorithm_and_supervised_stage_has_its_roles() -> None:
    assert set(ROLES) == set(PRESETS) | ({"sft", "dpo", "reward_model"} & set(get_args(StageKind)))


@pytest.mark.parametrize(
    ("holding", "bytes_each", "on_host"),
    [
        (Holding(), 16 + 2, 0),
        (Holding(optimizer="adam-8bit"), 2 + 2 + 1 + 1 + 4 + 2, 0),
        (Holding(offload=True), 16 + 2, 12),
        (Holding(optimizer="adam-8bit", offload=True), 10 + 2, 6),
    ],
)
def test_bytes_per_parameter(holding: Holding, bytes_each: int, on_host: int) -> None:
    plan = plan_memory(MemoryQuestion(algorithm="grpo", shape=SHAPE, gpu=GPU, holding=holding))
    assert plan.total == bytes_each * 600e6
    assert plan.on_host == on_host * 600e6
    assert plan.parts.states == plan.total - plan.on_host


def test_an_adapters_base_is_there_once() -> None:
    # q and o: 2 * (1000 + 1000), k and v: 2 * (1000 + 200), mlp: 3 * (1000 + 2000): 15,400 a layer and rank;
    # rank 8, 70 layers: 8,624,000 parameters, 16 bytes each, of actor and critic; one base and a reward model of
    # 2 * 600e6 bytes
    question = MemoryQuestion(algorithm="ppo", shape=SHAPE, gpu=GPU, holding=Holding(lora_rank=8))
    by_role = {role.role: role.total for role in plan_memory(question).states}
    adapter = 8_624_000 * 16
    assert by_role == {"actor": 1.2e9 + adapter, "critic": adapter, "reference": 0, "reward": 1.2e9}


def test_a_critic_of_another_size_has_its_own_base() -> None:
    small = ModelShape(
        parameters=100e6, layers=10, hidden=500, heads=10, kv_heads=2, head_dim=50, intermediate=900, vocab=20_000
    )
    full = MemoryQuestion(algorithm="ppo", shape=SHAPE, critic=small, gpu=GPU)
    assert {role.role: role.total for role in plan_memory(full).states}["critic"] == 16 * 100e6
    adapted = MemoryQuestion(algorithm="ppo", shape=SHAPE, critic=small, gpu=GPU, holding=Holding(lora_rank=1))
    critic = next(role for role in plan_memory(adapted).states if role.role == "critic")
    assert critic.weights > 2 * 100e6


@pytest.mark.parametrize(
    ("question", "roles"),
    [
        (MemoryQuestion(algorithm="grpo", shape=SHAPE, gpu=GPU, reference=False), ["actor"]),
        (MemoryQuestion(algorithm="dapo", shape=SHAPE, gpu=GPU, reference=True), ["actor", "reference"]),
        (MemoryQuestion(algorithm="grpo", shape=SHAPE, gpu=GPU, reward=SHAPE), ["actor", "reference", "reward"]),
        (MemoryQuestion(algorithm="sft", shape=SHAPE, gpu=GPU), ["actor"]),
    ],
)
def test_roles_can_be_left_out_and_added(question: MemoryQuestion, roles: list[str]) -> None:
    assert [role.role for role in plan_memory(question).states] == roles


def test_the_parts_of_a_gpu() -> None:
    load = Load(context=1000, samples_in_flight=10)
    parallel = Parallel(tp=2)
    parts = plan_memory(MemoryQuestion(algorithm="grpo", shape=SHAPE, gpu=GPU, load=load, parallel=parallel)).parts
    # full recomputation: 70 inputs of 2 * 1000 bytes and one layer of 2 * (5 * 1000 + 2 * 1000 + 2 * 200 + 3 * 2000)
    # = 26,800 bytes a token; 1000 tokens, over 2 GPUs
    assert parts.activations == 1000 * (70 * 2000 + 26_800) / 2
    assert parts.logits == 1000 * 20_000 * 8 / 2
    # a layer is (600e6 - 2 * 20e6) / 70 = 8e6 parameters: two of them in 2 bytes
    assert parts.gathered == 2 * 2 * 8e6 / 2
    # 2 * 70 layers * 2 heads * 100 * 2 bytes = 56,000 bytes a token
    assert parts.kv == 10 * 1000 * 56_000
    assert parts.engine == 600e6 * 2  # fits one GPU


def test_keeping_all_activations_instead_of_computing_them_again() -> None:
    load = Load(context=1000, recompute="none")
    assert plan_memory(MemoryQuestion(algorithm="sft", shape=SHAPE, gpu=GPU, load=load)).parts.activations == (
        1000 * 70 * 26_800
    )


def test_engines_on_other_gpus_are_not_counted() -> None:
    here = plan_memory(QUESTION)
    elsewhere = plan_memory(MemoryQuestion(algorithm="grpo", shape=SHAPE, gpu=GPU, generates_here=False))
    assert elsewhere.parts.kv == elsewhere.parts.engine == 0
    assert elsewhere.kv == here.kv > 0
    assert plan_memory(MemoryQuestion(algorithm="sft", shape=SHAPE, gpu=GPU)).kv == 0


def test_the_fewest_gpus_hold_everything_and_one_unit_less_does_not() -> None:
    big = ModelShape(
        parameters=70e9, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28_672, vocab=128_256
    )
    question = MemoryQuestion(algorithm="grpo", shape=big, gpu=GPU, parallel=Parallel(tp=4, pp=2))
    plan = plan_memory(question)
    fewest = plan.min_gpus_with_activations
    assert fewest is not None
    assert fewest % 8 == 0
    parts, room = plan.parts, usable(question)
    assert parts.on_one(shards=fewest, gpus=fewest) <= room
    assert parts.on_one(shards=fewest - 8, gpus=fewest - 8) > room
    tried = {fit.gpus: fit.missing_bytes for fit in plan.fits}
    assert tried[fewest] == 0
    assert tried[fewest - 8] == pytest.approx(parts.on_one(shards=fewest - 8, gpus=fewest - 8) - room)


def test_whole_engines_are_placed() -> None:
    plan = plan_memory(MemoryQuestion(algorithm="sft", shape=shape_of_parameters(70e9), gpu=GPU))
    engines = plan_memory(
        MemoryQuestion(algorithm="grpo", shape=shape_of_parameters(70e9), gpu=GPU, engine_tp=8, parallel=Parallel(tp=2))
    )
    assert plan.min_gpus_with_activations is not None
    assert plan.min_gpus_with_activations % 8  # nothing generates: any number will do
    assert engines.min_gpus_with_activations is not None
    assert engines.min_gpus_with_activations % 8 == 0
    assert all(fit.gpus % 8 == 0 for fit in engines.fits)


def test_rounding_adds_no_gpu() -> None:
    assert rounded_up(14.000000000000002, 1) == 14
    assert rounded_up(14.00001, 1) == 15
    assert rounded_up(1, 8) == rounded_up(8, 8) == 8
    assert Fit(gpus=1, bytes_per_gpu=72e9 + 0.5, usable_bytes=72e9).fits
    assert not Fit(gpus=1, bytes_per_gpu=72e9 + 2, usable_bytes=72e9).fits


def test_replicas_of_a_sharded_model_do_not_make_it_smaller() -> None:
    # fsdp over 4 of any number: states / 4 on each
    question = MemoryQuestion(algorithm="sft", shape=SHAPE, gpu=GPU, parallel=Parallel(fsdp=4))
    plan = plan_memory(question, gpus=64)
    fit = next(each for each in plan.fits if each.gpus == 64)
    assert fit.bytes_per_gpu == pytest.approx(16 * 600e6 / 4 + plan.parts.fixed)


def test_a_model_no_number_of_gpus_holds_names_the_missing_memory() -> None:
    question = MemoryQuestion(algorithm="sft", shape=SHAPE, gpu=GPU, load=Load(microbatch_tokens=10_000_000))
    plan = plan_memory(question)
    assert plan.min_gpus_with_activations is None
    # activations 10e6 * 166,800 = 1.668 TB, logits 10e6 * 160,000 = 1.6 TB, 32 MB of layers, 2 GB: 3.27 TB; 72 GB
    (note,) = (note for note in plan.notes if "no number" in note)
    assert all(amount in note for amount in ("3.27 TB", "3.2 TB", "72 GB", "activations take 1.67 TB"))
    assert "--microbatch-tokens" in note
    assert not any(fit.fits for fit in plan.fits)


def test_too_few_gpus_come_with_hints() -> None:
    # 18 * 40e9 bytes on 8 GPUs are 90 GB on each; without the optimizer's 12 bytes of 18 they are 30, with an 8-bit
    # optimizer 60, beside which 14 GB of activations, logits, layers and runtime are too many for 72
    big = shape_of_parameters(40e9)
    why = plan_memory(MemoryQuestion(algorithm="grpo", shape=big, gpu=GPU, generates_here=False)).why_not
    assert why is not None
    assert why.gpus == 8
    assert next(iter(why.parts)) == "states"
    assert why.parts["states"] == pytest.approx(90e9)
    assert why.missing_bytes == pytest.approx(sum(why.parts.values()) - 72e9)
    fits = {hint.option: hint.fits for hint in why.hints}
    assert fits == {"--offload": True, "--lora-rank 16": True, "--optimizer adam-8bit": False, "--tp 8": False}
    offloaded = MemoryQuestion(
        algorithm="grpo", shape=big, gpu=GPU, generates_here=False, holding=Holding(offload=True)
    )
    hint = next(hint for hint in why.hints if hint.option == "--offload")
    found = next(fit for fit in plan_memory(offloaded).fits if fit.gpus == 8)
    assert hint.bytes_per_gpu == pytest.approx(found.bytes_per_gpu)
    assert plan_memory(offloaded).why_not is None


def test_hints_leave_out_options_already_in_use() -> None:
    tight = MemoryQuestion(
        algorithm="grpo",
        shape=shape_of_parameters(200e9),
        gpu=GPU,
        holding=Holding(offload=True, optimizer="adam-8bit"),
        parallel=Parallel(fsdp=2),
        load=Load(recompute="none"),
        generates_here=False,
    )
    why = plan_memory(tight, gpus=16).why_not
    assert why is not None
    assert {hint.option for hint in why.hints} == {"--lora-rank 16", "--recompute full", "--fsdp 0", "--tp 8"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parallel": Parallel(tp=3)}, "3 does not divide the model's 10 attention heads"),
        ({"parallel": Parallel(tp=0)}, "--tp: needs 1 or more, was given 0"),
        ({"parallel": Parallel(pp=71)}, "--pp: 71"),
        ({"parallel": Parallel(ep=2)}, "no experts"),
        ({"margin": 1.0}, "--margin"),
        ({"holding": Holding(lora_rank=1001)}, "--lora-rank: a rank of 1001 is above the model's width of 1000"),
        ({"critic": SHAPE}, "grpo has no critic"),
        ({"algorithm": "grppo"}, "did you mean grpo?"),
        ({"load": Load(context=0)}, "--context: needs 1 or more"),
    ],
)
def test_invalid_questions_are_refused(change: dict[str, object], says: str) -> None:
    fields = {"algorithm": "grpo", "shape": SHAPE, "gpu": GPU, **change}
    with pytest.raises(UserError) as caught:
        plan_memory(MemoryQuestion(**fields))  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_number_of_gpus_starts_at_one() -> None:
    with pytest.raises(UserError, match="needs 1 or more, was given 0"):
        plan_memory(QUESTION, gpus=0)


def test_every_number_equals_its_formula() -> None:
    question = MemoryQuestion(
        algorithm="ppo", shape=SHAPE, gpu=GPU, holding=Holding(lora_rank=4), parallel=Parallel(tp=2)
    )
    assert check_figures(plan_memory(question).figures) > 12
