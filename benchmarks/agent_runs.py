"""Runs of the agents' recipes and of their controls, reduced to their figures."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.training_run import train
from tidemill.config.load import RECIPES
from tidemill.core.records import Record
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.events import EVICTION, read_events
from tidemill.telemetry.metrics import PASS_AT, read_metrics
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.statistics import wilson_interval

HERE = Path(__file__).resolve().parent
HELD_OUT = 200
SAMPLED = {"guess": 1, "calc-tool": 0, "python-tool": 0}
"""Samples per held-out task at the temperature of training. SmolLM2 needs minutes for them."""
LEARNING = "rewards"
RANDOM = (
    '--stage.rl.scoring.rewards=[{ kind = "random" }]',
    '--stage.rl.eval.rewards=[{ kind = "environment" }]',
)
BROKEN = f"--stage.rl.env.name={HERE / 'agent_environments.py'}:"
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "guess": {LEARNING: (), "random rewards": RANDOM},
    "calc-tool": {LEARNING: (), "random rewards": RANDOM, "tool out of order": (BROKEN + "BrokenCalculator",)},
    "python-tool": {LEARNING: (), "random rewards": RANDOM, "tool out of order": (BROKEN + "BrokenPython",)},
}
"""Additional arguments of each kind of run. The stages before RL are those of the recipe, and run once per seed."""


class Accuracy(Record):
    """Share of held-out tasks that are solved, with its 95 % interval over the tasks (Wilson)."""

    share: float
    low: float
    high: float


class AgentRun(Record):
    """One run: before and after RL, greedy and, if drawn, at the temperature of training."""

    recipe: str
    kind: str
    seed: int
    n: int
    greedy_before: Accuracy
    greedy_after: Accuracy
    sampled_before: Accuracy | None
    sampled_after: Accuracy | None
    evictions: int
    minutes: float  # of this call: with the demonstrations and SFT if it is the first of its seed
    cpu_minutes: float
    origin: dict[str, Any] = {}  # of the command that measured it


def agent_run(folder: Path, recipe: str, kind: str, seed: int) -> AgentRun:
    """Run a recipe in a separate process; stages that the folder contains are not repeated."""
    arguments = [
        "--run.seed",
        str(seed),
        f"--stage.rl.eval.prompts={HELD_OUT}",
        f"--stage.rl.eval.samples_per_prompt={SAMPLED[recipe]}",
    ]
    arguments += ["--stage.rl.eval.every_steps=0", *KINDS[recipe][kind]]
    before_s = _children_cpu_s()
    summary = train(RECIPES / f"{recipe}.toml", folder, *arguments)
    stage = next(stage for stage in summary["stages"] if stage["name"] == "rl")
    run = RunDirectory(PipelineFolder(folder).path / stage["run_dir"])
    lines = [line for line in read_metrics(run.metrics) if "eval/n" in line.values]
    first, last = lines[0].values, lines[-1].values
    assert first["eval/n"] == last["eval/n"] == HELD_OUT
    return AgentRun(
        recipe=recipe,
        kind=kind,
        seed=seed,
        n=HELD_OUT,
        greedy_before=_accuracy(first["eval/greedy_accuracy"]),
        greedy_after=_accuracy(last["eval/greedy_accuracy"]),
        sampled_before=_accuracy(first[f"eval/{PASS_AT}1"]) if SAMPLED[recipe] else None,
        sampled_after=_accuracy(last[f"eval/{PASS_AT}1"]) if SAMPLED[recipe] else None,
        evictions=sum(event["event"] == EVICTION for event in read_events(run.events)),
        minutes=summary["wall_s"] / 60,
        cpu_minutes=(_children_cpu_s() - before_s) / 60,
        origin=origin(),
    )


def _accuracy(share: float) -> Accuracy:
    low, high = wilson_interval(share, HELD_OUT)
    return Accuracy(share=share, low=low, high=high)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
