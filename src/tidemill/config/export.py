"""How a model leaves a pipeline."""

from __future__ import annotations

from typing import Literal

from tidemill.config.base import Config, OutputFolder


class ExportConfig(Config):
    path: OutputFolder = None
    """Stages of kind export: the folder written, which must be new or an earlier export. Default: `model` in the
    stage's directory."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights written; fp32 is what was trained, bit for bit."""
