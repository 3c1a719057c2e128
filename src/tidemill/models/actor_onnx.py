"""Actors as ONNX files: the mean of the actions, with the normalisation of the inputs inside."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import torch

from tidemill.models.actor import GaussianActor, load_arrays

OPSET = 18


def actor_of(weights: Mapping[str, npt.NDArray[np.float32]], policy: str, activation: str) -> GaussianActor:
    """The actor with the weights of a policy, whose names start with its own."""
    own = {name.removeprefix(f"{policy}."): each for name, each in weights.items() if name.startswith(f"{policy}.")}
    layers = sum(name.startswith("layers.") for name in own) // 2
    shapes = [own[f"layers.{at}.weight"].shape for at in range(layers)]
    actor = GaussianActor(
        shapes[0][1], shapes[-1][0], [outputs for outputs, _ in shapes[:-1]], activation, init_std=1.0
    )
    load_arrays(actor, own)
    return actor.eval()


def write_actor(path: Path, actor: GaussianActor, metadata: Mapping[str, str]) -> None:
    """Write the actor with a batch of any size. Equal actors and metadata give equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists packages for images that are not installed
    inputs = torch.zeros(2, actor.normaliser.mean.shape[0])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            actor,
            (inputs,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["observations"],
            output_names=["actions"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for node in model.graph.node:  # paths and lines of the sources, which differ between machines
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for place in (model.graph, *model.graph.value_info, *model.graph.input, *model.graph.output):
        place.ClearField("metadata_props")
    onnx.helper.set_model_props(model, dict(metadata))
    path.write_bytes(model.SerializeToString(deterministic=True))
