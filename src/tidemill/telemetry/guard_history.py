"""What the guards saw and decided in a run, read from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidemill.telemetry.events import GOLD, GUARD, HEADER, WORKER_HEALTH, decision_text, health_text, rewound_to
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.metrics import Chart

LOST = {"proxy_mean": "lost_proxy", "gold_mean": "lost_gold"}
"""Figures of gold events, and their names after a rollback took their step back."""
LABELS = ("reward", "gold", "reward, taken back", "gold, taken back")
QUALITY = Chart(
    "Reward and gold",
    "mean of the batch, and of its samples with gold",
    dict(zip((*LOST, *LOST.values()), LABELS, strict=True)),
    low=None,
)


class GuardHistory(NamedTuple):
    """Events of the guards, in order."""

    by_step: dict[int, dict[str, float]]  # of each step with gold scores, the figures of `QUALITY`
    decisions: list[dict[str, Any]]
    quarantined: dict[str, dict[str, Any]]  # the first such event of each machine, by its name

    @property
    def marks(self) -> list[tuple[int, str]]:
        """Vertical lines of a chart."""
        ends = (("onset", "onset"), ("step", "decided"))
        return [(one[key], text) for one in self.decisions for key, text in ends if isinstance(one.get(key), int)]


def guard_history(events: Iterable[dict[str, Any]]) -> GuardHistory:
    """A decision that a resumed run makes again counts once."""
    by_step, decisions, quarantined = dict[int, dict[str, float]](), dict[Any, dict[str, Any]](), dict[str, Any]()
    for event in events:
        name, step = event["event"], event.get("step")
        if name == GOLD and isinstance(step, int):
            figures = {key: value for key in LOST if (value := finite_number(event.get(key))) is not None}
            by_step.setdefault(step, {}).update(figures)
        elif name == GUARD and event.get("number") not in decisions:
            decisions[event.get("number")] = event
            if (target := rewound_to(event)) is not None:
                later = {at: figures for at, figures in by_step.items() if at > target}
                by_step |= {
                    at: {LOST[key]: figures[key] for key in LOST if key in figures} for at, figures in later.items()
                }
        elif name == WORKER_HEALTH and event.get("state") == "quarantined":
            quarantined.setdefault(str(event.get("machine") or event.get("worker")), event)
    return GuardHistory(by_step, list(decisions.values()), quarantined)


def guard_figures(history: GuardHistory) -> dict[str, Any]:
    """`guard` and `machines` of summary.json, each where the run has such events."""
    found = dict[str, Any]()
    if history.decisions:
        found["guard"] = [{key: one[key] for key in one if key not in HEADER} for one in history.decisions]
    if history.quarantined:
        found["machines"] = {name: health_text(event) for name, event in history.quarantined.items()}
    return found


def guard_sentences(summary: Mapping[str, Any]) -> list[str]:
    """A line for each decision, and one for each quarantined machine."""
    lines = [f"guard, step {one.get('step')}: {decision_text(one)}" for one in summary.get("guard", ())]
    return lines + [f"quarantined {name}: {cause}" for name, cause in summary.get("machines", {}).items()]
