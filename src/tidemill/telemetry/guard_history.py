"""What the guards saw and decided in a run, read from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidemill.telemetry.events import (
    GOLD,
    GUARD,
    GUARD_PROBE,
    HEADER,
    WORKER_HEALTH,
    decision_text,
    health_text,
    rewound_to,
)
from tidemill.telemetry.jsonl import finite_number

SMOOTHED = 2
"""Gold of a step is drawn as the mean of the pairs of this many steps before and after it, too: a step has few."""


class GuardHistory(NamedTuple):
    """Events of the guards, in order."""

    gold: dict[int, dict[str, Any]]  # by step, of the history that a rollback left
    abandoned: dict[int, dict[str, Any]]  # by step, of steps that a rollback took back
    decisions: tuple[dict[str, Any], ...]
    probes: tuple[dict[str, Any], ...]  # texts that the reward should not like, by probe
    health: tuple[dict[str, Any], ...]


def guard_history(events: Iterable[dict[str, Any]]) -> GuardHistory:
    """A decision that a resumed run makes again counts once."""
    gold, abandoned = dict[int, dict[str, Any]](), dict[int, dict[str, Any]]()
    decisions, probes, health = dict[Any, dict[str, Any]](), dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for event in events:
        name, step = event["event"], event.get("step")
        if name == GOLD and isinstance(step, int):
            gold[step] = event
        elif name == GUARD and event.get("number") not in decisions:
            decisions[event.get("number")] = event
            if (target := rewound_to(event)) is not None:
                abandoned |= {at: one for at, one in gold.items() if at > target}
                gold = {at: one for at, one in gold.items() if at <= target}
        elif name == GUARD_PROBE:
            probes[str(event.get("probe"))] = event
        elif name == WORKER_HEALTH:
            health.append(event)
    return GuardHistory(gold, abandoned, tuple(decisions.values()), tuple(probes.values()), tuple(health))


def count_of(event: Mapping[str, Any], key: str) -> int:
    return int(finite_number(event.get(key)) or 0)


def smoothed_gold(gold: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """By step, the mean gold score of the pairs of the steps around it; a step without pairs has none."""
    pairs = {
        step: (count_of(event, "pairs"), mean)
        for step, event in gold.items()
        if count_of(event, "pairs") and (mean := finite_number(event.get("gold_mean"))) is not None
    }
    means = dict[int, float]()
    for step in pairs:
        near = [pairs[at] for at in range(step - SMOOTHED, step + SMOOTHED + 1) if at in pairs]
        means[step] = sum(count * mean for count, mean in near) / sum(count for count, _ in near)
    return means


def quarantined(health: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Machines that were ever quarantined: `machine`, `worker`, `lease`, and the first `cause`."""
    found = dict[str, dict[str, Any]]()
    for event in health:
        if event.get("state") == "quarantined":
            names = {key: event.get(key) for key in ("machine", "worker", "lease")}
            found.setdefault(machine_name(event), names | {"cause": health_text(event)})
    return list(found.values())


def machine_name(event: Mapping[str, Any]) -> str:
    """Of the machine, or of the worker where machines have no names."""
    return str(event.get("machine") or event.get("worker") or "")


def guard_figures(history: GuardHistory) -> dict[str, Any]:
    """`guard`, `gold` and `machines` of summary.json, each where the run has such events."""
    found = dict[str, Any]()
    if history.decisions or history.probes or history.gold:
        fields = {"decisions": history.decisions, "probes": history.probes}
        found["guard"] = {
            name: [{key: value for key, value in event.items() if key not in HEADER} for event in events]
            for name, events in fields.items()
        }
    if history.gold:
        events = history.gold.values()
        measured, missing = (sum(count_of(event, key) for event in events) for key in ("pairs", "missing"))
        share = round(measured / (measured + missing), 4) if measured + missing else None
        why = next((str(event["why_missing"]) for event in events if event.get("why_missing")), "")
        found["gold"] = {"measured": measured, "missing": missing, "share": share, "why_missing": why}
    if history.health:
        found["machines"] = {"quarantined": quarantined(history.health)}
    return found


def guard_sentences(summary: Mapping[str, Any]) -> list[str]:
    """A line for each decision, and one that names quarantined machines."""
    decisions = summary.get("guard", {}).get("decisions", ())
    lines = [f"guard, step {one.get('step')}: {decision_text(one)}" for one in decisions]
    if machines := summary.get("machines", {}).get("quarantined"):
        names = (f"{machine_name(one)} ({one['cause']})" for one in machines)
        lines.append(f"quarantined: {', '.join(names)}")
    return lines
