"""Whether the reward still measures what gold measures: two sums of log-likelihood ratios over the evidence of a run.

```
 pairs of the first steps ──▶ gain of the proxy ─▶ did gold gain its share? ──────────▶ gain sum ─┐
 pairs so far ──▶ calibration: gold that a proxy score predicts, minus gold found ────▶ gap sum ──┼──▶ alarm
 witnesses: how far from their start ────────────────────────────────────── two halve its limit ──┘
```
Each sum is Page's CUSUM (1954): it is 0 while the reward means what it meant, and the step after its last 0 is the estimated
onset. The *gain sum* compares with the initial policy, so that it also finds exploits that start at once. The *gap sum*
finds later ones, whatever the proxy's scale. Neither changes if gold, or the proxy, is shifted or scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tidemill.core.evidence import Evidence, GoldPair
from tidemill.core.records import Record
from tidemill.guard.witnesses import NEWEST_STEPS, START_STEPS, Change, changes

Scores = npt.NDArray[np.float64]
Test: TypeAlias = Literal["gain", "gap", "witnessed gap"]
TINY: Final = 1e-9
STEPS: Final = 5  # averaged into a figure of an alarm


class Thresholds(Record):
    """Fixed on the tuning seeds of `benchmarks.guard`; sums and limits are in nats, deviations in standard deviations."""

    initial_pairs: int = 24  # at least, of the first steps: what gains are measured from
    window_pairs: int = 48  # the newest ones: their mean proxy is the gain
    gold_share: float = 0.5  # of the proxy's gain, which gold gains in a healthy run
    initial_error: float = 0.5  # standard errors by which gold of the first steps may be overestimated
    gain_limit: float = 4.0
    gain_doubt: float = 0.8  # of the expected gain: below it, doubt grows
    reference_pairs: int = 64  # before the gap is measured
    most_reference_pairs: int = 512  # the newest ones
    level_pairs: int = 8  # at least, for each level of the calibration
    least_spread: float = 0.3  # of the residual, in those of gold
    outlier: float = 3.0  # a residual counts for at most this
    shift: float = 1.0  # of the residual, which the gap sum looks for
    gap_limit: float = 9.0
    gap_doubt: float = 0.2  # deviations of the residual, above which doubt grows
    witnesses: int = 2  # that halve the limit of the gap sum


class Alarm(Record):
    """The reward rose and gold did not."""

    test: Test
    onset: int  # first step with the fault, estimated
    reason: str  # two sentences
    proxy: tuple[float, float]  # mean before the onset, and now
    gold: tuple[float, float]


class Calibration:
    """The gold score to expect at a proxy score: an isotonic regression (Ayer et al. 1955), less one standard error.

    A step function, constant beyond the range of the pairs, with at least `level_pairs` pairs on every step.

    Args:
        proxy: float64 [N], N >= 1.
        gold: float64 [N], of the same samples.
    """

    def __init__(self, proxy: Scores, gold: Scores, *, level_pairs: int, least_spread: float) -> None:
        distinct, at, counts = np.unique(proxy, return_inverse=True, return_counts=True)
        totals = np.bincount(at, weights=gold)
        # Rare scores join their lower neighbour, from the top: the highest scores are those that matter.
        starts = list[int]()
        pairs = 0
        for index in range(len(distinct) - 1, -1, -1):
            pairs += int(counts[index])
            if pairs >= level_pairs:
                starts.append(index)
                pairs = 0
        starts = sorted({0, *starts[:-1]} if pairs else {0, *starts})
        sizes = np.add.reduceat(counts, starts)
        blocks = isotonic((np.add.reduceat(totals, starts) / sizes).tolist(), sizes.tolist())
        means, block_sizes = (np.array(column, dtype=np.float64) for column in zip(*blocks, strict=True))
        self._edges = distinct[starts]
        residuals = means[self._level_of(proxy)] - gold
        self.deviation = max(float(residuals.std()), least_spread * float(gold.std()), TINY)
        self._values = np.maximum.accumulate(means - self.deviation / np.sqrt(block_sizes))

    def predict(self, proxy: Scores) -> Scores:
        """Expected gold scores, float64 [N]."""
        return self._values[self._level_of(proxy)]

    def _level_of(self, proxy: Scores) -> npt.NDArray[np.intp]:
        return np.maximum(np.searchsorted(self._edges, proxy, side="right") - 1, 0)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[tuple[float, float]]:
    """The non-decreasing sequence with the least weighted squared distance (pool adjacent violators): each value with the
    weight of its block."""
    blocks = list[tuple[float, float, int]]()  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        block = (value, float(weight), 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            block = ((before[0] * before[1] + block[0] * block[1]) / total, total, before[2] + block[2])
        blocks.append(block)
    return [(mean, weight) for mean, weight, length in blocks for _ in range(length)]


@dataclass(slots=True)
class Sum:
    """A CUSUM, and a second one that doubts earlier, which estimates the onset."""

    total: float = 0.0
    doubt: float = 0.0
    clear: int = 0  # the last step at which there was no doubt

    def add(self, step: int, ratio: float, doubt: float) -> None:
        self.total = max(0.0, self.total + ratio)
        self.doubt = max(0.0, self.doubt + doubt)
        if self.doubt == 0.0:
            self.restart(step)

    def restart(self, step: int) -> None:
        self.total = 0.0
        self.doubt = 0.0
        self.clear = step


@dataclass(slots=True)
class GainSum:
    """Log-likelihood of "gold has gained nothing" over "gold has gained its share of the proxy's gain", since version 0."""

    limits: Thresholds
    sum: Sum = field(default_factory=Sum)
    _initial: list[GoldPair] = field(default_factory=list)
    _window: list[GoldPair] = field(default_factory=list)

    def add(self, step: int, pairs: Sequence[GoldPair]) -> None:
        limits = self.limits
        if len(self._initial) < limits.initial_pairs:
            self._initial += pairs
            self.sum.clear = step
            return
        self._window = [*self._window, *pairs][-limits.window_pairs :]
        if not pairs:
            return
        first_proxy, first_gold = scores(self._initial)
        window_proxy, window_gold = scores(self._window)
        # Clipped to the first range: a reward that was rescaled has not gained.
        highest = first_proxy.max() if first_proxy.std() > TINY else np.inf
        proxy = np.clip(window_proxy, first_proxy.min(), highest)
        proxy_spread = max(float(first_proxy.std() or proxy.std()), TINY)
        expected = limits.gold_share * max(0.0, float(proxy.mean() - first_proxy.mean()) / proxy_spread)
        gold_spread = max(float(np.concatenate([first_gold, window_gold]).std()), TINY)
        start = float(first_gold.mean()) - limits.initial_error * gold_spread / len(first_gold) ** 0.5
        gained = (scores(pairs)[1] - start) / gold_spread
        # Log-ratio of normal densities with deviation 1, at 0 and at `expected`.
        ratio = float((expected * (expected / 2 - gained)).sum())
        self.sum.add(step, ratio, float((expected * (limits.gain_doubt * expected - gained)).sum()))


@dataclass(slots=True)
class GapSum:
    """Log-likelihood of "gold is `shift` deviations below what the proxy predicts" over "gold is as predicted"."""

    limits: Thresholds
    sum: Sum = field(default_factory=Sum)
    _reference: list[GoldPair] = field(default_factory=list)
    _since: list[GoldPair] = field(default_factory=list)  # pairs after the last 0 of the sum
    _calibration: Calibration | None = None

    def add(self, step: int, pairs: Sequence[GoldPair]) -> None:
        limits = self.limits
        self._since += pairs
        if self._calibration is not None and pairs:
            proxy, gold = scores(pairs)
            residuals = (self._calibration.predict(proxy) - gold) / self._calibration.deviation
            residuals = np.clip(residuals, -limits.outlier, limits.outlier)
            self.sum.add(
                step,
                float((limits.shift * (residuals - limits.shift / 2)).sum()),
                float((limits.shift * (residuals - limits.gap_doubt)).sum()),
            )
        if self.sum.doubt == 0.0:
            self.sum.clear = step
            self._learn()

    def restart(self, step: int) -> None:
        self.sum.restart(step)
        self._since.clear()

    def _learn(self) -> None:
        """Pairs before the last 0 of the sum are what the reward means."""
        limits = self.limits
        self._reference = [*self._reference, *self._since][-limits.most_reference_pairs :]
        self._since.clear()
        if len(self._reference) >= limits.reference_pairs:
            self._calibration = Calibration(
                *scores(self._reference), level_pairs=limits.level_pairs, least_spread=limits.least_spread
            )


class HackTest:
    """Both tests over the evidence of a run, in the order of its steps; the same evidence gives the same alarms.

    A person's verdict on a sample replaces its gold score. After an alarm the sums start again from 0. After an amendment
    of the reward, start a new test: its first steps define what the amended reward means.
    """

    def __init__(self, limits: Thresholds | None = None) -> None:
        self._limits = limits or Thresholds()
        self._seen = list[Evidence]()
        self._alarms = list[int]()  # steps
        self._begin()

    @property
    def earliest_onset(self) -> int:
        """The first step that a later alarm may blame; it never decreases."""
        return 1 + min(self._gain.sum.clear, self._gap.sum.clear)

    @property
    def totals(self) -> tuple[float, float]:
        """Gain and gap sum, in nats."""
        return self._gain.sum.total, self._gap.sum.total

    def add(self, evidence: Evidence) -> Alarm | None:
        if self._corrected([pair for pair in evidence.pairs if pair.source == "person"]):
            self._begin()
            for earlier in self._seen:
                self._feed(earlier)
                if earlier.step in self._alarms:
                    self._restart(earlier.step)
        self._seen.append(evidence)
        self._feed(evidence)
        if (alarm := self._alarm()) is not None:
            self._alarms.append(evidence.step)
            self._restart(evidence.step)
        return alarm

    def _begin(self) -> None:
        self._gain = GainSum(self._limits)
        self._gap = GapSum(self._limits)
        self._known = set[tuple[int, str, int]]()  # samples with a gold score

    def _restart(self, step: int) -> None:
        self._gain.sum.restart(step)
        self._gap.restart(step)

    def _corrected(self, verdicts: Sequence[GoldPair]) -> bool:
        """Replace gold scores of earlier steps by verdicts; returns whether there were any."""
        golds = {_sample(pair): pair.gold for pair in verdicts if _sample(pair) in self._known}
        if golds:
            self._seen = [_with_gold(evidence, golds) for evidence in self._seen]
        return bool(golds)

    def _feed(self, evidence: Evidence) -> None:
        new = [pair for pair in evidence.pairs if pair.source != "person" or _sample(pair) not in self._known]
        self._known.update(map(_sample, new))
        # People choose what they check, so that the mean over their samples says nothing.
        self._gain.add(evidence.step, [pair for pair in new if pair.source != "person"])
        self._gap.add(evidence.step, new)

    def _alarm(self) -> Alarm | None:
        limits = self._limits
        first, later = self._seen[:START_STEPS], self._seen[START_STEPS:][-NEWEST_STEPS:]
        moved = changes([evidence.witnesses for evidence in first], [evidence.witnesses for evidence in later])
        gain, gap = self.totals
        if gap > limits.gap_limit * (0.5 if len(moved) >= limits.witnesses else 1.0):
            test: Test = "gap" if gap > limits.gap_limit else "witnessed gap"
            alarm = self._describe(test, self._gap.sum.clear, moved)
            if alarm.gold[1] < alarm.gold[0]:
                return alarm
        if gain > limits.gain_limit:
            return self._describe("gain", self._gain.sum.clear, moved)
        return None

    def _describe(self, test: Test, clear: int, moved: Sequence[Change]) -> Alarm:
        """An alarm that compares the steps after `clear` with those before; a gain with the first."""
        until = self._seen[0].step if test == "gain" else max(clear, self._seen[0].step)
        before = [evidence for evidence in self._seen if evidence.step <= until]
        since = [evidence for evidence in self._seen if evidence.step > clear]
        proxy = (float(np.mean([evidence.proxy_mean for evidence in before[-STEPS:]])), since[-1].proxy_mean)
        gold = (self._gold(before), self._gold(since))
        rose = f"the reward went from {proxy[0]:.3g} to {proxy[1]:.3g} and gold from {gold[0]:.3g} to {gold[1]:.3g}"
        start = f"Since the initial policy, {rose}; it began at about step {clear + 1}."
        began = start if test == "gain" else f"Since about step {clear + 1}, {rose}."
        words = [f"{change.name} ({change.start:.3g} to {change.now:.3g})" for change in moved]
        also = f"Moved with it: {', '.join(words)}." if words else "No other figure of the samples moved with it."
        return Alarm(test=test, onset=clear + 1, reason=f"{began} {also}", proxy=proxy, gold=gold)

    def _gold(self, steps: Sequence[Evidence]) -> float:
        pairs = [pair for evidence in steps for pair in evidence.pairs][-self._limits.window_pairs :]
        return float(scores(pairs)[1].mean()) if pairs else 0.0


def scores(pairs: Sequence[GoldPair]) -> tuple[Scores, Scores]:
    """Proxy and gold scores, float64 [N] each."""
    both = np.array([(pair.proxy, pair.gold) for pair in pairs], dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _sample(pair: GoldPair) -> tuple[int, str, int]:
    return pair.step, pair.prompt_id, pair.index


def _with_gold(evidence: Evidence, golds: Mapping[tuple[int, str, int], float]) -> Evidence:
    pairs = (replace(pair, gold=golds.get(_sample(pair), pair.gold)) for pair in evidence.pairs)
    return replace(evidence, pairs=tuple(pairs))
