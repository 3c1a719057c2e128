from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tidemill.models.actor import GaussianActor, Network, Normaliser, arrays_of, load_arrays
from tidemill.robots.policy_arrays import mean_action


def test_normaliser_has_the_moments_of_all_inputs() -> None:
    normaliser = Normaliser(1)
    normaliser.update(torch.tensor([[1.0], [3.0]]))
    normaliser.update(torch.tensor([[[5.0]], [[7.0]]]))  # leading dimensions do not matter
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5; the prior of weight 1e-4 moves both a little.
    assert float(normaliser.mean) == pytest.approx(4.0, abs=1e-3)
    assert float(normaliser.variance) == pytest.approx(5.0, abs=1e-3)
    assert float(normaliser(torch.tensor([6.0]))) == pytest.approx(2 / math.sqrt(5), abs=1e-3)
    assert float(normaliser(torch.tensor([1e6]))) == 10.0


def test_log_density_and_entropy_of_a_gaussian() -> None:
    actor = GaussianActor(3, 2, (4,), "elu", init_std=2.0)
    means, actions = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]])
    # Each dimension: -log 2 - log(2π) / 2, and -1/2 for the one that is a standard deviation away.
    each = -math.log(2) - 0.5 * math.log(2 * math.pi)
    assert float(actor.logprobs(means, actions).detach()) == pytest.approx(2 * each - 0.5, abs=1e-6)
    normal = torch.distributions.Normal(means, torch.full((2,), 2.0))
    assert float(actor.entropy().detach()) == pytest.approx(float(normal.entropy().sum()), abs=1e-6)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
def test_numpy_and_torch_agree(activation: str) -> None:
    torch.manual_seed(0)
    actor = GaussianActor(5, 2, (16, 8), activation, init_std=1.0)
    actor.normaliser.update(3 + 2 * torch.randn(100, 5))
    observations = 3 + 4 * torch.randn(64, 5)
    weights = {f"legs.{name}": each for name, each in arrays_of(actor).items()}
    found = mean_action(weights, "legs", observations.numpy(), activation)
    np.testing.assert_allclose(found, actor(observations).detach().numpy(), atol=1e-6, rtol=1e-5)


def test_arrays_are_copies_and_of_one_module() -> None:
    first, second = Network(3, 1, (4,), "relu"), Network(3, 1, (4,), "relu")
    first.normaliser.update(torch.randn(10, 3))
    arrays = arrays_of(first)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    load_arrays(second, arrays)
    assert {name: each.tobytes() for name, each in arrays_of(second).items()} == {
        name: each.tobytes() for name, each in arrays.items()
    }
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_arrays(Network(2, 1, (4,), "relu"), arrays)
