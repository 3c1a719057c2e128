"""Run by `test_interpreter.py` in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from tidemill.core.records import SamplingParams
from tidemill.kernels.draw import _gumbel, draw_tokens
from tidemill.rollout.sampling import Drawn, draw, noise_key, seed_state

TEMPERATURES = (0.0, 0.3, 1.0, 2.0)


class Rows:
    """Rows to draw, with seeds and positions all over their ranges."""

    def __init__(self, rows: int, *, temperatures: tuple[float, ...] = TEMPERATURES) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator).tolist()
        self.positions = torch.randint(0, 200_000, (rows,), generator=generator)
        self.temperatures = torch.tensor(temperatures).repeat(-(-rows // len(temperatures)))[:rows]
        states = [seed_state(seed) for seed in self.seeds]
        self.states = torch.tensor(states).to(torch.int32)  # wraps

    def kernel(self, logits: torch.Tensor, order: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        rows = list(range(len(self.seeds))) if order is None else order
        return draw_tokens(logits[rows], self.states[rows], self.positions[rows], self.temperatures[rows])

    def torch(self, logits: torch.Tensor) -> Drawn:
        keys = [noise_key(seed, place) for seed, place in zip(self.seeds, self.positions.tolist(), strict=True)]
        temperatures = self.temperatures.double().mul(10).round().div(10).tolist()
        return draw(logits, keys, [SamplingParams(max_new_tokens=1, temperature=t) for t in temperatures])


def logits_of(rows: int, vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * scale


@pytest.mark.parametrize(("vocabulary", "rows"), [(1, 4), (50, 40), (1000, 24), (2048, 4), (2049, 4), (49_155, 4)])
def test_tokens_are_those_of_the_torch_function(vocabulary: int, rows: int) -> None:
    case, logits = Rows(rows), logits_of(rows, vocabulary)
    token_ids, logprobs = case.kernel(logits)
    expected = case.torch(logits)
    assert torch.equal(token_ids, expected.token_ids)
    torch.testing.assert_close(logprobs, expected.logprobs, atol=1e-5, rtol=0)


@triton.jit
def noise_kernel(hashes, noise, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, COUNT)
    tl.store(noise + places, _gumbel(tl.load(hashes + places).to(tl.uint32, bitcast=True)))


def test_noise_is_exact_at_both_ends() -> None:
    hashes = [
        0,
        1,
        2,
        127,
        128,
        129,
        0xFFFF,
        0x10000,
        1 << 24,
        1 << 30,
        1 << 31,
        *((1 << 32) - n for n in (1 << 12, 300, 257, 1, 2)),
    ]
    noise = torch.empty(len(hashes))
    noise_kernel[(1,)](torch.tensor(hashes).to(torch.int32), noise, COUNT=len(hashes))
    largest = 1 - 2**-24  # of float32 below 1
    expected = [-math.log(-math.log1p(-min((x + 0.5) / 2**32, largest))) for x in hashes]
    assert noise[:-5].tolist() == pytest.approx(expected[:-5], rel=5e-7)
    assert noise[-5:].tolist() == pytest.approx(expected[-5:], abs=0.05)  # 1 - u has few bits left


def test_a_row_has_the_same_bits_alone_and_in_other_batches() -> None:
    # The most likely token's logprob is -log(1 + the sum of the others): differences of the sum are not rounded away.
    case, logits = Rows(6, temperatures=(0.0, 0.0, 0.8)), logits_of(6, 6200, scale=1.0) - 8.0
    logits[:, 5000] = 0.0
    token_ids, logprobs = case.kernel(logits)
    for order in (*([row] for row in range(6)), [3, 1], [5, 4, 3, 2, 1, 0, 0, 2]):
        other_ids, other_logprobs = case.kernel(logits, order)
        assert torch.equal(other_ids, token_ids[order])
        assert torch.equal(other_logprobs, logprobs[order])


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    case, logits = Rows(4), logits_of(4, 300)
    assert torch.equal(case.kernel(logits[:, :77])[0], case.torch(logits[:, :77]).token_ids)
    token_ids, _ = draw_tokens(logits[:, :77], case.states, case.positions, case.temperatures)
    assert torch.equal(token_ids, case.torch(logits[:, :77]).token_ids)


@pytest.mark.parametrize("kind", ["one finite", "first block masked", "last block masked", "large", "far apart"])
def test_extreme_logits(kind: str) -> None:
    case, logits = Rows(4), logits_of(4, 4100)
    if kind == "one finite":
        logits[:, torch.arange(4100) != 4099] = -math.inf
    elif kind == "first block masked":
        logits[:, :2048] = -math.inf
    elif kind == "last block masked":
        logits[:, 4096:] = -math.inf
    elif kind == "large":
        logits += 3e4
    else:
        logits[:, 7], logits[:, 3000:] = 1e30, -1e30
    token_ids, logprobs = case.kernel(logits)
    expected = case.torch(logits)
    assert torch.equal(token_ids, expected.token_ids)
    # of 3e4, the last bit is 0.002 (0.008 at temperature 0.3)
    torch.testing.assert_close(logprobs, expected.logprobs, atol=0.008 if kind == "large" else 1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_of_nan_gives_a_token_of_the_vocabulary_and_no_logprob() -> None:
    logits = torch.full((4, 50), math.nan)
    token_ids, logprobs = Rows(4).kernel(logits)
    assert bool(((token_ids >= 0) & (token_ids < 50)).all())
    assert bool(logprobs.isnan().all())


def test_draws_follow_the_softmax() -> None:
    n = 100
    case = Rows(n, temperatures=(0.8,))
    logits = torch.tensor([0.0, 1.0, 0.5, -1.0])
    token_ids, logprobs = case.kernel(logits.expand(n, 4))
    expected = (logits / 0.8).softmax(-1)
    counts = torch.bincount(token_ids, minlength=4)
    assert float(((counts - n * expected) ** 2 / (n * expected)).sum()) < 16.3  # chi-squared(3), 0.999
    torch.testing.assert_close(logprobs, expected.log()[token_ids], atol=1e-5, rtol=0)
    assert torch.equal(token_ids, case.torch(logits.expand(n, 4)).token_ids)
