"""What names a model: one rule for every command, function and configuration key that takes one.

form                    example                            the model
built-in name           "char"                             built or converted once
hub id                  "organisation/name"                at `model.revision`; also "hub:organisation/name"
folder                  "./llama", Path("llama")           of transformers, or written by `export`
adapter                 "./adapter"                        with the base that its base_model.json names
checkpoint              "runs/a/checkpoints/step_10"       itself
run directory           "runs/a"                           its newest checkpoint, or the best of supervised runs
pipeline's directory    "runs/pipeline"                    that of its last stage that trained
`tidemill.Run`          Run("runs/a")                      as its directory
transformers model      model=, tokenizer=                 saved to a folder first (`api.inputs`)

A text that is a built-in name always means that model. Otherwise it is a path if it is written as one (it starts with
/, ./, ../ or ~, or has two slashes) or exists, and else a hub id. A `Path` is always a path.

`locate` finds the model and reads no weights; `catalog.resolve` then builds, downloads or merges. `exact_models`
replaces run directories in a configuration by their checkpoints, so that a resumed run starts from the model that it
started from, even if that model's run has newer ones. The checkpoint is not copied: resuming reads it again and
compares its digest, and if its run has deleted it since (`checkpoint.keep_last`), the error says so.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tidemill.config.addresses import HUB, address_hint
from tidemill.config.load import PREFIX
from tidemill.config.model import BUILT_IN_MODELS, LoraConfig, ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.hardware.model_config import CONFIG
from tidemill.models.checkpoint_manifest import pinned, read_manifest
from tidemill.models.folder import ADAPTER_CONFIG, DESCRIPTION, holds_adapter, is_local, refuse_other_folder
from tidemill.telemetry.jsonl import write_json
from tidemill.telemetry.run_dir import PROMPTS, SUPERVISED, PromptFormat, RunDirectory, read_json

ModelKind: TypeAlias = Literal["built-in", "hub", "folder", "checkpoint"]
STEP_FOLDER = re.compile(r"step_(\d+)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PIPELINE_STATE = "pipeline.json"
_ATTEMPTS = 100  # to pin the newest checkpoint before it is deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Which model was meant."""

    kind: ModelKind
    source: str  # as `model.source`: a built-in name, a hub id, or the path of one folder, never of a run
    run: Path | None = None  # the directory of the run that wrote it
    step: int | None = None  # of a checkpoint
    prompts: PromptFormat = field(default_factory=PromptFormat)  # how that run formatted its prompts

    @property
    def folder(self) -> Path | None:
        """Its folder; None for a name, whose folder may have to be built or downloaded."""
        return Path(self.source) if self.kind in ("folder", "checkpoint") else None

    @property
    def adapter(self) -> Path | None:
        """Its folder if that holds an adapter."""
        return self.folder if self.folder is not None and holds_adapter(self.folder) else None

    def config(self, configured: ModelConfig) -> ModelConfig:
        """The configuration of this model in place of the configured one, with an adapter attached."""
        if self.adapter is not None:
            from tidemill.models.saving import read_origin

            stored = read_origin(self.adapter).model
            return stored.model_copy(update={"chat_template": configured.chat_template})
        return self.merged_config(configured)

    def merged_config(self, configured: ModelConfig) -> ModelConfig:
        """The configuration of this model in place of the configured one, with an adapter merged into its base."""
        revision = configured.revision if self.source == configured.source else None
        return configured.model_copy(update={"source": self.source, "revision": revision, "lora": LoraConfig()})


def locate(given: str | Path) -> ModelSource:
    """Find a model. Reads no weights, and uses no network.

    A folder is not checked to be complete; `catalog.resolve` does that.

    Raises:
        UserError: there is no such folder, or the run has no checkpoint or is of another version.
    """
    text = str(given).strip().removeprefix(HUB)
    if hint := address_hint(text, of_model=True):
        raise UserError("is a web address, not a model", where=text, hint=hint)
    if not isinstance(given, Path):
        if not text:
            raise UserError("the name is empty", where="model", hint="`tidemill model list` lists models")
        if text in BUILT_IN_MODELS:
            return ModelSource(kind="built-in", source=text)
        if not is_local(text):
            return ModelSource(kind="hub", source=text)
    path = _expanded(text)
    if isinstance(given, Path) or str(path) in BUILT_IN_MODELS:
        path = path.absolute()  # as text it would be a name
    if not path.exists():
        raise _missing(path)
    return _in_folder(_chosen(path) if is_run(path) else path)


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of an unknown user
        raise UserError("there is no such user", where=text, hint="write ~/ for your home directory") from None


def _missing(path: Path) -> UserError:
    if STEP_FOLDER.fullmatch(path.name) and (left := _steps(path.parent)):
        hint = f"the newest is {left[max(left)]}; raise checkpoint.keep_last of that run to keep more"
        return UserError("this checkpoint was deleted, or never written", where=str(path), hint=hint)
    if STEP_FOLDER.fullmatch(path.name) and not path.parent.exists():
        hint = "put its run back, or correct the path; a run that started from it keeps the path in its config.toml"
        return UserError("the run of this checkpoint was moved or deleted", where=str(path), hint=hint)
    hint = similar_path(path) or "give a folder with config.json and its weights, or the directory of a run"
    return UserError("there is no such folder", where=str(path), hint=hint)


def is_run(path: Path) -> bool:
    """Whether a folder is not a model itself but the directory of a run or a pipeline, or a folder of checkpoints."""
    if any((path / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return False
    run = RunDirectory(path)
    if run.exists or run.manifest.is_file() or (path / PIPELINE_STATE).is_file():
        return True
    return run.checkpoints.is_dir() or bool(_steps(path))


def checkpoints_of(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest first."""
    steps = _steps(RunDirectory(run).checkpoints)
    return [steps[step] for step in sorted(steps)]


def stage_folders(pipeline: Path) -> dict[str, Path]:
    """The run directories of a pipeline's stages that have begun, by name, in order."""
    stages = read_json(pipeline / PIPELINE_STATE).get("stages", ())
    folders = {stage["name"]: pipeline / stage["folder"] for stage in stages}
    return {name: folder for name, folder in folders.items() if RunDirectory(folder).exists}


def _chosen(path: Path) -> Path:
    """The checkpoint that is the model of a run, of a pipeline's last stage that trained, or the newest in a folder."""
    if path.resolve().name == "checkpoints" and RunDirectory(path.resolve().parent).exists:
        path = path.resolve().parent
    run = RunDirectory(path)
    if (path / PIPELINE_STATE).is_file():
        trained = [_chosen(each) for each in stage_folders(path).values() if checkpoints_of(each)]
        if not trained:
            hint = f"run it: tidemill train @recipe.toml --run.dir {path}"
            raise UserError("no stage of this pipeline has trained yet", where=str(path), hint=hint)
        return trained[-1]
    _refuse_other_format(run)
    steps = _steps(run.checkpoints) or _steps(path)
    exported = path / "model"
    if not steps and (exported / CONFIG).is_file():
        return exported  # of a stage that exports
    if not steps:
        hint = "train at least one step; the last step of a session is always checkpointed"
        raise UserError("the run has no checkpoint", where=str(path), hint=hint)
    # The model of a supervised run is the checkpoint with the lowest held-out loss, if that is kept.
    kept_best = run.read_settings().get("checkpoint", {}).get("keep_best", True)
    best = _best(steps) if kept_best and run.read_manifest().get("kind") in SUPERVISED else None
    return steps[max(steps) if best is None else best]


def _best(steps: dict[int, Path]) -> int | None:
    """The step with the highest score, the earliest of equal ones; None if none has a score."""
    scores = {}
    for step, folder in steps.items():
        with contextlib.suppress(OSError, msgspec.DecodeError):
            scores[step] = read_manifest(folder).score
    scored = [(score, -step) for step, score in scores.items() if score is not None]
    return -max(scored)[1] if scored else None


def _steps(folder: Path) -> dict[int, Path]:
    entries = folder.iterdir() if folder.is_dir() else ()
    return {int(match[1]): each for each in entries if (match := STEP_FOLDER.fullmatch(each.name))}


def _in_folder(path: Path) -> ModelSource:
    """A folder with a model, and the run that wrote it."""
    real = path.resolve()  # a link to a checkpoint has the prompts of its run
    run = RunDirectory(real.parent.parent if real.parent.name == "checkpoints" else real.parent)
    match = STEP_FOLDER.fullmatch(real.name)
    if not run.exists:
        prompts = PromptFormat.stored_in(read_json(path / DESCRIPTION))
        return ModelSource(kind="checkpoint" if match else "folder", source=str(path), prompts=prompts)
    _refuse_other_format(run)
    description = read_json(path / DESCRIPTION)  # of an export
    return ModelSource(
        kind="checkpoint",
        source=str(path),
        run=run.path,
        step=int(match[1]) if match else None,
        prompts=PromptFormat.stored_in(description) if PROMPTS in description else run.prompt_format,
    )


def _refuse_other_format(run: RunDirectory) -> None:
    try:
        run.refuse_other_format()
    except UserError as error:
        hint = "use the version of Tidemill that wrote it, or copy a checkpoint out of it: that is a plain model folder"
        raise UserError(error.what, where=error.where, hint=hint) from None


def given_as(where: str, given: str | Path, error: UserError) -> UserError:
    """The error of a model that an argument or option names."""
    named = given if error.where == "model.source" else error.where
    return UserError(error.what, where=f"{where} {named}", hint=error.hint)


def checked(found: ModelSource) -> ModelSource:
    """The model itself, for an early error; `catalog.resolve` checks all of its files.

    Raises:
        UserError: its folder holds no model, or its name cannot be one.
    """
    if found.kind == "hub" and not HUB_ID.fullmatch(found.source):
        raise unknown_model(found.source)
    if found.folder is not None:
        refuse_other_folder(found.folder)
    return found


def unknown_model(name: str) -> UserError:
    """The error for a text that is neither a built-in name nor a path nor a hub id."""
    known = f"give {' or '.join(BUILT_IN_MODELS)}, a local folder, or a hub id such as organisation/name"
    hint = " ".join(filter(None, (did_you_mean(name), known)))
    return UserError(f"{name!r} is not a known model", where="model.source", hint=hint)


def did_you_mean(name: str) -> str:
    """A hint with the built-in model or the local folder whose name is closest; empty if there is none."""
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), BUILT_IN_MODELS, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else similar_path(Path(name))


@contextmanager
def open_model(given: str | Path, *, where: str = "model") -> Iterator[ModelSource]:
    """Locate a model. A checkpoint is pinned against deletion by a running process until the block ends.

    Args:
        where: the argument or option that names it, for errors.

    Raises:
        UserError: as `locate`.
    """
    for _ in range(_ATTEMPTS):
        try:
            found = locate(given)
            pin = contextlib.nullcontext(True) if found.folder is None else pinned(found.folder)
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(pin) and found.kind == "checkpoint":
                    continue  # deleted since it was located; its run has a newer one
                checked(found)
                pins = stack.pop_all()
        except UserError as error:
            raise given_as(where, given, error) from None
        with pins:
            yield found
        return
    raise UserError(
        "every checkpoint was deleted while it was opened",
        where=f"{where} {given}",
        hint="raise checkpoint.keep_last of its run",
    )


def write_prompts(prompts: PromptFormat, folder: Path) -> None:
    """Store in a model folder outside its run how the run formatted prompts."""
    if prompts != PromptFormat():
        write_json(folder / DESCRIPTION, {**read_json(folder / DESCRIPTION), PROMPTS: prompts})


def exact_source(given: str, *, earlier: str | None = None) -> str:
    """The value itself, or in place of a run directory the path of its checkpoint.

    Args:
        earlier: the value with which the configuration was stored. It is kept if it is the same model, or a checkpoint
            of the run that is given, which may have newer ones by now.

    Raises:
        UserError: as `locate`, for a run.
    """
    if given in BUILT_IN_MODELS or given.startswith((PREFIX, HUB)) or not is_local(given):
        return given.removeprefix(HUB)
    path = _expanded(given).absolute()
    if earlier is not None and earlier != given and is_local(earlier):
        stored = _expanded(earlier).resolve()
        runs = (path, *stage_folders(path).values())
        if stored == path.resolve() or stored.parent in {RunDirectory(each).checkpoints.resolve() for each in runs}:
            return earlier
    return locate(path).source if is_run(path) else given


def exact_models(spec: RunSpec, earlier: dict[str, Any] | None = None) -> RunSpec:
    """The configuration with the checkpoint of each run directory that it names.

    Args:
        earlier: the stored configuration of the run that is resumed, not validated.

    Raises:
        UserError: a run has no checkpoint or is of another version.
    """
    tree = spec.model_dump(mode="json")
    changed = False
    for (table, key), (stored, _) in zip_longest(_model_keys(tree), _model_keys(earlier or {}), fillvalue=({}, "")):
        if given := table.get(key):
            table[key] = exact_source(given, earlier=stored.get(key))
            changed |= table[key] != given
    return RunSpec.model_validate(tree) if changed else spec


def _model_keys(tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(table, key) of everything in a configuration that names a model."""
    yield tree.get("model", {}), "source"
    yield tree.get("critic", {}), "source"
    yield tree.get("eval", {}), "compare_with"
    for reward in tree.get("scoring", {}).get("rewards", ()):
        yield reward, "model"
