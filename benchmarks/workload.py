"""The workload of the generation benchmark: prompts, samples per prompt, and the length of every completion."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from benchmarks.additions import NEW_TOKENS, addition_prompts
from benchmarks.turns import Work


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All lengths are fixed in advance, so that both sides generate the same number of tokens."""

    case: str
    target: float | None
    prompts: tuple[tuple[int, ...], ...]  # token ids per prompt; empty if `texts` is given
    texts: tuple[str, ...]
    group_size: int
    lengths: tuple[int, ...]  # completion tokens of each sample, groups one after another
    slots: int  # ours: samples decoded at once; theirs: samples in a batch
    rounds: int

    @property
    def samples(self) -> int:
        return len(self.lengths)

    def work(self, prompts: list[list[int]]) -> Work:
        return Work(
            samples=self.samples,
            prompt_tokens=sum(len(prompt) for prompt in prompts) * self.group_size,
            completion_tokens=sum(self.lengths),
        )


def demo_shape(*, rounds: int) -> Workload:
    """8 prompts x 8 samples, the prompt six times as long as the completion."""
    return Workload(
        case="prompt 18, completion 3 (the demo's shape), 8 prompts x 8",
        target=3.0,
        prompts=(),
        texts=tuple(addition_prompts(8)),
        group_size=8,
        lengths=(NEW_TOKENS,) * 64,
        slots=64,
        rounds=rounds,
    )


def even_shape(*, prompts: int, group_size: int, target: float | None, vocabulary: int, rounds: int) -> Workload:
    """64 prompt tokens and 64 new ones."""
    return Workload(
        case=f"prompt 64, completion 64, {prompts} prompts x {group_size}",
        target=target,
        prompts=random_prompts(prompts, 64, vocabulary),
        texts=(),
        group_size=group_size,
        lengths=(64,) * (prompts * group_size),
        slots=prompts * group_size,
        rounds=rounds,
    )


def long_tail(*, samples: int, group_size: int, slots: int, vocabulary: int, rounds: int) -> Workload:
    """Geometric lengths of mean 48, cut at 256: a static batch waits for its longest sample."""
    return Workload(
        case=f"prompt 32, geometric lengths (mean 48, at most 256), {samples} samples over {slots} slots",
        target=2.5,
        prompts=random_prompts(samples // group_size, 32, vocabulary),
        texts=(),
        group_size=group_size,
        lengths=geometric_lengths(samples, mean=48, cut=256),
        slots=slots,
        rounds=rounds,
    )


def geometric_lengths(count: int, *, mean: float, cut: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of 1, 2, ... where each further token comes with probability 1 - 1/mean, but at most `cut`."""
    source = random.Random(seed)
    stay = math.log(1 - 1 / mean)
    return tuple(min(cut, 1 + int(math.log(1 - source.random()) / stay)) for _ in range(count))


def random_prompts(count: int, length: int, vocabulary: int, *, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Token ids without common prefixes; without low ids (special tokens)."""
    source = random.Random(seed)
    lowest = min(100, vocabulary // 2)
    return tuple(tuple(source.randrange(lowest, vocabulary) for _ in range(length)) for _ in range(count))
