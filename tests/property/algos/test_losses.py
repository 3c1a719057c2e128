from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.algos.losses import Normalize, Samples, cispo, denominator, gspo, ppo_clip, token_weights
from tidemill.algos.returns import value_loss

token = st.tuples(st.floats(-2, 2), st.floats(-8, 0), st.floats(-3, 3))  # log ratio, proximal logprob, advantage
tokens = st.lists(token, min_size=1, max_size=24)
dual = st.one_of(st.none(), st.floats(1.5, 5))
COMMON = settings(max_examples=80)


def columns(rows: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    log_ratio, proximal, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return (proximal + log_ratio).requires_grad_(), proximal, advantages


def gradient(loss_T: Tensor, trainer: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss_T.sum(), trainer)
    return grad


@COMMON
@given(tokens, dual)
def test_the_gradient_is_zero_for_clipped_tokens_and_plain_for_others(
    rows: list[tuple[float, float, float]], floor: float | None
) -> None:
    trainer, proximal, advantages = columns(rows)
    result = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.3, dual_clip=floor)
    grad = gradient(result.loss_T, trainer)
    assert bool((grad[result.clipped_T] == 0).all())
    torch.testing.assert_close(grad[~result.clipped_T], -(result.ratio_T * advantages)[~result.clipped_T])


@COMMON
@given(tokens)
def test_a_token_is_clipped_if_its_objective_is_below_the_plain_one(rows: list[tuple[float, float, float]]) -> None:
    trainer, proximal, advantages = columns(rows)
    result = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.3)
    plain = result.ratio_T * advantages
    assert bool((-result.loss_T <= plain).all())
    assert torch.equal(result.clipped_T, -result.loss_T.detach() < plain)


@COMMON
@given(tokens, st.floats(1.5, 5))
def test_the_dual_clip_bounds_the_loss_of_negative_advantages(
    rows: list[tuple[float, float, float]], floor: float
) -> None:
    trainer, proximal, advantages = columns(rows)
    result = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.3, dual_clip=floor)
    bad = advantages < 0
    assert bool((result.loss_T[bad] <= -floor * advantages[bad] + 1e-12).all())


@COMMON
@given(tokens, st.floats(-3, 3))
def test_shift_of_both_logprobs_changes_nothing(rows: list[tuple[float, float, float]], shift: float) -> None:
    trainer, proximal, advantages = columns(rows)
    one = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.2)
    other = ppo_clip(trainer + shift, proximal + shift, advantages, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(one.loss_T, other.loss_T)


@COMMON
@given(tokens, st.floats(0.1, 10))
def test_loss_scales_with_the_advantage(rows: list[tuple[float, float, float]], scale: float) -> None:
    trainer, proximal, advantages = columns(rows)
    one = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.2)
    other = ppo_clip(trainer, proximal, scale * advantages, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(other.loss_T, scale * one.loss_T)


@COMMON
@given(tokens, st.randoms(use_true_random=False))
def test_permutation(rows: list[tuple[float, float, float]], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one = ppo_clip(*columns(rows), clip_low=0.2, clip_high=0.2)
    other = ppo_clip(*columns([rows[i] for i in order]), clip_low=0.2, clip_high=0.2)
    assert torch.equal(other.loss_T, one.loss_T[order])
    assert torch.equal(other.clipped_T, one.clipped_T[order])


@COMMON
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from(["sample", "token", "constant"]), st.data()
)
def test_token_weights_give_the_mean_for_any_microbatches(
    lengths: list[int], normalize: Normalize, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [lengths[:cut], lengths[cut:]]
    weights = [weight for part in parts for weight in token_weights(part, normalize)]
    assert weights == token_weights(lengths, normalize)
    total = sum(denominator(part, normalize, constant=7) for part in parts)
    assert total == denominator(lengths, normalize, constant=7)
    if normalize == "constant":
        assert total == 7 * sum(length > 0 for length in lengths)
        assert weights == [float(length > 0) for length in lengths]
        return
    # the mean of a loss of 1 everywhere is 1
    weighted = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    assert weighted == pytest.approx(total)


@COMMON
@given(tokens, st.data())
def test_gspo_of_single_token_samples_is_the_plain_clip(
    rows: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    trainer, proximal, advantages = columns(rows)
    samples = Samples(torch.tensor(data.draw(st.permutations(range(len(rows))))), len(rows))
    one = gspo(trainer, proximal, advantages, samples=samples, clip_low=0.2, clip_high=0.3)
    other = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(one.loss_T, other.loss_T)
    assert torch.equal(one.clipped_T, other.clipped_T)


@COMMON
@given(tokens, st.floats(-3, 3), st.data())
def test_gspo_and_cispo_depend_only_on_the_ratio(
    rows: list[tuple[float, float, float]], shift: float, data: st.DataObject
) -> None:
    trainer, proximal, advantages = columns(rows)
    index = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    samples = Samples(torch.tensor(index), 3)
    one = gspo(trainer, proximal, advantages, samples=samples, clip_low=0.2, clip_high=0.2)
    other = gspo(trainer + shift, proximal + shift, advantages, samples=samples, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(one.loss_T, other.loss_T)
    held = cispo(trainer, proximal, advantages, clip_high=2.0)
    moved = cispo(trainer + shift, proximal + shift, advantages, clip_high=2.0)
    torch.testing.assert_close(gradient(held.loss_T, trainer), gradient(moved.loss_T, trainer))


@COMMON
@given(tokens)
def test_the_cispo_gradient_is_the_truncated_ratio_times_the_advantage(rows: list[tuple[float, float, float]]) -> None:
    trainer, proximal, advantages = columns(rows)
    result = cispo(trainer, proximal, advantages, clip_high=2.0)
    expected = -(trainer - proximal).exp().clamp(max=2.0) * advantages
    torch.testing.assert_close(gradient(result.loss_T, trainer), expected.detach())


@COMMON
@given(tokens, st.floats(0.05, 2))
def test_the_clipped_value_loss_is_never_below_the_plain_one(
    rows: list[tuple[float, float, float]], clip: float
) -> None:
    values, returns, start = columns(rows)
    plain, clipped = value_loss(values, returns, start), value_loss(values, returns, start, clip=clip)
    assert bool((clipped.loss_T >= plain.loss_T).all())
    assert bool((gradient(clipped.loss_T, values)[clipped.clipped_T] == 0).all())
    torch.testing.assert_close(clipped.loss_T[~clipped.clipped_T], plain.loss_T[~clipped.clipped_T])


@COMMON
@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), max_size=20))
def test_samples_sum_their_own_tokens(rows: list[tuple[float, int]]) -> None:
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    samples = Samples(torch.tensor([sample for _, sample in rows], dtype=torch.long), 4)
    own = [[value for value, sample in rows if sample == at] for at in range(4)]
    sums = samples.sum(values)
    torch.testing.assert_close(sums, torch.tensor([sum(each) for each in own], dtype=torch.float64))
    means = torch.tensor([sum(each) / len(each) if each else 0.0 for each in own], dtype=torch.float64)
    torch.testing.assert_close(samples.mean(values), means)
    torch.testing.assert_close(samples.mean(samples.spread(sums)), sums)
