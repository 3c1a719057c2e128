"""Table of a recorded run with a flawed reward, and of one without the flaw: the guard's evidence and sums, and where
each limit stops them."""

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


def recorded(name: str) -> tuple[dict[str, Any], list[Evidence]]:
    """A run of `benchmarks.hacked_reward`, flawed or honest, and its evidence."""
    run = json.loads(RECORDED.read_bytes())["runs"][name]
    return run, [msgspec.json.decode(line, type=Evidence) for line in run["evidence"]]


def first_alarm(evidence: list[Evidence], *, gain_limit: float, gap_limit: float) -> dict[str, Any] | None:
    """Where a guard with these limits decides; None if it does not."""
    test = HackTest(Thresholds(gain_limit=gain_limit, gap_limit=gap_limit))
    for each in evidence:
        if (alarm := test.add(each)) is not None:
            return {"step": each.step, "onset": alarm.onset, "test": alarm.test, "reason": alarm.reason}
    return None


def table() -> dict[str, Any]:
    limits = Thresholds()
    return {
        "gains": list(GAIN_LIMITS),
        "gaps": list(GAP_LIMITS),
        "default": [limits.gain_limit, limits.gap_limit],
        "flawed": _run("flawed"),
        "honest": _run("honest"),
    }


def _run(name: str) -> dict[str, Any]:
    """`sums` [step] of the gain and the gap test; `alarms` [gain limit][gap limit], null where nothing stops it."""
    run, evidence = recorded(name)
    test, sums = HackTest(Thresholds(gain_limit=NEVER, gap_limit=NEVER)), []
    for each in evidence:
        test.add(each)
        sums.append(row(test.totals, 4))
    return {
        "steps": [each.step for each in evidence],
        "reward": row((each.proxy_mean for each in evidence), 4),
        "gold": [digits(fmean(pair.gold for pair in each.pairs), 4) if each.pairs else None for each in evidence],
        "exact": row((run["exact"][str(each.step)] for each in evidence), 4),
        "sums": sums,
        "alarms": [
            [first_alarm(evidence, gain_limit=gain, gap_limit=gap) for gap in GAP_LIMITS] for gain in GAIN_LIMITS
        ],
        "accuracy": run["accuracy"],
    }
