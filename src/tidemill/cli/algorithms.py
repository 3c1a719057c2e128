"""`tidemill algorithms`: what a recipe's [algorithm] can name, with formulas, sources and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tidemill.algos.advantages import ADVANTAGES
from tidemill.algos.corrections import CORRECTIONS
from tidemill.algos.losses import LOSSES, TERMS
from tidemill.algos.preference import PREFERENCE_LOSSES
from tidemill.cli.output import Json, Result
from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS, AlgorithmConfig
from tidemill.config.schema import RunSpec
from tidemill.config.toml import write_value

TITLES = {
    "presets": "algorithm.name: sets the keys that are not given",
    "advantages": "algorithm.advantage",
    "losses": "algorithm.loss, ρ = exp(trainer - proximal)",
    "corrections": "algorithm.correction.kind, a weight of each token by r = exp(proximal - rollout)",
    "preference": "losses on preference pairs",
    "normalize": "algorithm.normalize, how tokens' losses become one",
    "kl": "algorithm.kl_in, and what else goes by an estimate of a KL divergence",
    "value": 'the value loss of a critic, advantage = "gae"',
    "shaping": "what else is added to rewards or losses",
    "supervised": "losses of the stages sft and reward_model",
}


def algorithms(*, json: Json = False) -> Result:
    """The algorithms a recipe can name: presets, advantages, losses, corrections, and what else makes up a loss."""
    data = listing()
    return Result(data=data, text=Group(*(table(TITLES[kind], rows) for kind, rows in data.items())))


def listing() -> dict[str, list[dict[str, Any]]]:
    """By kind, a row each with name, formula (a preset has none), source and the defaults of the keys it reads."""
    return {
        "presets": [
            {"name": name, "formula": "", "source": preset.source, "defaults": preset.settings}
            for name, preset in PRESETS.items()
        ],
        "advantages": [
            {"name": name, "formula": row.formula, "source": row.source, "scope": row.scope}
            | {"defaults": defaults("advantage", name, row.settings)}
            for name, row in ADVANTAGES.items()
        ],
        "losses": [
            {"name": name, "formula": row.formula, "source": row.source}
            | {"defaults": defaults("loss", name, row.settings)}
            for name, row in LOSSES.items()
        ],
        "corrections": [
            {"name": name, "formula": CORRECTIONS[name].formula, "source": CORRECTIONS[name].source}
            | {"defaults": {key: limit for key, limit in limits._asdict().items() if limit is not None}}
            for name, limits in CORRECTION_LIMITS.items()
        ],
        "preference": [
            {"name": name, "formula": row.formula, "source": row.source, "defaults": row.settings}
            for name, row in PREFERENCE_LOSSES.items()
        ],
        **{
            kind: [
                {"name": name, "formula": row.formula, "source": row.source, "defaults": plain_values(row.settings)}
                for name, row in rows.items()
            ]
            for kind, rows in TERMS.items()
        },
    }


def defaults(key: str, choice: str, names: Sequence[str]) -> dict[str, Any]:
    """What these keys are where a recipe makes this choice and no other; keys that are not set are left out."""
    section = AlgorithmConfig.model_validate({key: choice})
    return {name: value for name in names if (value := getattr(section, name)) is not None}


def plain_values(keys: Sequence[str]) -> dict[str, Any]:
    """What `section.key`s are where a recipe says nothing, by key; those that are not set are left out."""
    spec, pairs = RunSpec(), [key.split(".") for key in keys]
    return {name: value for section, name in pairs if (value := getattr(getattr(spec, section), name)) is not None}


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A line a row."""
    shown = Table(box=None, pad_edge=False, title=f"\n{title}", title_justify="left", title_style="bold")
    for heading in ("name", "formula", "defaults", "source"):
        if any(row.get(heading) for row in rows):
            shown.add_column(heading, no_wrap=heading == "name", overflow="fold")
    for row in rows:
        given = ", ".join(f"{name} = {write_value(value)}" for name, value in row["defaults"].items())
        cells = {"formula": row["formula"], "defaults": given, "source": row["source"]}
        shown.add_row(row["name"], *(escape(cells[str(column.header)]) for column in shown.columns[1:]))
    return shown
