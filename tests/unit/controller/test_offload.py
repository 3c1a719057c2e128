"""Adaptive offload; the comments show the arithmetic, and a small simulation checks convergence."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.controller.offload import (
    Balance,
    HandOver,
    OffloadState,
    StepObservation,
    after_step,
    balance_after,
    can_finish,
    seeding_useful,
    start,
    window,
)


def make_observation(**changes: Any) -> StepObservation:
    fields: dict[str, Any] = {
        "workers_first": 2,
        "workers_mean": 2.0,
        "trainer_wait_s": 12.0,
        "remote_wait_s": 3.0,
        "remote_s": 40.0,
        "train_s": 50.0,
    }
    return StepObservation(**{**fields, **changes})


def test_the_first_step_uses_the_window_given_and_wants_as_many_workers_as_reserved_engines() -> None:
    assert start(150.0, 4) == OffloadState(window_s=150.0, wanted_workers=4)
    assert window(start(150.0, 4), 3) == 150.0


def test_the_first_step_uses_the_known_window_for_its_number_of_workers() -> None:
    state = start(150.0, known=(346.0, 212.0))

    assert [window(state, workers) for workers in (1, 2, 3)] == [346.0, 212.0, 150.0]
    later = after_step(state, make_observation(), gain=3.0)  # with 2 workers
    assert later.window_s == 215.0  # 212 + (12 - 3) / 3
    assert later.window_by_count == {1: 346.0, 2: 215.0}


def test_the_window_moves_by_the_imbalance_over_the_gain() -> None:
    state = after_step(start(10.0), make_observation(), gain=3.0)

    assert state.window_s == 13.0  # 10 + (12 - 3) / 3
    assert state.wanted_workers == 2  # (40 * 2 + 13 * 1) / 50 = 1.86
    assert state.workers == 2


def test_the_window_has_a_floor() -> None:
    observation = make_observation(trainer_wait_s=0.0, remote_wait_s=60.0)

    assert after_step(start(10.0), observation, gain=3.0).window_s == 0.0  # 10 + (0 - 60) / 3 = -10
    assert after_step(start(10.0), observation, gain=3.0, floor_s=5.0).window_s == 5.0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"reserved_engines": 4}, 3),  # (40 * 2 + 13 * 4) / 50 = 2.64
        ({"remote_s": 68.5}, 3),  # (68.5 * 2 + 13) / 50 = 3 exactly
        ({"train_s": 1000.0}, 1),  # 93 / 1000
        ({"trainer_wait_s": 0.0, "remote_wait_s": 60.0, "remote_s": 0.0}, 1),  # 0 / 50; at least one
        # (0.1 * 3 + 0 * 1) / 0.3, slightly more than 1 in floating point
        ({"trainer_wait_s": 0.0, "remote_wait_s": 60.0, "remote_s": 0.1, "workers_mean": 3.0, "train_s": 0.3}, 1),
        ({"train_s": 0.0}, 7),  # unknown: unchanged
    ],
)
def test_the_wanted_number_is_the_generating_time_over_the_training_time(changes: dict[str, Any], wanted: int) -> None:
    before = OffloadState(window_s=10.0, wanted_workers=7)

    assert after_step(before, make_observation(**changes), gain=3.0).wanted_workers == wanted


def test_a_window_is_remembered_for_the_number_of_workers_that_a_step_began_with_and_kept() -> None:
    first = after_step(start(10.0), make_observation(), gain=3.0)
    assert first.window_by_count == {2: 13.0}  # 10 + (12 - 3) / 3

    joined = after_step(first, make_observation(workers_mean=3.0), gain=3.0)
    assert (joined.window_s, joined.window_by_count) == (16.0, {2: 13.0})  # one joined meanwhile
    assert window(joined, 3) == 16.0
    assert window(joined, 2) == 13.0

    back = after_step(joined, make_observation(), gain=3.0)
    assert back.window_s == 16.0  # from the remembered 13 that the step used, not from 16
    assert back.window_by_count == {2: 16.0}


def test_with_a_constant_number_of_workers_the_window_continues_from_the_last_step() -> None:
    state = OffloadState(window_s=19.0, wanted_workers=2, window_by_count={2: 13.0}, workers=2)
    assert window(state, 2) == 19.0  # not the remembered 13

    unsteady = make_observation(workers_mean=1.8)
    assert after_step(state, unsteady, gain=3.0).window_s == 22.0  # 19 + 3


@pytest.mark.parametrize(("mean", "remembered"), [(2.05, {2: 16.0}), (1.95, {2: 16.0}), (2.2, {}), (1.8, {})])
def test_a_window_is_not_remembered_if_the_number_of_workers_changed(mean: float, remembered: dict[int, float]) -> None:
    state = OffloadState(window_s=13.0, wanted_workers=2, workers=2)

    assert after_step(state, make_observation(workers_mean=mean), gain=3.0).window_by_count == remembered


def test_without_remember_windows_only_the_last_window_counts() -> None:
    steady = OffloadState(window_s=13.0, wanted_workers=2, workers=2)

    state = after_step(steady, make_observation(), gain=3.0, remembers=False)

    assert (state.window_s, state.window_by_count) == (16.0, {})
    assert window(state, 2) == 16.0


def test_after_a_change_of_workers_the_remembered_window_is_used() -> None:
    state = after_step(start(150.0, known=(346.0, 212.0)), make_observation(workers_mean=2.4), gain=3.0)

    assert state.window_s == 215.0  # 212 + (12 - 3) / 3
    assert [window(state, workers) for workers in (1, 2, 3)] == [346.0, 212.0, 215.0]


def test_a_step_without_workers_changes_no_window() -> None:
    state = OffloadState(window_s=13.0, wanted_workers=2, window_by_count={2: 13.0}, workers=2)
    alone = make_observation(workers_mean=0.0, trainer_wait_s=100.0, remote_s=0.0)

    assert after_step(state, alone, gain=3.0) == OffloadState(
        window_s=13.0, wanted_workers=2, window_by_count={2: 13.0}, workers=0
    )


@pytest.mark.parametrize(
    ("changes", "useful"),
    [
        ({}, True),
        ({"elapsed_s": 10.0}, False),  # the window is over
        ({"elapsed_s": 99.0, "preemptible_serving": 0}, True),
        ({"preemptible_serving": 0, "window_s": 0.0}, True),
        ({"window_s": 0.0, "elapsed_s": 0.0}, False),
    ],
)
def test_seeding_ends_with_its_window_if_others_generate(changes: dict[str, Any], useful: bool) -> None:
    fields: dict[str, Any] = {"elapsed_s": 9.0, "window_s": 10.0, "preemptible_serving": 2}

    assert seeding_useful(**{**fields, **changes}) is useful


BALANCE = Balance(train_s=40.0, train_s_per_token=0.01, drained_share=0.5)


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),  # 4,000 tokens take 40 s of training, in which 2 workers generate 2 * 100 * 0.5 * 40 = 4,000
        ({"left_tokens": 4000.0, "made_tokens": 0.0}, True),  # exactly 4,000
        ({"workers": 1}, True),  # exactly 2,000
        ({"workers": 1, "left_tokens": 2100.0, "made_tokens": 1900.0}, False),
        ({"trained_s": 20.0}, True),  # half of the training is done: 2,000
        ({"trained_s": 21.0}, False),  # 1,900
    ],
)
def test_can_finish_compares_generating_with_training_time(changes: dict[str, Any], can: bool) -> None:
    fields: dict[str, Any] = {"made_tokens": 2000.0, "left_tokens": 2000.0, "workers": 2, "best_tokens_per_s": 100.0}

    assert can_finish(BALANCE, **{**fields, **changes}) is can


def learned(before: Balance | None, hand_over: HandOver | None = None) -> Balance | None:
    return balance_after(
        before, train_s=60.0, tokens=3000, hand_over=hand_over, finished_s=150.0, best_tokens_per_s=100.0
    )


def test_balance_is_updated_from_a_step() -> None:
    first = learned(None)
    assert first == Balance(train_s=60.0, train_s_per_token=0.02, drained_share=0.5)

    # 2 workers could generate 2 * 100 * 50 = 10,000 tokens from second 100 to 150; 7,000 were left: 0.7.
    second = learned(BALANCE, HandOver(at_s=100.0, left_tokens=7000.0, workers=2))
    assert second is not None and second.train_s == 60.0
    assert (second.train_s_per_token, second.drained_share) == pytest.approx((0.015, 0.6))


def test_a_step_without_training_leaves_the_balance_unchanged() -> None:
    nothing = balance_after(BALANCE, train_s=0.0, tokens=0, hand_over=None, finished_s=9.0, best_tokens_per_s=100.0)

    assert nothing is BALANCE


TRAIN_S = 60.0
WORK = 240.0
"""Seconds one worker would need for the whole batch; the reserved engine is as fast as a worker."""


def play(window_s: float, workers: int) -> StepObservation:
    """One step: all generate during the window, then the reserved engine trains while the workers finish."""
    seeded = min(window_s * (1 + workers), WORK)
    remote_s = window_s + (WORK - seeded) / workers
    trained_s = window_s + TRAIN_S  # end of training without waits
    return StepObservation(
        workers_first=workers,
        workers_mean=float(workers),
        trainer_wait_s=max(remote_s - trained_s, 0.0),
        remote_wait_s=max(trained_s - remote_s, 0.0),
        remote_s=remote_s,
        train_s=TRAIN_S,
    )


def play_steps(state: OffloadState, workers: int, steps: int) -> OffloadState:
    for _ in range(steps):
        state = after_step(state, play(window(state, workers), workers), gain=3.0)
    return state


def balanced(workers: int) -> float:
    """The window for which both sides wait equally: WORK - T (1 + n) = TRAIN_S n."""
    return (WORK - TRAIN_S * workers) / (1 + workers)


@pytest.mark.parametrize("workers", [1, 2, 3])  # 90 s, 40 s, 15 s
def test_the_window_converges_to_equal_waits(workers: int) -> None:
    state = play_steps(start(10.0), workers, 30)

    assert state.window_s == pytest.approx(balanced(workers), abs=0.1)
    step = play(state.window_s, workers)
    assert step.trainer_wait_s == pytest.approx(step.remote_wait_s, abs=0.2)


def test_with_the_wanted_number_of_workers_no_window_is_needed() -> None:
    state, workers = start(10.0), 1
    for _ in range(60):
        state = play_steps(state, workers, 1)
        workers = state.wanted_workers

    assert workers == 4  # WORK / TRAIN_S: they generate as fast as the trainer trains
    assert state.window_s == pytest.approx(0.0, abs=0.1)


def test_a_remembered_window_is_restored_with_its_number_of_workers() -> None:
    state = play_steps(start(10.0), 3, 30)
    state = play_steps(state, 1, 30)
    assert state.window_s == pytest.approx(90.0, abs=0.1)

    step = play(window(state, 3), 3)

    assert window(state, 3) == pytest.approx(15.0, abs=0.1)
    assert step.trainer_wait_s == pytest.approx(step.remote_wait_s, abs=0.2)
    forgetful = play(state.window_s, 3)
    assert forgetful.remote_wait_s > 50.0
