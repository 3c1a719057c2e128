"""What a pipeline has achieved: the stage that it is for, and one sentence about the model that it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.core.formatting import between, decimal
from tidemill.core.records import Record
from tidemill.telemetry.run_data import EvaluationFigure, went
from tidemill.telemetry.statistics import wilson_interval

INTERVAL = "_interval"
"""Suffix of the figure that contains the 95 % interval of another."""
DIFFERENCE = "_difference"
"""Suffix of the difference from the model that an evaluation compares with."""
POLICY_KINDS = ("sft", "dpo", "rl", "control", "clone")
"""Kinds of stages that train a policy."""
TRANSFER_KINDS = ("twin", "bundle")
"""Kinds of stages that bring a robot's policy to the robot."""
RESULT_KINDS = (POLICY_KINDS, ("reward_model",), ("eval",), TRANSFER_KINDS)
"""What a pipeline is for: a policy, if a stage trains one."""
SHARES = ("greedy_accuracy", "pairwise_accuracy", "success")
TITLES = {
    "greedy_accuracy": "Held-out accuracy",
    "success": "Success",
    "reward_mean": "Held-out mean reward",
    "return_mean": "Mean return",
    "pairwise_accuracy": "Held-out pairwise accuracy",
    "loss": "Held-out loss",
}
"""Of the main figures. The first one that a stage has is its result."""
STATES = {
    "running": "is running",
    "interrupted": "was interrupted",
    "started": "was interrupted",
    "failed": "failed",
    "due": "has not started",
    "left out": "is left out",
}

Stage = Mapping[str, Any]
"""A stage of pipeline.json with its `figures` and `headline` of summary.json."""


class PipelineResult(Record):
    """What the page of a pipeline starts with."""

    headline: str
    main: str = ""  # the stage that the pipeline is for
    figure: str = ""  # its main figure
    shown: tuple[str, ...] = ()  # stages whose figures the headline is from


def pipeline_result(stages: Sequence[Stage]) -> PipelineResult:
    """The result of the last stage that trains a policy, as the last evaluation of its model measured it; without such
    a stage, that of the last reward model or evaluation. If that stage is not finished, what holds it up comes first,
    then the last result there is."""
    main = _last(_planned(stages)) or next(reversed(_planned(stages)), None)
    if main is None:
        return PipelineResult(headline="No stage has been started.")
    done = [stage for stage in stages if stage["state"] == "done"]
    if main["state"] == "done":
        return _result_of(main, stages, main)
    open_stage = next((stage for stage in stages if stage["state"] not in ("done", "due", "left out")), None)
    open_stage = open_stage or next(stage for stage in _planned(stages) if stage["state"] != "done")
    headline = f"{open_stage['name']} {STATES.get(open_stage['state'], open_stage['state'])}"
    if open_stage is not main:
        headline += f"; {main['name']} {STATES['due']}"
    reached = _last(done)
    if reached is None:
        return PipelineResult(headline=f"{headline}.", main=main["name"])
    found = _result_of(reached, stages, main)
    return PipelineResult(
        headline=f"{headline}. So far: {found.headline}", main=main["name"], figure=found.figure, shown=found.shown
    )


def _planned(stages: Sequence[Stage]) -> list[Stage]:
    """Without those that the user left out, unless that is all of them."""
    return [stage for stage in stages if stage["state"] != "left out"] or list(stages)


def _last(stages: Sequence[Stage]) -> Stage | None:
    ranked = (stage for kinds in RESULT_KINDS for stage in reversed(stages) if stage["kind"] in kinds)
    return next(ranked, None)


def _result_of(stage: Stage, stages: Sequence[Stage], main: Stage) -> PipelineResult:
    measured = _measurement(stage, stages)
    source = stage if measured is None else measured
    figure = main_figure(source)
    shown = tuple(dict.fromkeys((source["name"], stage["name"])))
    sentences = [_sentence(stage, source, figure)]
    if stage["kind"] in POLICY_KINDS:
        transfer = [one for one in stages if one["kind"] in TRANSFER_KINDS]
        sentences += [_finished(one) for one in transfer if one["state"] == "done"]
        sentences += [f"{one['name']} failed." for one in transfer if one["state"] == "failed"]
    return PipelineResult(headline=" ".join(sentences), main=main["name"], figure=figure, shown=shown)


def _measurement(stage: Stage, stages: Sequence[Stage]) -> Stage | None:
    """The last finished evaluation of a stage's model, or of its export."""
    names = {f"stage:{stage['name']}"}
    names |= {f"stage:{one['name']}" for one in stages if one["kind"] == "export" and one["model"] in names}
    finished = [one for one in stages if one["kind"] == "eval" and one["state"] == "done" and one["model"] in names]
    return next((one for one in reversed(finished) if main_figure(one)), None)


def main_figure(stage: Stage) -> str:
    """The name of its first figure of `TITLES`; empty if it has none."""
    return next((name for name in TITLES if stage["figures"].get(name) is not None), "")


def measured(figures: Mapping[str, Any], name: str) -> EvaluationFigure:
    """A figure with its interval; that of a share from the number of items, if it is not there."""
    value, n, ends = figures[name], figures.get("n"), figures.get(f"{name}{INTERVAL}")
    share = name.removesuffix("_before") in SHARES and 0 <= value <= 1
    if not ends and share and isinstance(n, int) and n:
        ends = wilson_interval(value, n)
    return EvaluationFigure("accuracy" if share else "mean reward", value, (ends[0], ends[1]) if ends else None)


def _sentence(stage: Stage, source: Stage, figure: str) -> str:
    """One sentence about the model of a stage, from its own figures or those of an evaluation."""
    figures = source["figures"]
    name = stage["name"]
    if not figure:
        return _finished(stage)
    title, value = TITLES[figure], decimal(figures[figure])
    if figures.get(f"{figure}_before") is not None:
        before, after = measured(figures, f"{figure}_before"), measured(figures, figure)
        return f"{title} {went(before, after, f'in {name}')}."
    sentence = f"{title} of {name} is {value}"
    if (difference := figures.get(f"{figure}{DIFFERENCE}")) is not None:
        ends = figures.get(f"{figure}{DIFFERENCE}{INTERVAL}")
        sentence += f", {decimal(abs(difference))} {'above' if difference >= 0 else 'below'} that of the other model"
        sentence += f" (95 %: {between(*ends)})" if ends else ""
    return f"{sentence}."


def _finished(stage: Stage) -> str:
    result = f": {stage['headline']}" if stage["headline"] else ""
    return f"{stage['name']} is finished{result}."
