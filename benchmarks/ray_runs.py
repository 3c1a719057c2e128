"""Complete runs on Ray, and the figures of their steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training_run import train
from benchmarks.turns import OFFLINE, ONE_THREAD
from tidemill.config.schema import RunSpec
from tidemill.config.toml import tables_to_toml
from tidemill.telemetry.metrics import MetricLine, read_metrics

DEADLINE_S = 1200.0
PROMPTS, GROUP_SIZE = 8, 8


def spec_of(steps: int, *, slots: int, **sections: Mapping[str, Any]) -> RunSpec:
    """A character model of 2M parameters with one single-threaded worker, like the trainer, whose engine never
    generates. Completions end at the model's stop token or after 32 tokens."""
    common = {
        "model": {"source": "char", "char": {"hidden_size": 192, "layers": 4, "heads": 4, "context": 64}},
        "task": {"kind": "arithmetic", "shots": 0},
        "scoring": {"rewards": [{"kind": "length", "target_tokens": 24}]},
        "sampling": {"max_new_tokens": 32},
        "engine": {"slots": slots, "tick_s": 0.05},
        "pool": {"kind": "static", "workers": 1},
        "fleet": {"seeding": False},
        "batch": {"prompts": PROMPTS, "group_size": GROUP_SIZE},
        "optimizer": {"learning_rate": 1e-5},
        "trainer": {"steps": steps, "threads": 1},
        "checkpoint": {"every_steps": 0},
        "eval": {"every_steps": 0, "prompts": 4},
        "telemetry": {"live": False},
    }
    return RunSpec.model_validate({"runtime": "ray"} | common | sections)


def steps_of(spec: RunSpec) -> list[MetricLine]:
    """Run it in a separate process, in a temporary folder.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-benchmark-") as folder:
        run, recipe = Path(folder) / "run", Path(folder) / "recipe.toml"
        recipe.write_text(tables_to_toml(spec.model_dump(mode="json", exclude_unset=True)))
        train(recipe, run, environment=ONE_THREAD | OFFLINE, progress=False, deadline_s=DEADLINE_S)
        return [line for line in read_metrics(run / "metrics.jsonl") if line.step]


def total(lines: Sequence[MetricLine], name: str) -> float:
    """Sum of a metric that every step has."""
    return sum(line.values[name] for line in lines)
