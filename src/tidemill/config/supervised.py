"""Learning from written examples: demonstrations (sft) and preference pairs (reward_model, dpo)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse


class SupervisedConfig(Config):
    epochs: int = Field(1, ge=0)
    """Passes over the training examples; 0 takes as many as trainer.steps optimizer steps need."""
    minibatch_tokens: int = Field(8192, ge=1)
    """Tokens of one optimizer step, what its examples share at their beginning counted once."""
    microbatch_tokens: int = Field(2048, ge=1)
    """The same of one forward and backward pass; a larger example runs alone."""
    evaluate_every_steps: int = Field(10, ge=0)
    """Measure the held-out examples every so many optimizer steps, besides before and after; 0 only before and
    after."""
    patience: int = Field(0, ge=0)
    """Stop after so many evaluations in a row without a lower held-out loss, with a checkpoint at each new lowest one;
    0 never stops early."""

    @model_validator(mode="after")
    def _consistent(self) -> SupervisedConfig:
        faults = []
        if self.microbatch_tokens > self.minibatch_tokens:
            faults.append(
                f"microbatch_tokens = {self.microbatch_tokens} is more than minibatch_tokens = "
                f"{self.minibatch_tokens}; lower the first or raise the second"
            )
        if self.patience and not self.evaluate_every_steps:
            faults.append(
                f"patience = {self.patience} never acts with evaluate_every_steps = 0; set how often to evaluate"
            )
        return refuse(faults, self)


class RewardModelConfig(Config):
    centring: float = Field(0.01, ge=0)
    """Weight of (chosen + rejected)² in the loss: keeps scores around zero, which differences alone do not."""
    margins: bool = True
    """Ask for each pair's own margin, where the data has them."""


class PreferenceConfig(Config):
    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: logistic on summed logprobs. ipo: squared on logprobs averaged over a completion's tokens."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How far the policy is held to the initial model: larger is nearer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo: the share of pairs believed to be labelled the wrong way round."""

    @model_validator(mode="after")
    def _smoothing_has_a_use(self) -> PreferenceConfig:
        faults = []
        if self.loss == "ipo" and self.label_smoothing:
            faults.append('label_smoothing is only for loss = "dpo"; leave it out')
        return refuse(faults, self)
