"""Samples of a prompt go to one worker, which computes the prompt once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

import pytest

from tests.doubles.costs import ConstantEngine, ConstantTrainer
from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import InFlight
from tidemill.controller.samples import Sample
from tidemill.core.records import GenerateRequest
from tidemill.hardware.completion_lengths import LogNormalLengths
from tidemill.pool.build_provider import static_timetable
from tidemill.sim.costs import WeightCosts
from tidemill.sim.simulation import CostModel, simulate_run
from tidemill.sim.workload import Workload

WORKERS, PROMPTS, SIZE, SLOTS = 4, 128, 8, 16


@pytest.mark.parametrize("queue_limit", [8, 20])
def test_siblings_go_to_one_worker_though_its_slots_become_free_one_by_one(
    monkeypatch: pytest.MonkeyPatch, queue_limit: int
) -> None:
    leases: defaultdict[int, set[str]] = defaultdict(set)
    assign = InFlight.assign

    def noted(self: InFlight, lease_id: str, samples: Iterable[Sample] | None = None) -> list[GenerateRequest]:
        assigned = list(samples or [])
        for sample in assigned:
            leases[sample.ordinal // SIZE].add(lease_id)
        return assign(self, lease_id, assigned)

    monkeypatch.setattr(InFlight, "assign", noted)
    spec = RunSpec.model_validate(
        {
            "batch": {"prompts": PROMPTS, "group_size": SIZE, "order": "arrival"},
            "sampling": {"max_new_tokens": 256},
            "engine": {"slots": SLOTS},
            "trainer": {"steps": 1},
            "eval": {"every_steps": 0},
            "fleet": {"seeding": False, "queue_limit": queue_limit},
            "pool": {"kind": "static", "workers": WORKERS},
        }
    )
    engine = ConstantEngine(slots=SLOTS, plateau=SLOTS, step_s=0.1, prefill_tokens_per_s=1e9)
    costs = CostModel(
        trainer=ConstantTrainer(tokens_per_s=math.inf), weights=WeightCosts(), shares_gpus=False, worker=engine
    )
    lengths = LogNormalLengths(median=40, sigma=0.8, limit=256)

    run = simulate_run(spec, costs, Workload(lengths=lengths, prompt_tokens=4), static_timetable(WORKERS))

    assert len(leases) == PROMPTS
    assert fmean(map(len, leases.values())) < 2  # 3.4 if workers take samples one by one
    # No slot waits for a group: nearly all the time until the last samples are decoded is spent on tokens.
    assert run.generated * engine.step_s / (WORKERS * SLOTS * run.seconds) > 0.8
