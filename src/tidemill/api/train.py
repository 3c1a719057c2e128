"""`tidemill.train`, `train_async` and `load_config`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.api.call_arguments import (
    Function,
    Overrides,
    Recipe,
    checked_callbacks,
    checked_overrides,
    checked_recipe,
    collected,
    layered,
)
from tidemill.api.entry import entry_point, same_arguments
from tidemill.api.inputs import Inputs
from tidemill.api.run import Run
from tidemill.config.issues import Purpose, refuse_without_task
from tidemill.config.load import Tree
from tidemill.config.pipeline import PipelineSpec, load_overridden
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.extensions.registry import provide
from tidemill.telemetry.run_dir import RunDirectory

if TYPE_CHECKING:
    from tidemill.jobs.stopping import StopRequest


@entry_point
def load_config(recipe: str | Path | None = None, overrides: Overrides | None = None) -> RunSpec:
    """The configuration of a recipe.

    Args:
        recipe: a TOML file, or the name of a built-in recipe (`tidemill recipe list`); None for the defaults.
        overrides: values by dotted key: `{"batch.prompts": 8}`.

    Raises:
        TidemillError: an unknown recipe or an invalid value; lists all of them.
    """
    return load(recipe, checked_overrides(overrides), purpose="read")


@entry_point
def train(
    recipe: str | Path | RunSpec | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    eval_sets: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    rewards: Sequence[Any] | None = None,
    task: Function | str | None = None,
    task_params: Mapping[str, Any] | None = None,
    environment: type | str | None = None,
    environment_params: Mapping[str, Any] | None = None,
    advantage: Function | str | None = None,
    loss: Function | str | None = None,
    loss_terms: Sequence[Any] = (),
    prompt_sampler: Function | str | None = None,
    callbacks: Sequence[Any] = (),
    overrides: Overrides | None = None,
    run_dir: str | Path | None = None,
) -> Run:
    """Train a model with reinforcement learning, or resume the run in `run_dir`.

    Works in scripts and notebooks. One run at a time per process. An interrupt (Ctrl-C, the stop button) ends the run
    after a checkpoint, and the same call resumes it. A script then ends with the KeyboardInterrupt, whose attribute
    `run` is the run (SIGTERM: SystemExit with code 143); in a notebook the run is returned.

    The stages of a recipe run one after another; finished ones are not repeated. Arguments apply to every stage that
    uses their section of the configuration, `overrides` also to one: `{"stage.sft.trainer.steps": 50}`.

    Args:
        recipe: a TOML file, the name of a built-in recipe such as "jsonl", or a configuration. None: the configuration
            in `run_dir`, if there is a run, else the defaults.
        model: a name ("smollm2-135m"), a hub id, a folder, a `Run` or its directory (its newest checkpoint), a
            checkpoint, or a `transformers` model, which is saved in the run directory and not changed.
        tokenizer: of a `transformers` model.
        data: training rows: a list of dicts, a `datasets.Dataset`, the path of a file, "hub:OWNER/NAME", or several of
            these as (weight, data) pairs.
        eval_data: held-out rows; by default a fraction of `data`.
        eval_sets: more rows (or paths) to evaluate, by name: `{"math": rows}`; instead of the recipe's `eval.sets`.
        columns: names of the columns for `prompt`, `messages`, `answer` and `tools`, if they differ.
        rewards: functions (see `tidemill.reward`), results of `tidemill.rewards`, names such as "exact", or
            `path/file.py:function`.
        task: a function that returns rows (see `tidemill.task`), instead of `data`.
        task_params: its arguments.
        environment: of an agent: a class (see `tidemill.Environment` and `tidemill.ToolEnvironment`), or the name of
            one. Without `data` it also makes the tasks, and its own rewards are the default.
        environment_params: arguments of the class.
        advantage: a function (see `tidemill.advantage`) or a name.
        loss: a function (see `tidemill.loss`) or a name.
        loss_terms: functions (see `tidemill.loss_term`), or (weight, function) pairs.
        prompt_sampler: a function (see `tidemill.prompt_sampler`).
        callbacks: instances of `tidemill.Callback`.
        overrides: values by dotted key: `{"batch.prompts": 8}`.
        run_dir: the run directory. Default: runs/NAME.

    Returns:
        The run; `run.interrupted` tells whether it was stopped before its last step.

    Raises:
        TidemillError: invalid input, a guard stopped the run, or a failure; finished steps are kept.
        KeyboardInterrupt: Ctrl-C in a script, after the checkpoint; its `run` is None before the run has started.
    """
    arguments = dict(locals())
    from tidemill.api.session import run_here

    return run_here(_job(arguments))


@entry_point
@same_arguments(train)
async def train_async(recipe: str | Path | RunSpec | None = None, **arguments: Any) -> Run:
    """`train`, for `await`: other tasks of the event loop run meanwhile. Cancelling the task stops the run after a
    checkpoint."""
    from tidemill.api.session import run_async

    return await run_async(_job({"recipe": recipe, **arguments}))


def _job(arguments: dict[str, Any]) -> Callable[[Any], Run]:
    callbacks = checked_callbacks(arguments.pop("callbacks", ()))

    def job(stop: Any) -> Run:
        from tidemill.jobs.train import train as run
        from tidemill.pipeline.console_reporter import ConsoleReporter
        from tidemill.pipeline.execution import run_pipeline
        from tidemill.planner.forecast.forecast import forecast_at_start

        spec, inputs = prepare(**arguments)
        provide(inputs.extensions)

        def work() -> None:
            if isinstance(spec, PipelineSpec):
                run_pipeline(spec, reporter=ConsoleReporter(), callbacks=callbacks, stop=stop)
            else:
                run(spec, forecast_run=forecast_at_start, callbacks=callbacks, stop=stop)

        return completed(spec.directory, stop, work)

    return job


def completed(directory: Path, stop: StopRequest, work: Callable[[], object]) -> Run:
    """Do the work and return its run; in a script, a signal is raised after the checkpoint, as `stopped_by`."""
    from tidemill.api.session import in_notebook

    try:
        work()
    except KeyboardInterrupt:  # before the first step, or the second one
        stopped = Run(directory) if RunDirectory(directory).config.is_file() else None
    else:
        if stop.signal is None or (stop.signal == signal.SIGINT and in_notebook()):
            return Run(directory)
        stopped = Run(directory)
    raise stopped_by(stop.signal or signal.SIGINT, stopped, directory)


def stopped_by(number: signal.Signals, run: Run | None, directory: Path) -> KeyboardInterrupt | SystemExit:
    """What a signal raises in a script after the checkpoint, with the run as its attribute `run`."""
    raised: KeyboardInterrupt | SystemExit
    if number == signal.SIGTERM:
        raised = SystemExit(128 + number)
    else:
        raised = KeyboardInterrupt(f"the run in {directory} was interrupted; the same call resumes it")
    raised.run = run  # type: ignore[union-attr]
    return raised


def prepare(recipe: Recipe = None, **arguments: Any) -> tuple[RunSpec | PipelineSpec, Inputs]:
    """The configuration and the inputs of `train`; saves objects in the run directory.

    Raises:
        UserError: an argument is invalid.
    """
    base, inputs, given = collected(recipe, **arguments)
    spec = load_overridden(*layered(base, inputs.with_overrides(given), replaced=inputs.overrides))
    if base is None and isinstance(spec, RunSpec):
        refuse_without_task(spec, "tidemill.train")
    return spec, inputs


def load(recipe: Recipe, given: Tree, *, purpose: Purpose, replaced: Iterable[str] = ()) -> RunSpec:
    """The configuration of a recipe, or of another configuration, with overrides.

    Args:
        given, replaced: as for `layered`.

    Raises:
        UserError: a value is invalid, or the recipe has stages.
    """
    checked = checked_recipe(recipe, of_runs="run_dir" if purpose == "train" else "model")
    found = load_overridden(*layered(checked, given, replaced=replaced), purpose=purpose)
    if not isinstance(found, RunSpec):
        what = "the recipe has stages, and this function needs a single run"
        raise UserError(what, where=str(recipe), hint="run it with tidemill.train")
    if purpose == "eval" and recipe is None:
        refuse_without_task(found, "tidemill.evaluate")
    return found
