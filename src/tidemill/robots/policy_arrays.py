"""Policies in numpy, so that a process that simulates imports no torch. `models/actor.py` has the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.core.chunks import Array

Singles = npt.NDArray[np.float32]
Weights = Mapping[str, Singles]
"""Tensors by name, of all actors: `NAME.normaliser.mean`, `NAME.layers.0.weight`, ..., `NAME.log_std`."""
EPSILON = 1e-5  # added to the variance of observations
CLIP = 10.0  # largest normalised observation

ACTIVATIONS: dict[str, Callable[[Singles], Singles]] = {
    "elu": lambda x: np.maximum(x, 0) + np.expm1(np.minimum(x, 0)),
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
}


def mean_action(weights: Weights, policy: str, observations: Singles, activation: str) -> Singles:
    """The mean of a policy's actions, [..., N, A], for observations [..., N, D]. Always called with the N of a shard,
    because the number of rows can change the rounding of a matrix product."""
    if f"{policy}.onnx" in weights:
        if observations.ndim > 2:
            return np.stack([mean_action(weights, policy, each, activation) for each in observations])
        from tidemill.robots.policy_folder import onnx_action

        return onnx_action(weights, policy, observations)
    variance, mean = weights[f"{policy}.normaliser.variance"], weights[f"{policy}.normaliser.mean"]
    hidden = np.clip((observations - mean) / np.sqrt(variance + np.float32(EPSILON)), -CLIP, CLIP)
    layers = sum(name.startswith(f"{policy}.layers.") and name.endswith(".weight") for name in weights)
    for layer in range(layers):
        hidden = hidden @ weights[f"{policy}.layers.{layer}.weight"].T + weights[f"{policy}.layers.{layer}.bias"]
        if layer < layers - 1:
            hidden = ACTIVATIONS[activation](hidden)
    return np.asarray(hidden, dtype=np.float32)


def pack(arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, Array]:
    """Arrays as they travel."""
    return {
        name: Array(dtype=each.dtype.str, shape=each.shape, data=np.ascontiguousarray(each).tobytes())
        for name, each in arrays.items()
    }


def unpack(arrays: Mapping[str, Array]) -> dict[str, npt.NDArray[Any]]:
    """Writable copies. Raises ValueError: the bytes do not fit the shape."""
    return {
        name: np.frombuffer(each.data, dtype=np.dtype(each.dtype)).reshape(each.shape).copy()
        for name, each in arrays.items()
    }
