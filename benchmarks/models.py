"""Models for benchmarks: SmolLM2 from the cache, and a character model of 0.8M parameters."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

from benchmarks.turns import OFFLINE, ONE_THREAD
from tidemill.config.model import ModelConfig
from tidemill.models.catalog import resolve


def smollm2() -> Path:
    """The converted folder; made on first use."""
    return resolve(ModelConfig(source="smollm2-135m"), progress=_say)


def char_model() -> Path:
    """The default character model."""
    return resolve(ModelConfig(source="char"), progress=_say)


def quiet() -> None:
    """Silence progress bars and warnings of libraries, here and in both sides."""
    os.environ |= ONE_THREAD | OFFLINE | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ["PYTHONWARNINGS"] = "ignore"  # read by the sides' interpreters
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
