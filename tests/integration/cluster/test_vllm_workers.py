"""`@vllm-local`: vLLM workers on Ray learn, and one may be killed. Run by `make test-vllm`."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import tidemill as tm
from tests.contract.engine.engines import HAS_VLLM
from tests.integration.cluster.test_train import _events, all_gone, start
from tests.processes import command_lines, processes_below

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this"),
    pytest.mark.timeout(800),
]
START_S = 150.0
WORKERS = 2
KILLS = 10
HUNG = (3, 7)
"""These are stopped instead, as by a hang; the others end as by the kernel's out-of-memory killer."""
LONG = (
    "--sampling.max_new_tokens=60",
    '--sampling.stop=["no such string"]',
    '--scoring.rewards=[{kind = "length", target_tokens = 30}]',
    "--optimizer.learning_rate=1e-12",  # the weights stay, so that two runs can be compared sample by sample
    "--batch.prompts=16",
    "--batch.group_size=16",
    "--eval.every_steps=0",
    "--checkpoint.every_steps=0",
)


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
    assert len(workers) == WORKERS
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


def ranks_below(pid: int) -> list[int]:
    return [each for each, name in command_lines(processes_below(pid)).items() if "VLLM::Worker_TP" in name]


def test_a_killed_and_a_hung_rank_end_their_leases_and_leave_no_orphan(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        Path("vllm-local"), run, *LONG, "--engine.tensor_parallel=2", "--trainer.steps=4000",
        "--fleet.heartbeat_timeout_s=5",
    )  # fmt: skip
    until, seen = time.monotonic() + 2 * START_S, set[int]()
    for ended, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        while joined(run) < WORKERS + ended:
            assert process.poll() is None, process.communicate(60)
            assert time.monotonic() < until, f"{joined(run)} workers joined"
            time.sleep(0.2)
        workers = [pid for pid, name in command_lines(processes_below(process.pid)).items() if "RolloutActor" in name]
        worker = next(pid for pid in workers if not seen & {*ranks_below(pid)} and len(ranks_below(pid)) == 2)
        seen |= {*ranks_below(worker)}
        time.sleep(1.5)  # it has samples now
        os.kill(ranks_below(worker)[1], number)
        while sum(line["event"] == "lease_end" for line in _events(run)) <= ended:
            assert time.monotonic() < until, "the lease did not end"
            time.sleep(0.2)
        all_gone([*seen], 5.0)
    seen |= {*ranks_below(process.pid)}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    all_gone([*seen], 5.0)
    first, second = [str(line["cause"]) for line in _events(run) if line["event"] == "lease_end"][:2]
    assert "of 2 of vLLM ended (exit code -9)" in first
    silent = re.search(r"no report for ([\d.]+) s", second)
    assert silent and float(silent[1]) >= 5.0, second
    assert {line["samples"] for line in tm.Run(run).metrics[1:]} == {256}


def joined(run: Path) -> int:
    return sum(line["event"] == "join" for line in _events(run))


def completions(run: Path) -> dict[tuple[int, str, int], str]:
    """By step, prompt and place in the group."""
    seen, found = Counter[tuple[int, str]](), dict[tuple[int, str, int], str]()
    for sample in tm.Run(run).samples(training=True):
        seen[sample.step, sample.prompt] += 1
        found[sample.step, sample.prompt, seen[sample.step, sample.prompt]] = sample.completion
    return found


def test_ten_killed_or_hung_workers_change_no_sample(tmp_path: Path) -> None:
    """Samples move between vLLM workers and the trainer's embedded engine, which alone generates the other run."""
    run = tmp_path / "killed"
    process = start(
        Path("vllm-local"), run, *LONG, "--engine.slots=48", "--trainer.steps=4000", "--fleet.heartbeat_timeout_s=5"
    )
    until, ended = time.monotonic() + 400.0, list[int]()
    while len(ended) < KILLS:
        assert process.poll() is None, process.communicate(60)
        assert time.monotonic() < until, f"{len(ended)} workers killed"
        if joined(run) == len(ended) + WORKERS:  # so that none is killed while it starts
            names = command_lines(processes_below(process.pid))
            for pid in [pid for pid, name in names.items() if "RolloutActor" in name and pid not in ended]:
                time.sleep(1.5)  # it has samples now
                os.kill(pid, signal.SIGSTOP if len(ended) in HUNG else signal.SIGKILL)
                ended.append(pid)
        time.sleep(0.2)
    while len(evictions := [line for line in _events(run) if line["event"] == "eviction"]) < KILLS:
        assert time.monotonic() < until, f"{len(evictions)} of {KILLS} ends of workers were noticed"
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert sum(int(str(line["samples"])) for line in evictions) > 10  # they migrated
    metrics = tm.Run(run).metrics[1:]
    assert {line["samples"] for line in metrics} == {256}
    steps = int(metrics[-1]["step"])
    quiet = start(
        Path("char-addition"), tmp_path / "quiet", *LONG, f"--trainer.steps={steps}", "--engine.batch_invariant=false",
        "--task.held_out_fraction=0.2", "--trainer.threads=1",
    )  # fmt: skip
    assert quiet.communicate(timeout=200)
    expected, found = completions(tmp_path / "quiet"), completions(run)
    assert found.keys() == expected.keys()  # nothing lost, nothing twice
    different = [key for key, text in expected.items() if found[key] != text]
    assert len(different) <= len(expected) // 1000, different  # two engines round differently
