"""How samples become new weights: batch, algorithm, optimizer, trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import Config, Probability

Decay = Annotated[float, Field(ge=0, lt=1)]


class BatchConfig(Config):
    prompts: int = Field(8, ge=1)
    """Groups learned from per published version."""
    group_size: int = Field(8, ge=1)
    """Samples per prompt; 1 only for advantages that do not compare the samples of a group."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch over the batch; must divide `prompts`."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    microbatch_tokens: int = Field(2048, ge=1)
    """Packed tokens (shared prefixes once) per forward and backward; a larger group is split by samples."""
    order: Literal["canonical", "arrival"] = "canonical"
    """canonical: fixed microbatches, bit-identical weights for a seed. arrival: starts earliest."""


class OptimizerConfig(Config):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW moment decay."""
    eps: float = Field(1e-8, gt=0)
    """AdamW denominator floor."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, on matrices only."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, down to min_learning_rate_ratio at the last step; steps of the critic alone do not count."""
    min_learning_rate_ratio: Probability = 0.1
    """Final learning rate as a share of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm is clipped to this."""


class TrainerConfig(Config):
    steps: int = Field(20, ge=1)
    """Batches to learn from (published versions)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocasts the forward and backward; weights and optimizer stay fp32. auto: bf16 on a GPU, fp32 else."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""
    threads: int = Field(0, ge=0)
    """CPU threads of one operation; 0 measures one against all when a run begins and keeps the faster. Give a number
    where two runs must agree bit for bit: another number may round sums differently."""
    logits_budget_mb: int = Field(256, ge=1)
    """Largest [tokens, vocabulary] block held at once; beyond it the vocabulary logprobs are computed in chunks."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""
