"""How long the reserved side generates in a step, and how many preemptible workers are wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tidemill.controller.fleet import Fleet
from tidemill.core.records import Record

STEADY = 0.1
"""A mean number of workers so close to a whole one counts as that number all along."""


ASSUMED_SHARE = 0.5
"""Of their best speed, what workers reach while they finish a batch, until that was seen."""
NEWS = 0.5
"""Weight of the last step in what is known of both sides."""
WORSE = 1.25
"""The reserved side generates again when there is so many times more left than others can finish in time."""


class Balance(Record):
    """What earlier steps say of how fast both sides are."""

    train_s: float  # of the last batch
    train_s_per_token: float
    drained_share: float = ASSUMED_SHARE  # of the best speed, what workers reached from a hand-over to the last token


class HandOver(Record):
    """The reserved side stopped generating."""

    at_s: float
    left_tokens: float  # expected then
    workers: int


class OffloadState(Record):
    """What is carried from step to step."""

    window_s: float  # T_seed after the last step
    wanted_workers: int  # N_prem
    window_by_count: dict[int, float] = {}  # the memory: T_seed by number of preemptible workers
    workers: int = 0  # preemptible ones that the last step had throughout; 0 where their number changed
    balance: Balance | None = None


class StepObservation(Record):
    """What a step was like. Times in seconds."""

    workers_first: int  # preemptible workers with which it began, for which its window was chosen
    workers_mean: float  # n_prem: preemptible workers serving, over the rollout
    trainer_wait_s: float  # the trainer had nothing to learn from
    remote_wait_s: float  # preemptible workers had nothing left to generate
    remote_s: float  # preemptible workers were generating
    train_s: float  # the trainer was learning
    reserved_engines: int = 1  # N_resv


def start(window_s: float, reserved_engines: int = 1, known: Sequence[float] = ()) -> OffloadState:
    """Before the first step: as many preemptible workers are wanted as there are engines on the reserved side.

    Args:
        known: windows that earlier runs found with one worker, with two, and so on.
    """
    return OffloadState(
        window_s=window_s, wanted_workers=reserved_engines, window_by_count=dict(enumerate(known, start=1))
    )


def window(state: OffloadState, workers: int) -> float:
    """The seeding window in seconds for a step that begins with so many preemptible workers.

    It goes on from the last step's; where that did not have this number throughout, from what is remembered of it.
    """
    return state.window_s if workers == state.workers else state.window_by_count.get(workers, state.window_s)


def after_step(
    state: OffloadState, observation: StepObservation, *, gain: float, floor_s: float = 0.0, remembers: bool = True
) -> OffloadState:
    """What a step teaches.

    The window is remembered for a number of workers when the step began with it and had it throughout: what a changing
    fleet makes both sides wait says little about any number. A step without preemptible workers teaches nothing, and
    one in which nothing was trained leaves the wanted number as it was.

    Args:
        gain: eta; divides the imbalance by which the window moves.
        floor_s: the window is never shorter.
        remembers: or only the last window counts, whatever the number of workers.
    """
    if observation.workers_mean <= STEADY:
        return replace(state, workers=0)
    workers = observation.workers_first
    imbalance_s = observation.trainer_wait_s - observation.remote_wait_s
    window_s = max(window(state, workers) + imbalance_s / gain, floor_s)
    steady = abs(observation.workers_mean - workers) <= STEADY
    return OffloadState(
        window_s=window_s,
        wanted_workers=_wanted(observation, window_s) or state.wanted_workers,
        window_by_count={**state.window_by_count, workers: window_s} if steady and remembers else state.window_by_count,
        workers=workers if steady else 0,
    )


def _wanted(observation: StepObservation, window_s: float) -> int | None:
    """N_prem rounded up, so that the preemptible side is not the slower one; None when nothing was trained."""
    if observation.train_s <= 0:
        return None
    engine_s = observation.remote_s * observation.workers_mean + window_s * observation.reserved_engines
    return max(1, math.ceil(engine_s / observation.train_s - 1e-9))


def seeding_useful(*, elapsed_s: float, window_s: float, preemptible_serving: int) -> bool:
    """Whether the reserved side should generate now, `elapsed_s` seconds into the step.

    Without a preemptible worker it always should, otherwise until the window is over. It does not stop earlier because
    others have free slots: what they took over they would decode beside all they have, and so more slowly.
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
    """Whether preemptible workers will have generated what is left when the trainer is through with the batch.

    Args:
        left_tokens: expected, of all unfinished samples.
        best_tokens_per_s: of one worker.
        trained_s: how long the trainer had for this batch already.
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
    """
    Args:
        train_s: of learning from `tokens` tokens.
        hand_over: of this step, where the number of workers was the same from then on; None teaches nothing of shares.
        finished_s: when the last token came.
    """
    if train_s <= 0 or not tokens:
        return before
    share = before.drained_share if before else ASSUMED_SHARE
    per_token = train_s / tokens
    if before is not None:
        per_token = NEWS * per_token + (1 - NEWS) * before.train_s_per_token
    if hand_over is not None and finished_s > hand_over.at_s and best_tokens_per_s > 0:
        could = hand_over.workers * best_tokens_per_s * (finished_s - hand_over.at_s)
        share = NEWS * hand_over.left_tokens / could + (1 - NEWS) * share
    return Balance(train_s=train_s, train_s_per_token=per_token, drained_share=share)


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
