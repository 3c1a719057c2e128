"""Trainer cost model: seconds per unit of work, and the memory of activations, logits and gathered layers."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation, solved
from tidemill.hardware.gpu_catalog import Gpu, Link, gather_s
from tidemill.hardware.model_shape import TRAINED, ModelShape, Optimizer

BACKWARD = 2
"""A backward pass costs two forward ones: gradients of inputs and of weights (arXiv 2001.08361, section 2.1)."""
PCIE_BYTES_PER_S = 25e9
"""Between a GPU and its host, per direction; assumed."""
HOST_BYTES_PER_S = 200e9
"""Host memory bandwidth of an optimizer step on CPU; assumed."""
SENT_BYTES = 2
"""Bytes of a communicated parameter or gradient, in bf16."""


class TrainerEfficiency(Record):
    """Share of the peaks that training reaches; assumed unless calibrated.

    Llama 3 (arXiv 2407.21783, table 4) reports 38-43 % of peak FLOP/s overall on up to 16,384 GPUs. The two minimum
    times model a host that launches about twenty kernels per layer at 10 µs each.
    """

    compute: float = 0.5  # of dense FLOP/s, in the passes
    link: float = 0.7  # of a link's or network's rate
    hidden: float = 0.8  # share of computing time that can hide gathering
    bandwidth: float = 0.7  # of memory bandwidth, in the optimizer's step
    launch_s: float = 200e-6  # minimum time per layer of a forward-sized pass of a microbatch
    step_s: float = 5e-3  # overhead of an optimizer step
    source: str = "assumed"


ASSUMED = TrainerEfficiency()
PASSES = {
    "launched": (
        "s",
        "microbatches * passes * launch_s",
        "the host launches the kernels of a layer one by one; the minimum time is assumed",
    ),
    "computed": (
        "s",
        "max(tokens * passes * (forward_token_s + pair_s * context / 2), launched)",
        "forward-sized passes of all roles with recomputation; a token attends to half a sequence on average",
    ),
    "gathered": (
        "s",
        "gather_s * passes * microbatches",
        "PyTorch FSDP, arXiv 2304.11277: layers are gathered in every pass of every microbatch",
    ),
    "passes": (
        "s",
        "computed + max(0, gathered - hidden * computed)",
        "an assumed fraction of the computation hides gathering",
    ),
}
"""Time of forward-sized passes."""
UPDATE = "every state is read and written once; the rest of the optimizer's step is assumed"


class TrainerProfile(Record):
    """Costs of one trainer on all its GPUs."""

    gpus: int
    ranks: int  # data parallel
    token_s: float  # forward pass of one token, over all GPUs
    pair_s: float  # attention to one earlier token, over all GPUs
    gather_s: float  # gather all layers once, per pass of a microbatch, all ranks at once
    update_s: float  # optimizer step
    hidden: float  # share of computing time that can hide gathering
    launch_s: float = 0.0  # minimum time of one pass of a microbatch

    def pass_s(
        self, tokens: float, context: float, *, passes: float, microbatches: float = 1, sheet: Derivation | None = None
    ) -> float:
        """Time of `passes` forward-sized passes over `tokens` tokens; sequences have mean length `context`.

        Args:
            microbatches: per rank, possibly fractional.
        """
        inputs = {
            "tokens": tokens,
            "context": context,
            "passes": passes,
            "microbatches": microbatches,
            "forward_token_s": self.token_s,
            "pair_s": self.pair_s,
            "gather_s": self.gather_s,
            "launch_s": self.launch_s,
            "hidden": self.hidden,
        }
        if sheet is None:  # in the simulator, for each group
            return solved(PASSES, inputs)["passes"]
        return sheet.evaluate(PASSES, label="training.{}_s", **inputs)["passes"]

    def microbatches(self, tokens: float, microbatch: float) -> int:
        """Microbatches per rank."""
        return max(1, math.ceil(tokens / self.ranks / microbatch))

    def step_s(
        self, tokens: float, context: float, *, passes: float, microbatch: float, sheet: Derivation | None = None
    ) -> float:
        """Time to train once on `tokens`, including the update.

        Args:
            passes: sum over models of one size: `learning_passes` for trained ones, 1 for frozen ones.
            microbatch: tokens per microbatch and rank.
        """
        sheet, count = sheet or Derivation(), self.microbatches(tokens, microbatch)
        return sheet.compute(
            "training_s",
            "s",
            formula="passes + update",
            source="passes and the update of a batch",
            passes=self.pass_s(tokens, context, passes=passes, microbatches=count, sheet=sheet),
            update=self.update_s,
        )


def learning_passes(*, recompute: bool, adapter: bool = False) -> int:
    """Forward-sized passes of training: forward, again with recomputation, and backward.

    With an adapter the frozen base has no weight gradients, so backward costs one forward pass.
    """
    return 1 + (1 if recompute else 0) + (1 if adapter else BACKWARD)


def trainer_profile(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int,
    gpus_per_machine: int | None = None,
    network: Link | None = None,
    dtype: str = "bf16",
    update_s: float | None = None,
    efficiency: TrainerEfficiency = ASSUMED,
    sheet: Derivation | None = None,
) -> TrainerProfile:
    """Derive the profile of fully sharded training.

    Args:
        network: of one machine; required for GPUs on several machines.
        update_s: time of the optimizer step; by default Adam on all parameters.

    Raises:
        UserError: the catalogue has no FLOP/s for this dtype.
    """
    machine = gpus_per_machine or gpu.gpus_per_machine
    seconds = (sheet or Derivation()).evaluate(
        {
            "forward_token_s": (
                "s",
                "2 * active_parameters / (gpus * peak_flops * efficiency)",
                f"Kaplan et al., arXiv 2001.08361; {gpu.source}; the efficiency is {efficiency.source}",
            ),
            "attention_pair_s": (
                "s",
                "4 * layers * width / (gpus * peak_flops * efficiency)",
                f"one product with a key and one with a value for every head; the efficiency is {efficiency.source}",
            ),
            "pass_launch_s": ("s", "launch_s * layers", "minimum time of a pass of a microbatch; assumed"),
        },
        active_parameters=shape.active_parameters,
        gpus=gpus,
        peak_flops=gpu.peak_flops(dtype),
        efficiency=efficiency.compute,
        layers=shape.layers,
        width=shape.attention_width,
        launch_s=efficiency.launch_s,
    )
    own = Link(bytes_per_s=gpu.link_bytes_per_s * efficiency.link, latency_s=0.0)
    across = Link(bytes_per_s=network.bytes_per_s * efficiency.link, latency_s=network.latency_s) if network else own
    # Each byte enters a machine once, over all its network cards; its GPUs forward it to each other.
    sharded = across if gpus > machine else own
    return TrainerProfile(
        gpus=gpus,
        ranks=gpus,
        token_s=seconds["forward_token_s"],
        pair_s=seconds["attention_pair_s"],
        gather_s=gather_s(shape.parameters * SENT_BYTES, members=gpus, link=sharded),
        update_s=updating_s(shape.parameters, gpu, gpus=gpus, efficiency=efficiency) if update_s is None else update_s,
        hidden=efficiency.hidden,
        launch_s=seconds["pass_launch_s"],
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
    sheet: Derivation | None = None,
) -> float:
    """Time of an optimizer step, reading and writing every state; `offload` moves gradients and weights over PCIe."""
    states = TRAINED[optimizer]
    formula = "step_s + 2 * state_bytes * parameters / (gpus * bandwidth * efficiency)"
    if offload:
        formula = "step_s + sent_bytes * parameters / (gpus * pcie) + 2 * kept_bytes * parameters / (machines * host)"
    return (sheet or Derivation()).evaluate(
        {"training.update_s": ("s", formula, UPDATE)},
        step_s=efficiency.step_s,
        state_bytes=states.total,
        sent_bytes=states.gradients + states.weights,
        kept_bytes=states.optimizer,
        parameters=parameters,
        gpus=gpus,
        machines=machines,
        bandwidth=gpu.bandwidth_bytes_per_s,
        efficiency=efficiency.bandwidth,
        pcie=PCIE_BYTES_PER_S,
        host=HOST_BYTES_PER_S,
    )["training.update_s"]


ELEMENT = 2  # bf16
LOGITS_BYTES = 8
"""Per token and vocabulary entry: logit and gradient in fp32."""
GATHERED_LAYERS = 2
"""Fully sharded training holds the current and the next layer gathered."""

Recompute: TypeAlias = Literal["full", "none"]


def layer_activation_bytes(shape: ModelShape) -> float:
    """Bytes that one layer keeps per token for its backward pass, in bf16 with fused attention.

    Residual stream, two norms, inputs of the projections (5 widths), queries and output of attention (2 attention
    widths), keys and values, and three MLP widths. With Llama 3's proportions 35.5 bytes per unit of
    width; Korthikanti et al. (arXiv 2205.05198, eq. 1 without the attention matrix) count 34.
    """
    keys = shape.kv_heads * shape.head_dim
    inner = shape.intermediate * max(shape.experts_per_token, 1)
    return ELEMENT * (5 * shape.hidden + 2 * shape.attention_width + 2 * keys + 3 * inner)


def kept_layers(shape: ModelShape, recompute: Recompute) -> tuple[float, float]:
    """Return (layers with only the input kept, layers with everything kept) at the peak of the backward pass.

    The first of p pipeline stages (1F1B, arXiv 2104.04473) holds p microbatches for 1/p of the layers, so pipelining
    does not reduce this.
    """
    return (shape.layers, 1) if recompute == "full" else (0, shape.layers)


def layer_parts(shape: ModelShape) -> tuple[float, float]:
    """Return (parameters of a layer without routed experts, of its experts), as fully sharded training gathers it."""
    outside = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    experts = shape.expert_parameters / max(shape.layers - shape.dense_layers, 1)
    layer = max(shape.parameters - outside, 0.0) / shape.layers
    return max(layer - experts, 0.0), experts
