"""summary.json: the figures of a run over all its sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tidemill.telemetry.events import EVALUATION, RESUME, past_sessions, read_events
from tidemill.telemetry.fleet_figures import amount, fleet_figures
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.metrics import HELD_OUT, PEAK_RSS, STEP_TIME, TRAINER_IDLE, MetricLine, read_metrics
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.statistics import normal_interval, wilson_interval


class Evaluation(NamedTuple):
    """One evaluation of the surviving history."""

    step: int
    reward_mean: float  # the best one has the highest
    reward_stderr: float | None  # None with one reward
    greedy_accuracy: float | None  # where answers are right or wrong
    n: int


class Figure(NamedTuple):
    """One evaluation's figure to be shown."""

    name: Literal["accuracy", "mean reward"]
    value: float
    interval: tuple[float, float] | None  # of 95 %


def comparable(found: Sequence[Evaluation]) -> list[Figure]:
    """The same figure of each: accuracy where all of them have it, else the mean reward."""
    shares = [(one.greedy_accuracy, one.n) for one in found if one.greedy_accuracy is not None]
    if len(shares) == len(found):
        return [_accuracy(share, n) for share, n in shares]
    return [Figure("mean reward", one.reward_mean, _around(one.reward_mean, one.reward_stderr)) for one in found]


def _accuracy(share: float, n: int) -> Figure:
    return Figure("accuracy", share, wilson_interval(share, n) if n and 0 <= share <= 1 else None)


def _around(mean: float, stderr: float | None) -> tuple[float, float] | None:
    return None if stderr is None else normal_interval(mean, stderr)


def evaluations(events: Iterable[dict[str, Any]], metrics: Sequence[MetricLine]) -> list[Evaluation]:
    """By step. An event is followed as soon as it is written; what a resume rewound is forgotten."""
    found = {line.step: one for line in metrics if (one := read_evaluation(line.step, line.values, prefix=HELD_OUT))}
    told: dict[int, Evaluation] = {}
    for event in events:
        step = event.get("step")
        if not isinstance(step, int):
            continue
        if event["event"] == RESUME:
            told = {at: evaluation for at, evaluation in told.items() if at <= step}
        elif event["event"] == EVALUATION and (one := read_evaluation(step, event)):
            told[step] = one
    both = found | told
    return [both[step] for step in sorted(both)]


def read_evaluation(step: int, values: Mapping[str, Any], *, prefix: str = "") -> Evaluation | None:
    """From an event or a step's metrics; None where they have no mean reward."""

    def value(name: str) -> float | None:
        return finite_number(values.get(f"{prefix}{name}"))

    reward = value("reward_mean")
    if reward is None:
        return None
    return Evaluation(step, reward, value("reward_stderr"), value("greedy_accuracy"), int(value("n") or 0))


TIMES = ("rollout", "train", "score", "eval")


def build_summary(
    run: RunDirectory, *, outcome: str, total_steps: int, wall_s: float | None = None, peak_rss_bytes: int = 0
) -> dict[str, Any]:
    """Figures of the surviving history: each step counts once, however often the run was killed and resumed.

    `wall_s`, `sessions` and what the fleet did and cost are over everything that ran, repeated work included.

    Args:
        run: the run directory, locked or not.
        outcome: "finished", "interrupted" (by the user), "failed" or "running".
        total_steps: the steps the run was asked for.
        wall_s: over all sessions; read from the logs when not given.
        peak_rss_bytes: of this process; earlier sessions' peaks come from the metrics.
    """
    lines, events, manifest = read_metrics(run.metrics), read_events(run.events), run.read_manifest()
    past = past_sessions(run.events, run.metrics)
    steps = [line for line in lines if line.step > 0]
    last = lines[-1] if lines else None
    peaks = [int(line.values.get(PEAK_RSS, 0)) for line in lines]
    time_rollout_s = _sum(steps, "time_rollout_s")
    wall_s = past.wall_s if wall_s is None else wall_s
    fleet, trained = run.read_settings().get("fleet"), int(_sum(steps, "tokens_trained"))
    generated = int(_sum(steps, "tokens_generated"))
    return {
        "run": manifest.get("run", run.path.name),
        "model": manifest.get("model", ""),
        "seed": manifest.get("seed"),
        "outcome": outcome,
        "finished": outcome == "finished",
        "interrupted": outcome == "interrupted",
        "steps": last.step if last else 0,
        "total_steps": total_steps,
        "optimizer_steps": sum(line.optimizer_steps for line in steps),
        "policy_version": last.policy_version if last else 0,
        "weights_digest": last.weights_digest if last else "",
        "sessions": past.count,
        "wall_s": round(wall_s, 3),
        "training_s": round(_sum(steps, STEP_TIME), 3),
        "time": {f"{name}_s": round(_sum(lines, f"time_{name}_s"), 3) for name in TIMES},
        "trainer_idle_share": _trainer_idle_share(steps),
        "tokens_generated": generated,
        "tokens_trained": trained,
        "tokens_per_s": round(generated / time_rollout_s, 2) if time_rollout_s > 0 else None,
        "eval": _evaluation(evaluations(events, lines)),
        **fleet_figures(
            events,
            lines,
            wall_s=wall_s,
            tokens_trained=trained,
            reserved_usd_per_hour=amount(fleet, "reserved_usd_per_hour") if isinstance(fleet, dict) else 0.0,
        ),
        "peak_rss_bytes": max([peak_rss_bytes, *peaks]),
    }


def held_out_changes(measured: dict[str, Any], digits: int) -> str:
    """Mean reward and accuracy of a summary's `eval`, before and after; empty for what was not measured at both."""
    before, after = ((measured.get(when) or {}) for when in ("before", "after"))
    changes = []
    for key, name in (("reward_mean", "mean reward"), ("greedy_accuracy", "greedy accuracy")):
        if before.get(key) is not None and after.get(key) is not None:
            changes.append(f"{name} {before[key]:.{digits}f} → {after[key]:.{digits}f}")
    return f"held-out {', '.join(changes)}" if changes else ""


def _sum(lines: list[MetricLine], name: str) -> float:
    return sum(line.values.get(name, 0.0) for line in lines)


def _trainer_idle_share(steps: list[MetricLine]) -> float | None:
    """Of the steps' time; None where nobody generated, or nothing took any time."""
    timed = [line for line in steps if TRAINER_IDLE in line.values]
    total_s = _sum(timed, STEP_TIME)
    return round(_sum(timed, TRAINER_IDLE) / total_s, 4) if total_s > 0 else None


def _evaluation(found: list[Evaluation]) -> dict[str, Any]:
    """Before the first step, after the last one evaluated, and the best; None where it was not measured."""
    before = next((evaluation for evaluation in found if evaluation.step == 0), None)
    after = found[-1] if found and found[-1].step > 0 else None
    best = max(found, key=lambda evaluation: (evaluation.reward_mean, -evaluation.step), default=None)

    def entry(evaluation: Evaluation | None) -> dict[str, Any]:
        return evaluation._asdict() if evaluation else dict.fromkeys(Evaluation._fields)

    return {"before": entry(before), "after": entry(after), "best": entry(best), "n": found[-1].n if found else 0}
