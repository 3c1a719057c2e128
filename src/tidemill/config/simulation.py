"""What `tidemill simulate` takes a recipe's run to be made of: model, machines, lengths. Nothing else reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from tidemill.config.base import Config, Probability, refuse

ScheduleName: TypeAlias = Literal[
    "colocated", "disaggregated", "one_step_off", "bounded_staleness", "streamed", "rlboost", "tidemill"
]


class SimulationConfig(Config):
    """Batch, limits, pool, prices, steps and seed are the run's own."""

    schedules: tuple[ScheduleName, ...] = Field(
        ("colocated", "disaggregated", "one_step_off", "bounded_staleness", "streamed", "rlboost", "tidemill"),
        min_length=1,
    )
    """Compared side by side on the same samples and machines. tidemill: the recipe's own [schedule] and [pool];
    rlboost: the same [pool]; the others have the reserved machines only, and are what their names say."""
    staleness: int = Field(4, ge=1)
    """Lag of bounded_staleness."""
    parameters: float | None = Field(None, ge=1)
    """Of the model, whose shape is then assumed; or give a model."""
    model: Path | None = None
    """A Hugging Face folder or its config.json: the model's shape."""
    catalog: Path | None = None
    """GPUs and machines of one's own, beside those of `tidemill plan catalog`."""
    machine: str = "rlboost-8xh100"
    """Each reserved machine."""
    machines: int = Field(1, ge=1)
    """Reserved machines. Where fleet.reserved_usd_per_hour is 0, they cost what the catalogue says."""
    worker_machine: str = "rlboost-2xh100"
    """Each preemptible worker's machine; priced in the same way."""
    engine_gpus: int = Field(1, ge=1)
    """GPUs that one engine is spread over, all of one machine, which has as many engines as fit."""
    engine_dtype: Literal["bf16", "fp8"] = "bf16"
    """Of an engine's weights and arithmetic."""
    boot_s: float = Field(60.0, ge=0)
    """From a machine to an engine that waits for weights."""
    changed_weights: Probability = 0.03
    """Share of the weights that a step changes, as bf16 has them; with the difference tidemill's workers catch up."""
    prompt_tokens: int = Field(512, ge=1)
    """Of each prompt."""
    different_prompts: int = Field(100_000, ge=1)
    """After so many they come again."""
    lengths: Literal["log_normal", "fixed", "run"] = "log_normal"
    """Of completions, up to sampling.max_new_tokens. run: those of the samples in lengths_from."""
    completion_tokens: float = Field(2000.0, ge=1)
    """Their mean, or the length of all."""
    completion_sigma: float = Field(0.8, ge=0, le=4)
    """log_normal: the spread of the logarithm; 0.8 makes the 95th percentile 3.7 times the median."""
    lengths_from: Path | None = None
    """A run directory."""
    prompt_correlation: Probability = 0.0
    """How far a prompt decides its completions' lengths: 0 not at all, 1 wholly."""
    solved: Probability = 0.5
    """Share of samples with reward 1; the others have 0."""
    score_s: float = Field(0.0, ge=0)
    """To judge a sample."""
    hours: float = Field(0.0, ge=0)
    """Simulated time; 0 for as long as trainer.steps take. Steps that are not finished then do not count."""

    @model_validator(mode="after")
    def _possible(self) -> SimulationConfig:
        faults = []
        if (self.lengths == "run") != (self.lengths_from is not None):
            faults.append('lengths = "run" and lengths_from go together; give both or none')
        if len(set(self.schedules)) < len(self.schedules):
            faults.append("schedules names one twice; leave it out")
        return refuse(faults, self)
