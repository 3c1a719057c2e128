from __future__ import annotations

from typing import Any

import pytest

from tests.planted import planted, spec_of
from tidemill.hardware.completion_lengths import quantiles
from tidemill.sim.one_machine import continued, simulate_recipe
from tidemill.telemetry.metrics import STEP_TIME


def test_lengths_as_often_as_they_were_seen() -> None:
    lengths = continued({2: 1, 4: 3}, {})
    assert quantiles(lengths, 8) == (2, 2, 4, 4, 4, 4, 4, 4)


def test_truncated_lengths_continue_with_the_same_end_probability() -> None:
    # 4 ended of 8 in 2 + 4 * 4 + ... = 40 tokens: a tenth of the tokens was a last one.
    lengths = continued({4: 4, 6: 4}, {6: 4})
    assert lengths.rate == pytest.approx(0.1)
    found = quantiles(lengths, 1000)
    assert found[:500] == (4,) * 500
    beyond = [tokens - 6 for tokens in found[500:]]
    assert min(beyond) == 1
    assert sum(beyond) / 500 == pytest.approx(1 / 0.1, rel=0.02)  # the mean of a geometric law


def test_completions_that_never_ended_are_always_truncated() -> None:
    assert continued({5: 3}, {5: 3}).quantile(0.5) > 100_000


def step_s(run: Any) -> float:
    return float(run.metrics[-1].values[STEP_TIME])


def test_one_thread_generates_and_then_learns() -> None:
    """Lag 0, two samples of one group that are always 3 tokens long."""
    spec = spec_of(3, batch={"prompts": 1, "group_size": 2}, sampling={"max_new_tokens": 3}, eval={"prompts": 1})
    profile = planted(spec, controller_sample_s=0.0, packed_prompt_tokens=6.0)
    run = simulate_recipe(spec, profile)
    # Passes: 0.02 + 10 * 0.0005, then twice 0.02 + 2 * 0.002; learning: 0.3 + (6 + 2 * 2) * 0.001.
    assert step_s(run) == pytest.approx(0.025 + 2 * 0.024 + 0.31, rel=1e-3)


def test_simulated_workers_take_turns_with_the_trainer_and_processes_do_not() -> None:
    """Generating on one thread takes as long however many engines there are; on four cores it does not."""
    pool, fleet = {"kind": "static", "workers": 2}, {"seeding": False}
    common: dict[str, Any] = {"pool": pool, "fleet": fleet, "batch": {"prompts": 4, "group_size": 4}}
    here, apart = (spec_of(4, runtime=runtime, **common) for runtime in ("inprocess", "ray"))
    alone, parallel, crowded = (
        step_s(simulate_recipe(spec, planted(spec, cores=cores, train_step_s=0.0)))
        for spec, cores in ((here, 4), (apart, 4), (apart, 1))
    )
    assert parallel < 0.7 * alone
    assert crowded == pytest.approx(alone, rel=0.1)
