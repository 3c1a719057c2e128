"""Engine cost model: seconds per unit of work, and the time to generate a batch including its tail.

`engine_profile` derives the seconds from model shape and GPU by the roofline (Williams et al. 2009): a step takes the
longer of reading its bytes and computing its FLOPs, each at an efficiency. A calibration may set them instead.
"""

from __future__ import annotations

import math
from functools import lru_cache

from tidemill.core.records import Record
from tidemill.hardware.completion_lengths import Lengths, quantiles
from tidemill.hardware.figures import evaluated
from tidemill.hardware.gpu_catalog import Gpu, Link, all_reduce_s
from tidemill.hardware.model_shape import DTYPE_BYTES, ModelShape

REDUCTIONS_PER_LAYER = 2
"""After attention and after the MLP (Megatron-LM, arXiv 1909.08053)."""
WORKSPACE_BYTES = 2e9
"""Per GPU: activations of a step, captured graphs, the driver; assumed."""

FLAT = 0.9
"""The plateau starts at the batch size with this share of the best throughput."""


PARKING_ROWS = 16
"""At least, if there are as many slots: with the default of 64 slots a quarter more memory. A row is lost if more
samples than rows end a turn before it is read."""
PARKING_BYTES, MOST_PARKING_ROWS = 256 << 20, 128
"""More rows if they fit in these bytes: a small model generates faster than environments answer."""


def parking_rows(slots: int, row_bytes: float) -> int:
    """Rows of the embedded engine's cache for samples between two turns."""
    fitting = min(int(PARKING_BYTES // row_bytes), MOST_PARKING_ROWS)
    return max(min(slots, PARKING_ROWS), fitting)


class EngineEfficiency(Record):
    """Share of a GPU's peaks that an engine reaches; assumed unless calibrated."""

    bandwidth: float = 0.8  # of memory bandwidth, decoding
    compute: float = 0.6  # of dense FLOP/s, prefill and large decoding batches
    link: float = 0.7  # of the link's rate, in reductions of a few megabytes
    reduction_s: float = 10e-6  # minimum time of one reduction
    step_s: float = 2e-3  # overhead per step: scheduling, sampling, launches
    memory: float = 0.9  # of GPU memory in use (vLLM's default)
    source: str = "assumed"


ASSUMED = EngineEfficiency()

WEIGHTS = "parameters_read * element_bytes / (gpus * bandwidth * efficiency)"
RUNNING = "min(slots, cache_tokens // sample_tokens)"
DECODE_STEP = "step + max(weights + experts + token * cached, sample * running + attended * cached)"
"""Roofline, Williams et al. 2009: the longer of memory traffic and arithmetic."""


class EngineProfile(Record):
    """Costs of one engine on all its GPUs."""

    slots: int  # most samples decoded at once
    cache_tokens: float  # capacity of the KV cache
    step_s: float  # overhead of a decoding step
    weights_s: float  # to read the non-expert weights
    cached_token_s: float  # to read one token's keys and values
    sample_s: float  # to compute one sample's token, including reductions
    attended_token_s: float  # to compute attention to one cached token
    prefill_token_s: float
    prefill_pair_s: float = 0.0  # per pair of a token and an earlier one
    experts_s: float = 0.0  # to read all experts
    expert_share: float = 0.0  # share of experts used per token

    def decode_step_s(self, running: int, cached: float) -> float:
        """`DECODE_STEP`, the time of one token for each of `running` samples with `cached` context tokens in total.

        With random routing, b tokens read 1 - (1 - k / E)^b of the experts.
        """
        moved = self.weights_s + self._experts_s(running) + self.cached_token_s * cached
        computed = self.sample_s * running + self.attended_token_s * cached
        return self.step_s + max(moved, computed)

    def decoding(self, running: float, cached: float) -> dict[str, float]:
        """The inputs of `DECODE_STEP`."""
        return {
            "step": self.step_s,
            "weights": self.weights_s,
            "experts": self._experts_s(running),
            "token": self.cached_token_s,
            "cached": cached,
            "sample": self.sample_s,
            "running": running,
            "attended": self.attended_token_s,
        }

    def _experts_s(self, running: float) -> float:
        return self.experts_s * (1 - (1 - self.expert_share) ** running) if self.expert_share else 0.0

    def decode_s(self, running: float, cached: float, steps: int) -> float:
        """Time of `steps` decoding steps; the context of each sample grows by one token per step.

        Memory and compute time both grow linearly, so they cross at most once.
        """
        moved = self.weights_s + self._experts_s(running) + self.cached_token_s * cached
        computed = self.sample_s * running + self.attended_token_s * cached
        moved_more, computed_more = self.cached_token_s * running, self.attended_token_s * running
        lead, closing = moved - computed, computed_more - moved_more
        overtaken = math.ceil(lead / closing) if closing and lead / closing >= 0 else steps
        first = min(overtaken, steps)
        moved_first = lead > 0 or (lead == 0 and closing < 0)
        before, after = ((moved, moved_more), (computed, computed_more))[:: 1 if moved_first else -1]
        return steps * self.step_s + _rising(*before, 0, first) + _rising(*after, first, steps)

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        """Time to prefill `tokens` after `before` cached ones; 0 without either."""
        return tokens * (self.prefill_token_s + self.prefill_pair_s * (before + tokens / 2))

    def tokens_per_s(self, running: int, context: float) -> float:
        """Decoding rate if every sample has `context` tokens."""
        return running / self.decode_step_s(running, running * context) if running else 0.0

    def most_running(self, context: float) -> int:
        """Samples of this length that fit slots and cache; 0 if none fits."""
        return int(evaluated(RUNNING, self.capacity(context)))

    def capacity(self, context: float) -> dict[str, float]:
        """The inputs of `RUNNING`."""
        return {"slots": self.slots, "cache_tokens": self.cache_tokens, "sample_tokens": max(context, 1)}

    def plateau(self, context: float) -> int:
        """The smallest batch that decodes at `FLAT` of the best rate; at least 1."""
        low, high = 1, max(self.most_running(context), 1)
        enough = FLAT * self.tokens_per_s(high, context)
        while low < high:  # the total rate never falls with more samples
            middle = (low + high) // 2
            low, high = (low, middle) if self.tokens_per_s(middle, context) >= enough else (middle + 1, high)
        return high


def _rising(start: float, more: float, first: int, end: int) -> float:
    """Sum of start + i * more for first <= i < end."""
    return (end - first) * (start + more * (first + end - 1) / 2)


def engine_profile(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int = 1,
    dtype: str = "bf16",
    slots: int = 256,
    efficiency: EngineEfficiency = ASSUMED,
    held_bytes: float = 0.0,
) -> EngineProfile:
    """Derive the profile of an engine that is tensor parallel over `gpus` equal GPUs.

    Args:
        dtype: of weights and arithmetic; keys and values are in bf16.
        held_bytes: memory per GPU that a trainer on the same GPUs keeps during generation.

    Raises:
        UserError: the catalogue has no FLOP/s for this dtype.
    """
    bandwidth = gpus * gpu.bandwidth_bytes_per_s * efficiency.bandwidth
    speed = gpus * gpu.peak_flops(dtype) * efficiency.compute
    element = DTYPE_BYTES[dtype]
    kv_bytes = shape.kv_bytes_per_token()
    reduced, each_reduced = _reduction_s(shape, gpu, gpus, efficiency)
    attention = 4 * shape.layers * shape.attention_width / speed
    multiplied = 2 * shape.active_parameters / speed
    cache = cache_bytes(shape, gpu, gpus=gpus, dtype=dtype, efficiency=efficiency, held_bytes=held_bytes)
    return EngineProfile(
        slots=slots,
        cache_tokens=max(cache / kv_bytes, 0.0),
        step_s=efficiency.step_s + reduced,
        weights_s=evaluated(WEIGHTS, weights_read(shape, gpu, gpus=gpus, dtype=dtype, efficiency=efficiency)),
        cached_token_s=kv_bytes / bandwidth,
        sample_s=multiplied + each_reduced,
        attended_token_s=attention,
        prefill_token_s=multiplied + each_reduced,
        prefill_pair_s=attention,
        experts_s=shape.expert_parameters * element / bandwidth,
        expert_share=shape.experts_per_token / shape.experts if shape.experts else 0.0,
    )


def weights_read(
    shape: ModelShape, gpu: Gpu, *, gpus: int, dtype: str, efficiency: EngineEfficiency
) -> dict[str, float]:
    """The inputs of `WEIGHTS`."""
    return {
        "parameters_read": shape.parameters - shape.expert_parameters - shape.embedding_parameters,
        "element_bytes": DTYPE_BYTES[dtype],
        "gpus": gpus,
        "bandwidth": gpu.bandwidth_bytes_per_s,
        "efficiency": efficiency.bandwidth,
    }


def cache_bytes(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int,
    dtype: str = "bf16",
    efficiency: EngineEfficiency = ASSUMED,
    held_bytes: float = 0.0,
) -> float:
    """Memory for keys and values after weights, workspace and `held_bytes` per GPU; negative if it does not fit."""
    room = gpus * (gpu.memory_bytes * efficiency.memory - WORKSPACE_BYTES - held_bytes)
    return room - shape.parameters * DTYPE_BYTES[dtype]


def _reduction_s(shape: ModelShape, gpu: Gpu, gpus: int, efficiency: EngineEfficiency) -> tuple[float, float]:
    """Time (per step, per token) to reduce hidden states over the GPUs of an engine."""
    if gpus == 1:
        return 0.0, 0.0
    count = REDUCTIONS_PER_LAYER * shape.layers
    real = Link(bytes_per_s=gpu.link_bytes_per_s * efficiency.link, latency_s=0.0)
    return count * efficiency.reduction_s, count * all_reduce_s(2 * shape.hidden, members=gpus, link=real)


PARTS = 64
"""Quantiles that represent the lengths of a batch."""


class Rollout(Record):
    """The generation work of a batch."""

    samples: int
    group_size: int  # samples that share a prompt
    prompt_tokens: float
    lengths: tuple[int, ...]  # of completions, equally likely, ascending

    @property
    def tokens(self) -> float:
        """Total completion tokens."""
        return self.samples * self.mean

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def running_context(self) -> float:
        """Mean context of a running sample: long samples are encountered more often, half-way through on average."""
        return self.prompt_tokens + sum(length**2 for length in self.lengths) / (2 * sum(self.lengths))


def rollout_of(lengths: Lengths, *, samples: int, group_size: int, prompt_tokens: float) -> Rollout:
    return Rollout(
        samples=samples, group_size=group_size, prompt_tokens=prompt_tokens, lengths=quantiles(lengths, PARTS)
    )


@lru_cache(maxsize=8192)  # a search of placements asks for the same engine and samples many times
def generation_s(engine: EngineProfile, rollout: Rollout, samples: float) -> float:
    """Time of one engine to generate `samples`: slots stay full while samples wait, then the rest drains.

    Each prompt is computed once per group and pauses decoding. Infinite if no sample fits.
    """
    if samples <= 0:
        return 0.0
    limit = engine.most_running(rollout.prompt_tokens + rollout.mean)
    if engine.most_running(rollout.prompt_tokens + rollout.lengths[-1]) < 1:
        return math.inf
    together = min(samples, limit)
    waiting_tokens = (samples - together) * rollout.mean
    steady_s = waiting_tokens / engine.tokens_per_s(limit, rollout.running_context)
    prompts_s = samples / rollout.group_size * engine.prefill_s(rollout.prompt_tokens)
    return prompts_s + steady_s + _drain_s(engine, rollout, together)


def _drain_s(engine: EngineProfile, rollout: Rollout, together: float) -> float:
    """Time of samples that start together, with fewer running after each length."""
    seconds, reached = 0.0, 0
    for number, length in enumerate(rollout.lengths):
        alive = max(together * (1 - number / len(rollout.lengths)), 1.0)
        context = rollout.prompt_tokens + (reached + length) / 2
        seconds += (length - reached) * engine.decode_step_s(math.ceil(alive), alive * context)
        reached = length
    return seconds


@lru_cache(maxsize=8192)
def steady_tokens_per_s(engine: EngineProfile, rollout: Rollout, samples: float = math.inf) -> float:
    """Rate if samples never run out: no tail, prompts included.

    Args:
        samples: limit of samples in flight.
    """
    running = max(1, min(engine.most_running(rollout.prompt_tokens + rollout.mean), samples))
    if engine.most_running(rollout.prompt_tokens + rollout.lengths[-1]) < 1:
        return 0.0
    decoding_s = 1 / engine.tokens_per_s(int(running), rollout.running_context)
    prompt_s = engine.prefill_s(rollout.prompt_tokens) / rollout.group_size / rollout.mean
    return 1 / (decoding_s + prompt_s)


CODED_PER_CORE_S = 1.1e9
"""Parameters per second that one core compares and encodes; applying is faster. Measured on one CPU
(benchmarks/results/weights.json: 134.5M in 0.12 s)."""
DELTA_ELEMENT_BYTES = 2.0
"""Bytes per changed element including its position; measured 1.0 to 2.0, more if fewer elements change (same file)."""
