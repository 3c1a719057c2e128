"""Whole runs of the controller in virtual time, against arithmetic done by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.costs import ConstantEngine, ConstantTrainer
from tidemill.config.schema import RunSpec
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.offload import Balance
from tidemill.core.errors import UserError
from tidemill.hardware.completion_lengths import LogNormalLengths
from tidemill.pool.build_provider import static_timetable
from tidemill.pool.provider import Change
from tidemill.pool.synthetic import Market, market_timetable
from tidemill.sim.costs import WeightCosts
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.simulation import ComponentFactories, CostModel, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.events import DECODE

ENGINE = ConstantEngine(slots=8, plateau=8, step_s=0.1, prefill_tokens_per_s=1e9)
PLANT = CostModel(
    trainer=ConstantTrainer(tokens_per_s=80.0, commit=1.0),
    weights=WeightCosts(nbytes=100, uplink_bytes_per_s=100.0, downlink_bytes_per_s=50.0, swap_s=0.5),
    reserved=ENGINE,
    reserved_load_s=0.5,
    worker=msgspec.structs.replace(ENGINE, boot_s=3.0),
)
WORK = Workload(lengths=LogNormalLengths(median=20, sigma=0.0, limit=20), prompt_tokens=4)
VARIED = Workload(lengths=LogNormalLengths(median=20, sigma=0.8, limit=64), prompt_tokens=4, prompt_correlation=0.5)


def spec_of(**changes: Any) -> RunSpec:
    """Two groups of 4 samples a step, 3 steps."""
    sections: dict[str, dict[str, Any]] = {
        "batch": {"prompts": 2, "group_size": 4, "order": "arrival"},
        "sampling": {"max_new_tokens": 64},
        "trainer": {"steps": 3},
        "eval": {"every_steps": 0},
        "fleet": {"reserved_usd_per_hour": 36.0, "preemptible_usd_per_hour": 3.6},
    }
    for name, value in changes.items():
        sections[name] = {**sections.get(name, {}), **value}
    return RunSpec.model_validate(sections)


def test_shared_gpus_alternate() -> None:
    run = simulate_run(spec_of(), PLANT, WORK)
    # 20 steps of 0.1 s make all 8 samples; 160 tokens at 80/s are 2 s, and 1 s more commits. The weights that a step
    # begins with have taken 0.5 s to load: 5.5 s a step, 3 of them learning.
    assert run.seconds == pytest.approx(3 * 5.5, abs=1e-2)
    assert run.tokens_trained == run.generated == 3 * 160
    assert run.learning_share == pytest.approx(3 / 5.5, abs=1e-3)
    # Samples are given out as the weights are published, and begun half a second later: nobody is idle by this count.
    assert run.reserved_generating_share == pytest.approx(2.5 / 5.5, abs=1e-3)
    assert run.trainer_idle_share == pytest.approx(0, abs=1e-3)
    assert run.cost_usd == pytest.approx(36.0 * run.seconds / 3600)


def test_separate_gpus_generate_while_others_train() -> None:
    apart = msgspec.structs.replace(PLANT, shares_gpus=False)
    ahead = {"max_policy_lag": 1, "membership": "first_finished"}
    run = simulate_run(spec_of(schedule=ahead, trainer={"steps": 21}), apart, WORK)
    # In the long run a step takes as long as learning does, 3 s; the engine has 2.5 s of work in it.
    assert run.metrics[20].elapsed_s - run.metrics[10].elapsed_s == pytest.approx(10 * 3.0, abs=0.1)
    assert max(name for name in run.metrics[-1].values if name.startswith("lag/")) == "lag/1"


def test_preemptible_machines_boot_pull_and_cost() -> None:
    alone = msgspec.structs.replace(PLANT, reserved=None)
    run = simulate_run(spec_of(trainer={"steps": 1}), alone, WORK, static_timetable(2))
    # 3 s to boot; both pull 100 bytes over an uplink of 100 bytes/s, at 50 each: 2 s, and 0.5 s to swap; then a
    # group each: 2 s, 2 s of learning and 1 s of committing.
    assert run.seconds == pytest.approx(3 + 2 + 0.5 + 2 + 2 + 1, abs=0.02)
    assert run.cost_usd == pytest.approx((36.0 + 2 * 3.6) * run.seconds / 3600)
    assert run.workers_mean == pytest.approx(2, abs=1e-3)


def test_equal_seeds_give_equal_logs() -> None:
    def digest(seed: int) -> str:
        return simulate_run(spec_of(run={"seed": seed}), PLANT, VARIED, static_timetable(2)).digest

    assert digest(1) == digest(1) != digest(2)


def test_no_engine_is_an_error() -> None:
    alone = msgspec.structs.replace(PLANT, reserved=None)
    with pytest.raises(UserError, match="no machine appeared in 24 h"):
        simulate_run(spec_of(), alone, WORK, iter(()))
    with pytest.raises(UserError, match="no engine to generate"):
        simulate_run(spec_of(), alone, WORK)
    with pytest.raises(UserError, match="no worker ever joined"):
        simulate_run(spec_of(fleet={"join_timeout_s": 1.0}), alone, WORK, static_timetable(2), seconds=60.0)
    with pytest.raises(UserError, match="no step finished"):
        simulate_run(spec_of(), PLANT, WORK, seconds=3.0)


def test_a_sample_that_fits_no_cache_is_refused() -> None:
    small = msgspec.structs.replace(PLANT, reserved=msgspec.structs.replace(ENGINE, cache_tokens=20.0))
    with pytest.raises(UserError, match=r"24 tokens.* 20: 4 are missing"):
        simulate_run(spec_of(), small, WORK)


def test_without_streaming_training_starts_with_the_whole_batch() -> None:
    apart = msgspec.structs.replace(PLANT, shares_gpus=False)
    whole = simulate_run(spec_of(trainer={"steps": 1}), msgspec.structs.replace(apart, streams=False), VARIED)
    streamed = simulate_run(spec_of(trainer={"steps": 1}), apart, VARIED)
    assert whole.tokens_trained == streamed.tokens_trained
    ((begin_s, end_s),) = whole.learned
    assert end_s - begin_s == pytest.approx(whole.tokens_trained / 80 + 1)
    assert streamed.learned[0][0] < begin_s
    assert streamed.seconds < whole.seconds


@settings(max_examples=25, deadline=None)
@given(
    lag=st.integers(1, 3),
    tokens_per_s=st.sampled_from([20.0, 80.0, 400.0]),
    membership=st.sampled_from(["planned", "first_finished"]),
    shares=st.booleans(),
)
def test_a_larger_lag_is_never_slower_with_equal_lengths(
    lag: int, tokens_per_s: float, membership: str, shares: bool
) -> None:
    """Nobody waits for a straggler, and nothing is thrown away."""
    cost_model = msgspec.structs.replace(
        PLANT, shares_gpus=shares, trainer=ConstantTrainer(tokens_per_s=tokens_per_s, commit=1.0)
    )
    ahead = {"max_policy_lag": lag, "membership": membership}
    on_policy = simulate_run(spec_of(), cost_model, WORK)
    later = simulate_run(spec_of(schedule=ahead), cost_model, WORK)
    assert later.tokens_trained == on_policy.tokens_trained
    assert later.seconds <= on_policy.seconds + 1e-3


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.integers(0, 2),
    cache=st.sampled_from([80.0, 200.0, math.inf]),
    reserved=st.booleans(),
    eviction_s=st.sampled_from([5.0, 30.0, 300.0]),
)
def test_tokens_and_cost_are_conserved(seed: int, lag: int, cache: float, reserved: bool, eviction_s: float) -> None:
    engine = msgspec.structs.replace(ENGINE, cache_tokens=cache)
    cost_model = msgspec.structs.replace(PLANT, reserved=engine if reserved else None, worker=engine)
    market = Market(machines=3, present=2, mean_time_to_eviction_s=eviction_s, mean_time_to_return_s=5.0)
    schedule = {"max_policy_lag": lag, "membership": "first_finished" if lag else "planned"}
    spec = spec_of(run={"seed": seed}, schedule=schedule)
    run = simulate_run(spec, cost_model, VARIED, market_timetable(market, seed=seed))

    # What was accepted was learned from or thrown away: in the end nothing is in flight. Engines made that, and what
    # nobody received.
    assert run.result.tokens_generated == run.tokens_trained + run.total("tokens_discarded")
    assert run.generated >= run.result.tokens_generated
    assert all(int(name[4:]) <= lag for line in run.metrics for name in line.values if name.startswith("lag/"))
    held_s = sum(min(one.end_s, run.seconds) - one.start_s for one in run.preemptible if one.start_s < run.seconds)
    assert run.cost_usd == pytest.approx((36.0 * run.seconds + 3.6 * held_s) / 3600, rel=1e-3)
    assert sum(line.values["time_step_s"] for line in run.metrics) == pytest.approx(run.seconds, abs=0.01)


def seeded(hand_over: str, timetable: Iterator[Change], **fleet: Any) -> SimulatedRun:
    spec = spec_of(
        batch={"prompts": 8},
        trainer={"steps": 8},
        fleet={"hand_over": hand_over, **fleet},
        pool={"kind": "static", "workers": 1},
    )
    return simulate_run(spec, PLANT, VARIED, timetable, factories=ComponentFactories(tick_s=0.1))


def test_balance_extends_seeding_until_workers_can_finish() -> None:
    fixed = {"seed_window_s": 0.0, "window_gain": 1e9}
    balance, window = (seeded(how, static_timetable(1), **fixed) for how in ("balance", "window"))

    assert balance.tokens_trained == window.tokens_trained
    # One worker alone takes longer than the trainer; after the first step, which shows how fast both are, it gets help.
    assert balance.metrics[0].elapsed_s == window.metrics[0].elapsed_s
    assert balance.seconds < 0.97 * window.seconds


def test_balance_does_not_end_seeding_before_the_window() -> None:
    long = {"seed_window_s": 60.0, "window_gain": 1e9}  # longer than any step
    balance, window = (seeded(how, static_timetable(2), **long) for how in ("balance", "window"))

    assert sorted(map(str, balance.events)) == sorted(map(str, window.events))  # simultaneous ones in any order


def test_balance_resumes_seeding_when_workers_fall_behind() -> None:
    quiet = seeded("balance", static_timetable(3))
    ends = [line.elapsed_s for line in quiet.metrics]
    handed_s = max(event["elapsed_s"] for event in local_decodes(quiet) if event["elapsed_s"] < ends[4])

    taken = [Change(time_s=handed_s + 0.5, place=place, to="down") for place in (0, 1)]
    run = seeded("balance", chain(static_timetable(3), taken))

    assert run.tokens_trained == quiet.tokens_trained
    again = [event for event in local_decodes(run) if handed_s + 0.5 < event["elapsed_s"] < run.metrics[4].elapsed_s]
    assert again and again[0]["step"] == 5


def test_balance_counts_only_as_many_samples_as_the_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(
        schedule={"tail": "batching", "oversample": 2.0, "nominal_slots": 16},
        batch={"prompts": 32},
        fleet={"hand_over": "balance", "seed_window_s": 0.0, "window_gain": 1e9},
        pool={"kind": "static", "workers": 1},
    )
    begin_step = Dispatcher.begin_step

    def count_all(self: Dispatcher, window_s: float, balance: Balance | None = None, *, samples: float = 0.0) -> None:
        begin_step(self, window_s, balance)

    factories = ComponentFactories(tick_s=0.1)
    run = simulate_run(spec, PLANT, VARIED, static_timetable(1), factories=factories)
    monkeypatch.setattr(Dispatcher, "begin_step", count_all)
    counting_all = simulate_run(spec, PLANT, VARIED, static_timetable(1), factories=factories)

    assert run.tokens_trained == counting_all.tokens_trained
    # Extra groups need not end: the reserved side stops earlier, and the trainer continues.
    seconds, counting_all_s = (sum(each["duration_s"] for each in local_decodes(one)) for one in (run, counting_all))
    assert seconds < 0.9 * counting_all_s
    assert run.seconds < counting_all.seconds


def local_decodes(run: SimulatedRun) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == DECODE and event["kind"] == "reserved"]
