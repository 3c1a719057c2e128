"""What the page of a run says about it, and `render_page`, which builds every page of Tidemill."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import tidemill
from tidemill.core.formatting import compact, counted, decimal, dollars, duration, gigabytes, interval, percent
from tidemill.telemetry import metrics
from tidemill.telemetry.events import (
    DATA,
    ENVIRONMENT_WARNING,
    FLEET_EVENTS,
    GOLD,
    GUARD_PROBE,
    HEADER,
    LISTED_EVENTS,
    REWARD_FAILED,
    SESSION_END,
    data_text,
    decision_text,
    health_text,
    probe_text,
)
from tidemill.telemetry.report.payoff import payoff_of
from tidemill.telemetry.report.readable_text import pieces, readable, shortened
from tidemill.telemetry.report.sample_cards import MEAN_REWARD, answer_pairs, evaluation_rows, headline_figures
from tidemill.telemetry.run_data import RunData, clearly_differs, comparable, first_and_last, went
from tidemill.telemetry.run_dir import SUPERVISED

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
ASSETS = {
    path.name: path
    for pattern in ("templates/*.js", "templates/*.css", "vendor/uplot/*")
    for path in HERE.glob(pattern)
}
"""Files that pages contain or, if they are served, load."""
DIRECTION_MARKS = {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Characters that reorder the text around them: a sample must not rearrange the page."""


def render_page(template: Path, **values: Any) -> str:
    """An HTML page; values are escaped, and characters that change the direction of text are shown.

    Besides `values`, a template has:
    - `version`, of Tidemill, and `nonce`, for scripts in the page;
    - `asset(name)`, the text of one of `ASSETS`, for use with `|safe`;
    - the filters `decimal`, `interval`, `readable` and `pieces` for texts, and `script_json` for use with `|safe`.
    It may extend or include this package's templates.
    """
    nonce = secrets.token_urlsafe(12)
    return (
        _environment(template.parent)
        .get_template(template.name)
        .render(version=tidemill.__version__, nonce=nonce, **values)
    )


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value.translate(DIRECTION_MARKS) if isinstance(value, str) else value,
    )
    environment.globals["asset"] = lambda name: ASSETS[name].read_text(encoding="utf-8")
    formats = (script_json, decimal, interval, readable, compact, duration, dollars, clock_time, health_text)
    environment.filters |= {function.__name__: function for function in formats}
    environment.filters["pieces"] = lambda text: pieces(shortened(text))
    return environment


def script_json(value: Any) -> str:
    """JSON for a script element: angle brackets and ampersands are escaped, so that no value can end the element."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def headline(data: RunData) -> str:
    """One sentence: the result of the run."""
    steps = data.metrics[-1].step if data.metrics else 0
    before, after = first_and_last(data.evaluations)
    over = counted(steps, "step")
    if before and after:
        first, last = comparable((before, after))
        return f"Held-out {first.name} {went(first, last, f'in {over}')}."
    if rewards := data.values(metrics.REWARD_MEAN):
        if len(rewards) == 1:
            return f"Mean reward is {decimal(rewards[-1])} after {over}."
        return f"Mean reward went from {decimal(rewards[0])} to {decimal(rewards[-1])} in {over}."
    for name, title in ((metrics.HELD_OUT_LOSS, "Held-out loss"), (metrics.LOSS, "Loss")):
        losses = data.values(name)
        if len(losses) > 1:
            return f"{title} went from {decimal(losses[0])} to {decimal(losses[-1])} in {over}."
    if before:
        when = "" if data.outcome == "finished" else " before the first step"
        (only,) = comparable((before,))
        return f"Held-out {only.name} is {decimal(only.value)}{when}."
    if data.model_evaluation is not None:
        return "No held-out completion has a valid reward."
    if steps:
        without = ", none with a valid reward" if metrics.SAMPLES_INVALID in data.metrics[-1].values else ""
        return f"{over} {'have' if steps > 1 else 'has'} been completed{without}."
    return "No step has been completed yet."


RECENT = 5
TRUNCATED_HIGH, MISMATCH_HIGH, ENTROPY_LEFT, NO_SIGNAL_HIGH = 0.2, 1e-3, 0.1, 0.5
MISTAKES_HIGH, LEFT_OUT_HIGH = 0.2, 0.03


class ReportFinding(NamedTuple):
    """A problem worth a look: a short title, and its meaning or what to do."""

    title: str
    text: str


def findings(data: RunData) -> list[ReportFinding]:
    """Possible problems, most urgent first."""
    found: list[ReportFinding] = []
    if data.damage:
        found.append(ReportFinding("The logs are damaged", f"Unreadable lines were skipped: {', '.join(data.damage)}."))
    rows = data.events_named(DATA)
    if rows and (warnings := rows[-1].get("warnings")):
        found.append(ReportFinding("Rows lack what rewards need", f"{'; '.join(warnings)}."))
    if rows and (few := rows[-1].get("few")):
        items = "examples" if data.manifest.get("kind") in SUPERVISED else "prompts"
        found.append(ReportFinding(f"Few held-out {items}", f"{'; '.join(few)}."))
    if invalid := sum(data.values(metrics.SAMPLES_INVALID)):
        failures = data.events_named(REWARD_FAILED)
        example = f" For example: {failures[-1].get('reason')}" if failures else ""
        title = f"{compact(invalid)} samples without a valid reward"
        found.append(ReportFinding(title, f"They were excluded from training.{example}"))
    if reset := sum(data.values(metrics.INVALID_WORLDS)):
        text = "Their physics was not finite. Rewards of these steps are 0, and the episodes count as failed."
        found.append(ReportFinding(f"{counted(int(reset), 'world')} reset", text))
    found += [*guard_findings(data), *_environment_findings(data)]
    found += [] if data.is_robot else _training_findings(data)
    verdict = payoff_of(data)
    if verdict and not verdict.pays:
        found.append(ReportFinding(verdict.title, verdict.text))
    if workers := data.summary["quarantined"]:
        text = "Their probe logprobs differed from the trainer's by more than fleet.probe_tolerance."
        found.append(ReportFinding(f"{counted(workers, 'worker')} quarantined", text))
    # Errors of single workers are in the fleet section, that of the newest session below the headline.
    elsewhere = FLEET_EVENTS | {SESSION_END}
    errors = [event for event in data.events.outline if event.get("error") and event["event"] not in elsewhere]
    if errors:
        last = f"Last: {errors[-1]['event']}, {errors[-1]['error']}"
        found.append(ReportFinding(f"{counted(len(errors), 'error')} in the event log", last))
    if (sessions := data.summary["sessions"]) > 1:
        times = "once" if sessions == 2 else f"{sessions - 1} times"
        text = "Dashed lines in the curves. Figures count each step once; wall time counts all work."
        found.append(ReportFinding(f"Resumed {times}", text))
    return found


def guard_findings(data: RunData) -> Iterator[ReportFinding]:
    """Decisions of the guard with their reasons, what its probes found, missing gold, quarantined machines."""
    for one in data.guard.decisions:
        yield ReportFinding(f"Guard, step {one.get('step')}: {decision_text(one)}", str(one.get("reason", "")))
    for one in data.events_named(GUARD_PROBE):
        yield ReportFinding(f"Guard: {probe_text(one)}", "This was found before the first step.")
    if missing := [event for event in data.events_named(GOLD) if event.get("missing")]:
        title = f"{counted(sum(event['missing'] for event in missing), 'gold score')} missing"
        yield ReportFinding(title, f"The guard cannot judge these samples. First: {missing[0].get('why_missing')}.")
    for name, event in data.guard.quarantined.items():
        yield ReportFinding(f"Quarantined {name}: {health_text(event)}", f"Worker: {event.get('worker')}.")


def _environment_findings(data: RunData) -> Iterator[ReportFinding]:
    """Errors of environments, which the page shows by kind if there are any but a few mistakes of the agent."""
    kinds = {
        "mistakes of the agent": sum(data.values(metrics.ENV_MISTAKES)),
        "timeouts": sum(data.values(metrics.ENV_TIMEOUTS)),
        "lost processes": sum(data.values(metrics.ENV_RETRIES)),
        "episodes that broke their environment": sum(data.values(metrics.ENV_FAILURES)),
        "episodes left out because of a fault": sum(data.values(metrics.ENV_FAULTS)),
    }
    warnings = data.events_named(ENVIRONMENT_WARNING)
    first = f"First warning: {warnings[0].get('reason')}" if warnings else ""
    calls = sum(data.values(metrics.ENV_CALLS))
    mistakes, *others = kinds.values()
    if warnings or any(others) or mistakes > MISTAKES_HIGH * calls:
        counts = ", ".join(f"{compact(count)} {kind}" for kind, count in kinds.items() if count)
        logged = f"{counts}, in {compact(calls)} calls. " if counts else ""  # empty if a guard ended the first step
        yield ReportFinding("Errors of the environment", f"{logged}{first}")
    shares = [line.values.get(metrics.EPISODE_ENDS["fault"], 0.0) for line in data.metrics if line.step > 0]
    if shares and (share := fmean(shares)) > LEFT_OUT_HIGH:
        text = "Their groups were trained on without them, which biases training if faults depend on the task."
        yield ReportFinding(f"{percent(share)} of episodes were left out", text)


def _training_findings(data: RunData) -> Iterator[ReportFinding]:
    def recent(name: str) -> float:
        values = data.values(name)[-RECENT:]
        return fmean(values) if values else 0.0

    groups = data.setting("batch", "prompts")
    if groups and (share := recent(metrics.NO_SIGNAL) / groups) > NO_SIGNAL_HIGH:
        text = "All samples of these groups got the same reward: the prompts are now too easy or too hard."
        yield ReportFinding(f"{percent(share)} of recent groups had no signal", text)
    ends = {end: recent(metrics.EPISODE_ENDS[end]) for end in metrics.BUDGETS}
    if any(ends.values()):
        for end, share in ends.items():
            if share > TRUNCATED_HIGH:
                yield ReportFinding(
                    f"{percent(share)} of recent episodes were cut", f"Consider a larger {metrics.BUDGETS[end]}."
                )
    elif (share := recent(metrics.TRUNCATED)) > TRUNCATED_HIGH:
        title = f"{percent(share)} of recent completions were truncated"
        yield ReportFinding(title, "Consider a larger sampling.max_new_tokens.")
    entropy = data.values(metrics.ENTROPY)
    if len(entropy) > RECENT and entropy[0] > 0 and recent(metrics.ENTROPY) <= ENTROPY_LEFT * entropy[0]:
        title = f"Entropy collapsed: {decimal(entropy[0])} → {decimal(entropy[-1])} nats"
        yield ReportFinding(title, "The samples of a group hardly differ any more.")
    if (mismatch := recent(metrics.MISMATCH_KL)) > MISMATCH_HIGH:
        text = f"KL {decimal(mismatch)} nats per token on the same tokens; this biases the gradients."
        workers = metrics.mismatches(line.values for line in data.metrics[-RECENT:])
        worst = max((name for name in workers if "/" in name), key=lambda name: workers[name][0], default="")
        if worst:
            text += f" Largest on {worst}: {decimal(workers[worst][0])}."
        yield ReportFinding("Engine and trainer logprobs differ", text)
    _, after = first_and_last(data.evaluations)
    best = max(data.evaluations, key=lambda evaluation: evaluation.reward_mean, default=None)
    if after and best and best.step != after.step:
        highest, last = comparable((best, after))
        if clearly_differs(highest, last):
            text = f"{decimal(highest.value)} after step {best.step}, {decimal(last.value)} after the last step."
            yield ReportFinding(f"Held-out {last.name} fell below its best", text)


def held_out(data: RunData) -> dict[str, Any] | None:
    """The panel below the headline: before and after training, or of `tidemill eval`; None without evaluation."""
    if (found := data.model_evaluation) is not None:
        rows = [bar_row(*figure, is_share=figure[0] != MEAN_REWARD) for figure in headline_figures(found)]
        of = counted(found["n"], "held-out prompt")
        return {"rows": rows, "of": of, "what": "Completions", "also": ""} if rows else None
    before, after = first_and_last(data.evaluations)
    shown = [(label, one) for label, one in (("before", before), ("after", after)) if one]
    if not shown:
        return None
    rows, figures = [], comparable([one for _, one in shown])
    for (label, one), figure in zip(shown, figures, strict=True):
        low, high = figure.interval or (None, None)
        remark = f"after step {one.step}" if one.step else "training"
        share = {"value": figure.value, "low": low, "high": high}
        rows.append(bar_row(label, remark, share, is_share=figure.name == "accuracy") | {"faint": label == "before"})
    what = f"{figures[0].name.capitalize()} of greedy completions"
    rewards = ", ".join(f"{label} {decimal(one.reward_mean)}" for label, one in shown)
    also = f"Mean reward: {rewards}." if figures[0].name == "accuracy" else ""
    return {"rows": rows, "of": counted(shown[-1][1].n, "held-out prompt"), "what": what, "also": also}


def bar_row(label: str, remark: str, share: dict[str, Any], *, is_share: bool) -> dict[str, Any]:
    """A row of `bars.html.j2`; only shares have a bar, from 0 to 1."""
    low, high = share["low"], share["high"]
    drawn = is_share and low is not None and high is not None
    return {
        "label": label,
        "remark": remark,
        "value": decimal(share["value"]),
        "bar": is_share,
        "faint": False,
        "share": 100 * min(1.0, max(0.0, share["value"])),
        "bracket": (100 * low, 100 * (high - low)) if drawn else None,
        "interval": f"{low:.2f} to {high:.2f}" if drawn else interval([low, high]),
    }


def evaluation_section(found: dict[str, Any]) -> dict[str, Any]:
    """The tables of an evaluation."""
    other = found.get("compared_with", {})
    compared = dict(other.get("figures", {}))
    for name, of_set in found.get("sets", {}).items():
        figures = of_set.get("compared_with", {}).get("figures", {})
        compared |= {f"{name}: {figure}": pair for figure, pair in figures.items()}
    return {
        "figures": [(row.of, row.name, row.value, row.interval) for row in evaluation_rows(found)],
        "compared": [_pair_row(name, pair) for name, pair in compared.items()],
        "other": " ".join(str(other.get(key, "")) for key in ("model", "weights_digest")),
        "answers": answer_pairs(found),
    }


def _pair_row(name: str, pair: dict[str, Any]) -> tuple[Any, ...]:
    change, figures = pair["difference"], (decimal(pair[key]) for key in ("other", "this"))
    counts = (pair["higher"], pair["lower"], decimal(pair["p_value"]))
    ends = interval([change["low"], change["high"]])
    return name.replace("_", " "), pair["n"], *figures, decimal(change["value"]), ends, *counts


def tiles(data: RunData) -> list[tuple[str, str, str]]:
    """(label, figure, remark)"""
    summary, forecast = data.summary, data.forecast
    steps = f"{summary['steps']} / {summary['total_steps']}" if summary["total_steps"] else str(summary["steps"])
    sessions, speed, idle = summary["sessions"], summary["tokens_per_s"], summary["trainer_idle_share"]
    rows = [
        ("Steps", steps, f"version {summary['policy_version']}"),
        ("Wall time", duration(summary["wall_s"]), f"in {sessions} sessions" if sessions > 1 else "one session"),
        ("Training", duration(summary["training_s"]), "surviving steps, without evaluation"),
        ("Tokens generated", compact(summary["tokens_generated"]), f"{compact(speed)} tokens/s" if speed else ""),
        ("Tokens trained", compact(summary["tokens_trained"]), counted(summary["optimizer_steps"], "optimizer step")),
        ("Peak memory", gigabytes(summary["peak_rss_bytes"]), "maximum over all sessions"),
    ]
    if forecast is not None:
        rows.insert(2, ("Forecast", duration(forecast.total_s.mean), forecast_error(data)))
    if summary["cost_usd"]:
        alone = summary["reserved_only_usd"]
        remark = f"reserved only: {dollars(alone)}" if alone else "of all machines"
        rows.insert(2, ("Cost", dollars(summary["cost_usd"]), remark))
    if idle is not None:
        rows.insert(3 + (forecast is not None), ("Trainer idle", percent(idle), "of training, waiting for samples"))
    return rows if data.metrics else rows[:2]


def forecast_error(data: RunData) -> str:
    """How far off the forecast was: in total for a run finished in one session, else over the steps so far."""
    forecast = data.forecast
    if forecast is None:
        return ""
    if data.outcome == "finished" and data.summary["sessions"] == 1:
        actual, expected, scope = data.summary["wall_s"], forecast.total_s.mean, "in total"
    else:
        lines = [line for line in data.metrics if line.step > 0 and metrics.STEP_TIME in line.values]
        actual = sum(line.values[metrics.STEP_TIME] for line in lines)
        expected, scope = sum(forecast.of_step(line.step).mean for line in lines), "so far, steps only"
    if not expected or not actual:
        return f"from {forecast.profile}"
    off = actual / expected - 1
    return f"the run took {percent(abs(off))} {'longer' if off >= 0 else 'less'} {scope}"


def facts(data: RunData) -> list[tuple[str, str]]:
    """(label, text): command, versions and machine of the newest session."""
    sessions = data.manifest.get("sessions") or [{}]
    newest = {key: value for key, value in sessions[-1].items() if value}
    git, machine, digest = newest.get("git", {}), newest.get("machine", {}), data.summary["weights_digest"]
    hardware = [
        str(machine.get("processor", "")),
        f"{machine['cores']} cores" if machine.get("cores") else "",
        gigabytes(machine["memory_bytes"]) if machine.get("memory_bytes") else "",
        str(machine.get("system", "")),
    ]
    rows = [
        ("Command", " ".join(newest.get("argv", []))),
        ("Versions", ", ".join(f"{package} {number}" for package, number in newest.get("versions", {}).items())),
        ("Data", data_text(rows[-1]) if (rows := data.events_named(DATA)) else ""),
        ("Commit", git.get("commit", "") + (" with local changes" if git.get("changed") else "")),
        ("Machine", ", ".join(filter(None, hardware))),
        ("Forecast", "; ".join((f"from {data.forecast.profile}", *data.forecast.notes)) if data.forecast else ""),
        ("Weights", f"version {data.summary['policy_version']}, digest {digest}" if digest else ""),
    ]
    return [(label, text) for label, text in rows if text]


EVENTS_SHOWN = 500


def event_rows(data: RunData) -> list[tuple[str, Any, str, str]]:
    """(time, session, event, fields) of important events and errors, newest first; spans of ordinary steps are
    omitted."""
    listed = [
        event
        for event in sorted(data.events.outline, key=lambda event: str(event.get("time", "")))
        if event["event"] in LISTED_EVENTS or (event.get("error") and event["event"] not in FLEET_EVENTS)
    ]
    rows = []
    for event in reversed(listed[-EVENTS_SHOWN:]):
        fields = (f"{key} {_logged(value)}" for key, value in event.items() if key not in HEADER and value is not None)
        rows.append((clock_time(event), event.get("session", ""), event["event"], ", ".join(fields)))
    return rows


def clock_time(event: dict[str, Any]) -> str:
    """UTC, as a reader wants it."""
    return str(event.get("time", "")).replace("T", " ").removesuffix("Z")


def _logged(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_logged, value))}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return decimal(value) if isinstance(value, float) else str(value)
