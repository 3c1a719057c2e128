"""How a model leaves a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tidemill.config.base import Config


class ExportConfig(Config):
    path: Path | None = None
    """Stages of kind export: the folder written, which must be new or an earlier export. Default: `model` in the
    stage's directory."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights written; fp32 is what was trained, bit for bit."""
