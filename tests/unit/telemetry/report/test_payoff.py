"""Verdicts about the price of preemptible machines, with figures computed by hand.

The reserved side costs 3.6 $/h, 0.001 $ a second, a preemptible machine 0.9 $/h, a quarter of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fabricated_fleet import FabricatedFleet
from tidemill.telemetry.fleet_figures import ReservedOnly
from tidemill.telemetry.report.payoff import FleetUse, payoff, payoff_of
from tidemill.telemetry.run_data import RunData

# Alone the reserved side takes 180 s, 0.18 $: 140 s of generation and 40 s of other work. With one machine for 100 s
# it takes 100 s: 0.1 $ + 100 s × 0.00025 $/s = 0.125 $. The machine is 0.025 / 0.125 = 20 % of the bill.
USE = FleetUse(
    wall_s=100.0,
    alone=ReservedOnly(generating_s=140.0, other_s=40.0),
    reserved_usd_per_hour=3.6,
    preemptible_usd=0.025,
    held_s=100.0,
    starting_s=10.0,
    generating_s=80.0,
    tokens=1400,
    tokens_recomputed=70,
    evictions=2,
    one_machine=False,
)


def use(**changes: Any) -> FleetUse:
    return msgspec.structs.replace(USE, **changes)


def test_machines_that_pay() -> None:
    verdict = payoff(USE)
    assert (USE.cost_usd, USE.alone_usd, USE.price_ratio, USE.saving_needed) == pytest.approx((0.125, 0.18, 0.25, 0.2))
    assert verdict.pays
    # 1 - 0.125 / 0.18 = 31 %; 1 - 100 / 180 = 44 %; 1,400 tokens / 140 s = 10 a second
    assert verdict.title == "Preemptible machines paid: $0.1250 instead of $0.1800, 31 % less"
    assert verdict.text.startswith(
        "At 25 % of the reserved side's price, they shortened the run by 44 %; they pay from 20 % on. What it costs"
    )
    assert "all 1.4k tokens at 10 tokens/s, its fastest here," in verdict.text


NOT_PAID = {
    # Alone 9 s of generation and 81 s of other work, 0.09 $: 10 % of the time is less than the 20 % that pay.
    "short completions": ({"alone": ReservedOnly(generating_s=9.0, other_s=81.0)}, "Generating is 10 % of the time"),
    # Alone 90 s, 0.09 $, of which 60 s generate.
    "one machine": (
        {"alone": ReservedOnly(generating_s=60.0, other_s=30.0), "one_machine": True},
        "All workers ran in the trainer's process",
    ),
    # They started for 60 of 100 s and generated for 30.
    "evictions": (
        {"alone": ReservedOnly(generating_s=60.0, other_s=30.0), "starting_s": 60.0, "generating_s": 30.0},
        "They generated in 30 % of the time paid for, and started in 60 %: 2 evictions, after which 5.0 % of the",
    ),
    # 100 - 10 - 30 = 60 s without work
    "no work": (
        {"alone": ReservedOnly(generating_s=60.0, other_s=30.0), "generating_s": 30.0},
        "They generated in 30 % of the time paid for, and waited in 60 %",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), NOT_PAID.values(), ids=NOT_PAID)
def test_machines_that_do_not_pay(changes: dict[str, Any], reason: str) -> None:
    verdict = payoff(use(**changes))
    assert not verdict.pays
    assert verdict.title.startswith("Preemptible machines did not pay: $0.1250 instead of $0.0900, 39 % more")
    assert reason in verdict.text


# 1 - 0.125 / 0.16 = 22 % and 0.125 / 0.102 - 1 = 23 %, below 25 %
@pytest.mark.parametrize(("generating_s", "alone"), [(120.0, "$0.1600"), (62.0, "$0.1020")])
def test_a_difference_within_the_error_of_the_estimate_is_no_verdict(generating_s: float, alone: str) -> None:
    verdict = payoff(use(alone=ReservedOnly(generating_s=generating_s, other_s=40.0)))
    assert verdict.pays is None
    assert verdict.title == f"Whether preemptible machines paid is open: $0.1250, and about {alone} without them"


def test_a_run_that_became_longer() -> None:
    verdict = payoff(use(alone=ReservedOnly(generating_s=60.0, other_s=20.0)))  # 1 - 100 / 80
    assert "they lengthened the run by 25 %" in verdict.text


def test_the_fabricated_fleet(tmp_path: Path) -> None:
    data = RunData.load(FabricatedFleet(tmp_path).make())
    verdict = payoff_of(data)
    assert verdict is not None
    assert verdict.pays == (data.summary["cost_usd"] < data.summary["reserved_only_usd"])
