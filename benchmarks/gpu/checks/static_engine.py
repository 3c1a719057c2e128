"""The embedded engine in static memory, as on a GPU, against the packed one; and with CUDA graphs against without.

In fp32, so that equal noise draws equal tokens except at near ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import engine
from benchmarks.gpu.check_rows import CheckRows, Limit, Settings, Skip
from benchmarks.gpu.checks.engine_agreement import Generated, generated
from benchmarks.gpu.checks.reference import in_dtype, sharp_model
from benchmarks.gpu.qwen_shapes import SHAPES, TINY
from tidemill.kernels.availability import missing
from tidemill.models.attention import use_packed_attention
from tidemill.rollout.engines.embedded.scheduler import PackedScheduler

ENGINE = "tidemill.rollout.engines.embedded"
FASTER = 1.5
"""Least ratio of the times of a step without and with graphs; of 44 ms before them, a GPU computed for 15."""


def static_engine(rows: CheckRows) -> None:
    settings = rows.settings
    rows.measure(
        "against the packed engine",
        partial(_against_packed, settings),
        [
            Limit("samples_differ", 1, "a near tie; 2,048 tokens in 32 samples"),
            Limit("logprob_difference", 1e-3, "order of sums"),
            Limit("repeated_differ", 0, "the same requests in the same order"),
        ],
    )
    limits = [Limit("samples_differ", 0, "a graph replays the same kernels")]
    rows.measure("graphs against none", partial(_graphs, settings), limits)
    limits = [Limit("times_faster", FASTER, "one launch instead of hundreds", least=True)]
    rows.measure("time of a step with graphs and without", partial(_graph_times, settings), limits)


def _require_kernels(settings: Settings, *, graphs: bool = False) -> None:
    if why := missing(settings.device):
        raise Skip(why)
    if graphs and settings.device.type != "cuda":
        raise Skip("a CPU has no CUDA graphs")


def _runs(settings: Settings) -> Any:
    """Generates the samples of the engine's checks in fp32."""
    model = in_dtype(sharp_model(settings), torch.float32)
    use_packed_attention(model)
    from tidemill.rollout.engines.embedded.static_decode import StepKernels

    return lambda kernels: generated(model, engine_requests(settings), fixed=False, kernels=kernels and StepKernels())


def engine_requests(settings: Settings) -> Any:
    groups, size, prompt, new_tokens = (2, 3, 12, 8) if settings.tiny else (4, 8, 300, 64)
    return engine.requests(TINY, groups, size, prompt, new_tokens)


def _against_packed(settings: Settings) -> dict[str, Any]:
    _require_kernels(settings)
    run = _runs(settings)
    static, again = run(True), run(True)
    with patch(f"{ENGINE}.engine.scheduler_kind", lambda *_: PackedScheduler):
        packed = run(False)
    return {
        **_compared(static, packed),
        "repeated_differ": static.differing(again),
        "samples": len(static.tokens),
    }


def _compared(one: Generated, other: Generated) -> dict[str, Any]:
    """Samples with other tokens, and the largest difference of logprobs before the first of these."""
    gaps, differ = [0.0], 0
    for each, tokens in one.tokens.items():
        pairs = zip(tokens, other.tokens[each], strict=True)
        equal = next((place for place, (a, b) in enumerate(pairs) if a != b), len(tokens))
        differ += equal < len(tokens)
        logprobs = zip(one.logprobs[each][:equal], other.logprobs[each][:equal], strict=True)
        gaps += [abs(a - b) for a, b in logprobs]
    return {"samples_differ": differ, "logprob_difference": max(gaps)}


@contextmanager
def _without_graphs() -> Iterator[None]:
    class Eager:
        """Implements the interface of `graphs.DecodeGraphs`."""

        def __init__(self, step: Any, sizes: Any) -> None:
            self.run = step

        def outdated(self, addresses: Any) -> bool:
            return False

    with patch(f"{ENGINE}.static_scheduler.DecodeGraphs", Eager):
        yield


def _graphs(settings: Settings) -> dict[str, Any]:
    _require_kernels(settings, graphs=True)
    run = _runs(settings)
    captured = run(True)
    with _without_graphs():
        eager = run(True)
    return {"samples_differ": captured.differing(eager), "samples": len(captured.tokens)}


def _graph_times(settings: Settings) -> dict[str, Any]:
    _require_kernels(settings, graphs=True)
    shape = TINY if settings.tiny else SHAPES["0.6B"]
    asked = engine.requests(shape, 32, 8, 512, 64)
    captured = engine.decode_step(shape, asked, settings.device)
    with _without_graphs():
        eager = engine.decode_step(shape, asked, settings.device)
    return {
        **captured,
        "eager_step_s": eager["step_s"],
        "eager_kernels": eager.get("kernels"),
        "times_faster": eager["step_s"] / captured["step_s"],
    }
