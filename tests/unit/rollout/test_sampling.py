from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.records import SamplingParams
from tidemill.rollout.sampling import blockwise_logsumexp, draw, gumbel, noise_key

CPU = torch.device("cpu")
GOLDEN = [-0.7033924, 1.7988982, -0.3008050, 3.4727314]


def params(count: int, **fields: float) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=1, **fields)] * count  # type: ignore[arg-type]


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86_32 with seed 0, for whole words (Appleby)."""
    state, mask = 0, 0xFFFFFFFF
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) & mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


def test_the_reference_of_these_tests_is_murmur3() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # published values of seed 0
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    places = [(1, 0), (2**63 - 1, 17), (987654321987, 130_000)]
    noise = gumbel([noise_key(*place) for place in places], 3000, CPU)
    for row, (seed, position) in enumerate(places):
        for token in (0, 1, 77, 2999):
            u = (murmur3(struct.pack("<QII", seed, position, token)) + 0.5) / 2**32
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=1e-5)


def test_golden_noise() -> None:
    noise = gumbel([noise_key(12345, 6)], 4, CPU)
    assert noise[0].tolist() == pytest.approx(GOLDEN, abs=1e-6)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel([noise_key(1, t) for t in range(64)], 4096, CPU).double()
    n = noise.numel()
    # mean Euler's gamma, variance pi^2 / 6; standard error of the mean sqrt(1.645 / n), 5 of them allowed
    assert abs(noise.mean() - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
    # the distribution function exp(-exp(-x)) is uniform: compare ten bins, chi-squared with 9 degrees of freedom
    counts = torch.histc(torch.exp(-torch.exp(-noise)), bins=10, min=0, max=1)
    assert float(((counts - n / 10) ** 2 / (n / 10)).sum()) < 27.9  # the 0.999 quantile


def test_noise_of_neighbouring_keys_positions_and_tokens_is_uncorrelated() -> None:
    noise = gumbel([noise_key(7, t) for t in range(512)], 512, CPU)
    centred = noise - noise.mean()
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.flip(0), centred.T):
        correlation = float((centred * other).mean() / centred.var())
        assert abs(correlation) < 5 / 512


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 40_000
    drawn = draw(logits.expand(n, 4), [noise_key(3, t) for t in range(n)], params(n, temperature=0.8))
    expected = (logits / 0.8).softmax(-1)
    counts = torch.bincount(drawn.token_ids, minlength=4)
    assert float(((counts - n * expected) ** 2 / (n * expected)).sum()) < 16.3  # chi-squared(3), 0.999
    torch.testing.assert_close(drawn.logprobs, expected.log()[drawn.token_ids])


def test_greedy_takes_the_most_likely_and_reports_its_probability() -> None:
    drawn = draw(torch.tensor([[0.0, math.log(3.0)]]), [0], params(1, temperature=0.0))
    assert drawn.token_ids.tolist() == [1]
    assert drawn.logprobs.tolist() == pytest.approx([math.log(3 / 4)])


def test_top_k_and_top_p_normalise_over_kept_tokens() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    n = 400
    keys = [noise_key(5, t) for t in range(n)]
    two = draw(logits.expand(n, 4), keys, params(n, top_k=2))
    assert set(two.token_ids.tolist()) == {0, 1}
    assert two.logprobs[two.token_ids == 0][0].item() == pytest.approx(math.log(0.4 / 0.7), rel=1e-5)
    # 0.4 + 0.3 < 0.75 <= 0.4 + 0.3 + 0.2: the token that crosses the threshold is kept
    three = draw(logits.expand(n, 4), keys, params(n, top_p=0.75))
    assert set(three.token_ids.tolist()) == {0, 1, 2}
    assert three.logprobs[three.token_ids == 2][0].item() == pytest.approx(math.log(0.2 / 0.9), rel=1e-5)


@settings(max_examples=30)
@given(st.permutations(range(9)), st.integers(0, 2**64 - 1))
def test_a_row_does_not_depend_on_its_neighbours(order: list[int], seed: int) -> None:
    logits = torch.linspace(-3, 3, 9 * 50).reshape(9, 50).sin() * 4
    keys = [noise_key(seed, t) for t in range(9)]
    mixed = [*params(3), *params(3, temperature=0.0), *params(3, temperature=0.5, top_p=0.9)]
    together = draw(logits, keys, mixed)
    shuffled = draw(logits[list(order)], [keys[i] for i in order], [mixed[i] for i in order])
    assert torch.equal(shuffled.token_ids, together.token_ids[list(order)])
    assert torch.equal(shuffled.logprobs, together.logprobs[list(order)])


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_blocks_of_rows_have_one_shape_and_give_the_same_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(rows, 50)
    expected = logits.logsumexp(-1)
    library, shapes = torch.Tensor.logsumexp, set[torch.Size]()

    def recorded(block: torch.Tensor, dim: int) -> torch.Tensor:
        shapes.add(block.shape)
        return library(block, dim)

    monkeypatch.setattr(torch.Tensor, "logsumexp", recorded)
    torch.testing.assert_close(blockwise_logsumexp(logits), expected)
    assert shapes == {torch.Size((32, 50))}
