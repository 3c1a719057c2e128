"""The mu_step correction with logprobs under versions published since generation."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trajectories import trajectory
from tidemill.config.algorithm import AlgorithmConfig
from tidemill.core.records import Trajectory, pack_logprobs
from tidemill.trainer.packing import WeightedSample, pack, split_by_sample
from tidemill.trainer.update import policy_outcome


def log(*probabilities: float) -> list[float]:
    return [math.log(each) for each in probabilities]


def made(rollout: list[float], published: list[list[float]], *, index: int = 0) -> Trajectory:
    """A sample with these logprobs; samples share only the first prediction."""
    plain = trajectory([5, 6], [10 + index] * len(rollout), 1.0, index=index, logprobs=rollout)
    return msgspec.structs.replace(plain, publish_logprobs=tuple(map(pack_logprobs, published)))


def weights(
    samples: list[Trajectory], proximal: list[list[float]], *, high: float, kind: str = "mu_step"
) -> list[list[float]]:
    """Correction weights of the tokens of each sample."""
    weighted = [WeightedSample(trajectory=one, advantage=1.0, token_weight=1.0) for one in samples]
    microbatch = pack(weighted, torch.device("cpu"))
    # In the order of the microbatch, as in the trainer.
    flat = torch.tensor([each for part in proximal for each in part])
    order = torch.cat([torch.from_numpy(part) for part in split_by_sample(torch.arange(len(flat)), microbatch.samples)])
    microbatch.proximal_logprobs = torch.empty_like(flat).index_copy(0, order.long(), flat)
    now_T = microbatch.proximal_logprobs.clone().requires_grad_()
    algorithm = AlgorithmConfig.model_validate({"correction": {"kind": kind, "high": high}})
    outcome = policy_outcome(algorithm, microbatch, now_T, torch.zeros_like(flat), kl_beta=0.0)
    return [part.tolist() for part in split_by_sample(outcome.corrected.weights_T, microbatch.samples)]


def test_a_token_generated_between_two_publishes_has_a_factor_for_the_later_one_only() -> None:
    rollout = log(0.1, 0.2, 0.4)  # the second token was generated after the first publish, the third after both
    published = [log(0.3, 0.2, 0.4), log(0.45, 0.5, 0.4)]
    now = log(0.45, 0.5, 0.1)  # of the last published version
    # first token: 0.3 / 0.1 = 3, truncated to 2; 0.45 / 0.3 = 1.5; 0.45 / 0.45 = 1
    # second token: 1; 0.5 / 0.2 = 2.5, truncated to 2; 1
    # third token: 1; 1; 0.1 / 0.4 = 0.25
    assert weights([made(rollout, published)], [now], high=2.0)[0] == pytest.approx([2 * 1.5, 2.0, 0.25])
    # tis truncates the whole ratio: 0.45 / 0.1 = 4.5, 0.5 / 0.2 = 2.5, 0.25
    assert weights([made(rollout, published)], [now], high=2.0, kind="tis")[0] == pytest.approx([2.0, 2.0, 0.25])


def test_samples_with_different_numbers_of_publishes_can_be_packed_together() -> None:
    seen_by_both = made(log(0.1, 0.2), [log(0.4, 0.2), log(0.4, 0.1)])
    young = made(log(0.2), [log(0.6)], index=1)
    newest = made(log(0.25), [], index=2)
    found = weights([seen_by_both, young, newest], [log(0.2, 0.1), log(0.6), log(0.75)], high=2.0)
    # 0.4 / 0.1 truncated to 2, then 1, then 0.2 / 0.4; 1, then 0.1 / 0.2, then 1
    assert found[0] == pytest.approx([1.0, 0.5])
    assert found[1] == pytest.approx([2.0])  # 3, truncated
    assert found[2] == pytest.approx([2.0])  # as tis


LOGPROBS = st.floats(-6.0, -0.125, width=32)


@given(st.data())
def test_without_truncation_the_factors_telescope_to_the_whole_ratio(data: st.DataObject) -> None:
    samples, proximal = [], []
    for index in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.integers(1, 5))
        several = st.lists(LOGPROBS, min_size=tokens, max_size=tokens)
        samples.append(made(data.draw(several), data.draw(st.lists(several, max_size=3)), index=index))
        proximal.append(data.draw(several))
    chained = weights(samples, proximal, high=1e9)
    whole = weights(samples, proximal, high=1e9, kind="tis")
    for ours, expected in zip(chained, whole, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4)
