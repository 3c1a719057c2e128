"""A trainer as seconds per piece of work, and the memory of training beside model states."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from tidemill.core.records import Record
from tidemill.hardware.gpu_catalog import Gpu, Link, all_reduce_s, gather_s
from tidemill.hardware.model_shape import TRAINED, ModelShape, Optimizer

BACKWARD = 2
"""A backward pass costs two forward ones: gradients of inputs and of weights (arXiv 2001.08361, section 2.1)."""
PCIE_BYTES_PER_S = 25e9
"""Between a GPU and its host, both directions in turn; assumed."""
HOST_BYTES_PER_S = 200e9
"""Of a host's memory, as the optimizer's step on its cores reads and writes it; assumed."""
SENT_BYTES = 2
"""Of a parameter or gradient in bf16."""


class TrainerEfficiency(Record):
    """How much of the peaks training reaches; assumed until a run is measured.

    Llama 3 (arXiv 2407.21783, table 4) reports 38-43 % of peak FLOP/s with everything in it on up to 16,384 GPUs.
    The two least times are of a host that launches kernels one by one, some twenty a layer at 10 µs: below them a small
    model is not faster, however large the GPU.
    """

    compute: float = 0.5  # of dense FLOP/s, in the passes themselves
    link: float = 0.7  # of a link's or network's rate
    hidden: float = 0.8  # of the computing time that gathering layers can hide behind
    bandwidth: float = 0.7  # of memory bandwidth, in the optimizer's step
    launch_s: float = 200e-6  # least time of a layer in one forward-sized pass of a microbatch
    step_s: float = 5e-3  # of every optimizer's step beside what it moves


ASSUMED = TrainerEfficiency()


class TrainerProfile(Record):
    """Seconds of one trainer on all its GPUs."""

    gpus: int
    ranks: int  # data parallel
    stages: int  # of its pipeline
    token_s: float  # one forward pass of one token, spread over all GPUs
    pair_s: float  # the same of the attention to one token before it
    gather_s: float  # all layers once, for one pass of one microbatch; every rank at the same time
    exchanged_token_s: float  # tensor parallelism: one pass of one token, spread over all ranks
    update_s: float  # the optimizer's step
    hidden: float  # share of computing behind which gathering hides
    launch_s: float = 0.0  # least time of one pass of one microbatch

    def pass_s(self, tokens: float, context: float, *, passes: float, microbatches: float = 1) -> float:
        """`passes` forward-sized passes over `tokens` tokens whose sequences are `context` long on average.

        Args:
            microbatches: of each rank, a part of one for a part of its tokens; a pipeline is empty at its ends for
                (stages - 1) of them.
        """
        launched = microbatches * passes * self.launch_s
        computed = max(tokens * passes * (self.token_s + self.pair_s * context / 2), launched)
        bubble = 1 + (self.stages - 1) / max(microbatches, 1)
        gathered = self.gather_s * passes * microbatches
        exposed = max(0.0, gathered - self.hidden * computed)
        return computed * bubble + exposed + tokens * passes * self.exchanged_token_s

    def microbatches(self, tokens: float, microbatch: float) -> int:
        """Of each rank, of so many tokens each."""
        return max(1, math.ceil(tokens / self.ranks / microbatch))

    def step_s(self, tokens: float, context: float, *, passes: float, microbatch: float) -> float:
        """Learning from `tokens` once, and the update.

        Args:
            passes: of all models, if they are of one size; `learning_passes` of those that learn, one of the others.
            microbatch: tokens of one microbatch of one rank.
        """
        count = self.microbatches(tokens, microbatch)
        return self.pass_s(tokens, context, passes=passes, microbatches=count) + self.update_s


def learning_passes(*, recompute: bool, adapter: bool = False) -> int:
    """Forward-sized passes of learning: forward, the same again where activations are not kept, backward; under an
    adapter the base has no gradients of its own, and a backward pass costs one forward one."""
    return 1 + (1 if recompute else 0) + (1 if adapter else BACKWARD)


def trainer_profile(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int,
    tp: int = 1,
    pp: int = 1,
    gpus_per_machine: int | None = None,
    network: Link | None = None,
    dtype: str = "bf16",
    update_s: float | None = None,
    efficiency: TrainerEfficiency = ASSUMED,
) -> TrainerProfile:
    """Fully sharded over what tensor and pipeline parallelism leave.

    Args:
        gpus: a multiple of tp * pp.
        network: of one machine; needed where the GPUs are on several.
        update_s: of the optimizer's step; otherwise that of Adam on all parameters.

    Raises:
        UserError: the catalogue knows no speed in this dtype.
    """
    machine = gpus_per_machine or gpu.gpus_per_machine
    ranks = gpus // (tp * pp)
    speed = gpus * gpu.peak_flops(dtype) * efficiency.compute
    own = Link(bytes_per_s=gpu.link_bytes_per_s * efficiency.link, latency_s=0.0)
    across = Link(bytes_per_s=network.bytes_per_s * efficiency.link, latency_s=network.latency_s) if network else own
    spread = gpus > machine
    # Between machines each byte enters a machine once, over all its cards; the GPUs pass it on among themselves.
    sharded = across if spread else own
    reduced = own if tp <= machine else Link(bytes_per_s=across.bytes_per_s / machine, latency_s=across.latency_s)
    return TrainerProfile(
        gpus=gpus,
        ranks=ranks,
        stages=pp,
        token_s=2 * shape.active_parameters / speed,
        pair_s=4 * shape.layers * shape.attention_width / speed,
        gather_s=gather_s(shape.parameters * SENT_BYTES / (tp * pp), members=ranks, link=sharded),
        exchanged_token_s=2
        * shape.layers
        * all_reduce_s(SENT_BYTES * shape.hidden, members=tp, link=reduced)
        / ranks
        / pp,
        update_s=updating_s(shape.parameters, gpu, gpus=gpus, efficiency=efficiency) if update_s is None else update_s,
        hidden=efficiency.hidden,
        launch_s=efficiency.launch_s * shape.layers / pp,
    )


def updating_s(
    parameters: float,
    gpu: Gpu,
    *,
    gpus: int,
    machines: int = 1,
    optimizer: Optimizer = "adam",
    offload: bool = False,
    efficiency: TrainerEfficiency = ASSUMED,
) -> float:
    """The optimizer reads and writes every state of `parameters` once; where hosts have them, between gradients that
    come and weights that go back."""
    states = TRAINED[optimizer]
    if offload:
        carried = (states.gradients + states.weights) * parameters / (gpus * PCIE_BYTES_PER_S)
        return efficiency.step_s + carried + 2 * states.optimizer * parameters / (machines * HOST_BYTES_PER_S)
    moved = 2 * states.total * parameters / (gpus * gpu.bandwidth_bytes_per_s * efficiency.bandwidth)
    return efficiency.step_s + moved


ELEMENT = 2  # bf16
LOGITS_BYTES = 8
"""Of one token and one word: the logit and its gradient in fp32, all at once."""
GATHERED_LAYERS = 2
"""Fully sharded training holds the layer in use and the next one whole."""

Recompute: TypeAlias = Literal["full", "none"]


def layer_activation_bytes(shape: ModelShape) -> float:
    """What one layer keeps of one token for its backward pass, in bf16, attention being fused.

    Residual stream, two norms, inputs of the projections (5 widths), queries and output of attention (2 widths of it),
    keys and values, and three times the inner width of a gated MLP. With Llama 3's proportions 35.5 bytes per unit of
    width; Korthikanti et al. (arXiv 2205.05198, eq. 1 without the attention matrix) count 34.
    """
    keys = shape.kv_heads * shape.head_dim
    inner = shape.intermediate * max(shape.experts_per_token, 1)
    return ELEMENT * (5 * shape.hidden + 2 * shape.attention_width + 2 * keys + 3 * inner)


def kept_layers(shape: ModelShape, recompute: Recompute) -> tuple[float, float]:
    """(layers of which only the input is kept, layers of which everything is) at the worst moment of a backward pass.

    The first stage of a pipeline of p stages (1F1B, arXiv 2104.04473) holds p microbatches for a p-th of the layers:
    pipelining does not make this less.
    """
    return (shape.layers, 1) if recompute == "full" else (0, shape.layers)


def activation_bytes(shape: ModelShape, *, tokens: float, recompute: Recompute, tp: int) -> float:
    """Of a microbatch of `tokens` on one GPU; tensor parallelism with sequence parallelism divides all of it."""
    inputs, whole = kept_layers(shape, recompute)
    return tokens * (inputs * ELEMENT * shape.hidden + whole * layer_activation_bytes(shape)) / tp


def logits_bytes(shape: ModelShape, *, tokens: float, tp: int) -> float:
    """Of a microbatch of `tokens` on one GPU."""
    return tokens * shape.vocab * LOGITS_BYTES / tp


def layer_parts(shape: ModelShape) -> tuple[float, float]:
    """(parameters of a layer without its routed experts, those of the experts)"""
    experts = shape.expert_parameters / max(shape.layers - shape.dense_layers, 1)
    return max(shape.layer_parameters - experts, 0.0), experts


def gathered_bytes(shape: ModelShape, *, tp: int, ep: int) -> float:
    """Layers held whole on one GPU; expert parallelism leaves it its own experts only."""
    dense, experts = layer_parts(shape)
    return GATHERED_LAYERS * ELEMENT * (dense / tp + experts / ep)
