"""Sampling noise: against an implementation in NumPy, against the CPU, and in other batches.

Integer hashes are the same everywhere; logarithms may differ by units in the last place (ulp) between devices. Tidemill
promises the same tokens on one device only; how often another device draws another token is measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.check_rows import CheckRows, Limit, Settings
from tidemill.core.records import SamplingParams
from tidemill.rollout.sampling import draw, gumbel, noise_key

CPU = torch.device("cpu")
Words = npt.NDArray[np.uint32]
LARGEST = 2e-5
"""Noise is below 23; 10 ulp there are 2e-5."""


def noise(rows: CheckRows) -> None:
    settings = rows.settings
    against_float64 = "two logarithms in float32 round; 3e-7 was measured on a CPU"
    rows.measure(
        "gumbel against numpy",
        partial(_against_numpy, settings),
        [Limit("max_relative_difference", 5e-6, against_float64)],
    )
    rows.measure(
        "gumbel against the cpu", partial(_against_cpu, settings), [Limit("max_difference", LARGEST, "10 ulp of 23")]
    )
    rows.measure(
        "drawn tokens against the cpu",
        partial(_drawn_tokens, settings),
        [Limit("tokens_differ", 1, "a tie within an ulp"), Limit("logprob_difference", 1e-4, "fp32 logsumexp")],
    )
    same = "draws are a function of seed and position"
    rows.measure(
        "the same draws in other batches",
        partial(_other_batches, settings),
        [Limit(figure, 0, same) for figure in ("tokens_differ", "logprobs_differ", "repeated_differ")],
    )


def _sizes(settings: Settings) -> tuple[int, int]:
    """Rows and vocabulary."""
    return (16, 997) if settings.tiny else (256, 151_936)


def _keys(count: int) -> list[int]:
    return [noise_key((0x9E3779B97F4A7C15 * (row + 1)) & ((1 << 64) - 1), row * 7919) for row in range(count)]


def _against_numpy(settings: Settings) -> dict[str, Any]:
    keys, vocabulary = _keys(4), _sizes(settings)[1]
    expected = np.stack([numpy_gumbel(key, vocabulary) for key in keys])
    found = gumbel(keys, vocabulary, settings.device).cpu().double().numpy()
    gaps = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    return {"max_relative_difference": float(gaps.max()), "of": gaps.size, "mean": float(found.mean())}


def numpy_gumbel(key: int, vocabulary: int) -> npt.NDArray[np.float64]:
    """murmur3 (Appleby) of the state `key` and each token; u = (hash + 1/2) / 2^32; -log(-log(1 - u)) in float64.

    u is a float32 by definition. Near 1 that rounds away up to a third of a thousandth of the noise, which there is
    most negative and never drawn.
    """
    word = np.arange(vocabulary, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    word = _rotated(word, 15) * np.uint32(0x1B873593)
    state = _rotated(np.uint32(key) ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= np.uint32(16)  # bytes hashed
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    u = ((state.astype(np.float64) + 0.5) / 2**32).astype(np.float32).astype(np.float64)
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24)))
    return noise


def _rotated(words: Words, bits: int) -> Words:
    rotated: Words = (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
    return rotated


def _against_cpu(settings: Settings) -> dict[str, Any]:
    rows, vocabulary = _sizes(settings)
    expected, found = (gumbel(_keys(rows), vocabulary, device).cpu() for device in (CPU, settings.device))
    ulps = (expected.view(torch.int32).long() - found.view(torch.int32).long()).abs()
    return {
        "different_bits": float((ulps > 0).double().mean()),
        "max_ulp": int(ulps.max()),  # many near 0, where the noise changes its sign
        "max_difference": float((expected - found).abs().max()),
    }


def _logits(settings: Settings) -> torch.Tensor:
    rows, vocabulary = _sizes(settings)
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def _drawn_tokens(settings: Settings) -> dict[str, Any]:
    logits = _logits(settings)
    keys, params = _keys(len(logits)), [SamplingParams(max_new_tokens=1)] * len(logits)
    expected, found = draw(logits, keys, params), draw(logits.to(settings.device), keys, params)
    same = expected.token_ids == found.token_ids.cpu()
    return {
        "tokens_differ": int((~same).sum()),
        "of": len(logits),
        "logprob_difference": float((expected.logprobs - found.logprobs.cpu())[same].abs().max()),
    }


def _other_batches(settings: Settings) -> dict[str, Any]:
    logits = _logits(settings).to(settings.device)
    keys, params = _keys(len(logits)), [SamplingParams(max_new_tokens=1)] * len(logits)
    whole, again = draw(logits, keys, params), draw(logits, keys, params)
    parts = [
        draw(logits[start : start + 7], keys[start : start + 7], params[start : start + 7])
        for start in range(0, len(logits), 7)
    ]
    logprobs = torch.cat([part.logprobs for part in parts])
    return {
        "tokens_differ": int((torch.cat([part.token_ids for part in parts]) != whole.token_ids).sum()),
        "logprobs_differ": int((logprobs != whole.logprobs).sum()),
        "repeated_differ": int(((again.token_ids != whole.token_ids) | (again.logprobs != whole.logprobs)).sum()),
        "of": len(logits),
    }
