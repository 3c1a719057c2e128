"""Compares two runs of the character model, one without and one with evictions."""

from __future__ import annotations

import io
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.saboteur import Eviction, Saboteur, sabotaged
from tidemill.config.load import RECIPES, merge
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, WorkerHost
from tidemill.core.records import Record
from tidemill.jobs.train import train
from tidemill.telemetry.events import EVICTION, LEASE_END
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.metrics import read_metrics

RECIPE = RECIPES / "char-addition.toml"
WORKERS = 3
CHANGES: dict[str, Any] = {
    "model": {"char": {"hidden_size": 64, "layers": 2}},
    # Long answers have value, so samples keep moving between workers during generation.
    "scoring": {"rewards": [{"kind": "regex", "pattern": r"^\d"}, {"kind": "length", "target_tokens": 32}]},
    # Stop strings of two tokens: a worker may take over between them.
    "sampling": {"max_new_tokens": 32, "stop": ["9+", "\n="]},
    "engine": {"batch_invariant": True, "slots": 6, "tick_s": 0.005},
    "batch": {"prompts": 8, "group_size": 4, "minibatches": 2, "order": "canonical"},
    "optimizer": {"learning_rate": 1e-3},
    "trainer": {"threads": 1},
    "eval": {"every_steps": 4, "prompts": 8},
    "checkpoint": {"every_steps": 0},
    # Seconds of the reserved engine, which takes part but leaves most work to preemptible workers.
    "fleet": {"seed_window_s": 0.05, "window_gain": 1e6, "drain_margin_s": 0.1},
}


class Disturbed(Record):
    """The evictions of a run, and its summary."""

    summary: dict[str, Any]
    evictions: tuple[Eviction, ...]  # in order
    seen: frozenset[str]  # leases with an eviction event, of workers that had joined


class Comparison(Record):
    """Differences between two runs in samples and weights."""

    samples: int
    tokens: int
    differing_tokens: int  # samples with different tokens
    differing_samples: int  # samples with any difference: a logprob, a version's digest, a reward
    differing_steps: int  # steps with different weights
    same_files: bool  # the final checkpoint's weights, bytewise


def char_spec(directory: Path, *, workers: int, steps: int, seed: int = 0, lag: int = 0) -> RunSpec:
    """The recipe with completions of up to 32 tokens. With `workers` 0 the reserved side generates everything."""
    here = {
        "run": {"dir": directory, "seed": seed},
        "trainer": {"steps": steps},
        "pool": {"kind": "static", "workers": workers},
        "schedule": {"max_policy_lag": lag, "unfinished": "wait" if lag else "continue"},
    }
    return RunSpec.model_validate(merge(merge(tomllib.loads(RECIPE.read_text()), CHANGES), here))


def quiet_run(directory: Path, *, steps: int, seed: int = 0, lag: int = 0) -> dict[str, Any]:
    """Its summary."""
    return train(char_spec(directory, workers=0, steps=steps, seed=seed, lag=lag), telemetry_stream=io.StringIO())


def disturbed_run(directory: Path, *, steps: int, seed: int = 0, lag: int = 0) -> Disturbed:
    """The same run with evictions."""
    hired: list[Saboteur] = []

    def hire(host: WorkerHost, clock: Clock) -> Saboteur:
        hired.append(Saboteur(host, clock=clock, workers=WORKERS, seed=seed))
        return hired[0]

    spec = char_spec(directory, workers=WORKERS, steps=steps, seed=seed, lag=lag)
    summary = train(spec, telemetry_stream=io.StringIO(), open_backend=sabotaged(hire))
    told = (line for _, line in read_lines(directory / "events.jsonl"))
    seen = frozenset(line["lease"] for line in told if line["event"] == EVICTION)
    return Disturbed(summary=summary, evictions=tuple(hired[0].evictions), seen=seen)


def tokens_by_kind(directory: Path) -> dict[str, int]:
    """Tokens received from workers of each kind."""
    tokens = Counter[str]()
    for _, line in read_lines(directory / "events.jsonl"):
        if line["event"] == LEASE_END:
            tokens[line["kind"]] += line["tokens"]
    return dict(tokens)


def digests(directory: Path) -> list[str]:
    """Weights digests before the first step and after each."""
    return [line.weights_digest for line in read_metrics(directory / "metrics.jsonl")]


def compare(quiet: Path, disturbed: Path) -> Comparison:
    """Compare everything that both runs wrote about samples and weights.

    Raises:
        KeyError, ValueError: they have different samples or steps.
    """
    ours, theirs = samples_of(quiet), samples_of(disturbed)
    pairs = [(ours[key], theirs[key]) for key in sorted(ours.keys() | theirs.keys())]
    steps = list(zip(digests(quiet), digests(disturbed), strict=True))
    weights = [next((run / "checkpoints").glob("*/*.safetensors")).read_bytes() for run in (quiet, disturbed)]
    return Comparison(
        samples=len(pairs),
        tokens=sum(len(one["token_ids"]) for one, _ in pairs),
        differing_tokens=sum(one["token_ids"] != other["token_ids"] for one, other in pairs),
        differing_samples=sum(one != other for one, other in pairs),
        differing_steps=sum(one != other for one, other in steps),
        same_files=weights[0] == weights[1],
    )


def samples_of(run: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Every line of every samples file, by what names the sample, without the workers that generated it."""
    names = ("step", "purpose", "prompt_id", "epoch", "index")
    lines = [line for path in sorted((run / "samples").iterdir()) for _, line in read_lines(path)]
    return {tuple(line[name] for name in names): {**line, "sources": None} for line in lines}
