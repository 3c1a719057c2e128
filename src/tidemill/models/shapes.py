"""The shapes of models that are not loaded: from settings, a config.json and the headers of weight files."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from tidemill.config.addresses import HUB
from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.hardware.model_config import hub_shape, read_shape
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.models.catalog import CHAR, SMOLLM2, SMOLLM2_PARAMETERS
from tidemill.models.folder import holds_adapter, stored_tensors
from tidemill.models.model_source import locate

SMOLLM2_SHAPE = ModelShape(
    parameters=SMOLLM2_PARAMETERS,
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    tied=True,
)
LEAST_STORED = 0.5
"""Weights with a smaller share of the parameters of their configuration belong to another model."""


def known_shape(config: ModelConfig, *, fetch: bool = False) -> ModelShape | None:
    """The shape of `[model]`; None if its configuration cannot be read here.

    Args:
        fetch: download the configuration of a hub model that is not in the cache.
    """
    source = config.source.strip()
    if source == CHAR:
        char = config.char
        return ModelShape(
            parameters=char.parameters,
            layers=char.layers,
            hidden=char.hidden_size,
            heads=char.heads,
            kv_heads=char.heads,
            head_dim=char.hidden_size // char.heads,
            intermediate=char.intermediate_size,
            vocab=char.vocabulary_size,
            tied=True,
        )
    if source == SMOLLM2:
        return SMOLLM2_SHAPE
    try:
        if (folder := locate(source).folder) is not None:
            return shape_of_folder(folder)
        from tidemill.models import hub

        cached = hub.cached(source, config.revision)
        if cached is None and config.revision is None and (listed := hub_shape(source.removeprefix(HUB))) is not None:
            return listed
        if cached is None and fetch:
            cached = hub.fetch(source, config.revision, progress=lambda _: None, weights=False)
        return None if cached is None else shape_of_folder(cached)
    except UserError:  # reported where the model is loaded
        return None


def shape_of_folder(folder: Path) -> ModelShape | None:
    """The shape of a folder's model, or of the base of its adapter; None if neither configuration nor weights tell it.

    Weights are counted, because a configuration does not tell every matrix. They are not believed if they cannot be
    those of the configuration: the model is built as the configuration says.

    Raises:
        UserError: the base of the adapter is unknown.
    """
    if holds_adapter(folder):
        from tidemill.models.saving import read_origin

        return known_shape(read_origin(folder).model)
    try:
        shape = read_shape(folder)
    except UserError:
        shape = None
    try:
        stored = sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())
    except UserError:  # not downloaded yet
        stored = 0
    if shape is None:
        return shape_of_parameters(stored) if stored else None
    return msgspec.structs.replace(shape, parameters=stored) if stored >= LEAST_STORED * shape.parameters else shape
