"""What a microbatch makes of its samples' logprobs under the versions published since they were made."""

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
from tidemill.trainer.packing import Weighted, by_sample, pack
from tidemill.trainer.update import policy_outcome


def log(*probabilities: float) -> list[float]:
    return [math.log(each) for each in probabilities]


def made(rollout: list[float], published: list[list[float]], *, index: int = 0) -> Trajectory:
    """A sample with these logprobs; its tokens are its own, so that samples share no prediction but the first."""
    plain = trajectory([5, 6], [10 + index] * len(rollout), 1.0, index=index, logprobs=rollout)
    return msgspec.structs.replace(plain, publish_logprobs=tuple(map(pack_logprobs, published)))


def weights(
    samples: list[Trajectory], proximal: list[list[float]], *, high: float, kind: str = "mu_step"
) -> list[list[float]]:
    """What the correction makes of each token, sample by sample."""
    weighted = [Weighted(trajectory=one, advantage=1.0, token_weight=1.0) for one in samples]
    microbatch = pack(weighted, torch.device("cpu"))
    # As the trainer has them: in the microbatch's order. Where each token went is read off its position.
    flat = torch.tensor([each for part in proximal for each in part])
    order = torch.cat([torch.from_numpy(part) for part in by_sample(torch.arange(len(flat)), microbatch.samples)])
    microbatch.proximal_logprobs = torch.empty_like(flat).index_copy(0, order.long(), flat)
    now_T = microbatch.proximal_logprobs.clone().requires_grad_()
    algorithm = AlgorithmConfig.model_validate({"correction": {"kind": kind, "high": high}})
    outcome = policy_outcome(algorithm, microbatch, now_T, torch.zeros_like(flat), kl_beta=0.0)
    return [part.tolist() for part in by_sample(outcome.corrected.weights_T, microbatch.samples)]


def test_a_token_made_between_two_publishes_has_a_factor_for_the_later_one_alone() -> None:
    rollout = log(0.1, 0.2, 0.4)  # the second token was made after the first publish, the third after both
    published = [log(0.3, 0.2, 0.4), log(0.45, 0.5, 0.4)]
    now = log(0.45, 0.5, 0.1)  # of the version that was published last
    # first token: 0.3 / 0.1 = 3, held at 2; 0.45 / 0.3 = 1.5; 0.45 / 0.45 = 1
    # second token: 1; 0.5 / 0.2 = 2.5, held at 2; 1
    # third token: 1; 1; 0.1 / 0.4 = 0.25
    assert weights([made(rollout, published)], [now], high=2.0)[0] == pytest.approx([2 * 1.5, 2.0, 0.25])
    # where tis holds the whole ratio: 0.45 / 0.1 = 4.5, 0.5 / 0.2 = 2.5, 0.25
    assert weights([made(rollout, published)], [now], high=2.0, kind="tis")[0] == pytest.approx([2.0, 2.0, 0.25])


def test_samples_that_saw_fewer_publishes_stand_beside_others() -> None:
    seen_by_both = made(log(0.1, 0.2), [log(0.4, 0.2), log(0.4, 0.1)])
    young = made(log(0.2), [log(0.6)], index=1)
    newest = made(log(0.25), [], index=2)
    found = weights([seen_by_both, young, newest], [log(0.2, 0.1), log(0.6), log(0.75)], high=2.0)
    # 0.4 / 0.1 held at 2, then 1, then 0.2 / 0.4; 1, then 0.1 / 0.2, then 1
    assert found[0] == pytest.approx([1.0, 0.5])
    assert found[1] == pytest.approx([2.0])  # 3, held
    assert found[2] == pytest.approx([2.0])  # as tis


LOGPROBS = st.floats(-6.0, -0.125, width=32)


@given(st.data())
def test_without_a_bound_it_telescopes_to_the_whole_ratio(data: st.DataObject) -> None:
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
