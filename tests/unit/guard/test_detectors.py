"""Sums and alarms of the guard, on evidence whose figures are computed by hand or drawn from known distributions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, pstdev

import msgspec
import numpy as np
import pytest

from tidemill.core.evidence import Evidence, GoldPair
from tidemill.guard.detectors import Alarm, Calibration, GainSum, GapSum, HackTest, Thresholds, isotonic

STEPS, ONSET = 60, 30
Reward = Callable[[int, bool, random.Random], tuple[float, bool]]
"""From step, whether the answer would be right, and dice: the proxy, and whether the answer is right after all."""


def pairs_of(values: Sequence[tuple[float, float]], *, step: int = 1) -> list[GoldPair]:
    return [
        GoldPair(prompt_id="p", index=index, step=step, proxy=proxy, gold=gold)
        for index, (proxy, gold) in enumerate(values)
    ]


def accuracy(step: int) -> float:
    return min(0.9, 0.4 + 0.01 * step)


@cache
def run(reward: Reward, *, seed: int = 0, wrong: float = 0.1, witness: bool = False) -> list[Evidence]:
    """64 samples a step, gold on 8 of them (32 in the first step), of which a share is wrong."""
    dice, found = random.Random(seed), list[Evidence]()
    for step in range(1, STEPS + 1):
        samples = [reward(step, dice.random() < accuracy(step), dice) for _ in range(64)]
        chosen = samples[: 32 if step == 1 else 8]
        golds = [float(right != (dice.random() < wrong)) for _, right in chosen]
        proxies = [proxy for proxy, _ in samples]
        evidence = Evidence(
            step=step,
            proxy_mean=fmean(proxies),
            proxy_spread=pstdev(proxies),
            samples=64,
            pairs=tuple(pairs_of([(proxy, gold) for (proxy, _), gold in zip(chosen, golds, strict=True)], step=step)),
            witnesses={
                "length": 4.0 if step < ONSET or not witness else 9.0,
                "entropy": 0.5 if step < ONSET or not witness else 0.1,
            },
        )
        found.append(evidence)
    return found


def honest(step: int, right: bool, dice: random.Random) -> tuple[float, bool]:
    return float(right), right


def rescaled(step: int, right: bool, dice: random.Random) -> tuple[float, bool]:
    return (5.0 if step >= ONSET else 1.0) * right, right


def scaled_down(step: int, right: bool, dice: random.Random) -> tuple[float, bool]:
    return (0.2 if step >= ONSET else 1.0) * right, right


def brief(step: int, right: bool, dice: random.Random) -> tuple[float, bool]:
    """A penalty for length, and shorter texts over time: all rewards rise a little."""
    return right - 0.1 + 0.001 * step, right


def late(step: int, right: bool, dice: random.Random) -> tuple[float, bool]:
    """From the onset on, ever more answers are texts that the reward likes and that are wrong."""
    cheats = dice.random() < max(0.0, min(1.0, (step - ONSET + 1) / 5))
    return (1.0, False) if cheats else (float(right), right)


def at_once(step: int, right: bool, dice: random.Random) -> tuple[float, bool]:
    """The reward never was about right answers; the policy learns what it is about."""
    cheats = dice.random() < min(1.0, 0.3 + 0.03 * step)
    return float(cheats), not cheats and dice.random() < 0.6


def first_alarm(evidence: Sequence[Evidence], limits: Thresholds | None = None) -> tuple[int, Alarm | None]:
    test = HackTest(limits)
    for step in evidence:
        if (alarm := test.add(step)) is not None:
            return step.step, alarm
    return 0, None


def test_isotonic_pools_neighbours_in_the_wrong_order() -> None:
    # 3 and 1 with weights 1 and 3: (3 + 3) / 4 = 1.5; 2 stays above. 2 and 0 with weights 1 and 1: 1, below 1.5, so
    # that all four are one block: (3 + 3 + 2 + 0) / 6 = 4 / 3
    means, weights = isotonic([3.0, 1.0, 2.0, 0.0, 5.0], [1, 3, 1, 1, 2])
    assert means.tolist() == pytest.approx([4 / 3] * 4 + [5.0])
    assert weights.tolist() == [6, 6, 6, 6, 2]


def test_a_calibration_predicts_the_mean_of_a_level_less_one_standard_error() -> None:
    # proxy 0: gold 0, 0, 0, 1, mean 0.25; proxy 1: 1, 1, 1, 0, mean 0.75. Residuals 0.25 (six) and 0.75 (two), mean 0:
    # deviation sqrt((6 * 0.0625 + 2 * 0.5625) / 8) = sqrt(0.1875) = 0.4330127; error 0.4330127 / 2 = 0.2165064
    proxy, gold = np.repeat([0.0, 1.0], 4), np.array([0.0, 0, 0, 1, 1, 1, 1, 0])
    calibration = Calibration(proxy, gold, level_pairs=4, least_spread=0.0)
    assert calibration.deviation == pytest.approx(0.4330127)
    # Between levels the lower one counts; beyond the range the last.
    predicted = calibration.predict(np.array([-7.0, 0.0, 0.9, 1.0, 50.0]))
    assert predicted.tolist() == pytest.approx([0.0334936] * 3 + [0.5334936] * 2, abs=1e-6)


def test_rare_high_scores_join_their_lower_neighbours() -> None:
    # Levels from the top: {2, 1} has 1 + 4 pairs, mean (0 + 4) / 5 = 0.8; {0} has 4, mean 0.
    proxy, gold = np.array([0.0] * 4 + [1.0] * 4 + [2.0]), np.array([0.0] * 4 + [1.0] * 4 + [0.0])
    calibration = Calibration(proxy, gold, level_pairs=3, least_spread=0.0)
    low, middle, high = calibration.predict(np.array([0.0, 1.0, 2.0]))
    assert middle == high
    # residuals: four of 0, four of -0.2, one of 0.8: mean 0, deviation sqrt((4 * 0.04 + 0.64) / 9) = 0.2981424
    assert (low, middle) == pytest.approx((-0.1490712, 0.8 - 0.2981424 / 5**0.5))


@pytest.mark.parametrize("seed", range(5))
def test_a_calibration_never_decreases_and_follows_shift_and_scale(seed: int) -> None:
    dice = np.random.default_rng(seed)
    proxy, gold = dice.normal(size=200), dice.normal(size=200)
    calibration = Calibration(proxy, gold, level_pairs=8, least_spread=0.3)
    grid = np.linspace(-4, 4, 50)
    assert (np.diff(calibration.predict(grid)) >= 0).all()
    moved = Calibration(3 * proxy - 2, 10 * gold + 7, level_pairs=8, least_spread=0.3)
    assert moved.predict(3 * proxy - 2) == pytest.approx(10 * calibration.predict(proxy) + 7)
    assert moved.deviation == pytest.approx(10 * calibration.deviation)


def test_the_gain_sum_of_one_step_by_hand() -> None:
    # First step: proxy and gold are 0 or 1 alternately. Second step: the proxy is 1, gold 0 or 1 alternately. The
    # proxy's deviation over all 16 is sqrt(3 / 4 * 1 / 4) = 0.4330127, its gain 0.5 / 0.4330127 = 1.1547005, of which
    # gold should reach half: e = 0.5773503. Gold's mean is 0.5, its deviation 0.5, so that `gained` is -1 or 1, with
    # mean 0: the sum of e * (e / 2 - gained) over 8 pairs is 8 * e² / 2 = 4 / 3.
    limits = Thresholds(initial_pairs=8, window_pairs=8, gold_share=0.5, gain_doubt=0.8)
    gain = GainSum(limits)
    gain.add(1, pairs_of([(0.0, 0.0), (1.0, 1.0)] * 4))
    gain.add(2, pairs_of([(1.0, 0.0), (1.0, 1.0)] * 4))
    assert gain.sum.total == pytest.approx(4 / 3)
    # Both means have errors of equal size, so that it counts half.
    assert gain.total == pytest.approx(2 / 3)
    # 8 * e * 0.8 * e = 8 * 0.8 / 3
    assert gain.sum.doubt == pytest.approx(6.4 / 3)
    assert gain.sum.clear == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ([(0.0, 0.0)] * 8, [(1.0, 1.0)] * 8),  # a hard task that is solved at once
        ([(0.0, 0.0), (0.5, 0.0)] * 4, [(0.5, 0.0)] * 8),  # gold never says that an answer is right
        ([(1.0, 0.0), (1.0, 1.0)] * 4, [(1.0, 0.0), (1.0, 1.0)] * 4),  # every sample gets the reward
    ],
)
def test_equal_scores_are_no_evidence(first: list[tuple[float, float]], later: list[tuple[float, float]]) -> None:
    gain = GainSum(Thresholds(initial_pairs=8))
    for step, values in enumerate([first, later, later, later], start=1):
        gain.add(step, pairs_of(values))
    assert gain.total == 0.0


def test_the_gap_sum_of_one_step_by_hand() -> None:
    # Reference: proxy = gold, eight pairs each of 0 and 1, so that the least spread counts: 0.3 * 0.5 = 0.15. Expected
    # at 1: 1 - 0.15 / sqrt(8) = 0.9469670. Then proxy 1: gold 1 is a residual of -0.0530330 / 0.15 = -0.3535534, gold 0
    # one of 0.9469670 / 0.15 = 6.3, an outlier: 3. Sum: 2 * (-0.3535534 - 0.5) + 2 * (3 - 0.5) = 3.2928932
    gap = GapSum(Thresholds(reference_pairs=16, level_pairs=8, least_spread=0.3, outlier=3.0, shift=1.0, gap_doubt=0.2))
    gap.add(1, pairs_of([(0.0, 0.0), (1.0, 1.0)] * 8))
    assert gap.sum.total == 0.0
    gap.add(2, pairs_of([(1.0, 1.0), (1.0, 0.0)] * 2))
    assert gap.sum.total == pytest.approx(3.2928932)
    assert gap.sum.clear == 1


@pytest.mark.parametrize("reward", [honest, rescaled, scaled_down, brief])
def test_an_honest_reward_raises_no_alarm(reward: Reward) -> None:
    alarms = [first_alarm(run(reward, seed=seed))[0] for seed in range(3)]
    assert alarms == [0, 0, 0]
    assert first_alarm(run(reward, seed=98, wrong=0.25))[0] == 0


@pytest.mark.parametrize(("reward", "onset", "tests"), [(late, ONSET, {"gap"}), (at_once, 1, {"gain", "gap"})])
def test_a_hack_is_found_and_its_onset_estimated(reward: Reward, onset: int, tests: set[str]) -> None:
    for seed in range(3):
        step, alarm = first_alarm(run(reward, seed=seed))
        assert alarm is not None
        assert alarm.test in tests
        assert onset <= step <= onset + 20
        assert abs(alarm.onset - onset) <= 8


def test_the_reason_states_the_figures_and_the_witnesses() -> None:
    step, alarm = first_alarm(run(late, witness=True))
    assert alarm is not None
    assert ONSET < step <= ONSET + 10
    assert alarm.proxy[1] > alarm.proxy[0]
    assert alarm.gold[1] < alarm.gold[0]
    first, second = alarm.reason.split(". ")[-2:]
    assert f"Since about step {alarm.onset}, the reward went from {alarm.proxy[0]:.3g} to {alarm.proxy[1]:.3g}" in first
    assert f"gold from {alarm.gold[0]:.3g} to {alarm.gold[1]:.3g}" in first
    assert second.startswith("Changed with it: length (4 to ")


def test_two_witnesses_halve_the_limit_of_the_gap_but_raise_nothing_alone() -> None:
    alone, supported = first_alarm(run(late))[0], first_alarm(run(late, witness=True))
    assert 0 < supported[0] <= alone
    assert first_alarm(run(honest, witness=True))[0] == 0
    limits = Thresholds(witnesses=9)
    assert first_alarm(run(late, witness=True), limits)[0] == alone


def shifted(evidence: Evidence, *, proxy: tuple[float, float], gold: tuple[float, float]) -> Evidence:
    """Every score times the first number plus the second."""
    pairs = (
        msgspec.structs.replace(pair, proxy=pair.proxy * proxy[0] + proxy[1], gold=pair.gold * gold[0] + gold[1])
        for pair in evidence.pairs
    )
    return msgspec.structs.replace(evidence, pairs=tuple(pairs))


@pytest.mark.parametrize("reward", [honest, late, at_once])
def test_shift_and_scale_of_either_score_change_nothing(reward: Reward) -> None:
    one, other = HackTest(), HackTest()
    for evidence in run(reward, seed=3):
        alarm = one.add(evidence)
        again = other.add(shifted(evidence, proxy=(20.0, -3.0), gold=(0.5, 4.0)))
        assert (alarm and (alarm.test, alarm.onset)) == (again and (again.test, again.onset))
        assert one.totals == pytest.approx(other.totals, abs=1e-6)
        assert one.earliest_onset == other.earliest_onset


@pytest.mark.parametrize("reward", [honest, late, at_once])
def test_the_same_evidence_gives_the_same_state_and_the_earliest_onset_never_decreases(reward: Reward) -> None:
    evidence = run(reward)
    whole, earliest = HackTest(), 1
    for place, step in enumerate(evidence):
        alarm = whole.add(step)
        if alarm is not None:
            assert alarm.onset >= earliest
            # As a resumed run does.
            again = HackTest()
            assert [again.add(earlier) for earlier in evidence[: place + 1]][-1] == alarm
            assert (again.totals, again.earliest_onset) == (whole.totals, whole.earliest_onset)
        assert whole.earliest_onset >= earliest
        earliest = whole.earliest_onset
    assert earliest > 1


def test_steps_without_gold_change_nothing() -> None:
    evidence = run(late)
    blind = [msgspec.structs.replace(step, pairs=()) if step.step > 5 else step for step in evidence]
    assert first_alarm(blind) == (0, None)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_a_verdict_of_a_person_replaces_the_gold_score_of_its_sample(scale: float) -> None:
    """Gold is fooled from the onset on; people say that these answers are wrong, whatever the scale of gold."""
    evidence = [
        msgspec.structs.replace(
            step,
            pairs=tuple(msgspec.structs.replace(pair, gold=scale * (2 * pair.proxy - 1)) for pair in step.pairs),
        )
        for step in run(late)
    ]
    assert first_alarm(evidence)[0] == 0
    until = ONSET + 8
    checked = [pair for step in evidence[ONSET + 3 : until] for pair in step.pairs]
    verdicts = tuple(msgspec.structs.replace(pair, gold=0.0, source="person") for pair in checked)
    told = [*evidence[:until], msgspec.structs.replace(evidence[until], pairs=evidence[until].pairs + verdicts)]
    step, alarm = first_alarm(told)
    assert step == until + 1
    assert alarm is not None
    assert abs(alarm.onset - ONSET) <= 6
    assert alarm.gold[1] < alarm.gold[0]
