"""How much the reserved side generates itself, and how many preemptible workers are wanted. Pure.

RLBoost's adaptive rollout offload (arXiv 2510.19225): in the first `T_seed` seconds of a step, the seeding window, the
reserved engines generate too; then they train while preemptible workers finish the batch. After every step

    T_seed += (t_train_wait - t_remote_wait) / eta
    N_prem  = (t_remote * n_prem + T_seed * N_resv) / t_train

so that in the end neither side waits for the other, and the preemptible workers alone can keep the trainer busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

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
