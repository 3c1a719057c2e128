"""`tidemill.evaluate` and `tidemill.generate`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tidemill.api.entry import entry_point
from tidemill.api.inputs import Inputs
from tidemill.api.run import Run
from tidemill.api.train import load
from tidemill.config.schema import RunSpec
from tidemill.extensions.registry import provide

Recipe = str | Path | RunSpec | Run | None
WARNING = "warning: "
EVERY_PROMPT = 2**31
"""A limit of prompts that no data set reaches."""


@entry_point
def evaluate(
    recipe: Recipe = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    columns: Mapping[str, str] | None = None,
    rewards: Sequence[Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a model on held-out prompts: mean reward, accuracy, pass@k, lengths and every greedy completion; under
    "sets" the same for each set of `eval.sets`.

    Args:
        recipe: as for `train`; or a `Run`, whose task and rewards are used, and its newest checkpoint unless `model` is
            given.
        model: as for `train`; a checkpoint folder; or a `Run`, for its newest checkpoint.
        tokenizer: of a `transformers` model.
        data: rows, all of which are evaluated, instead of the recipe's held-out prompts and sets.
        columns: as for `train`.
        rewards: as for `train`. Default: those of the recipe that measure correctness.
        overrides: values by dotted key: `{"eval.samples_per_prompt": 8}` adds pass@k.

    Returns:
        As `tidemill eval --json`.

    Raises:
        TidemillError: invalid input.
    """
    from tidemill.runtime.model_evaluation import evaluate as run

    def job(inputs: Inputs, source: str | Path | RunSpec | None, folder: Path | None) -> dict[str, Any]:
        inputs.add_data(data, None, columns)
        inputs.add_rewards(rewards)
        if data is not None:
            inputs.overrides["task"]["held_out_fraction"] = 1.0
            inputs.overrides["eval.prompts"] = EVERY_PROMPT
            inputs.overrides["eval.sets"] = []
        if rewards is not None:
            inputs.overrides["eval.rewards"] = inputs.overrides["scoring.rewards"]
        spec = load(source, {**inputs.overrides, **(overrides or {})}, purpose="eval")
        provide(inputs.extensions)
        return run(spec, model_folder=folder, progress=_warn)

    return _run(job, recipe, model, tokenizer)


@entry_point
def generate(
    prompts: str | Sequence[str],
    *,
    model: Any = None,
    tokenizer: Any = None,
    recipe: Recipe = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Generate one completion per prompt.

    Args:
        model, tokenizer: as for `evaluate`.
        recipe: as for `evaluate`; for the sampling settings and the model.
        overrides: values by dotted key: `{"sampling.temperature": 0}`.

    Returns:
        Per prompt: `prompt`, `completion`, `finish`, `tokens` and `logprob`.

    Raises:
        TidemillError: invalid input.
    """
    from tidemill.runtime.model_evaluation import generate as run

    def job(inputs: Inputs, source: str | Path | RunSpec | None, folder: Path | None) -> list[dict[str, Any]]:
        spec = load(source, {**inputs.overrides, **(overrides or {})}, purpose="generate")
        return run(spec, model_folder=folder, prompts=[prompts] if isinstance(prompts, str) else list(prompts))

    if recipe is None and isinstance(model, Run):
        recipe = model
    return _run(job, recipe, model, tokenizer)


T = TypeVar("T")
Job = Callable[[Inputs, str | Path | RunSpec | None, Path | None], T]


def _run(job: Job[T], recipe: Recipe, model: Any, tokenizer: Any) -> T:
    """Call `job` with the saved inputs, the recipe, and the folder that replaces the recipe's model."""
    from tidemill.api.session import run_here

    def here(_: object) -> T:
        with _temporary() as inputs:
            given = recipe if model is None else model
            folder = given.checkpoint if isinstance(given, Run) else Path(model) if isinstance(model, Path) else None
            if folder is None:
                inputs.add_model(model, tokenizer)
            return job(inputs, recipe.config if isinstance(recipe, Run) else recipe, folder)

    return run_here(here)


def _warn(message: str) -> None:
    """Raise what a command would print as a warning as one of Python's; other messages are not shown."""
    if message.startswith(WARNING):
        warnings.warn(message.removeprefix(WARNING), stacklevel=2)


@contextmanager
def _temporary() -> Iterator[Inputs]:
    with tempfile.TemporaryDirectory(prefix="tidemill-") as folder:
        yield Inputs(folder=Path(folder), kept=False)
