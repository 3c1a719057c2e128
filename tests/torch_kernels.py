"""The kernels of a decoding step in torch, for a static engine on CPUs."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from tests.kernel_references import decode_reference
from tidemill.core.records import SamplingParams
from tidemill.rollout.engines.embedded.static_decode import StepKernels
from tidemill.rollout.sampling import _mixed, draw


def draw_reference(logits: Tensor, states: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.draw.draw_tokens` by the torch function that CPUs use."""
    keys = [
        _mixed(state % 2**32, position) for state, position in zip(states.tolist(), positions.tolist(), strict=True)
    ]
    params = [SamplingParams(max_new_tokens=1, temperature=temperature) for temperature in temperatures.tolist()]
    drawn = draw(logits, keys, params)
    return drawn.token_ids, drawn.logprobs


TORCH_KERNELS = StepKernels(decode_reference, draw_reference, nullcontext)
