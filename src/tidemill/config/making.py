"""Data made by a pipeline itself: demonstrations from a task's answers, preference pairs from a model's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.config.base import Config


class MakingConfig(Config):
    prompts: int = Field(1000, ge=1)
    """Stages of kind demonstrations and pairs: prompts made into rows, at most."""
    side: Literal["train", "held_out"] = "train"
    """Which of the task's prompts: those that are learned from, or those that evaluations ask; what is made of the
    latter is for data.held_out_path."""
    samples_per_prompt: int = Field(8, ge=2)
    """pairs: answers drawn of each prompt."""
    pairs_per_prompt: int = Field(4, ge=1)
    """pairs: of one prompt, at most."""
