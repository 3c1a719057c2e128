"""Text tasks: prompts in a reproducible order, and rewards for their completions."""

from __future__ import annotations

from tidemill.envs.text.build_task import build_task
from tidemill.envs.text.prompts import Task, check_fits
from tidemill.envs.text.scorer import build_scorer, evaluation_scoring

__all__ = ["Task", "build_scorer", "build_task", "check_fits", "evaluation_scoring"]
