from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tidemill.algos.corrections import CORRECTIONS, Corrected, interpolated_proximal, mu_step
from tidemill.algos.losses import Samples
from tidemill.config.algorithm import CORRECTION_LIMITS, CorrectionConfig

RATIOS = [1.0, 4.0, 0.25, 2.0, 0.9]
SAMPLES = Samples(torch.tensor([0, 0, 0, 1, 1]), 2)


def corrected(kind: str, low: float | None = None, high: float | None = None) -> Corrected:
    row = CORRECTIONS[kind]
    limits = {name: value for name, value in (("low", low), ("high", high)) if name in row.limits}
    return row.function(torch.tensor(RATIOS, dtype=torch.float64).log(), SAMPLES, **limits)


@pytest.mark.parametrize(
    ("kind", "low", "high", "weights", "truncated", "masked"),
    [
        ("none", None, None, [1, 1, 1, 1, 1], [], []),
        ("tis", None, 3.0, [1, 3, 0.25, 2, 0.9], [1], []),
        ("clip_range", 0.5, 3.0, [1, 3, 0.5, 2, 0.9], [1, 2], []),
        ("icepop", 0.5, 3.0, [1, 0, 0, 2, 0.9], [], [1, 2]),
        # samples: 1 * 4 * .25 = 1 and 2 * .9 = 1.8, truncated to 1.5
        ("sequence_tis", None, 1.5, [1, 1, 1, 1.5, 1.5], [3, 4], []),
        # geometric means: 1 and sqrt(1.8) = 1.3416
        ("geometric", 0.9, 1.3, [1, 1, 1, 0, 0], [], [3, 4]),
        ("geometric", 0.9, 1.35, [1, 1, 1, 1, 1], [], []),
    ],
)
def test_weights(
    kind: str, low: float | None, high: float | None, weights: list[float], truncated: list[int], masked: list[int]
) -> None:
    result = corrected(kind, low, high)
    assert result.weights_T.tolist() == pytest.approx(weights)
    assert torch.nonzero(result.truncated_T).flatten().tolist() == truncated
    assert torch.nonzero(result.masked_T).flatten().tolist() == masked


def test_mu_step_truncates_each_publish_separately() -> None:
    # factors (3, 1/3) and (2, 2): their products 1 and 4; each truncated to 2: 2 * 1/3 and 2 * 2
    logs = torch.tensor([[3.0, 2.0], [1 / 3, 2.0]], dtype=torch.float64).log()
    result = mu_step(logs, Samples(torch.tensor([0, 0]), 1), high=2.0)
    assert result.weights_T.tolist() == pytest.approx([2 / 3, 4.0])
    assert result.truncated_T.tolist() == [True, False]


def test_mu_step_without_bounds_telescopes_and_with_one_step_is_tis() -> None:
    logs = torch.tensor([[0.3, -0.4], [0.5, 0.9]], dtype=torch.float64)
    samples = Samples(torch.tensor([0, 0]), 1)
    torch.testing.assert_close(mu_step(logs, samples, high=1e9).weights_T, logs.sum(0).exp())
    single, plain = mu_step(logs[1:], samples, high=2.0), CORRECTIONS["tis"].function(logs[1], samples, high=2.0)
    torch.testing.assert_close(single.weights_T, plain.weights_T)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_huge_ratio_stays_finite_and_has_no_gradient(kind: str) -> None:
    logs: Tensor = torch.tensor([200.0, -200.0], requires_grad=True)
    given = logs[None] if kind == "mu_step" else logs
    limits = {name: value for name, value in CORRECTION_LIMITS[kind]._asdict().items() if value is not None}  # type: ignore[index]
    result = CORRECTIONS[kind].function(given, Samples(torch.tensor([0, 1]), 2), **limits)
    assert bool(torch.isfinite(result.weights_T).all())
    assert not result.weights_T.requires_grad


def test_interpolated_proximal() -> None:
    # rollout -2, trainer -1: lag 0 gives rollout, lag 1 half way, lag 3 three quarters
    result = interpolated_proximal(torch.full((3,), -2.0), torch.full((3,), -1.0), torch.tensor([0, 1, 3]))
    assert result.tolist() == pytest.approx([-2.0, -1.5, -1.25])


def test_samples_reduce_and_spread() -> None:
    samples = Samples(torch.tensor([1, 0, 1]), 3)
    values = torch.tensor([1.0, 5.0, 3.0])
    assert samples.sum(values).tolist() == [5.0, 4.0, 0.0]
    assert samples.mean(values).tolist() == [5.0, 2.0, 0.0]
    assert samples.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [8.0, 7.0, 8.0]


def test_config_names_and_limits_match_the_registry() -> None:
    assert CorrectionConfig.model_fields["kind"].annotation.__args__ == tuple(CORRECTIONS)  # type: ignore[union-attr]
    for kind, limits in CORRECTION_LIMITS.items():
        given = tuple(name for name, value in limits._asdict().items() if value is not None)
        assert given == CORRECTIONS[kind].limits
