"""The pages of a run and of an evaluation. Every word of a run is escaped by the template."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import tidemill
from tidemill.core.formatting import between, compact, decimal, duration, gigabytes, percent
from tidemill.core.records import Record
from tidemill.telemetry.events import (
    CHECKPOINT,
    CRASH,
    EVALUATION,
    EVICTION,
    GIVEN_UP,
    JOIN_FAILED,
    QUARANTINE,
    REPLAY,
    RESUME,
    SESSION_END,
    SESSION_START,
    SINK_FAILED,
    WAITING,
)
from tidemill.telemetry.fleet_view import FLEET_EVENTS
from tidemill.telemetry.metrics import STEP_TIME
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.report.findings import ENDINGS, MEASURED, before_and_after, findings, headline
from tidemill.telemetry.report.run_data import RunData, SampleWindow, fleet_section
from tidemill.telemetry.report.showcase import (
    HEIGHT,
    LEGEND,
    MARGIN,
    PAIRS_SHOWN,
    WIDTH,
    Pair,
    best_and_worst,
    common_lines,
    histograms,
    pairs,
    shorten,
)
from tidemill.telemetry.report.timeline import drawn, timeline
from tidemill.telemetry.summary import comparable

DISTINCT = "distinct_"
GREEDY = "greedy"
REWARD = "mean reward"


class Figure(Record):
    """A row of the table of figures."""

    of: str  # which completions
    name: str
    value: str
    interval: str = ""  # of 95 %


class Compared(Record):
    """A row of the table of two models on the same prompts."""

    name: str
    n: int
    other: str
    this: str
    difference: str
    interval: str
    higher: int
    lower: int
    p_value: str


def headline_figures(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(figure, of which completions, value with its interval): accuracy or, where there is none, the mean reward; then
    pass@k by k."""
    for name, key in (("accuracy", "greedy_accuracy"), (REWARD, "reward_mean")):
        if found.get(key) is not None:
            yield name, GREEDY, _interval(found, key)
            break
    for k, share in found.get("drawn", {}).get("pass_at", {}).items():
        yield f"pass@{k}", _drawn_words(found), share


def figures(found: dict[str, Any]) -> list[Figure]:
    """Everything measured of the one model."""
    rows = [_with_interval(of, name, figure) for name, of, figure in headline_figures(found)]
    if found.get("greedy_accuracy") is not None and found.get("reward_mean") is not None:
        rows.insert(1, _with_interval(GREEDY, REWARD, _interval(found, "reward_mean")))
    for name, score in found.get("scores", {}).items():
        rows.append(_with_interval(GREEDY, f"score of {name}", score))
    rows += _plain(GREEDY, found)
    if "drawn" in found:
        if reward := found["drawn"].get("reward_mean"):
            rows.append(_with_interval(_drawn_words(found), REWARD, reward))
        rows += _plain(_drawn_words(found), found["drawn"])
    return sorted(rows, key=lambda row: row.of != GREEDY)


def compared(found: dict[str, Any]) -> list[Compared]:
    """This model against the other; empty where there is none."""
    return [
        Compared(
            name=name.replace("_", " "),
            n=pair["n"],
            other=decimal(pair["other"]),
            this=decimal(pair["this"]),
            difference=decimal(pair["difference"]["value"]),
            interval=between(pair["difference"]["low"], pair["difference"]["high"]),
            higher=pair["higher"],
            lower=pair["lower"],
            p_value=decimal(pair["p_value"]),
        )
        for name, pair in found.get("compared_with", {}).get("figures", {}).items()
    ]


def answers(found: dict[str, Any]) -> list[Pair]:
    """Some prompts with what this model and, where there is one, the other answered: those whose rewards differ first,
    then low rewards."""
    samples = found.get("samples", [])
    others = found.get("compared_with", {}).get("samples") or samples
    both = sorted(
        zip(others, samples, strict=True),
        key=lambda two: (two[0]["reward"] == two[1]["reward"], two[1]["reward"] or 0.0),
    )
    lead = common_lines([sample["prompt"] for sample in samples])
    return [
        Pair(
            prompt=shorten(this["prompt"][lead:]),
            answer=this["answer"],
            before=other["completion"],
            before_reward=other["reward"],
            after=this["completion"],
            after_reward=this["reward"],
        )
        for other, this in both[:PAIRS_SHOWN]
    ]


def _interval(found: dict[str, Any], name: str) -> dict[str, float]:
    low, high = found[f"{name}_interval"]
    return {"value": found[name], "low": low, "high": high}


def _drawn_words(found: dict[str, Any]) -> str:
    return f"{found['drawn']['samples_per_prompt']} a prompt"


def _with_interval(of: str, name: str, share: dict[str, float]) -> Figure:
    return Figure(of=of, name=name, value=decimal(share["value"]), interval=between(share["low"], share["high"]))


def _plain(of: str, found: dict[str, Any]) -> Iterator[Figure]:
    """Lengths, cut and invalid completions, and diversity."""
    lengths = ", ".join(f"{name} {decimal(value)}" for name, value in found["completion_tokens"].items())
    yield Figure(of=of, name="tokens of a completion", value=lengths)
    yield Figure(of=of, name="cut by the limit", value=decimal(found["truncated_fraction"]))
    yield Figure(of=of, name="without a valid reward", value=str(found["invalid"]))
    for name, value in found.items():
        if name.startswith(DISTINCT):
            yield Figure(of=of, name=name.replace("_", "-", 1).replace("_", " "), value=decimal(value))


HERE = Path(__file__).parent
TOLD_EVENTS = (
    SESSION_START, SESSION_END, RESUME, REPLAY, EVALUATION, CHECKPOINT, SINK_FAILED, WAITING, GIVEN_UP, EVICTION,
    CRASH, JOIN_FAILED, QUARANTINE,
)  # fmt: skip
EVENTS_SHOWN = 500
PLAIN_KEYS = ("time", "session", "elapsed_s", "event")


def render(story: RunData) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(context(story))


def context(story: RunData) -> dict[str, Any]:
    """What the template is given."""
    found_pairs, pairs_words = pairs(story)
    workers = timeline(story.events, story.metrics)
    galleries = [
        {"steps": steps_words(window), "best": best, "worst": worst}
        for window in (story.last, story.first)
        for best, worst in [best_and_worst(window)]
        if best or worst
    ]
    return {
        "story": story,
        "headline": headline(story),
        "ending": MEASURED if story.measured else ENDINGS.get(story.outcome, ENDINGS["unknown"]),
        "held_out": held_out(story),
        "measured": measured_section(story.measured) if story.measured else None,
        "tiles": [] if story.measured else tiles(story),
        "findings": findings(story),
        "fleet": fleet_section(story, workers) if workers else None,
        "chart_json": script_json(chart_data(story) | ({"fleets": [drawn(workers)]} if workers else {})),
        "histograms": histograms(story.first, story.last),
        "svg": {"width": WIDTH, "height": HEIGHT, "floor": HEIGHT - MARGIN},
        "first_steps": steps_words(story.first),
        "last_steps": steps_words(story.last),
        "pairs": found_pairs,
        "pairs_words": pairs_words,
        "galleries": galleries,
        "legend": LEGEND,
        "events": [] if story.measured else event_rows(story),
        "facts": facts(story),
        "manifest_text": msgspec.json.format(msgspec.json.encode(story.manifest)).decode() if story.manifest else "",
        # Of the page's own scripts; no other one is run.
        "nonce": secrets.token_urlsafe(12),
        "version": tidemill.__version__,
        "style": trusted("templates/report.css"),
        "script": trusted("templates/report.js"),
        "fleet_script": trusted("templates/fleet.js"),
        "uplot_style": trusted("vendor/uplot/uPlot.min.css"),
        "uplot_script": trusted("vendor/uplot/uPlot.iife.min.js"),
        "uplot_license": (HERE / "vendor/uplot/LICENSE").read_text(encoding="utf-8"),
    }


def trusted(name: str) -> str:
    """A file of this package, put into the page as it is."""
    return (HERE / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that nothing inside can end its script element with: angle brackets and ampersands are escaped."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def held_out(story: RunData) -> dict[str, Any] | None:
    """Figures of the before/after panel, or those of `tidemill eval`; None without an evaluation."""
    if story.measured is not None:
        rows = [_bar(*figure, is_share=figure[0] != REWARD) for figure in headline_figures(story.measured)]
        if not rows:  # no reward was valid
            return None
        return {"rows": rows, "n": story.measured["n"], "what": "Completions", "also": ""}
    before, after = before_and_after(story)
    shown = [(label, one) for label, one in (("before", before), ("after", after)) if one]
    if not shown:
        return None
    rows, found = [], comparable([one for _, one in shown])
    for (label, one), figure in zip(shown, found, strict=True):
        low, high = figure.interval or (figure.value, figure.value)
        remark = f"after step {one.step}" if one.step else "training"
        share = {"value": figure.value, "low": low, "high": high}
        bar = _bar(label, remark, share, is_share=figure.name == "accuracy")
        rows.append(bar if figure.interval else bar | {"interval": ""})
    what = f"{found[0].name.capitalize()} of greedy completions"
    rewards = ", ".join(f"{label} {decimal(one.reward_mean)}" for label, one in shown)
    also = f"Mean reward: {rewards}." if found[0].name == "accuracy" else ""
    return {"rows": rows, "n": shown[-1][1].n, "what": what, "also": also}


def _bar(label: str, remark: str, share: dict[str, float], *, is_share: bool) -> dict[str, Any]:
    """A row; only a share has a bar, which is drawn from 0 to 1."""
    low, high = share["low"], share["high"]
    return {
        "label": label,
        "remark": remark,
        "value": decimal(share["value"]),
        "bar": is_share,
        "share": 100 * min(1.0, max(0.0, share["value"])),
        "low": 100 * low,
        "high": 100 * high,
        "interval": f"{low:.2f}-{high:.2f}" if is_share else between(low, high),
    }


def measured_section(found: dict[str, Any]) -> dict[str, Any]:
    """The tables of an evaluation."""
    other = found.get("compared_with", {})
    return {
        "figures": figures(found),
        "compared": compared(found),
        "other": " ".join(str(other.get(key, "")) for key in ("model", "weights_digest")),
        "answers": answers(found),
    }


def tiles(story: RunData) -> list[tuple[str, str, str]]:
    """(label, figure, remark)."""
    summary = story.summary
    steps = f"{summary['steps']} / {summary['total_steps']}" if summary["total_steps"] else str(summary["steps"])
    sessions = summary["sessions"]
    speed, idle = summary["tokens_per_s"], summary["trainer_idle_share"]
    rows = [
        ("Steps", steps, f"version {summary['policy_version']}"),
        ("Wall time", duration(summary["wall_s"]), f"in {sessions} sessions" if sessions > 1 else "one session"),
        ("Training", duration(summary["training_s"]), "steps that count, without evaluation"),
        ("Tokens generated", compact(summary["tokens_generated"]), f"{compact(speed)} tokens/s" if speed else ""),
        ("Tokens trained", compact(summary["tokens_trained"]), f"{summary['optimizer_steps']} optimizer steps"),
        ("Peak memory", gigabytes(summary["peak_rss_bytes"]), "largest of all sessions"),
    ]
    if story.forecast is not None:
        rows.insert(2, ("Forecast", duration(story.forecast.total_s.mean), forecast_words(story)))
    if idle is not None:
        rows.insert(3 + (story.forecast is not None), ("Trainer idle", percent(idle), "of that, waiting for samples"))
    return rows if story.metrics else rows[:2]


def forecast_words(story: RunData) -> str:
    """How far off the forecast was, of the whole run once that is finished, of its steps before."""
    forecast = story.forecast
    if forecast is None:
        return ""
    if story.outcome == "finished" and story.summary["sessions"] == 1:
        actual, expected, of = story.summary["wall_s"], forecast.total_s.mean, "in all"
    else:
        lines = [line for line in story.metrics if line.step > 0 and STEP_TIME in line.values]
        actual = sum(line.values[STEP_TIME] for line in lines)
        expected, of = sum(forecast.of_step(line.step).mean for line in lines), "so far, steps alone"
    if not expected or not actual:
        return f"of {forecast.profile}"
    off = actual / expected - 1
    return f"it took {percent(abs(off))} {'longer' if off >= 0 else 'less'} {of}"


def steps_words(window: SampleWindow) -> str:
    """`steps 1-3`; empty without any."""
    if not window.steps:
        return ""
    low, high = window.steps[0], window.steps[-1]
    return f"steps {low}-{high}" if high > low else f"step {low}"


def facts(story: RunData) -> list[tuple[str, str]]:
    """(label, text) of the newest session: how it was started, with what, on what."""
    sessions = story.manifest.get("sessions") or [{}]
    newest = {key: value for key, value in sessions[-1].items() if value}
    git, machine, digest = newest.get("git", {}), newest.get("machine", {}), story.summary["weights_digest"]
    forecast = "; ".join((story.forecast.profile, *story.forecast.notes)) if story.forecast else ""
    rows = [
        ("Command", " ".join(newest.get("argv", []))),
        ("Versions", ", ".join(f"{package} {number}" for package, number in newest.get("versions", {}).items())),
        ("Commit", git.get("commit", "") + (" with local changes" if git.get("changed") else "")),
        ("Machine", ", ".join(_machine_words(machine))),
        ("Forecast", forecast and f"from {forecast}"),
        ("Weights", f"version {story.summary['policy_version']}, digest {digest}" if digest else ""),
    ]
    return [(label, text) for label, text in rows if text]


def _machine_words(machine: dict[str, Any]) -> list[str]:
    words = [str(machine.get("processor", ""))]
    words += [f"{machine['cores']} cores"] if machine.get("cores") else []
    words += [gigabytes(machine["memory_bytes"])] if machine.get("memory_bytes") else []
    return [word for word in (*words, str(machine.get("system", ""))) if word]


def event_rows(story: RunData) -> list[dict[str, Any]]:
    """The turns of the story, newest first: everything but the spans of ordinary steps."""
    told = [
        event
        for event in story.events
        if event["event"] in TOLD_EVENTS or (event.get("error") and event["event"] not in FLEET_EVENTS)
    ]
    return [
        {
            "time": str(event.get("time", "")).replace("T", " ").removesuffix("Z"),
            "session": event.get("session", ""),
            "event": event["event"],
            "fields": ", ".join(
                f"{key} {_field(value)}" for key, value in event.items() if key not in PLAIN_KEYS and value is not None
            ),
        }
        for event in reversed(told[-EVENTS_SHOWN:])
    ]


def _field(value: Any) -> str:
    return decimal(value) if isinstance(value, float) else str(value)
