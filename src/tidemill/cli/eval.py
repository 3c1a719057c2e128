"""`tidemill eval`: mean reward, accuracy, pass@k, lengths and diversity on held-out prompts; one model or two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.arguments import Checkpoint, Items, model_folder, spec_for
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import note
from tidemill.cli.result import DryRun, Json, Result
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.models.checkpoint_manifest import refuse_damaged

Compare = Annotated[
    str | None,
    Parameter(
        name="--compare",
        help="Ask another model the same and compare: a checkpoint, a run directory or a built-in model.",
    ),
]


def evaluate(
    *items: Items,
    checkpoint: Checkpoint = None,
    compare: Compare = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> Result:
    """Measure a model or a checkpoint on the task's held-out prompts: mean reward and accuracy of greedy completions,
    lengths, diversity; with `--eval.samples_per_prompt N` also pass@k."""
    with model_folder(checkpoint) as folder, compared(compare) as other:
        spec = spec_for(items, checkpoint, purpose="eval")
        if dry_run:
            return show_dry_run(spec, purpose="eval")
        from tidemill.runtime.evaluate import evaluate as run

        found = run(spec, model_folder=folder, compare=other, progress=note)
    return Result(data=found, text=figures(found))


@contextmanager
def compared(name: str | None) -> Iterator[Path | str | None]:
    """The other model: a built-in one's name, or the folder with its weights. Damage is reported here, because it is
    loaded only after the first is measured."""
    if name is None or (name in BUILT_IN_MODELS and not Path(name).exists()):
        yield name
        return
    with model_folder(Path(name), option="--compare") as folder:
        assert folder is not None
        refuse_damaged(folder)
        yield folder


def figures(found: dict[str, Any]) -> str:
    """One figure a line; completions are left to `--json`."""
    lines = list[tuple[str, str]]()
    for name, value in found.items():
        if name == "drawn":
            lines += _drawn(value)
        elif name == "scores":
            lines += [(f"score {scorer}", _with_interval(score)) for scorer, score in value.items()]
        elif name == "compared_with":
            lines += _compared(value)
        elif value is not None and f"{name}_interval" in found:
            low, high = found[f"{name}_interval"]
            lines.append((name, _with_interval({"value": value, "low": low, "high": high})))
        else:
            lines += _plain(name, value)
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:<{width}}  {words}" for name, words in lines)


def _plain(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and "low" in value:
        return [(name, _with_interval(value))]
    if isinstance(value, dict):
        return [(name, ", ".join(f"{part} {_number(each)}" for part, each in value.items()))]
    return [(name, _number(value))] if isinstance(value, (str, int, float)) else []


def _drawn(drawn: dict[str, Any]) -> list[tuple[str, str]]:
    rest = {name: value for name, value in drawn.items() if name not in ("samples_per_prompt", "pass_at")}
    return [
        ("drawn", f"{drawn['samples_per_prompt']} samples of each prompt"),
        *((f"  pass@{k}", _with_interval(figure)) for k, figure in drawn["pass_at"].items()),
        *(line for name, value in rest.items() for line in _plain(f"  {name}", value)),
    ]


def _compared(other: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("compared_with", f"{other['model']}, weights {other['weights_digest']}")]
    for name, figure in other["figures"].items():
        means = f"{_number(figure['other'])} -> {_number(figure['this'])}"
        counts = f"higher on {figure['higher']} of {figure['n']}, lower on {figure['lower']}"
        change = _with_interval(figure["difference"], sign="+")
        lines.append((f"  {name}", f"{means}, {change}; {counts}, p = {figure['p_value']:.2g}"))
    return lines


def _with_interval(figure: dict[str, Any], *, sign: str = "") -> str:
    return f"{figure['value']:{sign}.4g} (95 %: {figure['low']:{sign}.3g} to {figure['high']:{sign}.3g})"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
