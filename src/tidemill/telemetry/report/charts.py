"""Which curves the page draws, and their data."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

from msgspec.structs import replace

from tidemill.core.records import Record
from tidemill.telemetry.events import RESUME
from tidemill.telemetry.metrics import (
    CONTROLLER_CPU,
    CRASHES,
    CRITIC_WAIT,
    EVICTIONS,
    GREEDY_ACCURACY,
    HELD_OUT,
    HELD_OUT_LOSS,
    HELD_OUT_REWARD,
    HELD_OUT_STDERR,
    METRICS,
    MIGRATIONS,
    PEAK_RSS,
    REMOTE_WAIT,
    SEED_WINDOW,
    STEP_TIME,
    TOKENS_LOST,
    TOKENS_RECOMPUTED,
    TRAINER_IDLE,
    TRAINER_WAIT,
    WORKERS_MEAN,
)
from tidemill.telemetry.report.run_data import RunData

OTHER_CHARTS = 12
FIGURES = 6


class Chart(Record):
    """One curve or several that share an axis. `band` is drawn around the first series."""

    title: str
    note: str
    series: tuple[tuple[str, str], ...]  # (metric, label)
    band: str = ""  # metric: half the band's height
    kind: Literal["line", "points", "stacked"] = "line"
    low: float | None = None
    high: float | None = None
    scale: float = 1.0  # shown value = metric * scale
    only_if_any: bool = False  # left out while all values are 0
    only_with: str = ""  # metric: left out where it was never measured


FORECAST_STEP, FORECAST_HALF = "forecast/step_s", "forecast/half_s"
"""Put beside the metrics of the steps that were forecast."""

CHARTS: tuple[Chart, ...] = (
    Chart(
        title="Held-out accuracy",
        note="greedy completions",
        series=((GREEDY_ACCURACY, "accuracy"),),
        kind="points",
        low=0,
        high=1,
    ),
    Chart(title="Held-out reward", note="mean, greedy completions", series=((HELD_OUT_REWARD, "mean"),), kind="points"),
    Chart(title="Reward", note="mean ± deviation", series=(("reward_mean", "mean"),), band="reward_std"),
    Chart(
        title="Loss on examples",
        note="mean",
        series=((HELD_OUT_LOSS, "held-out"), ("loss", "training")),
        only_with="examples",
    ),
    Chart(
        title="Right tokens",
        note="share",
        series=(("eval/token_accuracy", "held-out"), ("token_accuracy", "training")),
        low=0,
        high=1,
    ),
    Chart(
        title="Pairs put right",
        note="share",
        series=(("eval/pairwise_accuracy", "held-out"), ("pairwise_accuracy", "training")),
        low=0,
        high=1,
    ),
    Chart(title="Entropy", note="nats per token", series=(("entropy", "entropy"),), low=0),
    Chart(
        title="Rewards of DPO",
        note="β times the log-ratio to the reference",
        series=(("reward_margin", "margin"), ("reward_chosen", "chosen"), ("reward_rejected", "rejected")),
    ),
    Chart(title="Scores", note="of both sides", series=(("score_margin", "margin"), ("score_mean", "mean"))),
    Chart(
        title="KL", note="nats per token", series=(("approx_kl", "of the update"), ("kl_ref", "to reference")), low=0
    ),
    Chart(title="KL to reference, k1", note="nats per token", series=(("kl_ref_k1", "log-ratio"),)),
    Chart(title="Clip fraction", note="% of tokens", series=(("clip_fraction", "clipped"),), low=0, scale=100),
    Chart(
        title="Completion length",
        note="tokens",
        series=(("completion_tokens_mean", "mean"), ("completion_tokens_max", "longest")),
        low=0,
    ),
    Chart(title="Cut by the limit", note="% of samples", series=(("truncated_fraction", "cut"),), low=0, scale=100),
    Chart(
        title="Without signal",
        note="per step",
        series=(
            ("groups_without_signal", "groups"),
            ("groups_skipped_invalid", "groups skipped"),
            ("samples_invalid", "samples invalid"),
        ),
        low=0,
    ),
    Chart(title="Gradient norm", note="before clipping", series=(("grad_norm", "norm"),), low=0),
    Chart(title="Learning rate", note="", series=(("learning_rate", "rate"),), low=0),
    Chart(
        title="Time per step",
        note="seconds",
        series=(
            ("time_rollout_s", "rollout"),
            ("time_train_s", "training"),
            ("time_score_s", "scoring"),
            ("time_eval_s", "evaluation"),
        ),
        kind="stacked",
        low=0,
    ),
    Chart(
        title="Step time against the forecast",
        note="seconds, with two standard deviations",
        series=((FORECAST_STEP, "forecast"), (STEP_TIME, "actual")),
        band=FORECAST_HALF,
        low=0,
        only_with=FORECAST_STEP,
    ),
    Chart(
        title="Logprobs at a publish",
        note="seconds",
        series=(("time_publish_logprobs_s", "of what is under way"),),
        low=0,
    ),
    Chart(
        title="Read by reward models and reference",
        note="tokens",
        series=(("tokens_read_ahead", "while generated"), ("tokens_read_late", "afterwards")),
        low=0,
        only_if_any=True,
    ),
    Chart(title="Generation speed", note="tokens per second", series=(("tokens_per_s", "speed"),), low=0),
    Chart(title="Engine against trainer", note="KL, nats per token", series=(("mismatch_kl", "mismatch"),), low=0),
    Chart(title="Importance ratio", note="", series=(("ratio_mean", "mean"), ("ratio_max", "largest"))),
    Chart(title="Variance of the ratio", note="", series=(("ratio_var", "variance"),), low=0),
    Chart(title="Effective sample size", note="share", series=(("effective_sample_size", "share"),), low=0, high=1),
    Chart(
        title="Corrected",
        note="% of tokens",
        series=(("correction_masked", "left out"), ("correction_truncated", "held at a limit")),
        low=0,
        scale=100,
        only_if_any=True,
    ),
    Chart(
        title="Policy lag",
        note="versions",
        series=(("policy_lag_mean", "mean"), ("policy_lag_max", "largest")),
        low=0,
        only_if_any=True,
    ),
    Chart(title="Value loss", note="", series=(("value_loss", "loss"),), low=0),
    Chart(title="Explained variance", note="share", series=(("explained_variance", "share"),), high=1),
    Chart(title="KL coefficient", note="", series=(("kl_beta", "beta"),), low=0, only_if_any=True),
    Chart(
        title="Prompt tokens",
        note="per step",
        series=(("prompt_tokens_computed", "computed"), ("prompt_tokens_reused", "reused")),
        low=0,
    ),
    Chart(
        title="Trained tokens",
        note="per step, with their prompts",
        series=(("tokens_packed", "shared prefixes once"), ("tokens_unpacked", "each sample by itself")),
        low=0,
    ),
    Chart(
        title="Updates cut short",
        note="per step",
        series=(("minibatches_dropped", "minibatches, by kl_stop"), ("optimizer_steps_skipped", "steps, not finite")),
        low=0,
        only_if_any=True,
    ),
    Chart(
        title="Kept from earlier sessions",
        note="tokens",
        series=(("tokens_recovered", "recovered"), ("tokens_other_weights", "by other weights")),
        low=0,
        only_if_any=True,
    ),
    Chart(title="Outdated messages", note="ignored", series=(("deltas_ignored", "ignored"),), low=0, only_if_any=True),
    Chart(
        title="Evictions",
        note="per step",
        series=((EVICTIONS, "machines taken"), (CRASHES, "workers crashed"), (MIGRATIONS, "samples moved")),
        low=0,
        only_if_any=True,
    ),
    Chart(
        title="Lost and computed again",
        note="tokens per step",
        series=((TOKENS_LOST, "lost"), (TOKENS_RECOMPUTED, "computed again"), ("tokens_discarded", "discarded")),
        low=0,
        only_if_any=True,
    ),
    Chart(
        title="Begun again or given up",
        note="per step",
        series=(
            ("samples_restarted", "samples, too old"),
            ("groups_dropped", "groups, too old"),
            ("groups_redrawn", "groups without signal, redrawn"),
        ),
        low=0,
        only_if_any=True,
    ),
    Chart(title="Preemptible workers", note="mean", series=((WORKERS_MEAN, "workers"),), low=0, only_if_any=True),
    Chart(
        title="Who waited for whom",
        note="seconds per step",
        series=((TRAINER_WAIT, "trainer"), (REMOTE_WAIT, "workers"), (SEED_WINDOW, "seeding window")),
        low=0,
        only_if_any=True,
    ),
    Chart(
        title="The trainer waited",
        note="seconds per step",
        series=((TRAINER_IDLE, "for samples"), (CRITIC_WAIT, "for its critic")),
        low=0,
        only_if_any=True,
    ),
    Chart(title="Peak memory", note="GB", series=((PEAK_RSS, "memory"),), low=0, scale=1e-9),
)

COMPONENT = "reward/"
LAG = "lag/"
NOT_DRAWN = {"eval/n", HELD_OUT_STDERR, "tokens_generated", "tokens_trained", "samples", "samples_left_out", "loss"}
NOT_DRAWN |= {FORECAST_HALF, CONTROLLER_CPU, "cpu_train_s", "pairs_packed"}
NOT_DRAWN |= {"reward_std", STEP_TIME, "value_clip_fraction", "value_grad_norm", "returns_mean", "examples", "epoch"}


def chart_data(story: RunData) -> dict[str, Any]:
    """What the page's script draws: the steps, and every chart that has at least one value."""
    by_step = {line.step: dict(line.values) for line in story.metrics}
    for evaluation in story.evaluations:
        row = by_step.setdefault(evaluation.step, {})
        row[HELD_OUT_REWARD] = evaluation.reward_mean
        if evaluation.greedy_accuracy is not None:
            row[GREEDY_ACCURACY] = evaluation.greedy_accuracy
    if story.forecast is not None:
        for step, row in by_step.items():
            if step > 0:
                expected = story.forecast.of_step(step)
                row |= {FORECAST_STEP: expected.mean, FORECAST_HALF: (expected.high - expected.low) / 2}
    steps = sorted(by_step)
    rows = [by_step[step] for step in steps]
    charted = {name for chart in CHARTS for name, _ in chart.series}
    unknown = sorted({name for row in rows for name in row} - charted - NOT_DRAWN)
    held_out = {name for name in unknown if name.removeprefix(HELD_OUT) in charted}
    components = tuple((name, name.removeprefix(COMPONENT)) for name in unknown if name.startswith(COMPONENT))
    lags = sorted((name for name in unknown if name.startswith(LAG)), key=lambda name: (len(name), name))
    others = [name for name in unknown if not name.startswith((COMPONENT, LAG)) and name not in held_out]
    usual = [_with_held_out(chart, held_out) for chart in CHARTS]
    charts = [
        *usual[:3],
        Chart(title="Rewards apart", note="mean of each", series=components),
        *usual[3:],
        *_lag_chart(lags),
        *(_other(name) for name in others[:OTHER_CHARTS]),
    ]
    resumed = sorted({event["step"] for event in story.events if event["event"] == RESUME and _is_step(event)})
    drawn = [data for chart in charts if (data := _draw(chart, rows))]
    return {"steps": steps, "resumed": resumed, "charts": drawn}


def _with_held_out(chart: Chart, held_out: Collection[str]) -> Chart:
    """With what is held out and has no chart of its own beside the same of the training examples."""
    more = ((f"{HELD_OUT}{name}", f"{label}, held-out") for name, label in chart.series)
    return replace(chart, series=(*chart.series, *(one for one in more if one[0] in held_out)))


def _lag_chart(names: list[str]) -> list[Chart]:
    """Which share of the tokens was how old; nothing where all were made by the trainer's own version."""
    if names in ([], [f"{LAG}0"]):
        return []
    series = tuple((name, name.removeprefix(LAG)) for name in names)
    return [Chart(title="Tokens by lag", note="% of tokens", series=series, kind="stacked", low=0, scale=100)]


def _is_step(event: dict[str, Any]) -> bool:
    return isinstance(event.get("step"), int)


def _other(name: str) -> Chart:
    return Chart(title=name, note=METRICS[name].unit if name in METRICS else "", series=((name, name),))


def _draw(chart: Chart, rows: list[dict[str, float]]) -> dict[str, Any] | None:
    series = [
        {"label": label, "values": [_shown(row.get(name), chart.scale) for row in rows]}
        for name, label in chart.series
        if any(name in row for row in rows)
    ]
    if chart.kind == "stacked":
        series = [one for one in series if any(one["values"])]
    if chart.only_with and not any(chart.only_with in row for row in rows):
        return None
    if not series or (chart.only_if_any and not any(value for one in series for value in one["values"])):
        return None
    band = [_shown(row.get(chart.band), chart.scale) for row in rows] if chart.band else []
    return {
        "title": chart.title,
        "note": chart.note,
        "kind": chart.kind,
        "low": chart.low,
        "high": chart.high,
        "series": series,
        "band": band if any(value is not None for value in band) else [],
    }


def _shown(value: float | None, scale: float) -> float | None:
    """Few figures keep the page small; JSON has no NaN."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value * scale:.{FIGURES}g}")
