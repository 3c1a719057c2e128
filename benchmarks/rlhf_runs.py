"""One run of the RLHF recipe, reduced to its figures."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.origin import origin
from benchmarks.subjects import check_models
from benchmarks.training_run import train
from tidemill.config.load import RECIPES, from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.records import PreferencePair, Record
from tidemill.data.examples import load_pairs
from tidemill.models.codec import load_codec
from tidemill.models.loading import context_limit
from tidemill.models.reward_model import load_reward_model
from tidemill.telemetry.events import read_events
from tidemill.telemetry.metrics import MetricLine, read_metrics
from tidemill.telemetry.run_data import evaluations
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.statistics import LEVEL, RESAMPLES, Interval
from tidemill.trainer.scoring import reward_scores

RECIPE = RECIPES / "rlhf.toml"
CPU = "cpu_seconds"
CURVES = ("reward_mean", "kl_ref_k1", "kl_ref", "entropy", "explained_variance", "clip_fraction")
LAST_STEPS = 5  # averaged as the final value
DIGITS = 5  # digits kept


class Change(Record):
    """The same held-out questions before and after PPO."""

    n: int
    before: float
    after: float
    low: float  # 95 % interval of the difference, over questions
    high: float
    p_value: float  # of the sign test over questions


class Pairs(Record):
    """The reward model on held-out pairs."""

    pairs: int
    questions: int
    accuracy: float
    low: float  # 95 % interval over questions, as pairs of one question are correlated
    high: float


class RlhfRun(Record):
    """One seed."""

    seed: int
    minutes: float  # all stages, all sessions
    cpu_minutes: float  # process time over all sessions
    stage_s: dict[str, float]
    peak_rss_bytes: int
    pairs: Pairs
    score: Change  # of the reward model, greedy completions
    accuracy: Change  # true, greedy completions
    drawn: Change  # true, samples at the training temperature: share of correct ones per question
    first: dict[str, float]  # of a metric, in PPO's first step
    last: dict[str, float]  # of a metric, mean over PPO's last steps
    curves: dict[str, dict[int, float]]  # of a metric, by step
    held_out: dict[int, float]  # true greedy accuracy by step
    origin: dict[str, Any] = {}  # of the command that measured it


def rlhf_run(directory: Path, seed: int) -> RlhfRun:
    """Run or resume the recipe in a separate process with one compute thread.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the same call resumes.
        RuntimeError: the command failed; its message is on standard error.
    """
    began_s = _children_cpu_s()
    try:
        summary = train(RECIPE, directory, "--run.seed", str(seed), "--trainer.threads", "1")
    finally:
        if directory.is_dir():
            (directory / CPU).write_text(str(_cpu_s(directory) + _children_cpu_s() - began_s))
    return reduced(directory, summary, seed)


def _cpu_s(directory: Path) -> float:
    """CPU seconds of earlier sessions."""
    path = directory / CPU
    return float(path.read_text()) if path.is_file() else 0.0


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def reduced(directory: Path, summary: Mapping[str, Any], seed: int) -> RlhfRun:
    """The figures of a finished pipeline whose folders still exist.

    Raises:
        RuntimeError: PPO had no reference or no critic, or trained on nothing.
    """
    stages = {stage["name"]: stage for stage in summary["stages"]}
    folders = {name: RunDirectory(directory / stage["run_dir"]) for name, stage in stages.items()}
    measured = folders["measure"].read_summary()["compared_with"]["figures"]
    lines = [line for line in read_metrics(folders["ppo"].metrics) if line.step > 0]
    check_models("ppo", lines, reference=True, critic=True)
    found = evaluations(read_events(folders["ppo"].events), read_metrics(folders["ppo"].metrics))
    return RlhfRun(
        seed=seed,
        minutes=_rounded(summary["wall_s"] / 60),
        cpu_minutes=_rounded(_cpu_s(directory) / 60),
        stage_s={name: round(stage["wall_s"], 1) for name, stage in stages.items()},
        peak_rss_bytes=max(stage["figures"].get("peak_rss_bytes", 0) for stage in stages.values()),
        pairs=_pairs(from_toml(folders["rm"].config.read_text()), folders["rm"]),
        score=_change(measured["model"]),
        accuracy=_change(measured["greedy_accuracy"]),
        drawn=_change(measured["drawn_accuracy"]),
        first={name: _mean(lines[:1], name) for name in CURVES},
        last={name: _mean(lines[-LAST_STEPS:], name) for name in CURVES},
        curves={
            name: {line.step: _rounded(line.values[name]) for line in lines if name in line.values} for name in CURVES
        },
        held_out={one.step: _rounded(one.greedy_accuracy) for one in found if one.greedy_accuracy is not None},
        origin=origin(),
    )


def over_questions(outcomes: Sequence[tuple[str, bool]], *, seed: int = 0) -> Interval:
    """Share of correct outcomes with percentiles 2.5 and 97.5 over resampled questions.

    Args:
        outcomes: (question, correct) per pair.
    """
    of_questions: dict[str, list[bool]] = defaultdict(list)
    for question, right in outcomes:
        of_questions[question].append(right)
    right_Q = np.array([sum(rights) for rights in of_questions.values()], dtype=np.float64)
    pairs_Q = np.array([len(rights) for rights in of_questions.values()], dtype=np.float64)
    draw = np.random.Generator(np.random.PCG64(seed))
    at_RQ = draw.integers(len(right_Q), size=(RESAMPLES, len(right_Q)))
    shares_R = right_Q[at_RQ].sum(axis=1) / pairs_Q[at_RQ].sum(axis=1)
    low, high = np.quantile(shares_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(right_Q.sum() / pairs_Q.sum()), float(low), float(high))


def _pairs(spec: RunSpec, stage: RunDirectory) -> Pairs:
    """Score the stage's held-out pairs again, to know which are correct."""
    folder = Path(stage.read_summary()["model"])
    model = load_reward_model(folder, device=torch.device("cpu"))
    examples = load_pairs(
        spec.data, codec=load_codec(folder), context_limit=context_limit(model.model), chat_template=False
    )
    pairs: Sequence[PreferencePair] = examples.held_out
    sides = [pair.prompt_ids + side for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)]
    scores = reward_scores(model, sides, budget=spec.supervised.microbatch_tokens)
    outcomes = [
        (bytes(pair.prompt_ids).hex(), chosen > rejected)
        for pair, chosen, rejected in zip(pairs, scores[0::2], scores[1::2], strict=True)
    ]
    share = over_questions(outcomes)
    return Pairs(
        pairs=len(outcomes),
        questions=len({question for question, _ in outcomes}),
        accuracy=_rounded(share.value),
        low=_rounded(share.low),
        high=_rounded(share.high),
    )


def _change(figures: Mapping[str, Any]) -> Change:
    return Change(
        n=figures["n"],
        before=_rounded(figures["other"]),
        after=_rounded(figures["this"]),
        low=_rounded(figures["difference"]["low"]),
        high=_rounded(figures["difference"]["high"]),
        p_value=_rounded(figures["p_value"]),
    )


def _mean(lines: Sequence[MetricLine], name: str) -> float:
    return _rounded(fmean(line.values[name] for line in lines if name in line.values))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
