"""`recipes/vllm-local.toml`: vLLM workers on Ray learn, and one may be killed. Run by `make test-vllm`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import tidemill as tm
from tests.contract.engine.engines import HAS_VLLM
from tests.integration.cluster.test_train import _events, start
from tests.processes import command_lines, processes_below

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this"),
    pytest.mark.timeout(400),
]
START_S = 150.0


def test_vllm_workers_train_and_one_may_be_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(Path("vllm-local"), run, "--eval.every_steps=0", "--trainer.steps=400")
    until = time.monotonic() + START_S
    while sum(line["event"] == "join" for line in _events(run)) < 2:
        assert process.poll() is None, process.communicate(60)
        assert time.monotonic() < until, "the vLLM workers did not join"
        time.sleep(0.2)
    joined_at = tm.Run(run).metrics[-1]["step"]
    workers = [pid for pid, name in command_lines(processes_below(process.pid)).items() if "RolloutActor" in name]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    while tm.Run(run).metrics[-1]["step"] < joined_at + 40:
        assert process.poll() is None, process.communicate(60)
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert json.loads(out)["interrupted"], err
    done = tm.Run(run)
    events = _events(run)
    assert not [line for line in events if "quarantine" in str(line["event"])]
    assert len([line for line in events if line["event"] == "lease_end" and line["evicted"]]) == 1
    by_workers = [line["tokens"] for line in events if line["event"] == "lease_end" and line["worker"] != "local"]
    assert sum(map(int, map(str, by_workers))) > 500
    rewards = [line["reward_mean"] for line in done.metrics if line["step"] > 0]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1  # it learns
    mismatch = [line["mismatch_kl"] for line in done.metrics if line["step"] > 0]
    assert max(mismatch) < 1e-3
    for line in done.metrics[1:]:
        assert line["samples"] == 256  # nothing lost, nothing twice
