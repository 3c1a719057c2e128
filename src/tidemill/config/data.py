"""What the supervised stages learn from: demonstrations and preference pairs in files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse

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
