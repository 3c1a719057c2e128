from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend_stages import pipeline
from tidemill.config.explain import ROWS, without_effect
from tidemill.config.keys import find
from tidemill.config.load import load_spec
from tidemill.pipeline.execution import plan_pipeline

MODEL = '--scoring.rewards=[{kind="model", model="./m"}]'
SETTINGS: list[tuple[list[str], list[str]]] = [  # what does nothing, and with what it would
    (["--schedule.fresh_fraction=0.5"], ["--schedule.max_policy_lag=1"]),
    (["--schedule.membership=first_finished", "--schedule.unfinished=restart"], ["--schedule.max_policy_lag=1"]),
    (["--schedule.on_lag_limit=drop"], ["--schedule.max_policy_lag=1", "--schedule.membership=first_finished"]),
    (["--schedule.max_redraws=1"], ["--algorithm.dynamic_sampling=true"]),
    (["--fleet.tail_fraction=0.2", "--fleet.size=adaptive"], ["--pool.workers=1"]),
    (["--fleet.preemptible_usd_per_hour=2"], ["--pool.kind=synthetic"]),
    (["--fleet.heartbeat_timeout_s=30"], ["--pool.workers=1", "--runtime=ray"]),
    (["--pool.kind=synthetic", "--pool.noticed=0.5"], ["--pool.notice_s=5"]),
    (["--ray.trainer_cpus=2"], ["--runtime=ray"]),
    (["--placement.actor_cpus=2"], ["--runtime=ray", "--placement.reward_model=actor", MODEL]),
    (["--placement.reward_model=actor", "--runtime=ray"], [MODEL]),
    (["--placement.reference=actor", "--runtime=ray"], ["--algorithm.kl_beta=0.1"]),
    (["--algorithm.kl_ratio=true"], ["--algorithm.kl_beta=0.1"]),
    (["--reading.ahead=true"], ["--algorithm.kl_beta=0.1"]),
    (["--reading.own_thread=true"], ["--reading.ahead=true", MODEL]),
    (["--reading.chunk_tokens=8"], ["--reading.ahead=true", MODEL]),
    (["--critic.max_grad_norm=2", "--algorithm.lam=0.9"], ["--algorithm.name=ppo"]),
    (["--algorithm.gamma=0.9"], ["--algorithm.name=reinforce_pp"]),
    (["--algorithm.name=cispo", "--algorithm.clip_low=0.1"], ["--algorithm.loss=ppo_clip"]),
    (["--algorithm.kl_stop=0.1"], ["--batch.epochs=2"]),
    (["--optimizer.min_learning_rate_ratio=0.5"], ["--optimizer.schedule=linear"]),
]


def told(args: list[str]) -> list[str]:
    return without_effect(load_spec(args, purpose="read"))


@pytest.mark.parametrize(("idle", "needed"), SETTINGS)
def test_a_key_that_does_nothing_is_told_with_the_reason(idle: list[str], needed: list[str]) -> None:
    (line,) = told(idle)
    assert any(arg.removeprefix("--").split("=")[0] in line for arg in idle)
    assert told([*idle, *needed]) == []


def test_keys_with_one_reason_share_a_line() -> None:
    (both,) = told(["--schedule.membership=first_finished", "--schedule.unfinished=restart"])
    assert both == (
        "schedule.membership, schedule.unfinished have no effect: at schedule.max_policy_lag = 0 nothing is left over "
        "for another batch"
    )
    (one,) = told(["--fleet.tail_fraction=0.2"])
    assert one == "fleet.tail_fraction has no effect: the pool has no preemptible workers"


def test_what_a_preset_sets_is_nobodys_fault() -> None:
    assert told(["--algorithm.name=ppo", "--algorithm.kl_beta=0"]) == []  # which has kl_in = "reward"


def test_a_run_in_progress_draws_no_samples_to_evaluate() -> None:
    (line,) = told(["--eval.samples_per_prompt=4"])
    assert line.startswith("eval.samples_per_prompt has no effect: a run in progress is evaluated greedily")


def test_every_key_of_the_table_is_one() -> None:
    for row in ROWS:
        for key in row.keys:
            assert find(tuple(key.split("."))), key


def test_stages_of_a_pipeline_are_told_too(tmp_path: Path) -> None:
    recipe = (
        '[model]\nsource = "char"\n[[stage]]\nname = "one"\nkind = "rl"\nfleet.tail_fraction = 0.2\n'
        '[[stage]]\nname = "two"\nkind = "eval"\neval.samples_per_prompt = 4\n'
    )
    assert plan_pipeline(pipeline(tmp_path, recipe)).unused == (
        "stage one: fleet.tail_fraction has no effect: the pool has no preemptible workers",
    )
