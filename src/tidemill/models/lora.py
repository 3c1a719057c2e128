"""Low-rank adapters, attached and computed by peft inside the `transformers` model.

Only the adapter is trained, published, saved and named by the digest. The base never changes, so models with other
versions of the adapter, or without one, can share it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command

_ATTRIBUTE = "tidemill_adapter"
_LEARNED = (".lora_A.", ".lora_B.")  # parts of peft's parameter names
_WRAPPED = ".base_layer."  # inserted by peft into the names of wrapped layers


@dataclass(slots=True)
class Adapter:
    """The origin of a model's adapter."""

    made_from: ModelConfig
    base_digest: str = ""  # of the frozen weights; computed on first use


def attach_adapter(model: PreTrainedModel, config: ModelConfig) -> None:
    """Add an adapter with the settings of `config.lora` to `model`, in place, and freeze all other parameters.

    Its second matrices are zeros, so it does not change the model before training. Its weights depend on the seed only.

    Raises:
        UserError: peft is not installed, or a target is not a linear layer of the model.
    """
    peft, lora = require_peft(), config.lora
    known = linear_layers(model)
    if unknown := [name for name in lora.targets if name not in known]:
        raise UserError(
            f"{type(model).__name__} has no linear layer {unknown[0]!r}",
            where="model.lora.targets",
            hint=f"name some of {', '.join(known)}, or none for all of them",
        )
    targets = list(lora.targets) or known
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(lora.seed)
        model.add_adapter(settings)
    setattr(model, _ATTRIBUTE, Adapter(config))


def merge_adapter(model: PreTrainedModel) -> None:
    """Add the adapter of `model` to the base's weights and remove it, in place."""
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
    """Import peft, an optional dependency. Raises UserError: it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"an adapter needs the package peft ({error})", where="model.lora", hint=install_command("lora")
        ) from error
    return peft


def adapter_of(model: nn.Module) -> Adapter | None:
    """The origin of the model's adapter; None without an adapter."""
    found: Adapter | None = getattr(model, _ATTRIBUTE, None)
    return found


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name: the adapter's, or all without an adapter. Tied parameters once."""
    named = model.named_parameters()
    return dict(named) if adapter_of(model) is None else {name: p for name, p in named if _is_learned(name)}


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the base under an adapter, by their names without one; empty without an adapter."""
    if adapter_of(model) is None:
        return {}
    return {name.replace(_WRAPPED, "."): p for name, p in model.named_parameters() if not _is_learned(name)}


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers without those of an adapter, by their names without one; tied ones under
    each of their names."""
    state = model.state_dict(keep_vars=True).items()
    return {name.replace(_WRAPPED, "."): tensor for name, tensor in state if not _is_learned(name)}


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The distinct last parts of the names of all linear layers except the output head, sorted."""
    head = model.get_output_embeddings()
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in layers})


def _is_learned(name: str) -> bool:
    return any(part in name for part in _LEARNED)
