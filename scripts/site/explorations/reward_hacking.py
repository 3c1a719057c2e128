"""Table of a recorded run with a flawed reward: the guard's evidence, its two sums, and where each limit stops it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from scripts.site.explorations.rounding import digits, row
from tidemill.core.evidence import Evidence
from tidemill.guard.detectors import HackTest, Thresholds

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "hacked_reward.json"
GAIN_LIMITS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)
GAP_LIMITS = (2.0, 4.0, 7.0, 10.0, 14.0, 20.0, 30.0, 50.0)
NEVER = 1e9  # a limit that no sum reaches


def recorded() -> tuple[dict[str, Any], list[Evidence]]:
    """The result of `benchmarks.hacked_reward`, and the evidence in it."""
    result = json.loads(RECORDED.read_bytes())
    return result, msgspec.convert(result["evidence"], list[Evidence])


def first_alarm(evidence: list[Evidence], *, gain_limit: float, gap_limit: float) -> dict[str, Any] | None:
    """Where a guard with these limits decides; None if it does not."""
    test = HackTest(Thresholds(gain_limit=gain_limit, gap_limit=gap_limit))
    for each in evidence:
        if (alarm := test.add(each)) is not None:
            return {"step": each.step, "onset": alarm.onset, "test": alarm.test, "reason": alarm.reason}
    return None


def table() -> dict[str, Any]:
    """`alarms` [gain limit][gap limit], null where the run is not stopped."""
    result, evidence = recorded()
    test, sums = HackTest(Thresholds(gain_limit=NEVER, gap_limit=NEVER)), []
    for each in evidence:
        test.add(each)
        sums.append(row(test.totals, 4))
    limits = Thresholds()
    return {
        "steps": [each.step for each in evidence],
        "reward": row((each.proxy_mean for each in evidence), 4),
        "gold": [digits(fmean(pair.gold for pair in each.pairs), 4) if each.pairs else None for each in evidence],
        "exact": row((line["exact"] for line in result["steps"]), 4),
        "pairs": [len(each.pairs) for each in evidence],
        "sums": sums,
        "gains": list(GAIN_LIMITS),
        "gaps": list(GAP_LIMITS),
        "default": [limits.gain_limit, limits.gap_limit],
        "alarms": [
            [first_alarm(evidence, gain_limit=gain, gap_limit=gap) for gap in GAP_LIMITS] for gain in GAIN_LIMITS
        ],
        "accuracy": result["accuracy"],
    }
