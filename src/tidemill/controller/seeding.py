"""How long the reserved side generates beside preemptible workers, step by step, and how many of them are wanted."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from tidemill.controller.fleet import Fleet
from tidemill.controller.offload import (
    STEADY,
    Balance,
    HandOver,
    OffloadState,
    StepObservation,
    after_step,
    balance_after,
    start,
    window,
)


class Seeding:
    """What one run learned of who waits for whom.

    Args:
        ahead: batches are generated under a policy lag. Then what is in flight is more than what is left of a batch,
            and the reserved side does not stop by it.
    """

    def __init__(self, fleet: Fleet, *, ahead: bool) -> None:
        self._fleet = fleet
        self._judges_balance = fleet.config.hand_over == "balance" and not ahead
        self._state: OffloadState | None = None  # None where no preemptible worker can come
        self._workers_first = 0  # when the step began

    def begin(self) -> None:
        if self._fleet.elastic:
            config = self._fleet.config
            known = config.known_windows if config.remember_windows else ()
            self._adopt(start(config.seed_window_s, self._fleet.reserved_engines, known))

    def begin_step(self) -> float | None:
        """How many seconds the reserved side generates in the step; None for all the time, where nobody else can."""
        if self._state is None:
            return None
        self._workers_first = self._fleet.joined
        return window(self._state, self._workers_first)

    @property
    def balance(self) -> Balance | None:
        """What is known of both sides' speeds, where it decides when the reserved side stops."""
        return self._state.balance if self._state is not None and self._judges_balance else None

    def learn(
        self, timings: Mapping[str, float], *, tokens: int, hand_over: HandOver | None, finished_s: float
    ) -> dict[str, float]:
        """Learn from a step: the window of later ones, how many workers would be of use, how fast both sides were.

        Args:
            timings: of the step, in seconds, and its `workers_mean`.
            tokens: of the batch.
            finished_s: when its last token came.

        Returns:
            How long workers had nothing to do.
        """
        fleet, state = self._fleet, self._state
        if state is None:
            return {}
        observation = StepObservation(
            workers_first=self._workers_first,
            workers_mean=timings["workers_mean"],
            trainer_wait_s=timings["time_trainer_wait_s"],
            remote_wait_s=fleet.idle_s(),
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
        self._adopt(replace(offload, balance=balance))
        return {"time_remote_wait_s": observation.remote_wait_s}

    def _adopt(self, state: OffloadState) -> None:
        self._state = state
        if self._fleet.config.size == "adaptive":
            self._fleet.want(state.wanted_workers)
