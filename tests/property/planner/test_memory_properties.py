"""What holds for any model, any degrees and any GPU."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formulas import check_figures
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_shape import shape_of_parameters
from tidemill.planner.memory.memory_plan import plan_memory
from tidemill.planner.memory.per_gpu import fit, unit, usable
from tidemill.planner.memory.states import ROLES, Holding, Load, MemoryQuestion, Parallel

CATALOG = load_catalog()
QUESTIONS = st.builds(
    MemoryQuestion,
    algorithm=st.sampled_from(sorted(ROLES)),
    shape=st.floats(3e8, 1e12).map(shape_of_parameters),
    gpu=st.sampled_from(list(CATALOG.gpus.values())),
    holding=st.builds(
        Holding,
        optimizer=st.sampled_from(["adam", "adam-8bit"]),
        lora_rank=st.sampled_from([0, 8]),
        offload=st.booleans(),
    ),
    parallel=st.builds(Parallel, tp=st.just(1), pp=st.sampled_from([1, 2]), fsdp=st.sampled_from([0, 0, 8])),
    load=st.builds(
        Load,
        context=st.integers(16, 65536),
        samples_in_flight=st.integers(0, 1024),
        recompute=st.sampled_from(["full", "none"]),
    ),
    generates_here=st.booleans(),
    margin=st.floats(0, 0.5),
)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(QUESTIONS, st.integers(1, 64))
def test_more_gpus_never_need_more_memory_on_each(question: MemoryQuestion, units: int) -> None:
    parts, step = plan_memory(question).parts, unit(question)
    fewer, more = (fit(question, parts, step * count) for count in (units, units + 1))
    assert more.bytes_per_gpu <= fewer.bytes_per_gpu
    assert more.missing_bytes <= fewer.missing_bytes


@settings(derandomize=True, deadline=None, max_examples=40)
@given(QUESTIONS)
def test_the_smallest_plan_fits_and_one_gpu_less_does_not(question: MemoryQuestion) -> None:
    plan = plan_memory(question)
    fewest, step = plan.min_gpus_with_activations, unit(question)
    if fewest is None:
        assert not any(each.fits for each in plan.fits)
        assert not fit(question, plan.parts, step * 10**6).fits
        return
    assert fit(question, plan.parts, fewest).fits
    assert fewest == step or not fit(question, plan.parts, fewest - step).fits
    assert fewest >= plan.min_gpus
    assert usable(question) <= question.gpu.memory_bytes


@settings(derandomize=True, deadline=None, max_examples=40)
@given(QUESTIONS)
def test_states_are_the_sum_of_their_parts_and_figures_equal_their_formulas(question: MemoryQuestion) -> None:
    plan = plan_memory(question)
    assert plan.total == sum(role.total for role in plan.states)
    assert 0 <= plan.on_host <= plan.total
    check_figures(plan.figures)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(QUESTIONS)
def test_memory_savers_never_need_more_memory(question: MemoryQuestion) -> None:
    plan = plan_memory(question)
    full = MemoryQuestion(algorithm=question.algorithm, shape=question.shape, gpu=question.gpu)
    assert plan.total <= plan_memory(full).total
    assert plan.parts.states <= plan_memory(full).parts.states
