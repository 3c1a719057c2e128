from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from tests.doubles.samples import make_report
from tidemill.controller.in_flight import StepCounters
from tidemill.controller.rollout_context import RolloutContext


def test_counters_of_a_new_lease_start_at_zero() -> None:
    nobody = cast(Any, None)
    rollout = RolloutContext(
        fleet=nobody, ledger=nobody, scorer=nobody, codec=nobody, telemetry=nobody, clock=nobody, stop=asyncio.Event()
    )
    counters = StepCounters()
    # One worker: 30 and 12 more under its first lease, 7 under the next.
    for lease_id, computed in (("first", 30), ("first", 42), ("next", 7)):
        report = make_report()
        status = msgspec.structs.replace(report.status, prompt_tokens_computed=computed, prompt_tokens_reused=computed)
        rollout.update_status(msgspec.structs.replace(report, lease_id=lease_id, status=status), counters)
    assert (counters.prompt_tokens_computed, counters.prompt_tokens_reused) == (49, 49)
