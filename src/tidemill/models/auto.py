"""Reads configurations, tokenizers and models with the Auto classes of transformers, from local folders only.

No other module calls those classes. Nothing is downloaded, no code of a folder is executed, nothing is asked on
standard input: a `model_type` that transformers implements is loaded with the library's class, any other is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tidemill.core.errors import UserError
from tidemill.hardware.model_config import CONFIG
from tidemill.models.folder import check_config


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


_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_ATTENTION = "eager"  # config.json could name one that is downloaded


def load_config(folder: Path) -> Any:
    """The configuration of a model folder.

    Raises:
        UserError: config.json is missing or malformed, or transformers does not implement its model_type.
    """
    stored = check_config(folder)
    name = stored["model_type"]
    if name not in CONFIG_MAPPING:
        own = "; code in the folder is never executed" if "auto_map" in stored else ""
        raise UserError(
            f"transformers {transformers.__version__} does not implement model_type {name!r:.60}{own}",
            where=str(folder / CONFIG),
            hint="choose a model of a supported family (docs/models.md lists them)",
        )
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # each model validates its own fields in its own way
        raise UserError(
            f"the model configuration is refused by transformers: {first_line(error)}",
            where=str(folder / CONFIG),
            hint="copy or download the file again",
        ) from error


def load_pretrained(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The causal language model of a folder, and the library's report of missing and mismatched tensors.

    Raises:
        UserError: as `load_config`, or no causal language model can be made of it.
    """
    config = load_config(folder)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                use_safetensors=True,
                output_loading_info=True,
                **_LOCAL,
            )
    except Exception as error:  # as above
        raise _no_model(error, folder) from error
    model, report = loaded
    return model, report


def build_unloaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder's configuration; its weights are whatever the memory holds.

    Raises:
        UserError: as `load_pretrained`.
    """
    config = load_config(folder)
    try:
        with quiet(), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=False
            )
    except Exception as error:  # as above
        raise _no_model(error, folder) from error
    return model


def load_tokenizer(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a folder.

    Raises:
        UserError: it is missing or damaged, has no fast version, or needs code of the folder.
    """
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, **options, **_LOCAL)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise UserError(
            f"the tokenizer cannot be loaded: {first_line(error)}",
            where=str(folder),
            hint="copy or download the model's tokenizer files again",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "the tokenizer has no tokenizer.json", where=str(folder), hint="save it once with a version that writes one"
        )
    return tokenizer


def configured_context(config: Any) -> int:
    """The longest sequence, in tokens, that a model of this configuration was made for.

    Raises:
        UserError: the configuration does not say.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        raise UserError(
            f"the configuration of model_type {config.model_type!r} has no max_position_embeddings",
            where="model.source",
            hint="choose a model of a supported family (docs/models.md lists them)",
        )
    return int(limit)


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0][:300]


def _no_model(error: Exception, folder: Path) -> UserError:
    return UserError(
        f"the model cannot be loaded: {first_line(error)}",
        where=str(folder),
        hint="give a causal language model that this version of transformers knows",
    )
