"""Loads configurations, tokenizers and models with the Auto classes of transformers, from local folders only.

No other module calls these classes. Nothing is downloaded and no code of a folder is executed: a `model_type` that
transformers does not implement is refused.
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
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tidemill.core.errors import UserError
from tidemill.hardware.model_config import CONFIG
from tidemill.models.folder import OTHER_FAMILY, check_config, damaged


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers inside the block."""
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
_ATTENTION = "eager"  # config.json could name a kernel to download


def load_config(folder: Path) -> Any:
    """The configuration of a model folder.

    Raises:
        UserError: config.json is missing or malformed, or transformers does not implement its model_type.
    """
    stored = check_config(folder)
    name = stored["model_type"]
    if name not in CONFIG_MAPPING:
        note = "; code in the folder is never executed" if "auto_map" in stored else ""
        raise UserError(
            f"transformers {transformers.__version__} does not implement model_type {name!r:.60}{note}",
            where=str(folder / CONFIG),
            hint=OTHER_FAMILY,
        )
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # each model validates its own fields in its own way
        raise damaged(f"transformers refuses the model configuration: {first_line(error)}", folder / CONFIG) from error


def load_pretrained(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The causal language model of a folder, and transformers' report of missing and mismatched tensors.

    Raises:
        UserError: as `load_config`, or the model cannot be loaded.
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
    except Exception as error:  # see load_config
        raise _load_error(error, folder) from error
    model, report = loaded
    return model, report


def build_unloaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a configuration, with uninitialized weights; errors as `load_pretrained`."""
    config = load_config(folder)
    try:
        with quiet(), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=False
            )
    except Exception as error:  # see load_config
        raise _load_error(error, folder) from error
    return model


def build_on_meta(folder: Path) -> PreTrainedModel:
    """The model of a configuration in fp32: parameters on the meta device, buffers in memory with their values.

    Errors as `load_pretrained`.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), param.requires_grad))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:  # each parameter is allocated, but never written, before it is registered
        model = build_unloaded(folder, torch.float32)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    model.tie_weights()  # skipped together with the initial values
    return model


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give all parameters on the meta device memory on `device`, without values. Sharded ones stay tied, others not."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def load_tokenizer(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a folder.

    Raises:
        UserError: it is missing or damaged, has no fast version, or needs code from the folder.
    """
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, **options, **_LOCAL)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise damaged(f"the tokenizer cannot be loaded: {first_line(error)}", folder) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "the tokenizer has no tokenizer.json",
            where=str(folder),
            hint="save it with a version of transformers that writes one",
        )
    return tokenizer


def configured_context(config: Any) -> int:
    """The context length of a model configuration, in tokens.

    Raises:
        UserError: the configuration does not have one.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        raise UserError(
            f"the configuration of model_type {config.model_type!r} has no max_position_embeddings",
            where="model.source",
            hint=OTHER_FAMILY,
        )
    return int(limit)


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0][:300]


def _load_error(error: Exception, folder: Path) -> UserError:
    return UserError(
        f"the model cannot be loaded: {first_line(error)}",
        where=str(folder),
        hint="give a causal language model that this version of transformers knows",
    )
