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

# Alone the reserved side takes 160 s, 0.16 $: 120 s of generation and 40 s of other work. With one machine for 100 s
# it takes 100 s: 0.1 $ + 100 s × 0.00025 $/s = 0.125 $. The machine is 0.025 / 0.125 = 20 % of the bill.
USE = FleetUse(
    wall_s=100.0,
    alone=ReservedOnly(generating_s=120.0, other_s=40.0),
    reserved_usd_per_hour=3.6,
    preemptible_usd=0.025,
    held_s=100.0,
    starting_s=10.0,
    generating_s=80.0,
    tokens=1200,
    tokens_recomputed=60,
    evictions=2,
    one_machine=False,
)


def use(**changes: Any) -> FleetUse:
    return msgspec.structs.replace(USE, **changes)


def test_machines_that_pay() -> None:
    verdict = payoff(USE)
    assert (USE.cost_usd, USE.alone_usd, USE.price_ratio, USE.saving_needed) == pytest.approx((0.125, 0.16, 0.25, 0.2))
    assert verdict.pays
    # 1 - 0.125 / 0.16 = 22 %; 1 - 100 / 160 = 38 %; 1,200 tokens / 120 s = 10 a second
    assert verdict.title == "Preemptible machines paid: $0.1250 instead of $0.1600, 22 % less"
    assert verdict.text.startswith(
        "At 25 % of the reserved side's price, they shortened the run by 38 %; they pay from 20 % on. What it costs"
    )
    assert "all 1.2k tokens at 10 tokens/s, its fastest here," in verdict.text


NOT_PAID = {
    # Alone 14 s of generation and 86 s of other work, 0.10 $: 14 % of the time is less than the 20 % that pay.
    "short completions": ({"alone": ReservedOnly(generating_s=14.0, other_s=86.0)}, "Generating is 14 % of the time"),
    # Alone 100 s, 0.10 $, of which 60 s generate.
    "one machine": (
        {"alone": ReservedOnly(generating_s=60.0, other_s=40.0), "one_machine": True},
        "All workers ran in the trainer's process",
    ),
    # They started for 60 of 100 s and generated for 30.
    "evictions": (
        {"alone": ReservedOnly(generating_s=60.0, other_s=40.0), "starting_s": 60.0, "generating_s": 30.0},
        "They generated in 30 % of the time paid for, and started in 60 %: 2 evictions, after which 5.0 % of the",
    ),
    # 100 - 10 - 30 = 60 s without work
    "no work": (
        {"alone": ReservedOnly(generating_s=60.0, other_s=40.0), "generating_s": 30.0},
        "They generated in 30 % of the time paid for, and waited in 60 %",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), NOT_PAID.values(), ids=NOT_PAID)
def test_machines_that_do_not_pay(changes: dict[str, Any], reason: str) -> None:
    verdict = payoff(use(**changes))
    assert not verdict.pays
    assert verdict.title.startswith("Preemptible machines did not pay: $0.1250 instead of $0.1")
    assert reason in verdict.text


# 1 - 0.125 / 0.14 = 11 % and 0.125 / 0.12 - 1 = 4.2 %, below 20 %
@pytest.mark.parametrize(("generating_s", "words"), [(100.0, "$0.1400, 11 % less"), (80.0, "$0.1200, 4.2 % more")])
def test_a_difference_within_the_error_of_the_estimate_is_no_verdict(generating_s: float, words: str) -> None:
    verdict = payoff(use(alone=ReservedOnly(generating_s=generating_s, other_s=40.0)))
    assert verdict.pays is None
    assert verdict.title == f"Preemptible machines may not have paid: $0.1250 instead of {words}"


def test_a_run_that_became_longer() -> None:
    verdict = payoff(use(alone=ReservedOnly(generating_s=60.0, other_s=20.0)))  # 1 - 100 / 80
    assert "they lengthened the run by 25 %" in verdict.text


def test_the_fabricated_fleet(tmp_path: Path) -> None:
    data = RunData.load(FabricatedFleet(tmp_path).make())
    verdict = payoff_of(data)
    assert verdict is not None
    assert verdict.pays == (data.summary["cost_usd"] < data.summary["reserved_only_usd"])
