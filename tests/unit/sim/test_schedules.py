"""What a scenario's machines can do, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gpu_rows import QWEN3, engine_row, train_step_row, write_rows
from tests.unit.sim.test_costs import trajectory
from tidemill.config.schema import RunSpec
from tidemill.core.records import Group
from tidemill.sim.costs import ProfiledEngine
from tidemill.sim.schedules import SCHEDULES, SimulatedCluster, cluster_of


def cluster(**simulation: Any) -> SimulatedCluster:
    """14e9 parameters: 28 GB in bf16, 224 GB of states."""
    given = {"parameters": 14e9, "machine": "rlboost-8xh100", "engine_gpus": 2, **simulation}
    sections = {name: given.pop(name) for name in ("algorithm", "batch", "fleet", "model", "trainer") if name in given}
    return cluster_of(RunSpec.model_validate({"simulation": given, "sampling": {"max_new_tokens": 8192}, **sections}))


def test_deltas_are_used_where_they_are_faster() -> None:
    # The whole takes 28e9 / 6.25e9 = 4.48 s. A difference of 14e9 * 0.03 * 2 bytes is sent in 0.13 s, encoded and
    # applied in 14e9 / (1.1e9 * 16) = 0.795 s each.
    slow = cluster().weights(deltas=True)
    assert (slow.nbytes, slow.delta_nbytes) == (28e9, 0.84e9)
    assert slow.publish_s == slow.pull_s == pytest.approx(0.795, abs=1e-3)
    assert (slow.uplink_bytes_per_s, slow.downlink_bytes_per_s) == (25e9, 6.25e9)
    # Each of an engine's two GPUs reads and writes 14 GB at 3.35 TB/s.
    assert slow.swap_s == pytest.approx(2 * 14e9 / 3.35e12)
    # 3,200 Gbit/s carry the whole in 0.07 s.
    fast = cluster(worker_machine="aws-p5.48xlarge").weights(deltas=True)
    assert (fast.delta_nbytes, fast.publish_s, fast.pull_s) == (0, 0.0, 0.0)
    assert cluster().weights(deltas=False).delta_nbytes == 0


def test_an_adapter_is_trained_and_published() -> None:
    # 14e9 * 16 bytes; a reference is 2 bytes more each, a critic as much again as the policy.
    assert cluster(algorithm={"kl_beta": 0.0}).states_bytes == pytest.approx(224e9)
    assert cluster(algorithm={"kl_beta": 0.01}).states_bytes == pytest.approx(252e9)
    assert cluster(algorithm={"name": "ppo", "kl_beta": 0.0}).states_bytes == pytest.approx(448e9)
    adapted = cluster(model={"lora": {"rank": 8}})
    assert adapted.trained_parameters < 0.01 * 14e9
    assert adapted.states_bytes == pytest.approx(28e9 + 16 * adapted.trained_parameters)
    assert adapted.weights(deltas=False).nbytes == pytest.approx(2 * adapted.trained_parameters, abs=1)


def test_reserved_engines_load_over_links_or_over_the_network() -> None:
    assert cluster().load_s == pytest.approx(14e9 / 450e9)
    assert cluster(machines=2).load_s == pytest.approx(28e9 / 25e9)


def test_engines_and_trainer_run_at_measured_efficiencies(tmp_path: Path) -> None:
    # 1.7B on one H100: 256 samples of 512 tokens in 30 s, a step on 32 of them in 2 s.
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    file = write_rows(tmp_path / "rows.json", train_step_row(2.0), engine_row(30.0, engine="embedded"))
    given = {
        "simulation": {"model": tmp_path, "measured": [file]},
        "batch": {"microbatch_tokens": 16_384},
        "trainer": {"activation_checkpointing": True},
        "sampling": {"max_new_tokens": 8192},
    }
    site = cluster_of(RunSpec.model_validate(given))
    engine = msgspec.structs.replace(site.engine(site.gpu), slots=256)
    # 32 prompts, then 512 steps, whose contexts grow by one token per sample
    assert 32 * engine.prefill_s(512) + engine.decode_s(256, 256 * 512, 512) == pytest.approx(30.0, rel=0.01)
    trainer = site.trainer(1)
    samples = tuple(trajectory(512, 512) for _ in range(8))
    groups = [Group(position=position, prompt_id=str(position), trajectories=samples) for position in range(4)]
    # the simulation launches one microbatch more
    accumulated_s = sum(trainer.accumulate_s(group) for group in groups)
    assert accumulated_s + trainer.profile.update_s == pytest.approx(2.0, rel=0.01)


def test_the_split_balances_both_sides() -> None:
    # 224 GB of states need 4 of 8 GPUs with 72 GB each.
    assert cluster().balanced(overlapping=True) == 4
    # Twice the passes for the critic, and activations computed again: more GPUs learn.
    more = {"algorithm": {"advantage": "gae"}, "trainer": {"activation_checkpointing": True}}
    small: dict[str, Any] = {"parameters": 1e9, "engine_gpus": 1, "completion_tokens": 500}
    small["batch"] = {"prompts": 512, "microbatch_tokens": 16384}
    for overlapping in (True, False):
        generating = [cluster(**small, **changes).balanced(overlapping=overlapping) for changes in ({}, more)]
        assert generating[1] < generating[0]


def test_tail_batching_has_the_keys_of_the_recipe_and_no_lag() -> None:
    keys = {"tail": "batching", "oversample": 1.5, "nominal_slots": 40}
    given = RunSpec.model_validate({"schedule": keys})
    assert SCHEDULES["tail_batching"](given).schedule == given.schedule
    ahead = SCHEDULES["tail_batching"](RunSpec.model_validate({"schedule": {"max_policy_lag": 2}})).schedule
    assert (ahead.tail, ahead.max_policy_lag, ahead.oversample) == ("batching", 0, 1.25)


def test_an_engine_fits_one_machine() -> None:
    # 8 // 5 engines on each of 3 machines; the other 3 GPUs of each learn at best, over the network.
    odd = cluster(machines=3, engine_gpus=5, worker_machine="rlboost-8xh100")
    assert odd.most_generating == 15
    cost_model = odd.cost_model(SCHEDULES["colocated"](odd.spec), generating=15, elastic=True)
    assert isinstance(cost_model.reserved, ProfiledEngine)
    assert isinstance(cost_model.worker, ProfiledEngine)
    assert (cost_model.reserved.engines, cost_model.worker.engines) == (3, 1)
    # A small model that generates for long: a fourth engine would shorten the step, if it fitted.
    long: dict[str, Any] = {"parameters": 1e9, "completion_tokens": 6000, "completion_sigma": 0.1}
    assert cluster(**long, machines=3, engine_gpus=5).balanced(overlapping=True) == 15
    # 14 GB go through the links of GPUs of one machine, 450 GB/s each, or through the network's 25 GB/s.
    one, across = cluster(engine_gpus=5).trainer(6).profile, cluster(machines=2, engine_gpus=5).trainer(6).profile
    assert across.gather_s == pytest.approx(one.gather_s * 450 / 25)
    assert cluster(machines=2).trainer(6).profile.gather_s == one.gather_s


def test_catalogue_prices_are_defaults() -> None:
    catalogue, given = cluster(machines=2).spec.fleet, cluster(fleet={"preemptible_usd_per_hour": 1.0}).spec.fleet
    assert (catalogue.reserved_usd_per_hour, catalogue.preemptible_usd_per_hour) == (2 * 83.79, 5.32)
    assert (given.reserved_usd_per_hour, given.preemptible_usd_per_hour) == (83.79, 1.0)
