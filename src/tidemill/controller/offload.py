"""Adaptive offload: how long the local worker generates in a step, and how many preemptible workers are requested.

From RLBoost (arXiv 2510.19225). In the first `T_seed` seconds of a step, the seeding window, the reserved engines
generate, too; then they train while preemptible workers finish the batch. After every step

    T_seed += (t_train_wait - t_remote_wait) / eta
    N_prem  = (t_remote * n_prem + T_seed * N_resv) / t_train

so that neither side waits for the other, and preemptible workers alone keep the trainer busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tidemill.controller.fleet import Fleet
from tidemill.core.records import Record

STEADY = 0.1
"""Tolerance within which the mean number of workers counts as constant."""

INITIAL_SHARE = 0.5
"""Initial `Balance.drained_share`."""

LAST_STEP_WEIGHT = 0.5
"""Weight of the last step in the moving averages of `Balance`."""

REMAINING_FACTOR = 1.25
"""The local worker starts again when the remaining tokens exceed what the others can finish by this factor."""


class Balance(Record):
    """Measured speeds of both sides."""

    train_s: float  # of the last batch
    train_s_per_token: float
    drained_share: float = INITIAL_SHARE  # workers' mean speed from the hand-over to the last token / their best speed


class HandOver(Record):
    """State when the local worker stopped generating."""

    at_s: float
    left_tokens: float  # expected
    workers: int


class OffloadState(Record):
    """State carried from step to step."""

    window_s: float  # T_seed after the last step
    wanted_workers: int  # N_prem
    window_by_count: dict[int, float] = {}  # T_seed by number of preemptible workers
    workers: int = 0  # preemptible workers of the last step; 0 if their number changed
    balance: Balance | None = None


class StepObservation(Record):
    """Measurements of a step; times in seconds."""

    workers_first: int  # preemptible workers at its start, for which its window was chosen
    workers_mean: float  # n_prem: serving preemptible workers, over the rollout
    trainer_wait_s: float  # the trainer waited for samples
    remote_wait_s: float  # preemptible workers had no samples
    remote_s: float  # preemptible workers generated
    train_s: float  # the trainer computed
    reserved_engines: int = 1  # N_resv


def start(window_s: float, reserved_engines: int = 1, known: Sequence[float] = ()) -> OffloadState:
    """State before the first step; requests as many preemptible workers as there are reserved engines.

    Args:
        known: windows of earlier runs with one worker, with two, and so on.
    """
    return OffloadState(
        window_s=window_s, wanted_workers=reserved_engines, window_by_count=dict(enumerate(known, start=1))
    )


def window(state: OffloadState, workers: int) -> float:
    """Seeding window in seconds of a step that begins with `workers` preemptible workers.

    The last step's, if it had this number of workers throughout; otherwise the one remembered for this number.
    """
    return state.window_s if workers == state.workers else state.window_by_count.get(workers, state.window_s)


def after_step(
    state: OffloadState, observation: StepObservation, *, gain: float, floor_s: float = 0.0, remembers: bool = True
) -> OffloadState:
    """Update the state after a step.

    The window is remembered for a number of workers only if the step had that number throughout. A step without
    preemptible workers changes no window; N_prem is rounded up, and unchanged if nothing was trained.

    Args:
        gain: eta; divides the imbalance by which the window moves.
        floor_s: minimum of the window.
        remembers: whether windows are remembered by number of workers.
    """
    if observation.workers_mean <= STEADY:
        return replace(state, workers=0)
    workers = observation.workers_first
    imbalance_s = observation.trainer_wait_s - observation.remote_wait_s
    window_s = max(window(state, workers) + imbalance_s / gain, floor_s)
    steady = abs(observation.workers_mean - workers) <= STEADY
    wanted = state.wanted_workers
    if observation.train_s > 0:
        engine_s = observation.remote_s * observation.workers_mean + window_s * observation.reserved_engines
        wanted = max(1, math.ceil(engine_s / observation.train_s - 1e-9))
    return OffloadState(
        window_s=window_s,
        wanted_workers=wanted,
        window_by_count={**state.window_by_count, workers: window_s} if steady and remembers else state.window_by_count,
        workers=workers if steady else 0,
    )


def seeding_useful(*, elapsed_s: float, window_s: float, preemptible_serving: int) -> bool:
    """Whether the local worker should generate, `elapsed_s` seconds into the step: in the window, or without others.

    It does not stop earlier when others have free slots: a larger batch would slow down the samples they already have.
    """
    return preemptible_serving == 0 or elapsed_s < window_s


def can_finish(
    balance: Balance,
    *,
    made_tokens: float,
    left_tokens: float,
    workers: int,
    best_tokens_per_s: float,
    trained_s: float = 0.0,
) -> bool:
    """Whether preemptible workers are expected to finish generating before the trainer finishes the batch.

    Args:
        left_tokens: expected, of all unfinished samples.
        best_tokens_per_s: of one worker.
        trained_s: time the trainer has already spent on this batch.
    """
    train_s = balance.train_s_per_token * (made_tokens + left_tokens) - trained_s
    return left_tokens <= workers * best_tokens_per_s * balance.drained_share * train_s


def balance_after(
    before: Balance | None,
    *,
    train_s: float,
    tokens: int,
    hand_over: HandOver | None,
    finished_s: float,
    best_tokens_per_s: float,
) -> Balance | None:
    """Update the measured speeds after a step.

    Args:
        train_s: time to train on `tokens` tokens.
        hand_over: of this step, if the number of workers did not change after it; None leaves `drained_share` as it is.
        finished_s: time of the last token.
    """
    if train_s <= 0 or not tokens:
        return before
    share = before.drained_share if before else INITIAL_SHARE
    per_token = train_s / tokens
    if before is not None:
        per_token = LAST_STEP_WEIGHT * per_token + (1 - LAST_STEP_WEIGHT) * before.train_s_per_token
    if hand_over is not None and finished_s > hand_over.at_s and best_tokens_per_s > 0:
        possible = hand_over.workers * best_tokens_per_s * (finished_s - hand_over.at_s)
        share = LAST_STEP_WEIGHT * hand_over.left_tokens / possible + (1 - LAST_STEP_WEIGHT) * share
    return Balance(train_s=train_s, train_s_per_token=per_token, drained_share=share)


class Seeding:
    """Applies the offload policy to one run.

    Args:
        ahead: batches are generated under a policy lag. The samples in flight are then more than the rest of a batch,
            so that `Balance` cannot decide when the local worker stops.
    """

    def __init__(self, fleet: Fleet, *, ahead: bool) -> None:
        self._fleet = fleet
        self._uses_balance = fleet.config.hand_over == "balance" and not ahead
        self._state: OffloadState | None = None  # None without a provider
        self._workers_first = 0  # at the start of the step

    def begin(self) -> None:
        if self._fleet.elastic:
            config = self._fleet.config
            known = config.known_windows if config.remember_windows else ()
            self._set_state(start(config.seed_window_s, self._fleet.reserved_engines, known))
            if config.size == "pool":  # an autoscaled cluster has no workers until somebody asks for them
                self._fleet.rent(more=True)

    def begin_step(self) -> float | None:
        """Seeding window of the step in seconds; None without a provider, when the local worker always generates."""
        if self._state is None:
            return None
        self._workers_first = self._fleet.serving_count
        return window(self._state, self._workers_first)

    @property
    def balance(self) -> Balance | None:
        """Measured speeds, if they decide when the local worker stops."""
        return self._state.balance if self._state is not None and self._uses_balance else None

    def end_step(
        self, timings: Mapping[str, float], *, tokens: int, hand_over: HandOver | None, finished_s: float
    ) -> dict[str, float]:
        """Update windows, requested workers and measured speeds; returns how long workers had no samples.

        Args:
            timings: of the step, in seconds, and its `workers_mean`.
            tokens: of the batch.
            finished_s: time of its last token.
        """
        fleet, state = self._fleet, self._state
        if state is None:
            return {}
        observation = StepObservation(
            workers_first=self._workers_first,
            workers_mean=timings["workers_mean"],
            trainer_wait_s=timings["time_trainer_wait_s"],
            remote_wait_s=fleet.mean_idle_s(),
            remote_s=timings["time_rollout_s"],
            train_s=timings["time_train_s"],
            reserved_engines=fleet.reserved_engines,
        )
        steady = hand_over is not None and abs(observation.workers_mean - hand_over.workers) <= STEADY
        balance = balance_after(
            state.balance,
            train_s=observation.train_s,
            tokens=tokens,
            hand_over=hand_over if steady else None,
            finished_s=finished_s,
            best_tokens_per_s=fleet.profile.best_tokens_per_s,
        )
        config = fleet.config
        offload = after_step(
            state,
            observation,
            gain=config.window_gain,
            floor_s=config.window_floor_s,
            remembers=config.remember_windows,
        )
        self._set_state(replace(offload, balance=balance))
        return {"time_remote_wait_s": observation.remote_wait_s}

    def _set_state(self, state: OffloadState) -> None:
        self._state = state
        if self._fleet.config.size == "adaptive":
            self._fleet.request_workers(state.wanted_workers)
