"""Whether the reward still measures what gold measures: two sums of log-likelihood ratios over the evidence of a run.

Each is Page's CUSUM (1954): 0 while the reward means what it meant. The *gain sum* compares with the initial policy, so
that it also finds exploits that start at once. The *gap sum* compares gold with what the proxy has predicted so far, at
any scale of the proxy. Neither changes if gold or the proxy is shifted or scaled.
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

Scores: TypeAlias = npt.NDArray[np.float64]
Test: TypeAlias = Literal["gain", "gap", "witnessed gap"]
SampleKey: TypeAlias = tuple[int, str, int]
TINY: Final = 1e-9
SHOWN_STEPS: Final = 5  # averaged into a proxy figure of an alarm


class Thresholds(Record):
    """Chosen on the tuning runs of `benchmarks.guard`. Limits are in nats, other figures in standard deviations."""

    initial_pairs: int = 40  # at least, of the first steps: gains are measured from their means
    window_pairs: int = 48  # the newest ones: their mean proxy is the gain
    least_gold_spread: float = 0.25  # deviation of the initial gold scores, as a share of the range seen
    gold_share: float = 0.5  # of the proxy's gain, which gold gains in a healthy run
    gain_limit: float = 3.0
    gain_doubt: float = 0.8  # share of the expected gain, below which doubt grows
    reference_pairs: int = 64  # before the gap is measured
    most_reference_pairs: int = 512  # the newest ones
    level_pairs: int = 8  # at least, for each level of the calibration
    least_spread: float = 0.3  # of the residual, in deviations of gold
    outlier: float = 3.0  # a residual counts for at most this
    shift: float = 0.75  # of the residual, which the gap sum looks for
    gap_limit: float = 14.0
    gap_doubt: float = 0.2  # residual above which doubt grows
    witnesses: int = 2  # that halve the limit of the gap sum
    onset_margin: int = 5  # steps by which a fault is older than the first doubt


class Alarm(Record):
    """The reward rose and gold did not."""

    test: Test
    onset: int  # first step with the fault, estimated
    reason: str  # two sentences
    proxy: tuple[float, float]  # mean before the onset, and now
    gold: tuple[float, float]


class Calibration:
    """The gold score to expect at a proxy score: isotonic regression (Ayer et al. 1955), less one standard error.

    A step function, constant beyond the range of the pairs.

    Args:
        proxy: float64 [N], N >= 1.
        gold: float64 [N], of the same samples.
        level_pairs: at least, for each step of the function.
        least_spread: of the residuals, as a share of gold's standard deviation.
    """

    def __init__(self, proxy: Scores, gold: Scores, *, level_pairs: int, least_spread: float) -> None:
        distinct, at, counts = np.unique(proxy, return_inverse=True, return_counts=True)
        starts, pairs = [0], 0
        # From the top, because the highest scores matter most: rare ones join their lower neighbours.
        for index in range(len(distinct) - 1, 0, -1):
            pairs += int(counts[index])
            if pairs >= level_pairs:
                starts.append(index)
                pairs = 0
        starts.sort()
        sizes = np.add.reduceat(counts, starts)
        means, weights = isotonic(np.add.reduceat(np.bincount(at, weights=gold), starts) / sizes, sizes)
        self._edges = distinct[starts]
        residuals = means[self._level_of(proxy)] - gold
        self.deviation = max(float(residuals.std()), least_spread * float(gold.std()), TINY)
        self._values = np.maximum.accumulate(means - self.deviation / np.sqrt(weights))

    def predict(self, proxy: Scores) -> Scores:
        """Expected gold scores, float64 [N]; they never decrease with the proxy."""
        return self._values[self._level_of(proxy)]

    def _level_of(self, proxy: Scores) -> npt.NDArray[np.intp]:
        return np.maximum(np.searchsorted(self._edges, proxy, side="right") - 1, 0)


def isotonic(values: npt.ArrayLike, weights: npt.ArrayLike) -> tuple[Scores, Scores]:
    """The non-decreasing sequence with the least weighted squared distance (pool adjacent violators), and the weight of
    each value's block; float64 [N] each."""
    blocks = list[tuple[float, float, int]]()  # mean, weight, length
    for value, weight in zip(np.asarray(values, np.float64), np.asarray(weights, np.float64), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            block = ((before[0] * before[1] + block[0] * block[1]) / total, total, before[2] + block[2])
        blocks.append(block)
    means, totals, lengths = zip(*blocks, strict=True)
    return np.repeat(means, lengths), np.repeat(totals, lengths)


@dataclass(slots=True)
class Sum:
    """A CUSUM that raises the alarm, and one of weaker evidence, *doubt*: the onset is the step after its last 0."""

    total: float = 0.0
    doubt: float = 0.0
    clear: int = 0  # the last step without doubt
    pairs: int = 0  # since then

    def add(self, step: int, ratios: Scores, doubts: Scores) -> None:
        self.total = max(0.0, self.total + float(ratios.sum()))
        self.doubt = max(0.0, self.doubt + float(doubts.sum()))
        self.pairs += len(ratios)
        if self.doubt == 0.0:
            self.total = 0.0
            self.clear = step
            self.pairs = 0


@dataclass(slots=True)
class GainSum:
    """Log-likelihood of "gold gained nothing since the initial policy" over "its share of the proxy's gain"."""

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
        proxy, gold = scores(self._window)
        if first_proxy.std() > TINY:
            # A reward that was scaled up has not gained.
            proxy = np.clip(proxy, first_proxy.min(), first_proxy.max())
        proxy_spread = float(np.concatenate([first_proxy, proxy]).std())
        gold_spread = float(np.concatenate([first_gold, gold]).std())
        if min(proxy_spread, gold_spread) <= TINY:
            return  # scores that are all equal tell nothing
        if first_gold.std() < limits.least_gold_spread * np.ptp(np.concatenate([first_gold, gold])):
            return  # gold was almost always the same, so that it need not follow a small gain: a format comes first
        expected = limits.gold_share * max(0.0, float(proxy.mean() - first_proxy.mean()) / proxy_spread)
        gained = (scores(pairs)[1] - float(first_gold.mean())) / gold_spread
        # Log-ratio of normal densities with deviation 1, at 0 and at `expected`.
        ratios = expected * (expected / 2 - gained)
        self.sum.add(step, ratios, expected * (limits.gain_doubt * expected - gained))

    @property
    def total(self) -> float:
        """In nats, with the error of the initial mean, which all pairs since share."""
        return self.sum.total / (1 + self.sum.pairs / max(len(self._initial), 1))


@dataclass(slots=True)
class GapSum:
    """Log-likelihood of "gold is `shift` deviations below what the proxy predicts" over "gold is as predicted"."""

    limits: Thresholds
    sum: Sum = field(default_factory=Sum)
    _reference: list[GoldPair] = field(default_factory=list)  # what the reward means
    _since: list[GoldPair] = field(default_factory=list)  # doubted pairs
    _calibration: Calibration | None = None

    def add(self, step: int, pairs: Sequence[GoldPair]) -> None:
        limits = self.limits
        self._since += pairs
        if self._calibration is not None and pairs:
            proxy, gold = scores(pairs)
            residuals = (self._calibration.predict(proxy) - gold) / self._calibration.deviation
            residuals = np.clip(residuals, -limits.outlier, limits.outlier)
            ratios = limits.shift * (residuals - limits.shift / 2)
            self.sum.add(step, ratios, limits.shift * (residuals - limits.gap_doubt))
        if self.sum.doubt == 0.0:
            self.sum.clear = step
            self._learn()

    def _learn(self) -> None:
        limits = self.limits
        self._reference = [*self._reference, *self._since][-limits.most_reference_pairs :]
        self._since.clear()
        if len(self._reference) >= limits.reference_pairs:
            proxy, gold = scores(self._reference)
            self._calibration = Calibration(
                proxy, gold, level_pairs=limits.level_pairs, least_spread=limits.least_spread
            )


class HackTest:
    """Both tests over the evidence of a run, in the order of its steps; the same evidence gives the same alarms.

    A person's verdict on a sample, 0 to 1, replaces its gold score. After an amendment of the reward, start a new test:
    its first steps define what the amended reward means.
    """

    def __init__(self, limits: Thresholds | None = None) -> None:
        self._limits = limits or Thresholds()
        self._seen = list[Evidence]()
        self._low, self._high = 0.0, 1.0  # of all gold scores, and of verdicts
        self._begin()

    @property
    def earliest_onset(self) -> int:
        """The first step that a later alarm may blame; it never decreases."""
        return self._onset(min(self._gain.sum.clear, self._gap.sum.clear))

    @property
    def totals(self) -> tuple[float, float]:
        """Gain sum and gap sum, in nats."""
        return self._gain.total, self._gap.sum.total

    def add(self, evidence: Evidence) -> Alarm | None:
        """Add the evidence of the next step; returns an alarm as long as there is reason for one."""
        evidence = self._scaled(evidence)
        golds = {_key(pair): pair.gold for pair in evidence.pairs if pair.source == "person"}
        if not self._known.isdisjoint(golds):
            self._seen = [_with_gold(earlier, golds) for earlier in self._seen]
            self._begin()
            for earlier in self._seen:
                self._feed(earlier)
        self._seen.append(evidence)
        self._feed(evidence)
        return self._alarm()

    def _scaled(self, evidence: Evidence) -> Evidence:
        """With verdicts on the scale of gold."""
        golds = [pair.gold for pair in evidence.pairs if pair.source != "person"]
        self._low, self._high = min([self._low, *golds]), max([self._high, *golds])
        verdicts = {_key(pair): pair.gold for pair in evidence.pairs if pair.source == "person"}
        scaled = {key: self._low + verdict * (self._high - self._low) for key, verdict in verdicts.items()}
        return _with_gold(evidence, scaled) if verdicts else evidence

    def _begin(self) -> None:
        self._gain = GainSum(self._limits)
        self._gap = GapSum(self._limits)
        self._known = set[SampleKey]()  # samples with a gold score

    def _feed(self, evidence: Evidence) -> None:
        new = [pair for pair in evidence.pairs if pair.source != "person" or _key(pair) not in self._known]
        self._known.update(map(_key, new))
        # People choose what they check, so that the mean over their samples says nothing.
        self._gain.add(evidence.step, [pair for pair in new if pair.source != "person"])
        self._gap.add(evidence.step, new)

    def _onset(self, clear: int) -> int:
        return max(1, clear + 1 - self._limits.onset_margin)

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
        return self._describe("gain", self._gain.sum.clear, moved) if gain > limits.gain_limit else None

    def _describe(self, test: Test, clear: int, moved: Sequence[Change]) -> Alarm:
        """An alarm that compares the steps after `clear` with those before its onset; a gain with the first step."""
        onset, start = self._onset(clear), self._seen[0].step
        until = start if test == "gain" else max(onset - 1, start)
        before = [evidence for evidence in self._seen if evidence.step <= until]
        since = [evidence for evidence in self._seen if evidence.step > clear]
        proxy = (float(np.mean([evidence.proxy_mean for evidence in before[-SHOWN_STEPS:]])), since[-1].proxy_mean)
        gold = (self._gold(before), self._gold(since))
        went = f"the reward went from {proxy[0]:.3g} to {proxy[1]:.3g} and gold from {gold[0]:.3g} to {gold[1]:.3g}"
        gained = f"Compared with the initial policy, {went}, since about step {onset}."
        words = [f"{change.name} ({change.start:.3g} to {change.now:.3g})" for change in moved]
        also = f"Changed with it: {', '.join(words)}." if words else "No other figure of the samples changed with it."
        reason = f"{gained if test == 'gain' else f'Since about step {onset}, {went}.'} {also}"
        return Alarm(test=test, onset=onset, reason=reason, proxy=proxy, gold=gold)

    def _gold(self, steps: Sequence[Evidence]) -> float:
        pairs = [pair for evidence in steps for pair in evidence.pairs][-self._limits.window_pairs :]
        return float(scores(pairs)[1].mean()) if pairs else 0.0


def scores(pairs: Sequence[GoldPair]) -> tuple[Scores, Scores]:
    """Proxy and gold scores, float64 [N] each."""
    both = np.array([(pair.proxy, pair.gold) for pair in pairs], dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _key(pair: GoldPair) -> SampleKey:
    return pair.step, pair.prompt_id, pair.index


def _with_gold(evidence: Evidence, golds: Mapping[SampleKey, float]) -> Evidence:
    pairs = (replace(pair, gold=golds.get(_key(pair), pair.gold)) for pair in evidence.pairs)
    return replace(evidence, pairs=tuple(pairs))
