"""`tidemill algorithms`: algorithms, losses and corrections with formulas, sources and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tidemill.algos.advantages import ADVANTAGES
from tidemill.algos.corrections import CORRECTIONS
from tidemill.algos.credit import CREDITS
from tidemill.algos.losses import LOSSES, TERMS
from tidemill.algos.preference import PREFERENCE_LOSSES
from tidemill.cli.output import Json, Result
from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS, AlgorithmConfig
from tidemill.config.schema import RunSpec
from tidemill.config.toml import write_value

TITLES = {
    "presets": "algorithm.name: sets the defaults of the other keys",
    "advantages": "algorithm.advantage",
    "credits": 'algorithm.credit, the advantage of each turn; "outcome" (default): that of the trajectory',
    "losses": "algorithm.loss, ρ = exp(trainer - proximal)",
    "corrections": "algorithm.correction.kind, a weight of each token by r = exp(proximal - rollout)",
    "preference": "losses on preference pairs",
    "normalize": "algorithm.normalize, the reduction of token losses",
    "kl": "algorithm.kl_in and other uses of KL estimates",
    "value": 'the value loss of a critic, advantage = "gae"',
    "shaping": "additional terms of rewards and losses",
    "supervised": "losses of the stages sft and reward_model",
}


def algorithms(*, json: Json = False) -> Result:
    """List presets, advantages, credit of turns, losses, corrections and other loss terms."""
    data = listing()
    return Result(data=data, text=Group(*(table(TITLES[kind], rows) for kind, rows in data.items())))


def listing() -> dict[str, list[dict[str, Any]]]:
    """Rows by kind: name, formula (empty for presets), source and defaults of the keys it reads."""

    def row(name: str, entry: Any, defaults: Any, **more: Any) -> dict[str, Any]:
        return {"name": name, "formula": entry.formula, "source": entry.source, **more, "defaults": defaults}

    limits = {
        name: {key: limit for key, limit in of_kind._asdict().items() if limit is not None}
        for name, of_kind in CORRECTION_LIMITS.items()
    }
    return {
        "presets": [
            {"name": name, "formula": "", "source": preset.source, "defaults": preset.settings}
            for name, preset in PRESETS.items()
        ],
        "advantages": [
            row(name, entry, defaults("advantage", name, entry.settings), scope=entry.scope)
            for name, entry in ADVANTAGES.items()
        ],
        "credits": [
            row(name, entry, plain_values([f"algorithm.{setting}" for setting in entry.settings]))
            for name, entry in CREDITS.items()
        ],
        "losses": [row(name, entry, defaults("loss", name, entry.settings)) for name, entry in LOSSES.items()],
        "corrections": [row(name, CORRECTIONS[name], limits[name]) for name in limits],
        "preference": [row(name, entry, entry.settings) for name, entry in PREFERENCE_LOSSES.items()],
        **{
            kind: [row(name, entry, plain_values(entry.settings)) for name, entry in entries.items()]
            for kind, entries in TERMS.items()
        },
    }


def defaults(key: str, choice: str, names: Sequence[str]) -> dict[str, Any]:
    """Defaults of `names` if a recipe sets only `key = choice`; unset keys are omitted."""
    section = AlgorithmConfig.model_validate({key: choice})
    return {name: value for name in names if (value := getattr(section, name)) is not None}


def plain_values(keys: Sequence[str]) -> dict[str, Any]:
    """Schema defaults of `section.key` names, by key; unset keys are omitted."""
    spec, pairs = RunSpec(), [key.split(".") for key in keys]
    return {name: value for section, name in pairs if (value := getattr(getattr(spec, section), name)) is not None}


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One table row per row."""
    shown = Table(box=None, pad_edge=False, title=f"\n{title}", title_justify="left", title_style="bold")
    for heading in ("name", "formula", "defaults", "source"):
        if any(row.get(heading) for row in rows):
            shown.add_column(heading, no_wrap=heading == "name", overflow="fold")
    for row in rows:
        given = ", ".join(f"{name} = {write_value(value)}" for name, value in row["defaults"].items())
        cells = {"formula": row["formula"], "defaults": given, "source": row["source"]}
        shown.add_row(row["name"], *(escape(cells[str(column.header)]) for column in shown.columns[1:]))
    return shown
