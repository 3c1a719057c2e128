"""Where the reserved engine runs, and how it gets weights, changes nothing that is learned."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine.engines import HAS_VLLM
from tests.forked import Forked
from tests.integration.cluster.test_weight_transports import RECIPE
from tests.processes import command_lines, processes_below
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_dir import RunDirectory

pytestmark = pytest.mark.xdist_group("ray")

DEADLINE_S = 240.0
SMALL = ("--pool.workers", "0", "--trainer.steps", "4")
IN_PROCESS, SHARDS = ("--runtime", "inprocess"), ("--trainer.shards", "2")
COLOCATED, OWN = ("--placement.engine", "colocated"), ("--placement.engine", "own")
LANE = ("--weights.lane", "collective")


def start(folder: Path, name: str, *more: str) -> Forked:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return Forked("train", f"@{recipe}", "--run.dir", str(folder / name), "--json", *SMALL, *more)


def finished(process: Forked) -> dict[str, Any]:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def digest(folder: Path, name: str, *more: str) -> str:
    return str(finished(start(folder, name, *more))["weights_digest"])


@pytest.mark.slow  # tests/unit/runtime/test_colocated.py
@pytest.mark.timeout(300)
def test_a_colocated_engine_in_one_process_learns_the_same(tmp_path: Path) -> None:
    shared = digest(tmp_path, "shared", *IN_PROCESS)

    assert digest(tmp_path, "colocated", *IN_PROCESS, *COLOCATED) == shared
    assert digest(tmp_path, "elastic", *IN_PROCESS, *COLOCATED, "--pool.workers", "2") == shared


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_shards_learn_the_same_with_an_engine_in_each_and_over_a_lane(tmp_path: Path) -> None:
    pulled = digest(tmp_path, "pulled", *SHARDS)

    assert digest(tmp_path, "colocated", *SHARDS, *COLOCATED) == pulled
    assert digest(tmp_path, "lane", *SHARDS, *LANE) == pulled


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_trainer_on_ray_learns_the_same_with_every_place_of_the_engine(tmp_path: Path) -> None:
    shared = digest(tmp_path, "shared", *IN_PROCESS)
    places = {"colocated": COLOCATED, "elastic": (*COLOCATED, "--pool.workers", "1"), "own": OWN, "lane": (*OWN, *LANE)}

    assert {name: digest(tmp_path, name, *place) for name, place in places.items()} == dict.fromkeys(places, shared)


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_killed_engine_on_a_lane_ends_the_run_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    more = (*OWN, *LANE, "--checkpoint.every_steps", "1", "--trainer.steps", "12")
    process = start(tmp_path, "killed", *more)
    metrics, until = RunDirectory(tmp_path / "killed").metrics, time.monotonic() + DEADLINE_S
    while not (metrics.exists() and any(line.step >= 2 for line in read_metrics(metrics))):
        assert process.poll() is None, process.communicate(60)
        assert time.monotonic() < until
        time.sleep(0.05)
    (engine,) = [pid for pid, name in command_lines(processes_below(process.pid)).items() if "RolloutActor" in name]
    os.kill(engine, signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode not in (0, None)
    assert "reserved engine died" in err or "weights were not broadcast" in err
    assert "run the same command again" in err
    resumed = finished(start(tmp_path, "killed", *more))
    assert resumed["weights_digest"] == digest(tmp_path, "whole", *IN_PROCESS, "--trainer.steps", "12")


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this")
@pytest.mark.timeout(800)
def test_a_colocated_vllm_learns_in_one_process_and_in_each_shard(tmp_path: Path) -> None:
    more = ("--engine.kind", "vllm", "--engine.batch_invariant", "false", "--model.char.hidden_size", "128", *COLOCATED)
    one = finished(start(tmp_path, "one", *IN_PROCESS, *more))

    steps = [line.values for line in read_metrics(RunDirectory(tmp_path / "one").metrics)[1:]]
    assert len(steps) == 4
    assert 0 <= max(values["mismatch_kl"] for values in steps if "mismatch_kl" in values) < 1e-3
    assert one["weights_digest"] == digest(tmp_path, "shards", *SHARDS, *more)
