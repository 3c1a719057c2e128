"""Stages beside reinforcement learning: their data, supervised learning, data generation and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from tidemill.config.base import Config, OutputFolder, refuse


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


DataFormat: TypeAlias = Literal["auto", "jsonl", "parquet", "datasets"]


class DataConfig(Config):
    path: Path | None = None
    """Demonstrations (`completion`) or preference pairs (`chosen`, `rejected`, perhaps `margin`), one a row, each with
    `prompt` or `messages`. The stages that learn from them need it; reinforcement learning has `task` instead."""
    format: DataFormat = "auto"
    """auto: a folder is one that `datasets` saved (save_to_disk), *.parquet is Parquet, any other file JSON lines."""
    held_out_path: Path | None = None
    """Rows to evaluate on; by default a share of `path`, chosen by content hash."""
    held_out_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the questions kept for evaluation when there is no held_out_path; 0 keeps none."""
    max_tokens: int = Field(0, ge=0)
    """Longest prompt plus completion, in tokens; 0 takes the model's own limit."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What a longer row is: a fault of the data, or left out and counted."""
    end_token: bool = True
    """Close every completion with the token that ends the model's turn. Turn it off where completions end with a stop
    string of their own (`sampling.stop`, or the task's), so that data and generated samples look alike."""
    seed: int | None = Field(None, ge=0)
    """Orders the rows in every epoch; by default run.seed."""

    @model_validator(mode="after")
    def _has_a_path(self) -> DataConfig:
        faults = []
        if self.path is None and self.held_out_path is not None:
            faults.append("held_out_path is given without path; give path, the rows to learn from")
        return refuse(faults, self)


class DataGenerationConfig(Config):
    prompts: int = Field(1000, ge=1)
    """Stages of kind demonstrations and pairs: prompts made into rows, at most."""
    split: Literal["train", "held_out"] = "train"
    """Which of the task's prompts: those that are learned from, or those that evaluations ask; what is made of the
    latter is for data.held_out_path."""
    samples_per_prompt: int = Field(8, ge=2)
    """pairs: answers drawn of each prompt."""
    pairs_per_prompt: int = Field(4, ge=1)
    """pairs: of one prompt, at most."""


class ExportConfig(Config):
    path: OutputFolder = None
    """Stages of kind export: the folder written, which must be new or an earlier export. Default: `model` in the
    stage's directory."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights written; fp32 is what was trained, bit for bit."""
