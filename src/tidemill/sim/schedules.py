"""Schedules as differences from a recipe: how the same controller is told to run, and on which GPUs it generates.

A new schedule is a function, a row and a name in `config/simulation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.config.schedule import ScheduleConfig
from tidemill.config.schema import RunSpec
from tidemill.config.simulation import ScheduleName
from tidemill.config.words import counted
from tidemill.core.records import Record
from tidemill.sim.chunked import chunked_twins
from tidemill.sim.rlboost import rlboost_fleet, rlboost_twins
from tidemill.sim.run import Twins


class Schedule(Record):
    """What differs."""

    words: str
    schedule: ScheduleConfig
    shares_gpus: bool  # the same reserved GPUs generate and learn, in turn; else some do this, the others that
    fleet: dict[str, Any] = {}  # keys of [fleet]
    elastic: bool = False  # preemptible workers generate, too
    streams: bool = False  # learning begins with the first group that is complete; else with the whole batch
    deltas: bool = False  # workers catch up by differences
    twins: Twins = Twins()  # other parts of the controller's surroundings, or of the controller


def colocated(spec: RunSpec) -> Schedule:
    """As veRL does: every engine has its part of the batch from the beginning."""
    return Schedule(
        words="all GPUs generate a batch, each engine its part, then all learn from it",
        schedule=ScheduleConfig(),
        shares_gpus=True,
        twins=chunked_twins(),
    )


def disaggregated(spec: RunSpec) -> Schedule:
    return Schedule(
        words="some GPUs generate, the others learn from whole batches, on policy",
        schedule=ScheduleConfig(),
        shares_gpus=False,
    )


def one_step_off(spec: RunSpec) -> Schedule:
    """As slime does: the next batch is generated with the weights before, while this one is learned from."""
    return Schedule(
        words="the next batch is generated with the weights before, while others learn from this one",
        schedule=ScheduleConfig(max_policy_lag=1, unfinished="finish"),
        shares_gpus=False,
    )


def bounded_staleness(spec: RunSpec) -> Schedule:
    """AReaL (arXiv 2505.24298): samples under way go on under new weights, and batches are of those finished first."""
    lag = spec.simulation.staleness
    return Schedule(
        words=f"generating runs ahead by up to {counted(lag, 'version')}, and goes on under new weights",
        schedule=ScheduleConfig(max_policy_lag=lag, membership="first_finished"),
        shares_gpus=False,
    )


def streamed(spec: RunSpec) -> Schedule:
    """StreamRL (arXiv 2504.15930), on policy: samples stream to the trainer, those expected longest begin first."""
    return Schedule(
        words="some GPUs generate, the others learn from groups as they are complete, on policy",
        schedule=ScheduleConfig(),
        shares_gpus=False,
        streams=True,
    )


def rlboost(spec: RunSpec) -> Schedule:
    """RLBoost (arXiv 2510.19225), with the constants of its public code."""
    return Schedule(
        words="preemptible workers generate beside GPUs that do so at first; the samples of a prompt travel together",
        schedule=ScheduleConfig(),
        fleet=rlboost_fleet(spec.batch.group_size),
        shares_gpus=True,
        elastic=True,
        streams=True,
        twins=rlboost_twins(spec.batch.group_size),
    )


def tidemill(spec: RunSpec) -> Schedule:
    """The recipe as it is: samples move one by one, workers catch up by differences, the longest begin first."""
    return Schedule(
        words="the recipe: preemptible workers generate beside GPUs that generate and learn in turn",
        schedule=spec.schedule,
        shares_gpus=True,
        elastic=True,
        streams=True,
        deltas=True,
    )


SCHEDULES: dict[ScheduleName, Callable[[RunSpec], Schedule]] = {
    "colocated": colocated,
    "disaggregated": disaggregated,
    "one_step_off": one_step_off,
    "bounded_staleness": bounded_staleness,
    "streamed": streamed,
    "rlboost": rlboost,
    "tidemill": tidemill,
}
