"""Run by `test_static_scheduler.py` in Triton's interpreter: the engine with the kernels that a GPU uses."""

from __future__ import annotations

import pytest

from tests.engine_requests import engine, finish_all, prompts, request
from tests.model_shapes import MODEL_SHAPES
from tidemill.rollout.engines.embedded.static_decode import StepKernels


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma3"])
def test_tokens_are_those_of_the_packed_scheduler(shape: str) -> None:
    """Groups, of which the first sample ends first; more samples than slots; windows of 8."""
    requests = [
        request(text, index=index, temperature=(1.0, 0.7, 0.0)[index], max_new_tokens=2 + index)
        for text in prompts(2, length=10, shared=6)
        for index in range(3)
    ]
    made = finish_all(engine(MODEL_SHAPES[shape](), kernels=StepKernels()), requests)
    packed = finish_all(engine(MODEL_SHAPES[shape]()), requests)
    assert made.tokens == packed.tokens
    for name, logprobs in packed.logprobs.items():
        assert made.logprobs[name] == pytest.approx(logprobs, abs=1e-5)
