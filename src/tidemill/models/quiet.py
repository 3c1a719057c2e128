"""Keeps the model library's progress bars and advice off the terminal; faults still raise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers inside the block, and put its settings back after."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
