"""The shapes of the models that a recipe names, without loading them."""

from __future__ import annotations

from pathlib import Path

from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.models import char_shape
from tidemill.models.catalog import is_local, listing
from tidemill.planner.forecast.memory import Models
from tidemill.sim.profiles.model_config import read_shape
from tidemill.sim.profiles.model_shape import ModelShape


def shape_of_model(config: ModelConfig) -> ModelShape:
    """
    Raises:
        UserError: it is not on this machine.
    """
    if config.source == "char":
        return _char(config.char)
    if is_local(config.source):
        return read_shape(Path(config.source).expanduser())
    entry = next((entry for entry in listing() if entry.name == config.source and entry.cached), None)
    if entry is None:
        cure = f"fetch it (`tidemill model get {config.source}`), or give --params or --model"
        raise UserError(f"the shape of {config.source} is not known here", where="model.source", cure=cure)
    return read_shape(Path(entry.path))


def models_of(spec: RunSpec) -> Models:
    """The policy, and what stands beside it.

    Raises:
        UserError: one of them is not on this machine.
    """
    source = spec.critic.source
    return Models(
        policy=shape_of_model(spec.model),
        critic=None if source is None else shape_of_model(ModelConfig(source=source, char=spec.model.char)),
        rewards=tuple(read_shape(folder) for folder in spec.scoring.model_folders),
    )


def _char(config: CharModelConfig) -> ModelShape:
    return ModelShape(
        parameters=char_shape.parameter_count(config),
        layers=config.layers,
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        intermediate=char_shape.intermediate_size(config.hidden_size),
        vocab=len(config.alphabet) + len(char_shape.SPECIAL_TOKENS),
        tied=True,
    )
