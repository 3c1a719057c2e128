"""The models that benchmarks load: SmolLM2 out of the cache, and a character model of 0.8M parameters."""

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
    """Keep progress bars and advice of third-party libraries out of the figures, here and in the sides."""
    os.environ |= ONE_THREAD | OFFLINE | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ["PYTHONWARNINGS"] = "ignore"  # read by the sides' interpreters
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
