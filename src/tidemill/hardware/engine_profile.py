"""An engine as seconds per piece of work, and how long a batch takes to generate, with its tail.

`engine_profile` derives the seconds from shape and GPU by the roofline (Williams et al. 2009): a step takes as long as
the longer of reading its bytes and computing its FLOPs, each at an efficiency. A calibration may state them instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tidemill.core.records import Record
from tidemill.hardware.completion_lengths import Lengths, quantiles
from tidemill.hardware.gpu_catalog import Gpu, Link, all_reduce_s
from tidemill.hardware.model_shape import DTYPE_BYTES, ModelShape

REDUCTIONS_PER_LAYER = 2
"""After attention and after the MLP (Megatron-LM, arXiv 1909.08053)."""
WORKSPACE_BYTES = 2e9
"""Of one GPU: activations of a step, captured graphs, the driver; assumed."""

FLAT = 0.9
"""A batch size is on the plateau when it reaches this share of the best throughput."""


class EngineEfficiency(Record):
    """How much of a GPU's peaks an engine reaches. All assumed until a run is measured."""

    bandwidth: float = 0.8  # of memory bandwidth, decoding
    compute: float = 0.6  # of dense FLOP/s, prefill and large decoding batches
    link: float = 0.7  # of the link's rate, in reductions of a few megabytes
    reduction_s: float = 10e-6  # least time of one reduction, however small
    step_s: float = 2e-3  # of every step beside the model: scheduling, sampling, launches
    memory: float = 0.9  # of the GPU's memory that an engine and what shares it with the engine take (vLLM's default)


ASSUMED = EngineEfficiency()


class EngineProfile(Record):
    """Seconds of one engine, on however many GPUs it runs."""

    slots: int  # samples decoded at once at most
    cache_tokens: float  # that fit the cache
    step_s: float  # of every decoding step
    weights_s: float  # to read what every step reads of the weights
    cached_token_s: float  # to read one token's keys and values
    sample_s: float  # to compute one sample's token, and to reduce it between GPUs
    attended_token_s: float  # to compute the attention to one cached token
    prefill_token_s: float
    prefill_pair_s: float = 0.0  # per token and token before it
    experts_s: float = 0.0  # to read all experts
    expert_share: float = 0.0  # of the experts that one token uses

    def decode_step_s(self, running: int, cached: float) -> float:
        """One token for each of `running` samples, whose contexts are `cached` tokens together.

        With b tokens of random routing 1 - (1 - k / E)^b of the experts are read.
        """
        experts = self.experts_s * (1 - (1 - self.expert_share) ** running) if self.expert_share else 0.0
        moved = self.weights_s + experts + self.cached_token_s * cached
        computed = self.sample_s * running + self.attended_token_s * cached
        return self.step_s + max(moved, computed)

    def decode_s(self, running: float, cached: float, steps: int) -> float:
        """The sum of `steps` decoding steps, each with one more token of every sample in the cache.

        What is moved and what is computed both rise steadily, so that one overtakes the other once at most.
        """
        experts = self.experts_s * (1 - (1 - self.expert_share) ** running) if self.expert_share else 0.0
        moved = self.weights_s + experts + self.cached_token_s * cached
        computed = self.sample_s * running + self.attended_token_s * cached
        moved_more, computed_more = self.cached_token_s * running, self.attended_token_s * running
        lead, closing = moved - computed, computed_more - moved_more
        overtaken = math.ceil(lead / closing) if closing and lead / closing >= 0 else steps
        first = min(overtaken, steps)
        moved_first = lead > 0 or (lead == 0 and closing < 0)
        before, after = ((moved, moved_more), (computed, computed_more))[:: 1 if moved_first else -1]
        return steps * self.step_s + _rising(*before, 0, first) + _rising(*after, first, steps)

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        """Of `tokens` that follow `before` others already in the cache; with none of either it takes no time."""
        return tokens * (self.prefill_token_s + self.prefill_pair_s * (before + tokens / 2))

    def tokens_per_s(self, running: int, context: float) -> float:
        """Of decoding alone, every sample having `context` tokens."""
        return running / self.decode_step_s(running, running * context) if running else 0.0

    def most_running(self, context: float) -> int:
        """Samples of this length that slots and cache hold; 0 where not even one fits."""
        return min(self.slots, int(self.cache_tokens // max(context, 1)))

    def with_slots_for(self, context: float) -> EngineProfile:
        """With as many slots as the cache holds samples of `context` tokens, at least 1 and at most the slots it has.

        Engines admit by free cache (PagedAttention, arXiv 2309.06180), so that the number of samples decoded at once
        follows from memory and length.
        """
        return msgspec.structs.replace(self, slots=max(self.most_running(context), 1))

    def plateau(self, context: float) -> int:
        """The smallest number of samples that is decoded at `FLAT` of the best rate; at least 1."""
        low, high = 1, max(self.most_running(context), 1)
        enough = FLAT * self.tokens_per_s(high, context)
        while low < high:  # more samples are never decoded more slowly in all
            middle = (low + high) // 2
            low, high = (low, middle) if self.tokens_per_s(middle, context) >= enough else (middle + 1, high)
        return high

    def put_back(self, contexts: Sequence[int]) -> int:
        """How many of the samples begun last lose their cache when all are to have one more token.

        What is put back waits and is computed again, prompt and tokens alike, once there is room (vLLM's preemption by
        recomputation, arXiv 2309.06180, section 4.5).

        Args:
            contexts: tokens of each running sample, in the order in which they began.
        """
        held, kept = 0.0, 0
        for context in contexts:
            held += context + 1
            if held > self.cache_tokens:
                break
            kept += 1
        return len(contexts) - kept


def _rising(start: float, more: float, first: int, end: int) -> float:
    """The sum of start + i * more for first <= i < end."""
    return (end - first) * (start + more * (first + end - 1) / 2)


def engine_profile(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int = 1,
    dtype: str = "bf16",
    slots: int = 256,
    link: Link | None = None,
    efficiency: EngineEfficiency = ASSUMED,
    held_bytes: float = 0.0,
) -> EngineProfile:
    """Tensor parallel over `gpus` of one kind.

    Args:
        dtype: of weights and of the arithmetic; keys and values are in bf16.
        link: between the GPUs, if it is not their own.
        held_bytes: of each GPU's memory, what a trainer on the same GPUs keeps while the engine generates.

    Raises:
        UserError: the catalogue knows no speed in this dtype.
    """
    bandwidth = gpus * gpu.bandwidth_bytes_per_s * efficiency.bandwidth
    speed = gpus * gpu.peak_flops(dtype) * efficiency.compute
    element = DTYPE_BYTES[dtype]
    kv_bytes = shape.kv_bytes_per_token()
    reduced, each_reduced = _reduction_s(shape, gpu, gpus, link, efficiency)
    attention = 4 * shape.layers * shape.attention_width / speed
    multiplied = 2 * shape.active_parameters / speed
    return EngineProfile(
        slots=slots,
        cache_tokens=max(
            cache_bytes(shape, gpu, gpus=gpus, dtype=dtype, efficiency=efficiency, held_bytes=held_bytes) / kv_bytes,
            0.0,
        ),
        step_s=efficiency.step_s + reduced,
        weights_s=(shape.parameters - shape.expert_parameters - shape.embedding_parameters) * element / bandwidth,
        cached_token_s=kv_bytes / bandwidth,
        sample_s=multiplied + each_reduced,
        attended_token_s=attention,
        prefill_token_s=multiplied + each_reduced,
        prefill_pair_s=attention,
        experts_s=shape.expert_parameters * element / bandwidth,
        expert_share=shape.experts_per_token / shape.experts if shape.experts else 0.0,
    )


def cache_bytes(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int,
    dtype: str = "bf16",
    efficiency: EngineEfficiency = ASSUMED,
    held_bytes: float = 0.0,
) -> float:
    """Left for keys and values beside weights, workspace and `held_bytes` on each GPU; negative where bytes are
    missing."""
    room = gpus * (gpu.memory_bytes * efficiency.memory - WORKSPACE_BYTES - held_bytes)
    return room - shape.parameters * DTYPE_BYTES[dtype]


def _reduction_s(
    shape: ModelShape, gpu: Gpu, gpus: int, link: Link | None, efficiency: EngineEfficiency
) -> tuple[float, float]:
    """(of a step, of each token in it): sums of hidden states over the GPUs of an engine."""
    if gpus == 1:
        return 0.0, 0.0
    between = link or Link(bytes_per_s=gpu.link_bytes_per_s, latency_s=0.0)
    count = REDUCTIONS_PER_LAYER * shape.layers
    real = Link(bytes_per_s=between.bytes_per_s * efficiency.link, latency_s=0.0)
    least = efficiency.reduction_s + between.latency_s * gpus
    return count * least, count * all_reduce_s(2 * shape.hidden, members=gpus, link=real)


PARTS = 64
"""Quantiles that stand for the lengths of a batch."""


class Rollout(Record):
    """What is generated for a batch."""

    samples: int
    group_size: int  # samples that share a prompt
    prompt_tokens: float
    lengths: tuple[int, ...]  # of completions, equally likely, rising

    @property
    def tokens(self) -> float:
        """Completion tokens in all."""
        return self.samples * self.mean

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def running_context(self) -> float:
        """Tokens of a sample met at any moment: long ones are met more often, half-way through on average."""
        return self.prompt_tokens + sum(length**2 for length in self.lengths) / (2 * sum(self.lengths))


def rollout_of(lengths: Lengths, *, samples: int, group_size: int, prompt_tokens: float) -> Rollout:
    return Rollout(
        samples=samples, group_size=group_size, prompt_tokens=prompt_tokens, lengths=quantiles(lengths, PARTS)
    )


def generation_s(engine: EngineProfile, rollout: Rollout, samples: float) -> float:
    """Of one engine's `samples`: while others wait, slots stay full; then all that run are drained to the longest.

    Each prompt is computed once for its group, and decoding waits meanwhile; infinite where not even one sample fits.
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
    """Of samples begun at once: step by step through the lengths, with fewer and fewer of them."""
    seconds, reached = 0.0, 0
    for number, length in enumerate(rollout.lengths):
        alive = max(together * (1 - number / len(rollout.lengths)), 1.0)
        context = rollout.prompt_tokens + (reached + length) / 2
        seconds += (length - reached) * engine.decode_step_s(math.ceil(alive), alive * context)
        reached = length
    return seconds


def steady_tokens_per_s(engine: EngineProfile, rollout: Rollout, samples: float = math.inf) -> float:
    """Where there is always another sample to begin: no tail; prompts are part of the work.

    Args:
        samples: in flight at most.
    """
    running = max(1, min(engine.most_running(rollout.prompt_tokens + rollout.mean), samples))
    if engine.most_running(rollout.prompt_tokens + rollout.lengths[-1]) < 1:
        return 0.0
    decoding_s = 1 / engine.tokens_per_s(int(running), rollout.running_context)
    prompt_s = engine.prefill_s(rollout.prompt_tokens) / rollout.group_size / rollout.mean
    return 1 / (decoding_s + prompt_s)


CODED_PER_CORE_S = 1.1e9
"""Parameters that one core compares and encodes in a second; applying them is faster. Measured on one machine's CPU
(benchmarks/results/weights.json: 134.5M in 0.12 s), so another's will differ."""
DELTA_ELEMENT_BYTES = 2.0
"""Of a changed element with its place; measured 1.0 to 2.0, the more the fewer elements change (the same file)."""
