"""What holds for any model on any GPU."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.hardware.completion_lengths import LogNormalLengths
from tidemill.hardware.engine_profile import EngineProfile, engine_profile, generation_s, rollout_of
from tidemill.hardware.gpu_catalog import Gpu, load_catalog
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.hardware.trainer_profile import TrainerEfficiency, trainer_profile

SHAPES = st.floats(3e8, 4e11).map(shape_of_parameters)
GPUS = st.sampled_from(list(load_catalog().gpus.values()))
ENGINES = st.builds(
    lambda shape, gpu, gpus: engine_profile(shape, gpu, gpus=gpus), SHAPES, GPUS, st.sampled_from([1, 2, 4, 8])
)
LENGTHS = st.builds(
    LogNormalLengths, median=st.floats(10, 5000), sigma=st.floats(0, 1.5), limit=st.integers(100, 20_000)
)
SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)


@SETTINGS
@given(ENGINES, st.integers(1, 255), st.integers(0, 100_000))
def test_more_work_takes_longer_and_a_larger_batch_is_never_less_efficient(
    engine: EngineProfile, running: int, context: int
) -> None:
    step_s, more_s = (engine.decode_step_s(each, each * context) for each in (running, running + 1))
    assert step_s <= more_s
    assert engine.decode_step_s(running, running * context + 1) >= step_s
    assert engine.tokens_per_s(running + 1, context) >= engine.tokens_per_s(running, context) * (1 - 1e-12)


@SETTINGS
@given(ENGINES, st.floats(1, 20_000))
def test_the_plateau_is_reachable_and_no_smaller_batch_is_on_it(engine: EngineProfile, context: float) -> None:
    plateau, most = engine.plateau(context), engine.most_running(context)
    assert 1 <= plateau <= max(most, 1)
    best = engine.tokens_per_s(max(most, 1), context)
    assert engine.tokens_per_s(plateau, context) >= 0.9 * best
    assert plateau == 1 or engine.tokens_per_s(plateau - 1, context) < 0.9 * best


@SETTINGS
@given(ENGINES, LENGTHS, st.integers(1, 2000), st.floats(1, 2000))
def test_more_samples_take_longer_and_none_is_faster_than_its_tokens(
    engine: EngineProfile, lengths: LogNormalLengths, samples: int, prompt: float
) -> None:
    rollout = rollout_of(lengths, samples=samples, group_size=8, prompt_tokens=prompt)
    seconds = generation_s(engine, rollout, samples)
    assert generation_s(engine, rollout, samples + 1) >= seconds * (1 - 1e-9)
    assert seconds >= lengths.quantile(0.99) * engine.decode_step_s(1, 0)


@SETTINGS
@given(SHAPES, GPUS, st.sampled_from([1, 2, 4, 8]), st.floats(1e3, 1e7))
def test_twice_the_gpus_never_compute_longer(shape: ModelShape, gpu: Gpu, gpus: int, tokens: float) -> None:
    few, many = (trainer_profile(shape, gpu, gpus=count, gpus_per_machine=64) for count in (gpus, 2 * gpus))
    assert many.token_s == pytest.approx(few.token_s / 2)
    outside_steps_s = TrainerEfficiency().step_s
    assert many.update_s - outside_steps_s == pytest.approx((few.update_s - outside_steps_s) / 2)
    half, whole = (few.step_s(each, 1000, passes=4, microbatch=8192) for each in (tokens / 2, tokens))
    assert half <= whole
