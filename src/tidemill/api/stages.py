"""`tidemill.sft`, `reward_model`, `dpo`, `demonstrations` and `pairs`: the stages of a recipe, one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tidemill.api.call_arguments import Function, Overrides, Recipe, checked_callbacks, collected, layered
from tidemill.api.entry import entry_point, same_arguments
from tidemill.api.inputs import ROW_HINT, Inputs
from tidemill.api.run import ROWS, Run
from tidemill.api.train import completed
from tidemill.config.pipeline import KINDS, StageSpec, load_stage
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.core.errors import UserError
from tidemill.data.rows import DEMONSTRATION_SHAPE, PAIR_SHAPE
from tidemill.extensions.registry import provide
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.run_dir import RunDirectory, read_json

if TYPE_CHECKING:
    from tidemill.jobs.stopping import StopRequest

SupervisedKind: TypeAlias = Literal["sft", "reward_model", "dpo"]
DataKind: TypeAlias = Literal["demonstrations", "pairs"]
CONTENTS = "contents"
"""Key of the manifest: digests of the files of prompts, by key, stored with the rows that were made of them."""
SHAPES: dict[SupervisedKind, str] = {"sft": DEMONSTRATION_SHAPE, "reward_model": PAIR_SHAPE, "dpo": PAIR_SHAPE}


@entry_point
def sft(
    recipe: Recipe = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    columns: Mapping[str, str] | None = None,
    callbacks: Sequence[Any] = (),
    overrides: Overrides | None = None,
    run_dir: str | Path | None = None,
) -> Run:
    """Fine-tune a model on demonstrations, or resume the run in `run_dir`.

    Interrupts are handled as by `tidemill.train`. The weights are those of an `sft` stage with the same data and
    settings.

    Args:
        recipe: a TOML file without stages, or a configuration; of its sections those of an `sft` stage count. None: the
            configuration in `run_dir`, if there is a run, else the defaults.
        model: a name ("smollm2-135m"), a folder, a hub id, a `Run`, or a `transformers` model, which is saved in the
            run directory and not changed.
        tokenizer: of a `transformers` model.
        data: rows with `prompt` (a text or messages) and `completion`, with `messages`, of which all turns of the
            assistant are learned, or with `text`. A list of dicts, a `datasets.Dataset`, the path of a file,
            "hub:OWNER/NAME", a `Run` of `demonstrations`, or several of these as (weight, data) pairs.
        eval_data: held-out rows; by default a tenth of the prompts (`data.held_out_fraction`).
        columns: names of the columns that differ: `{"completion": "answer"}`.
        callbacks: instances of `tidemill.Callback`.
        overrides: values by dotted key: `{"supervised.epochs": 3, "optimizer.learning_rate": 1e-5}`.
        run_dir: the run directory. Default: runs/sft.

    Returns:
        The run. As `model` of the next call it stands for its checkpoint with the lowest held-out loss.

    Raises:
        TidemillError: invalid input, no finite gradient, or a failure; finished steps are kept.
        KeyboardInterrupt: as `tidemill.train`.
    """
    return _train("sft", locals())


@entry_point
@same_arguments(sft)
def reward_model(recipe: Recipe = None, **arguments: Any) -> Run:
    """Train a reward model on preference pairs, or resume the run in `run_dir`.

    `tidemill.train(rewards=[tidemill.rewards.model(run)])` uses it; the policy needs the same tokenizer.

    Args:
        data: rows with `prompt` (a text or messages), `chosen` and `rejected` (texts or messages), and optionally
            `margin`. Without a prompt, it is the common start of both sides. Kinds of data as for `sft`; or a `Run` of
            `pairs`.
        run_dir: the run directory. Default: runs/reward_model.
        recipe, model, tokenizer, eval_data, columns, callbacks, overrides: as for `sft`.

    Returns:
        The run.

    Raises:
        TidemillError: as `sft`.
    """
    return _train("reward_model", {"recipe": recipe, **arguments})


@entry_point
@same_arguments(sft)
def dpo(recipe: Recipe = None, **arguments: Any) -> Run:
    """Train a model on preference pairs with DPO or IPO, or resume the run in `run_dir`.

    The model as given is the reference.

    Args:
        data: as for `reward_model`.
        overrides: values by dotted key: `{"preference.beta": 0.05, "preference.loss": "ipo"}`.
        run_dir: the run directory. Default: runs/dpo.
        recipe, model, tokenizer, eval_data, columns, callbacks: as for `sft`.

    Returns:
        The run, as of `sft`.

    Raises:
        TidemillError: as `sft`.
    """
    return _train("dpo", {"recipe": recipe, **arguments})


@entry_point
def demonstrations(
    recipe: Recipe = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    columns: Mapping[str, str] | None = None,
    task: Function | str | None = None,
    task_params: Mapping[str, Any] | None = None,
    environment: type | str | None = None,
    environment_params: Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    run_dir: str | Path | None = None,
) -> Run:
    """Write the answers of a task, or the episodes that an environment's teacher plays, as rows for `sft`.

    Args:
        recipe: as for `tidemill.train`, without stages.
        model: the model that will learn from them, whose tokenizer is used; kinds as for `sft`.
        data: rows with `prompt` or `messages`, and `answer`; kinds as for `tidemill.train`.
        overrides: values by dotted key: `{"data_generation.prompts": 500}`; `{"data_generation.split": "held_out"}` for
            the held-out prompts instead of the others.
        run_dir: the run directory. Default: runs/demonstrations.
        tokenizer, columns, task, task_params, environment, environment_params: as for `tidemill.train`.

    Returns:
        The run: give it as `data` to `sft`, or read `run.rows`.

    Raises:
        TidemillError: invalid input, or the task has no answers.
    """
    return _write_rows("demonstrations", locals())


@entry_point
def pairs(
    recipe: Recipe = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    columns: Mapping[str, str] | None = None,
    rewards: Sequence[Any] | None = None,
    task: Function | str | None = None,
    task_params: Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    run_dir: str | Path | None = None,
) -> Run:
    """Sample completions of a task's prompts and write pairs of right and wrong ones, as rows for `dpo` and
    `reward_model`.

    Args:
        recipe: as for `tidemill.train`, without stages.
        model: what generates; kinds as for `sft`.
        data: rows with `prompt` or `messages`, and what the rewards need; kinds as for `tidemill.train`.
        rewards: as for `tidemill.train`; 1 for a right completion, 0 for a wrong one.
        overrides: values by dotted key: `{"data_generation.samples_per_prompt": 8, "sampling.temperature": 1.0}`.
        run_dir: the run directory. Default: runs/pairs. The same call continues an interrupted one.
        tokenizer, columns, task, task_params: as for `tidemill.train`.

    Returns:
        The run: give it as `data` to `dpo` or `reward_model`, or read `run.rows`.

    Raises:
        TidemillError: invalid input, or no prompt has right and wrong completions.
    """
    return _write_rows("pairs", locals())


def _train(kind: SupervisedKind, arguments: Mapping[str, Any]) -> Run:
    from tidemill.api.session import run_here

    given = dict(arguments)
    callbacks = checked_callbacks(given.pop("callbacks", ()))

    def job(stop: StopRequest) -> Run:
        from tidemill.jobs.train_supervised import train_supervised

        spec, _ = _prepared(kind, SHAPES[kind], section="data", **given)
        if not spec.data.all_sources:
            raise UserError("is missing", where="data", hint=f"give data=rows; {SHAPES[kind]}")
        return completed(
            spec.directory, stop, lambda: train_supervised(spec, kind, callbacks=callbacks, stop_request=stop)
        )

    return run_here(job)


def _write_rows(kind: DataKind, arguments: Mapping[str, Any]) -> Run:
    from tidemill.api.session import run_here

    def job(stop: StopRequest) -> Run:
        spec, inputs = _prepared(kind, ROW_HINT, **arguments)
        provide(inputs.extensions)
        return completed(spec.directory, stop, lambda: _generate(kind, spec))

    return run_here(job)


def _prepared(kind: SupervisedKind | DataKind, shape: str, **arguments: Any) -> tuple[RunSpec, Inputs]:
    """The configuration of a stage, and its inputs."""
    base, inputs, given = collected(kind=kind, shape=shape, **arguments)
    if kind == "demonstrations":
        inputs.overrides.pop("scoring.rewards", None)  # of an environment: nothing is scored
    given = inputs.with_overrides(given)
    sections = KINDS[kind].sections
    return load_stage(kind, *layered(base, given, sections=sections, replaced=inputs.overrides)), inputs


def _generate(kind: DataKind, spec: RunSpec) -> None:
    """Write the rows of a stage into its run directory, unless they are there.

    Raises:
        UserError: the directory holds another run, or the rows cannot be made.
    """
    from tidemill.jobs.batch_generation import provenance_path
    from tidemill.jobs.train import EXTENSIONS, KIND, MODEL_DIGEST, check_same_config, refuse_other_kind
    from tidemill.pipeline.job import Job
    from tidemill.pipeline.stage_kinds import RUNNERS
    from tidemill.pipeline.stage_plan import content_digest, file_inputs
    from tidemill.runtime.extension_checks import identities, refuse_changed, run_extensions

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    functions, started_s = identities(run_extensions(spec)), time.monotonic()
    files = [file for file in file_inputs(StageSpec(name=spec.run.name, kind=kind, spec=spec)) if not file.function]
    rows = [file for file in files if file.location[0] == "task" and file.path.exists()]
    contents = {file.key: content_digest(file.path, where=file.key) for file in rows}
    with RunDirectory.open(spec.directory) as run:
        refuse_other_kind(run, kind)
        if check_same_config(run, spec) is not None and (run.path / ROWS).is_file():
            started = run.read_manifest()
            refuse_changed(started.get(EXTENSIONS, {}), functions, where=str(run.path))
            read = {key: digest for key, digest in started.get(CONTENTS, {}).items() if key in contents}
            refuse_changed(read, contents, where=str(run.path))
            return
        run.write_config(to_toml(spec))
        names = {"run": spec.run.name, "model": spec.model.source}
        manifest = build_manifest(run.read_manifest(), **names, seed=spec.run.seed, unix_s=time.time())
        run.write_manifest(manifest | {KIND: kind})
        job = Job(name=spec.run.name, kind=kind, digest="", spec=spec, earlier=(), progress=say)
        outcome = RUNNERS[kind](job)
        weights = read_json(provenance_path(run.path / ROWS)).get("weights_digest", "")  # empty if nothing was sampled
        run.write_manifest(manifest | {KIND: kind, MODEL_DIGEST: weights, EXTENSIONS: functions, CONTENTS: contents})
        ending = {"outcome": "finished", "finished": True, "interrupted": False}
        wall_s = round(time.monotonic() - started_s, 3)
        result = {"headline": outcome.headline, "wall_s": wall_s, **outcome.figures}
        run.write_summary({**names, "kind": kind, **ending, **result})
    say(f"{outcome.headline} in {run.path / ROWS}")
