"""Read a run directory: configuration, logs, samples, and the figures of summary.json computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from tidemill.config.load import from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.core.formatting import counted, decimal
from tidemill.telemetry.events import (
    DATA,
    EVALUATION,
    PLAN,
    ROBOT_EVALUATION,
    SESSION_END,
    SESSION_START,
    rewound_to,
)
from tidemill.telemetry.fleet_figures import RunSession, amount, fleet_figures, sessions_of
from tidemill.telemetry.guard_history import GuardHistory, guard_figures, guard_history
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.manifest import Forecast, read_forecast
from tidemill.telemetry.metric_table import MetricTable
from tidemill.telemetry.metrics import (
    EVAL_TIME,
    HELD_OUT_LOSS,
    HELD_OUT_NAME,
    LOSS,
    PEAK_RSS,
    RETURN_MEAN,
    REWARD_MEAN,
    ROLLOUT_TIME,
    SCORE_TIME,
    STEP_TIME,
    SUCCESS,
    TOKENS_GENERATED,
    TOKENS_TRAINED,
    TRAIN_TIME,
    TRAINER_IDLE,
    MetricLine,
    held_out_prefix,
)
from tidemill.telemetry.run_dir import ROBOT_KINDS, TRAINING_PURPOSE, RunDirectory
from tidemill.telemetry.run_logs import EventLog, RunLogs
from tidemill.telemetry.run_state import outcome_of
from tidemill.telemetry.sample_files import Sample, read_samples
from tidemill.telemetry.statistics import normal_interval, wilson_interval

NO_RUN = "name the directory given to `tidemill train` as --run.dir"


class LoggedEvaluation(NamedTuple):
    """One evaluation of held-out prompts."""

    step: int
    reward_mean: float
    reward_stderr: float | None  # None for a single reward
    greedy_accuracy: float | None  # None if the rewards do not define correctness
    n: int
    recorded_interval: tuple[float, float] | None = None  # of the mean, 95 %

    @property
    def reward_interval(self) -> tuple[float, float] | None:
        """The recorded one; in runs of earlier versions the normal one of the standard error. None of equal rewards."""
        if self.recorded_interval is not None:
            return self.recorded_interval
        return normal_interval(self.reward_mean, self.reward_stderr) if self.reward_stderr else None

    @property
    def accuracy_interval(self) -> tuple[float, float] | None:
        share = self.greedy_accuracy
        return wilson_interval(share, self.n) if share is not None and self.n and 0 <= share <= 1 else None


class EvaluationFigure(NamedTuple):
    """The headline number of an evaluation."""

    name: Literal["accuracy", "mean reward", "success", "mean return"]
    value: float
    interval: tuple[float, float] | None  # 95 %; None if unknown


def comparable(found: Sequence[LoggedEvaluation]) -> list[EvaluationFigure]:
    """The same figure of each evaluation: accuracy if all of them have it, else the mean reward."""
    if all(one.greedy_accuracy is not None for one in found):
        return [EvaluationFigure("accuracy", one.greedy_accuracy or 0.0, one.accuracy_interval) for one in found]
    return [EvaluationFigure("mean reward", one.reward_mean, one.reward_interval) for one in found]


def of_robots(found: Sequence[Mapping[str, Any]]) -> list[EvaluationFigure]:
    """The same figure of events of `robot_evaluation`: success if all of them have it, else the mean return."""
    if all("success" in one for one in found):
        return [EvaluationFigure("success", one["success"], (*one["success_interval"],)) for one in found]
    return [EvaluationFigure("mean return", one["return_mean"], None) for one in found]


class HeadlineFigure(NamedTuple):
    """What a run is judged by: its newest evaluation, else its mean reward or its loss."""

    name: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    history: Sequence[float] = ()  # by step


def headline_figure(data: RunData) -> HeadlineFigure:
    """Without a value if the run has none of these figures."""
    if found := comparable(data.evaluations):
        return HeadlineFigure(f"held-out {found[-1].name}", *found[-1][1:], [one.value for one in found])
    if (model := data.model_evaluation) and (one := read_evaluation(0, model)):
        (figure,) = comparable([one])
        return HeadlineFigure(f"held-out {figure.name}", *figure[1:])
    if after := data.robot_evaluations.get("after"):
        (figure,) = of_robots([after])
        return HeadlineFigure(*figure, data.values(SUCCESS if figure.name == "success" else RETURN_MEAN))
    labels = ((SUCCESS, "success in training"), (RETURN_MEAN, "mean return"))
    for name, label in (*labels, (REWARD_MEAN, "mean reward"), (HELD_OUT_LOSS, "held-out loss"), (LOSS, "loss")):
        if values := data.values(name):
            return HeadlineFigure(label, values[-1], None, values)
    return HeadlineFigure()


def clearly_differs(one: EvaluationFigure, other: EvaluationFigure) -> bool:
    """Whether two figures differ significantly (95 %): Newcombe's interval for a difference (1998), from the interval
    of each figure. A figure without an interval does not tell."""
    low, high = sorted((one, other), key=lambda figure: figure.value)
    if low.interval is None or high.interval is None:
        return False
    return high.value - low.value > math.hypot(high.value - high.interval[0], low.interval[1] - low.value)


def went(first: EvaluationFigure, last: EvaluationFigure, over: str) -> str:
    """`rose from 0.280 to 0.830 in 20 steps`, `stayed at 0.280 …`, or that a change is within sampling error; just
    `went from …` if that is not known."""
    if decimal(first.value) == decimal(last.value):
        return f"stayed at {decimal(last.value)} {over}"
    change = f"from {decimal(first.value)} to {decimal(last.value)} {over}"
    if first.interval is None or last.interval is None:
        return f"went {change}"
    if not clearly_differs(first, last):
        return f"went {change}, which is within sampling error"
    return f"{'rose' if last.value > first.value else 'fell'} {change}"


def read_evaluation(step: int, values: Mapping[str, Any], *, prefix: str = "") -> LoggedEvaluation | None:
    """From an event or a step's metrics; None without a mean reward."""
    numbers = (finite_number(values.get(f"{prefix}{name}")) for name in LoggedEvaluation._fields[1:5])
    reward, stderr, accuracy, n = numbers
    interval: tuple[float, float] | None = None
    match values.get("reward_mean_interval"):  # only in events
        case [int() | float() as low, int() | float() as high]:
            interval = float(low), float(high)
    return None if reward is None else LoggedEvaluation(step, reward, stderr, accuracy, int(n or 0), interval)


def evaluations(
    events: Iterable[dict[str, Any]], metrics: Sequence[MetricLine], name: str = HELD_OUT_NAME
) -> list[LoggedEvaluation]:
    """Evaluations of one set of prompts in the surviving history, by step.

    Both logs are read: the event is written first, and metrics of rewound steps are gone.
    """
    logged: dict[int, LoggedEvaluation] = {}
    for event in events:
        step = event.get("step")
        if not isinstance(step, int):
            continue
        if (kept := rewound_to(event)) is not None:
            logged = {at: evaluation for at, evaluation in logged.items() if at <= kept}
        elif event["event"] != EVALUATION or event.get("set", HELD_OUT_NAME) != name:
            continue
        elif one := read_evaluation(step, event):
            logged[step] = one
    prefix = held_out_prefix(name)
    evaluated = [line for line in metrics if f"{prefix}reward_mean" in line.values]
    found = {line.step: one for line in evaluated if (one := read_evaluation(line.step, line.values, prefix=prefix))}
    found |= logged
    return [found[step] for step in sorted(found)]


def first_and_last(found: Sequence[LoggedEvaluation]) -> tuple[LoggedEvaluation | None, LoggedEvaluation | None]:
    """The evaluation before the first step, and the newest one after it."""
    before = next((evaluation for evaluation in found if evaluation.step == 0), None)
    return before, found[-1] if found and found[-1].step > 0 else None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The files of a run directory, read without a lock: the run may be in progress.

    Missing files are empty; unreadable lines are skipped and listed in `damage`.
    """

    run: RunDirectory
    config_text: str  # empty without config.toml
    settings: dict[str, Any]  # tables of config.toml, not validated; empty if it is not TOML
    manifest: dict[str, Any]
    events: EventLog
    metrics: MetricTable  # of the surviving history, by step
    stored_summary: dict[str, Any]  # summary.json as last written
    forecast: Forecast | None
    line_counts: dict[str, tuple[int, int]]  # complete lines of each log, and how many of them cannot be read

    @classmethod
    def read(cls, path: Path, *, where: str = "") -> Self:
        """Read the run in `path`.

        Args:
            where: for errors, the argument that named the run; by default its path.

        Raises:
            UserError: there is no run, it has another format, or no line of its metrics can be read.
        """
        run = RunDirectory(path)
        if not any(file.exists() for file in (run.config, run.manifest, run.events, run.metrics)):
            raise UserError("no run there", where=where or str(path), hint=similar_path(path) or NO_RUN)
        run.refuse_other_format()
        data = cls.load(run)
        lines, unreadable = data.line_counts[run.metrics.name]
        if lines and lines == unreadable:
            raise UserError("no line can be read", where=str(run.metrics), hint="restore the file from a copy")
        return data

    @classmethod
    def load(cls, run: RunDirectory) -> Self:
        """Read whatever is there, without any check."""
        logs = RunLogs(run)
        logs.refresh()
        return cls.of(run, logs)

    @classmethod
    def of(cls, run: RunDirectory, logs: RunLogs) -> Self:
        """The run with what was read of its logs, and its other files."""
        files = (logs.metrics_file, logs.events_file)
        return cls(
            run=run,
            config_text=run.config.read_text(encoding="utf-8", errors="replace") if run.exists else "",
            settings=run.read_settings(),
            manifest=run.read_manifest(),
            events=logs.events,
            metrics=logs.metrics,
            stored_summary=run.read_summary(),
            forecast=read_forecast(run.path),
            line_counts={file.path.name: (file.lines, file.unreadable) for file in files},
        )

    @property
    def spec(self) -> RunSpec:
        """The validated configuration.

        Raises:
            UserError: config.toml is missing or not valid.
        """
        text = self.run.read_config()
        if text is None:
            raise UserError("no run there (no config.toml)", where=str(self.run.path), hint=NO_RUN)
        return from_toml(text, source=str(self.run.config))

    @property
    def damage(self) -> tuple[str, ...]:
        """`2 of 40 lines of metrics.jsonl cannot be read`, for each log with unreadable lines."""
        return tuple(
            f"{unreadable} of {counted(lines, 'line')} of {name} cannot be read"
            for name, (lines, unreadable) in self.line_counts.items()
            if unreadable
        )

    @cached_property
    def _outline(self) -> list[dict[str, Any]]:
        return self.events.outline

    @cached_property
    def sessions(self) -> dict[int, RunSession]:
        return sessions_of(self._outline, self.metrics)

    @cached_property
    def evaluations(self) -> list[LoggedEvaluation]:
        return evaluations(self._outline, self.metrics)

    @cached_property
    def eval_sets(self) -> dict[str, list[LoggedEvaluation]]:
        """The evaluations of each set of `eval.sets`, by name."""
        names = dict.fromkeys(str(event["set"]) for event in self.events_named(EVALUATION) if "set" in event)
        return {name: evaluations(self._outline, self.metrics, name) for name in names}

    @cached_property
    def robot_evaluations(self) -> dict[str, dict[str, Any]]:
        """The newest events of evaluations "before" and "after" the training of a robot's policy."""
        finished = [event for event in self.events_named(ROBOT_EVALUATION) if "error" not in event]
        return {str(event["when"]): event for event in finished}

    @property
    def is_robot(self) -> bool:
        """Whether it is a stage of a robot: without prompts, tokens and samples."""
        return self.manifest.get("kind") in ROBOT_KINDS

    @cached_property
    def guard(self) -> GuardHistory:
        return guard_history(self._outline)

    @cached_property
    def outcome(self) -> str:
        """finished, interrupted, failed, running, killed or unknown."""
        return outcome_of(self._outline, self.run.events)

    @property
    def name(self) -> str:
        return str(self.manifest.get("run", self.run.path.name))

    @property
    def total_steps(self) -> int:
        """Planned steps: of the newest `plan` event, else trainer.steps; 0 if neither says."""
        planned = [event["steps"] for event in self.events_named(PLAN) if isinstance(event.get("steps"), int)]
        return planned[-1] if planned else int(self.setting("trainer", "steps"))

    @property
    def model_evaluation(self) -> dict[str, Any] | None:
        """The figures of `tidemill eval` or of an evaluation stage; None for a training run."""
        return self.stored_summary if "completion_tokens" in self.stored_summary else None

    @property
    def failure(self) -> str:
        """Type and message of the error that ended the newest session; empty if none did, or in older runs."""
        if self.outcome != "failed":
            return ""
        return str(self.events_named(SESSION_END)[-1].get("error", ""))

    def setting(self, section: str, key: str) -> float:
        """A number of config.toml; 0 if it is not there."""
        table = self.settings.get(section)
        return amount(table, key) if isinstance(table, dict) else 0.0

    def events_named(self, *names: str) -> list[dict[str, Any]]:
        return self.events.named(*names)

    def values(self, metric: str) -> list[float]:
        """A metric of every step that has it, by step."""
        return self.metrics.values(metric)

    def samples(self, *, training: bool | None = None) -> list[Sample]:
        """Training samples, held-out samples, or by default both, by step. Read from disk on each call."""
        return [
            sample
            for _, purpose, path in self.run.sample_files()
            if training is None or training == (purpose == TRAINING_PURPOSE)
            for sample in read_samples(path)
        ]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of summary.json, computed from the logs."""
        return self.summarize(
            outcome=self.outcome,
            total_steps=self.total_steps,
            peak_rss_bytes=int(amount(self.stored_summary, PEAK_RSS)),
        )

    def summarize(
        self, *, outcome: str, total_steps: int, wall_s: float | None = None, peak_rss_bytes: int = 0
    ) -> dict[str, Any]:
        """The figures of summary.json. Each step counts once, however often the run was killed and resumed.

        `wall_s`, `sessions` and the fleet's figures include repeated work.

        Args:
            outcome: "finished", "interrupted" (by the user), "failed" or "running".
            total_steps: planned steps.
            wall_s: of all sessions; read from the logs by default.
            peak_rss_bytes: of this process; peaks of earlier sessions are in the metrics.
        """
        newest = self.events_named(SESSION_START)[-1:]
        count = int(amount(newest[0], "session")) if newest else 0
        if wall_s is None:
            wall_s = self.sessions[count].end_s if count in self.sessions else 0.0
        last = self.metrics[-1] if self.metrics else None
        rollout_s, idle_s = self._of_steps(ROLLOUT_TIME), self._of_steps(TRAINER_IDLE)
        is_step = self.metrics.column("step") > 0
        is_timed = is_step & ~np.isnan(self.metrics.column(TRAINER_IDLE))
        timed_s = float(np.nansum(self.metrics.column(STEP_TIME)[is_timed]))
        generated, trained = int(self._of_steps(TOKENS_GENERATED)), int(self._of_steps(TOKENS_TRAINED))
        times = {"rollout_s": ROLLOUT_TIME, "train_s": TRAIN_TIME, "score_s": SCORE_TIME, "eval_s": EVAL_TIME}
        data = self.events_named(DATA)
        keys = ("training", "held_out", "left_out", "rows", "missing")
        sets = {name: _evaluation_summary(found) for name, found in self.eval_sets.items()}
        return {
            "run": self.name,
            "model": self.manifest.get("model", ""),
            "seed": self.manifest.get("seed"),
            "outcome": outcome,
            "finished": outcome == "finished",
            "interrupted": outcome == "interrupted",
            "steps": last.step if last else 0,
            "total_steps": total_steps,
            "optimizer_steps": int(self.metrics.column("optimizer_steps")[is_step].sum()),
            "policy_version": last.policy_version if last else 0,
            "weights_digest": last.weights_digest if last else "",
            "sessions": count,
            "wall_s": round(wall_s, 3),
            "training_s": round(self._of_steps(STEP_TIME), 3),
            "time": {key: round(sum(self.values(name)), 3) for key, name in times.items()},
            # None if nothing was generated, or no step was timed.
            "trainer_idle_share": round(idle_s / timed_s, 4) if timed_s > 0 else None,
            TOKENS_GENERATED: generated,
            TOKENS_TRAINED: trained,
            "tokens_per_s": round(generated / rollout_s, 2) if rollout_s > 0 else None,
            **({"data": {key: data[-1][key] for key in keys if key in data[-1]}} if data else {}),
            "eval": _evaluation_summary(self.evaluations) | ({"sets": sets} if sets else {}),
            **fleet_figures(
                self._outline,
                self.metrics,
                wall_s=wall_s,
                tokens_trained=trained,
                reserved_usd_per_hour=self.setting("fleet", "reserved_usd_per_hour"),
                sessions=self.sessions,
                decoded=self.events.decoded,
                idle_s=self.idle_s,
            ),
            **guard_figures(self.guard),
            PEAK_RSS: int(max([peak_rss_bytes, *self.values(PEAK_RSS)])),
        }

    @property
    def in_one_process(self) -> bool:
        """Whether workers are in the trainer's process."""
        return bool(self.settings.get("runtime", "inprocess") == "inprocess")

    @property
    def idle_s(self) -> float | None:
        """Time in which the trainer waited for other machines, see `reserved_only`."""
        return None if self.in_one_process else self._of_steps(TRAINER_IDLE)

    def _of_steps(self, name: str) -> float:
        """Sum of a metric over all steps after the start."""
        return float(np.nansum(self.metrics.column(name)[self.metrics.column("step") > 0]))


def _evaluation_summary(found: Sequence[LoggedEvaluation]) -> dict[str, Any]:
    """Before the first step, the newest, and the best; null fields where there is none."""
    before, after = first_and_last(found)
    best = max(found, key=lambda evaluation: (evaluation.reward_mean, -evaluation.step), default=None)
    figures = ("step", "reward_mean", "reward_stderr", "greedy_accuracy", "n")
    summary: dict[str, Any] = {}
    for when, one in (("before", before), ("after", after), ("best", best)):
        summary[when] = {name: getattr(one, name, None) for name in figures}
        if one:
            intervals = {"reward_mean": one.reward_interval, "greedy_accuracy": one.accuracy_interval}
            summary[when] |= {f"{name}_interval": list(ends) if ends else None for name, ends in intervals.items()}
    return summary | {"n": found[-1].n if found else 0}


def held_out_changes(summary: dict[str, Any], digits: int, *, name: str = "held-out") -> str:
    """Mean reward and accuracy before and after, from the `eval` of a summary; empty if there is no such pair."""
    before, after = ((summary.get(when) or {}) for when in ("before", "after"))
    changes = []
    for key, title in (("reward_mean", "mean reward"), ("greedy_accuracy", "greedy accuracy")):
        if before.get(key) is not None and after.get(key) is not None:
            changes.append(f"{title} {before[key]:.{digits}f} → {after[key]:.{digits}f}")
    return f"{name} {', '.join(changes)}" if changes else ""


def read_run_samples(path: Path) -> list[Sample]:
    """All samples of a run directory, which needs nothing but samples/, or of one samples file.

    Raises:
        UserError: the run directory has another format.
    """
    if not path.is_dir():
        return read_samples(path)
    run = RunDirectory(path)
    run.refuse_other_format()
    return [sample for _, _, file in run.sample_files() for sample in read_samples(file)]
