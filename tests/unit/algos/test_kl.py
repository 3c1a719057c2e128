from __future__ import annotations

import math

import pytest
import torch

from tidemill.algos.kl import (
    adapted_beta,
    approximate_kl,
    gaussian_kl,
    k3,
    kl_reward,
    mismatch,
    mismatch_by_source,
    no_mismatch,
)


def test_k3_value_and_gradient() -> None:
    # d = ref - trainer = (0.5, -0.5, 0): e^0.5 - 1.5 = 0.1487213; e^-0.5 - 0.5 = 0.1065307; 0
    # gradient to trainer 1 - e^d: 1 - 1.6487213 = -0.6487213; 1 - 0.6065307 = 0.3934693; 0
    trainer = torch.tensor([-2.0, -1.0, -3.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.5, -3.0], requires_grad=True)
    penalty = k3(trainer, ref)
    assert penalty.tolist() == pytest.approx([0.1487213, 0.1065307, 0.0], abs=1e-6)
    penalty.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == pytest.approx([-0.6487213, 0.3934693, 0.0], abs=1e-6)
    assert ref.grad is None


def test_k3_of_a_small_difference_is_accurate() -> None:
    # e^d - d - 1 = d²/2 + d³/6 + ...: 5e-9 for d = 1e-4, which exp(d) - d - 1 in float32 rounds to 0 or 1e-7
    assert k3(torch.tensor([0.0]), torch.tensor([1e-4])).item() == pytest.approx(5e-9, rel=0.05)


def test_approximate_kl_value_and_direction() -> None:
    # log ρ = trainer - proximal = 0.5: ρ - 1 - log ρ = 1.6487213 - 1.5 = 0.1487213
    trainer = torch.tensor([-1.5], requires_grad=True)
    estimate = approximate_kl(trainer, torch.tensor([-2.0]))
    assert estimate.tolist() == pytest.approx([0.1487213], abs=1e-6)
    assert not estimate.requires_grad


def test_estimates_are_unbiased_over_a_whole_vocabulary() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    # KL(p ‖ q) = 0.5 ln 2.5 + 0.2 ln 0.4 = 0.4581454 - 0.1832581 = 0.2748872
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(0.2748872, abs=1e-6)
    assert float((p * approximate_kl(q.log(), p.log())).sum()) == pytest.approx(0.2748872, abs=1e-6)


def test_the_gradient_of_k3_is_that_of_the_reverse_direction() -> None:
    # Documented caveat: Σ p ∇k3 (p held fixed, as sampling does) equals ∇KL(ref ‖ trainer), not ∇KL(trainer ‖ ref)
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    (sampled,) = torch.autograd.grad((logprobs.exp().detach() * k3(logprobs, ref.log())).sum(), logits)
    forward = (ref * (ref.log() - logits.log_softmax(-1))).sum()
    (expected,) = torch.autograd.grad(forward, logits)
    now = logits.log_softmax(-1)
    (reverse,) = torch.autograd.grad((now.exp() * (now - ref.log())).sum(), logits)
    assert torch.allclose(sampled, expected)
    assert not torch.allclose(sampled, reverse)


def test_with_the_ratio_the_gradient_is_that_of_the_divergence_off_policy() -> None:
    # Tokens from another policy q: Σ q ∇(ρ k3) with ρ = p / q is ∇KL(p ‖ ref)
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    rollout = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    weighted = k3(logprobs, ref.log()) * (logprobs - rollout.log()).exp()
    (sampled,) = torch.autograd.grad((rollout * weighted).sum(), logits)
    now = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((now.exp() * (now - ref.log())).sum(), logits)
    torch.testing.assert_close(sampled, expected)


def test_kl_reward() -> None:
    rollout = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty = kl_reward(rollout, torch.tensor([-1.5, -1.5]))
    assert penalty.tolist() == [0.5, -0.5]
    assert not penalty.requires_grad


@pytest.mark.parametrize(
    # error (kl / target - 1) clipped to ±0.2, a tenth of it is corrected
    ("kl", "beta"),
    [(0.1, 0.5), (0.11, 0.505), (0.09, 0.495), (1.0, 0.51), (0.0, 0.49)],
)
def test_adapted_beta(kl: float, beta: float) -> None:
    assert adapted_beta(0.5, kl, 0.1) == pytest.approx(beta)


def test_mismatch_stats() -> None:
    # r = (1, 2, 0.5): mean 3.5 / 3 = 1.1666667; Σr² = 5.25, variance 5.25 / 3 - 1.3611111 = 0.3888889;
    # ESS 3.5² / (3 * 5.25) = 12.25 / 15.75 = 0.7777778;
    # KL (0 + (1 - ln 2) + (-0.5 + ln 2)) / 3 = 0.5 / 3 = 0.1666667
    ratios = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    stats = mismatch(torch.full((3,), -4.0), ratios.log() - 4.0).reduce()
    assert stats["ratio_mean"] == pytest.approx(1.1666667)
    assert stats["ratio_var"] == pytest.approx(0.3888889)
    assert stats["ratio_max"] == pytest.approx(2.0)
    assert stats["effective_sample_size"] == pytest.approx(0.7777778)
    assert stats["mismatch_kl"] == pytest.approx(0.1666667)


def test_the_maximum_of_ratios_below_one() -> None:
    stats = (no_mismatch() + mismatch(torch.tensor([0.0]), torch.tensor([math.log(0.5)]))).reduce()
    assert stats["ratio_max"] == pytest.approx(0.5)


def test_mismatch_of_each_source() -> None:
    ratios = torch.tensor([2.0, 1.0, 0.5, 1.0])
    sums = mismatch_by_source(torch.full((4,), -4.0), ratios.log() - 4.0, torch.tensor([1, 0, 1, 1]), 3)
    # r - 1 - log r: 1 - log 2 and log 2 - 0.5 and 0
    assert sums.tolist() == [[0.0, pytest.approx(0.5), 0.0], [1.0, 3.0, 0.0]]


def test_mismatch_of_tiny_differences_is_accurate() -> None:
    # log r = ±1e-6: variance of r 1e-12, KL 5e-13 per token
    trainer = torch.tensor([1e-6, -1e-6] * 500, dtype=torch.float64)
    stats = mismatch(torch.zeros(1000, dtype=torch.float64), trainer).reduce()
    assert stats["ratio_var"] == pytest.approx(1e-12, rel=1e-3)
    assert stats["mismatch_kl"] == pytest.approx(5e-13, rel=1e-3)


def test_no_tokens_have_no_metrics() -> None:
    assert no_mismatch().reduce() == {}


def test_ratios_of_zero_give_effective_sample_size_zero() -> None:
    stats = mismatch(torch.zeros(2), torch.full((2,), -2000.0)).reduce()
    assert stats["effective_sample_size"] == 0.0
    assert stats["ratio_mean"] == 0.0


def test_gaussian_kl() -> None:
    # One dimension: N(0, 1) to N(1, 2²): log 2 + (1 + 1) / 8 - 1/2. The second dimension does not change.
    found = gaussian_kl(torch.zeros(3, 2), torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([math.log(2), 0.0]))
    torch.testing.assert_close(found, torch.full((3,), math.log(2) + 0.25 - 0.5))
    old = torch.distributions.Normal(torch.tensor([0.3, -1.0]), torch.tensor([0.5, 2.0]))
    new = torch.distributions.Normal(torch.tensor([0.1, 0.0]), torch.tensor([0.7, 1.5]))
    expected = torch.distributions.kl_divergence(old, new).sum()
    torch.testing.assert_close(gaussian_kl(old.mean, old.stddev.log(), new.mean, new.stddev.log()), expected)
