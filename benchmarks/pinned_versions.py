"""The cost of one version per sample: `schedule.unfinished = "wait"` and "continue", by policy lag.

    python -m benchmarks.pinned_versions [--rounds 4]

Simulated: one engine of 64 slots on separate machines, log-normal completions of up to 512 tokens, 64 samples per step.
The trainer's speed varies: where it is the bottleneck nothing is lost; where generation is, the engine waits for the
longest sample of each step. In one process, where engine and trainer alternate on a thread, the runs alternate, and
seconds per step are compared round by round.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.equivalent_runs import char_spec, samples_of
from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts, check_equal
from tests.doubles.costs import ConstantEngine, ConstantTrainer
from tidemill.config.schema import RunSpec
from tidemill.hardware.completion_lengths import LogNormalLengths
from tidemill.jobs.train import train
from tidemill.sim.costs import WeightCosts
from tidemill.sim.simulation import CostModel, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.metrics import read_metrics

Unfinished = Literal["continue", "wait"]

LAGS = (1, 2, 3)
TRAINER_TOKENS_PER_S = (100.0, 200.0, 400.0, 800.0)  # the engine decodes at most 640 per second
SIMULATED_STEPS, MEASURED_STEPS, MEASURED_LAG = 30, 20, 2
LONGEST = 512
WORK = Workload(lengths=LogNormalLengths(median=100, sigma=0.8, limit=LONGEST), prompt_tokens=20)


def simulated(lag: int, trainer_tokens_per_s: float, unfinished: Unfinished) -> tuple[float, float, int]:
    """Seconds per step, the share without samples for the trainer, and the trained tokens."""
    cost_model = CostModel(
        trainer=ConstantTrainer(tokens_per_s=trainer_tokens_per_s, commit=1.0),
        weights=WeightCosts(nbytes=0),
        reserved=ConstantEngine(slots=64, plateau=64, step_s=0.1, prefill_tokens_per_s=1e5),
        reserved_load_s=0.5,
        shares_gpus=False,
    )
    spec = RunSpec.model_validate(
        {
            "batch": {"prompts": 8, "group_size": 8},
            "sampling": {"max_new_tokens": LONGEST},
            "schedule": {"max_policy_lag": lag, "unfinished": unfinished},
            "trainer": {"steps": SIMULATED_STEPS},
            "eval": {"every_steps": 0},
        }
    )
    run = simulate_run(spec, cost_model, WORK)
    return run.seconds / SIMULATED_STEPS, run.trainer_idle_share, run.tokens_trained


def measured(slots: int, unfinished: Unfinished, seed: int) -> float:
    """Seconds per step of the character model in one process, without the first step."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        spec = char_spec(directory, workers=0, steps=MEASURED_STEPS, seed=seed, lag=MEASURED_LAG)
        changes: dict[str, Any] = {
            "schedule": spec.schedule.model_copy(update={"unfinished": unfinished}),
            "engine": spec.engine.model_copy(update={"slots": slots}),
            "eval": spec.eval.model_copy(update={"every_steps": 0}),
        }
        train(spec.model_copy(update=changes), telemetry_stream=io.StringIO())
        check_versions(unfinished, [len(line["versions"]) for line in samples_of(directory).values()])
        lines = [line for line in read_metrics(directory / "metrics.jsonl") if line.step]
        return (lines[-1].elapsed_s - lines[0].elapsed_s) / (len(lines) - 1)


def check_versions(unfinished: Unfinished, versions: Sequence[int]) -> None:
    """Raises RuntimeError: a sample that waits has tokens of several versions, or none that continues has.

    Args:
        versions: of the tokens of each sample.
    """
    mixed = sum(count > 1 for count in versions)
    if unfinished == "continue":
        check_counts("continue", samples_of_several_versions=mixed)
    elif mixed:
        raise RuntimeError(f"wait: {mixed} samples have tokens of several versions")


def main() -> int:
    parser = argparse.ArgumentParser(description='The cost of schedule.unfinished = "wait".')
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parsed(parser).rounds
    torch.set_num_threads(1)
    apart = []
    for lag in LAGS:
        for speed in TRAINER_TOKENS_PER_S:
            (continued_s, idle_share, tokens), (waiting_s, _, tokens_waiting) = (
                simulated(lag, speed, unfinished) for unfinished in ("continue", "wait")
            )
            check_equal("trained tokens", {"continue": tokens, "wait": tokens_waiting})
            apart.append(
                {
                    "max_policy_lag": lag,
                    "trainer_tokens_per_s": speed,
                    "trainer_idle_share": idle_share,
                    "continue_s_per_step": continued_s,
                    "wait_s_per_step": waiting_s,
                    "ratio": waiting_s / continued_s,
                }
            )
            print(
                f"lag {lag}, trainer idle for {idle_share:.0%} of a step: {waiting_s / continued_s:.2f} times as long"
            )
    together = []
    measured(64, "continue", 0)  # warms up
    for slots in (16, 64):
        ratios = []
        for at in range(rounds):
            order: tuple[Unfinished, ...] = ("continue", "wait") if at % 2 else ("wait", "continue")
            step_s = {unfinished: measured(slots, unfinished, at) for unfinished in order}
            ratios.append(step_s["wait"] / step_s["continue"])
        together.append({"slots": slots, "max_policy_lag": MEASURED_LAG, "ratios": ratios})
        print(f"one process, {slots} slots: {statistics.median(ratios):.2f} times as long, rounds {ratios}")
    write_result("pinned_versions", {"simulated": apart, "one_process": together})
    return 0


if __name__ == "__main__":
    sys.exit(main())
