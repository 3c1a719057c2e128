"""Keys that were set and will not act in training: a table of what each depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel

from tidemill.config.describe_pool import preemptible
from tidemill.config.pool import SyntheticPool
from tidemill.config.schema import RunSpec


class Row(NamedTuple):
    keys: tuple[str, ...]
    act: Callable[[RunSpec], bool]
    why_not: str


def _learns_again(spec: RunSpec) -> bool:
    return spec.batch.minibatches * spec.batch.epochs > 1


def _leaves_over(spec: RunSpec) -> bool:
    return spec.schedule.max_policy_lag > 0


def _may_be_late(spec: RunSpec) -> bool:
    return _leaves_over(spec) and spec.schedule.membership == "first_finished"


def _reads(spec: RunSpec) -> bool:
    return bool(spec.scoring.model_folders) or spec.algorithm.kl_beta > 0


def _warns(spec: RunSpec) -> bool:
    return not isinstance(spec.pool, SyntheticPool) or spec.pool.notice_s > 0


ROWS = (
    Row(
        ("schedule.fresh_fraction", "schedule.membership", "schedule.unfinished"),
        _leaves_over,
        "at schedule.max_policy_lag = 0 nothing is left over for another batch",
    ),
    Row(
        ("schedule.on_lag_limit",),
        _may_be_late,
        'no group is late unless schedule.max_policy_lag is above 0 and membership = "first_finished"',
    ),
    Row(("schedule.max_redraws",), lambda spec: spec.algorithm.dynamic_sampling, "algorithm.dynamic_sampling is off"),
    Row(
        (
            *("fleet.size", "fleet.seed_window_s", "fleet.window_gain", "fleet.queue_limit", "fleet.max_moves"),
            *("fleet.tail_fraction", "fleet.join_s", "fleet.hand_back_s", "fleet.probe_limit", "fleet.hand_over"),
            *("fleet.window_floor_s", "fleet.remember_windows", "fleet.known_windows"),
            "fleet.preemptible_usd_per_hour",
        ),
        preemptible,
        "the pool has no preemptible workers",
    ),
    Row(("fleet.known_windows",), lambda spec: spec.fleet.remember_windows, "fleet.remember_windows is false"),
    Row(
        ("fleet.hand_over",),
        lambda spec: not _leaves_over(spec) or not preemptible(spec),
        "only at schedule.max_policy_lag = 0 does one step's generating end before the next begins",
    ),
    Row(
        ("fleet.silence_s",),
        lambda spec: spec.runtime == "ray" and preemptible(spec),
        "there are no preemptible workers that are processes of their own",
    ),
    Row(("pool.noticed",), _warns, "pool.notice_s is 0"),
    Row(
        (
            *("ray.address", "ray.reserved_selector", "ray.trainer_cpus", "ray.trainer_gpus", "ray.worker_cpus"),
            "ray.worker_gpus",
        ),
        lambda spec: spec.runtime == "ray",
        'runtime is not "ray"',
    ),
    Row(
        ("placement.actor_cpus", "placement.actor_gpus"),
        lambda spec: bool(spec.placement.on_actors),
        "no model is placed on an actor",
    ),
    Row(("placement.reward_model",), lambda spec: bool(spec.scoring.model_folders), 'no reward is of kind "model"'),
    Row(
        ("placement.reference", "algorithm.kl_in", "algorithm.kl_ratio"),
        lambda spec: spec.algorithm.kl_beta > 0,
        "algorithm.kl_beta = 0 needs no reference",
    ),
    Row(("reading.ahead",), _reads, "there is neither a reward model nor a reference"),
    Row(("reading.own_thread",), lambda spec: spec.reading.ahead, "reading.ahead is off"),
    Row(
        ("reading.chunk_tokens", "reading.cache_tokens"),
        lambda spec: spec.reading.ahead or bool(spec.placement.on_actors),
        "no model reads sample by sample: reading.ahead is off, and none is on an actor",
    ),
    Row(
        (
            *("placement.critic", "critic.kind", "critic.source", "critic.learning_rate", "critic.max_grad_norm"),
            *("critic.normalize", "algorithm.lam", "algorithm.bootstrap_truncated", "algorithm.value_clip"),
            "algorithm.value_coefficient",
        ),
        lambda spec: spec.algorithm.needs_critic,
        'there is no critic: algorithm.advantage is not "gae"',
    ),
    Row(
        ("algorithm.gamma",),
        lambda spec: not spec.algorithm.compares_siblings,
        "the advantage is one number a sample",
    ),
    Row(("algorithm.clip_low",), lambda spec: spec.algorithm.loss != "cispo", 'loss = "cispo" has no lower limit'),
    Row(("algorithm.kl_stop",), _learns_again, "each batch is one optimizer step, so that there is nothing to stop"),
    Row(
        ("optimizer.min_learning_rate_ratio",),
        lambda spec: spec.optimizer.schedule != "constant",
        'optimizer.schedule is "constant"',
    ),
    Row(
        ("eval.samples_per_prompt", "eval.pass_at", "eval.compare_with"),
        lambda spec: False,
        "a run in progress is evaluated greedily and by itself; `tidemill eval` does more",
    ),
)


def without_effect(spec: RunSpec) -> list[str]:
    """A sentence for each reason why keys that are not at their defaults do nothing in this run."""
    found = []
    for row in ROWS:
        idle = [] if row.act(spec) else [key for key in row.keys if _is_set(spec, key)]
        if idle:
            found.append(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect: {row.why_not}")
    return found


def _is_set(spec: RunSpec, key: str) -> bool:
    """Whether a key has another value than by default; of the algorithm, than its preset gives it."""
    section, name = key.split(".")
    node: BaseModel = getattr(spec, section)
    if section == "algorithm":
        return name in spec.algorithm.changed_from_preset()
    field = type(node).model_fields.get(name)  # a pool of another kind may have no such key
    return field is not None and getattr(node, name) != field.get_default(call_default_factory=True)
