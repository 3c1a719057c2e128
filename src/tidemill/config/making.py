"""Data made by a pipeline itself: demonstrations from a task's answers, preference pairs from a model's own."""

from __future__ import annotations

from pydantic import Field

from tidemill.config.base import Config


class MakingConfig(Config):
    prompts: int = Field(1000, ge=1)
    """Stages of kind demonstrations and pairs: training prompts made into rows, at most."""
    samples_per_prompt: int = Field(8, ge=2)
    """pairs: answers drawn of each prompt."""
    pairs_per_prompt: int = Field(4, ge=1)
    """pairs: of one prompt, at most."""
