"""What holds for any weights and links, and for any table of lags."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formulas import check_figures
from tidemill.planner.overlap import plan_overlap
from tidemill.planner.staleness import Measured, plan_staleness
from tidemill.planner.transfer import TransferQuestion, plan_transfer

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)
RATES = st.floats(1e7, 1e12)
TRANSFERS = st.builds(
    TransferQuestion,
    parameters=st.floats(1e6, 1e12),
    link=RATES,
    worker_link=st.none() | RATES,
    store=st.none() | RATES,
    file=RATES,
    workers=st.integers(1, 1000),
    changed=st.floats(0, 1),
    step_s=st.none() | st.floats(0.1, 1e4),
)
ROWS = st.lists(
    st.builds(
        Measured, lag=st.integers(0, 9).map(float), reward_per_step=st.floats(-1, 1), utilisation=st.floats(0.01, 1)
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row.lag,
)


@SETTINGS
@given(TRANSFERS)
def test_faster_links_are_never_slower_and_more_workers_never_faster(question: TransferQuestion) -> None:
    plan = plan_transfer(question)
    check_figures(plan.figures)
    assert [path.seconds for path in plan.paths] == sorted(path.seconds for path in plan.paths)
    seconds = {path.path: path.seconds for path in plan.paths}
    faster = plan_transfer(msgspec.structs.replace(question, link=2 * question.link))
    # where the store is said to be as fast as is asked of it, that depends on the workers
    more = plan_transfer(msgspec.structs.replace(question, workers=question.workers + 1))
    assert all(path.seconds <= seconds[path.path] * (1 + 1e-9) for path in faster.paths)
    if question.store is not None:
        assert all(path.seconds >= seconds[path.path] * (1 - 1e-9) for path in more.paths)


@SETTINGS
@given(st.floats(0.01, 1e3), st.floats(0.01, 1e3), st.integers(2, 64))
def test_overlap_and_resizing_never_increase_the_time(rollout: float, training: float, gpus: int) -> None:
    plan = plan_overlap(rollout, training, gpus=gpus)
    check_figures(plan.figures)
    assert plan.in_sequence < plan.overlapped <= 1
    assert plan.rollout_gpus is not None
    assert plan.resized is not None
    assert 1 <= plan.rollout_gpus < gpus
    assert 0 < plan.resized <= 1
    # no other whole split has a shorter step
    best = max(rollout / plan.rollout_gpus, training / (gpus - plan.rollout_gpus))
    assert all(best <= max(rollout / given, training / (gpus - given)) for given in range(1, gpus))


@SETTINGS
@given(ROWS, st.floats(0.1, 10))
def test_staleness_fits_are_invariant_to_reward_unit_and_row_order(rows: list[Measured], scale: float) -> None:
    plan = plan_staleness(rows)
    scaled = [msgspec.structs.replace(row, reward_per_step=row.reward_per_step * scale) for row in reversed(rows)]
    other = plan_staleness(scaled)
    progress = {each.lag: each.progress for each in plan.lags}
    assert [each.progress for each in other.lags] == pytest.approx([value * scale for value in progress.values()])
    assert progress[plan.best_lag] == max(progress.values())
