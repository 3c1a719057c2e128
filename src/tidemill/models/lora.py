"""Low-rank adapters, made and computed by peft inside the `transformers` model itself.

Such a model learns in its adapter alone: that is what is optimised, published, stored and named by its digest. The base
under it never changes, so that whoever computes with another version of the adapter, or with none, may share it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError

_ATTRIBUTE = "tidemill_adapter"
_LEARNED = (".lora_A.", ".lora_B.")  # peft's names
_WRAPPED = ".base_layer."  # and what it puts into the names of the layers it wraps


@dataclass(slots=True)
class Adapter:
    """What a model with an adapter knows of how it came to be."""

    made_from: ModelConfig
    base_digest: str = ""  # of the frozen weights; filled in when it is first asked for


def attach_adapter(model: PreTrainedModel, config: ModelConfig) -> None:
    """Put an adapter as `config.lora` says into `model`, in place, and freeze everything else.

    It adds nothing until it has learned (its second matrices are zeros); its numbers depend on the seed alone.

    Raises:
        UserError: peft is not installed, or a target is no linear layer of the model.
    """
    peft, lora = require_peft(), config.lora
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=_targets(model, lora.targets), lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(lora.seed)
        model.add_adapter(settings)
    setattr(model, _ATTRIBUTE, Adapter(config))


def merge_adapter(model: PreTrainedModel) -> None:
    """Add the adapter of `model` to the base's weights, in place; what remains is the plain model."""
    require_peft()
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    delattr(model, _ATTRIBUTE)


def require_peft() -> Any:
    """The package, which is an extra.

    Raises:
        UserError: with the command that installs it.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"an adapter needs the package peft ({error})", where="model.lora", hint='pip install "tidemill[lora]"'
        ) from error
    return peft


def adapter_of(model: nn.Module) -> Adapter | None:
    """None for a model that learns as a whole."""
    found: Adapter | None = getattr(model, _ATTRIBUTE, None)
    return found


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes, by name: the adapter's parameters, or all where there is no adapter. Tied ones once."""
    named = model.named_parameters()
    return dict(named) if adapter_of(model) is None else {name: p for name, p in named if _is_learned(name)}


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The base under an adapter, by the names it has without one; empty where there is no adapter."""
    if adapter_of(model) is None:
        return {}
    return {name.replace(_WRAPPED, "."): p for name, p in model.named_parameters() if not _is_learned(name)}


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The last part of the name of every linear layer but the output head, sorted."""
    head = model.get_output_embeddings()
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in layers})


def _is_learned(name: str) -> bool:
    return any(part in name for part in _LEARNED)


def _targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    known = linear_layers(model)
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(
            f"{type(model).__name__} has no linear layer {unknown[0]!r} that could take an adapter",
            where="model.lora.targets",
            hint=f"name some of {', '.join(known)}, or none of them for all",
        )
    return list(wanted) or known
