"""`tidemill.evaluate`, `tidemill.generate` and `tidemill.export`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

from tidemill.api.call_arguments import checked_overrides
from tidemill.api.entry import entry_point
from tidemill.api.inputs import Inputs
from tidemill.api.run import Run
from tidemill.api.train import load
from tidemill.config.keys import flattened
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.extensions.registry import provide
from tidemill.models.model_source import ModelSource, open_model
from tidemill.models.prompt_format import formatted_as_trained

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
            given. Default: the configuration of the run that trained the model, if there is one.
        model: as for `train`.
        tokenizer: of a `transformers` model.
        data: rows, all of which are evaluated, instead of the recipe's held-out prompts and sets. Without a recipe
            these, and those of another task, are formatted as the run that trained the model formats its rows.
        columns: as for `train`.
        rewards: as for `train`. Default: those of the recipe that measure correctness.
        overrides: values by dotted key: `{"eval.samples_per_prompt": 8}` adds pass@k.

    Returns:
        As `tidemill eval --json`.

    Raises:
        TidemillError: invalid input.
    """
    from tidemill.jobs.model_evaluation import evaluate as run

    def job(inputs: Inputs, source: str | Path | RunSpec | None, found: ModelSource | None) -> dict[str, Any]:
        inputs.add_data(data, None, columns)
        inputs.add_rewards(rewards)
        if data is not None:
            inputs.imply("task.held_out_fraction", 1.0)
            inputs.imply("task.held_out_path", None)
            # New rows replace the task of a configuration.
            if isinstance(source, RunSpec) and (system := getattr(source.task, "system_prompt", "")):
                inputs.imply("task.system_prompt", system)
            inputs.imply("eval.prompts", EVERY_PROMPT)
            inputs.imply("eval.sets", [])
        if rewards is not None:
            inputs.imply("eval.rewards", inputs.overrides["scoring.rewards"])
        given = inputs.with_overrides(checked_overrides(overrides))
        spec = load(source, given, purpose="eval", replaced=inputs.overrides)
        if found is not None and (recipe is None or (isinstance(recipe, Run) and model is None)):
            spec = formatted_as_trained(spec, found, note=_warn)
        provide(inputs.extensions)
        return run(spec, model=found, progress=_warn)

    return _run(job, recipe, model, tokenizer)


@entry_point
def generate(
    prompts: Any,
    *,
    model: Any = None,
    tokenizer: Any = None,
    recipe: Recipe = None,
    overrides: Mapping[str, Any] | None = None,
    raw: bool = False,
) -> list[dict[str, Any]]:
    """Generate one completion per prompt.

    A text is formatted as the run that trained the model formats its rows: as a user message in the chat template if it
    was trained on chats, after the run's system prompt. Messages always use the chat template.

    Args:
        prompts: a text, messages (`[{"role": "user", "content": "2+2="}]`), or a list of these.
        model, tokenizer, recipe: as for `evaluate`. Without `recipe`, the sampling settings are those of the model's
            run.
        overrides: values by dotted key: `{"sampling.temperature": 0}`.
        raw: send texts as written.

    Returns:
        Per prompt: `prompt`, `completion`, `finish`, `tokens`, `logprob`; `format` ("chat" or "text") and `sent`, the
        text that the model got.

    Raises:
        TidemillError: invalid input.
    """
    from tidemill.jobs.model_evaluation import generate as run

    def job(inputs: Inputs, source: str | Path | RunSpec | None, found: ModelSource | None) -> list[dict[str, Any]]:
        given = inputs.with_overrides(checked_overrides(overrides))
        if found is None and source is None and "model.source" not in flattened(given):
            raise UserError("no model given", where="model", hint="give a run, a folder or a name")
        spec = load(source, given, purpose="generate", replaced=inputs.overrides)
        return run(spec, model=found, prompts=prompts, raw=raw)

    return _run(job, recipe, model, tokenizer)


@entry_point
def export(
    model: Any,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model as a plain Hugging Face folder with a model card; an adapter is merged into its base.

    Args:
        model, tokenizer: as for `train`.
        folder: a new folder, or an earlier export, which is replaced.
        dtype: of the weights.
        overrides: values by dotted key: `{"model.revision": "v1.0"}`.

    Returns:
        The folder.

    Raises:
        TidemillError: invalid input, or the folder cannot be written.
    """
    from tidemill.jobs.export import DTYPES, export_source

    def job(inputs: Inputs, source: str | Path | RunSpec | None, found: ModelSource | None) -> Path:
        if found is None:
            raise UserError("no model given", where="model", hint="give a run, a folder or a name")
        if dtype not in DTYPES:
            raise UserError(f"{dtype!r} is not a type of weights", where="dtype", hint=f"use {', '.join(DTYPES)}")
        given = inputs.with_overrides(checked_overrides(overrides))
        config = load(source, given, purpose="read", replaced=inputs.overrides).model
        to = Path(folder).expanduser()
        export_source(found, to=to, dtype=dtype, config=config)
        return to

    return _run(job, None, model, tokenizer)


T = TypeVar("T")
Job = Callable[[Inputs, str | Path | RunSpec | None, ModelSource | None], T]


def _run(job: Job[T], recipe: Recipe, model: Any, tokenizer: Any) -> T:
    """Call `job` with the saved inputs, the recipe, and the model that replaces the recipe's."""
    from tidemill.api.session import run_here

    def here(_: object) -> T:
        given = recipe if model is None and isinstance(recipe, Run) else model
        with tempfile.TemporaryDirectory(prefix="tidemill-") as folder, ExitStack() as stack:
            inputs = Inputs(folder=Path(folder), kept=False)
            inputs.add_model(given, tokenizer)
            found: ModelSource | None = None
            if given is not None:
                opened = given.path if isinstance(given, Run) else given
                if not isinstance(opened, (str, Path)):
                    opened = inputs.overrides["model.source"]  # where it was saved
                found = stack.enter_context(open_model(opened))
                inputs.overrides["model.source"] = found.source
            source = recipe.config if isinstance(recipe, Run) else recipe
            if source is None and found is not None and found.run is not None:
                source = Run(found.run).config
            return job(inputs, source, found)

    return run_here(here)


def _warn(message: str) -> None:
    """Print warnings, as training does; other messages are not shown."""
    if message.startswith(WARNING):
        sys.stderr.write(f"{message}\n")
