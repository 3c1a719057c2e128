"""Networks of control policies: Gaussian actors and critics with the normalisation of their inputs.

`robots/policy_arrays.py` has the same arithmetic in numpy, for processes that simulate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

EPSILON = 1e-5
CLIP = 10.0
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": partial(nn.ELU, inplace=True),
    "relu": partial(nn.ReLU, inplace=True),
    "tanh": nn.Tanh,
}
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Normaliser(nn.Module):
    """(x - mean) / sqrt(variance + 1e-5), clipped at ±10, with the moments of all inputs so far."""

    mean: Tensor  # float32 [D]
    variance: Tensor  # float32 [D]
    count: Tensor  # float32 []

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, inputs: Tensor) -> None:
        """Add inputs [..., D] to the moments, by Chan's formula for two sets."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        added = rows.shape[0]
        mean, variance = rows.mean(0), rows.var(0, correction=0)
        total, delta = self.count + added, mean - self.mean
        spread = self.variance * self.count + variance * added + delta.square() * self.count * added / total
        self.mean += delta * added / total
        self.variance.copy_(spread / total)
        self.count.copy_(total)

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs - self.mean) * torch.rsqrt(self.variance + EPSILON)).clamp(-CLIP, CLIP)


class Network(nn.Module):
    """A normaliser and a multilayer perceptron; parameters are named `layers.0.weight`, ..."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.normaliser = Normaliser(inputs)
        widths = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activation = ACTIVATIONS[activation]()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., outputs] for inputs [..., D]."""
        return self.outputs(self.normaliser(inputs))

    def outputs(self, normalised: Tensor) -> Tensor:
        """[..., outputs] for inputs that were normalised before."""
        hidden = normalised
        for layer in self.layers[:-1]:
            hidden = self.activation(layer(hidden))
        result: Tensor = self.layers[-1](hidden)
        return result


class GaussianActor(Network):
    """A normal distribution of actions with a mean that depends on the observation, and a learned spread that does
    not."""

    def __init__(self, inputs: int, actions: int, hidden: Sequence[int], activation: str, *, init_std: float) -> None:
        super().__init__(inputs, actions, hidden, activation)
        self.log_std = nn.Parameter(torch.full((actions,), math.log(init_std)))

    def logprobs(self, means: Tensor, actions: Tensor) -> Tensor:
        """Log density [...] of actions [..., A]."""
        scaled = (actions - means) * torch.exp(-self.log_std)
        return (-0.5 * scaled.square() - self.log_std - LOG_SQRT_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """[], of the distribution."""
        return (self.log_std + LOG_SQRT_2PI + 0.5).sum()


def arrays_of(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Parameters and buffers by name, copied."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def load_arrays(module: nn.Module, arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Copy arrays into the parameters and buffers of these names. Raises RuntimeError: they are of another module."""
    module.load_state_dict({name: torch.from_numpy(np.asarray(each)) for name, each in arrays.items()})
