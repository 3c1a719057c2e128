"""The plan of a pipeline: the digest of each stage, which stages are finished, and which have to run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import xxhash

from tidemill.config.addresses import HUB
from tidemill.config.functions import FunctionReference, function_references
from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.keys import belongs_to, did_you_mean, dotted, flattened, neutral_keys
from tidemill.config.load import PREFIX
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.pipeline import KINDS, StageSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.extensions.loading import source_file
from tidemill.extensions.registry import SESSION, resolve
from tidemill.models.folder import is_local

FORMAT = 3
"""Part of every digest; raised when stages of equal configuration give another output."""
SHORT_DIGEST_CHARS = 10
NAME_KEYS = ("source", "compare_with")
"""Keys that accept the name of a model as well as its folder."""
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInput:
    """A file or folder that a stage reads, other than the output of another stage."""

    location: tuple[str | int, ...]
    path: Path
    function: str = ""  # its name; the path of the file does not matter

    @property
    def key(self) -> str:
        return dotted(self.location)


def file_inputs(stage: StageSpec) -> list[FileInput]:
    """The files and folders that a stage reads: data, local models, and files with user functions. Modules that such a
    file imports are not included."""
    found = []
    for location, value in stage.sources():
        is_name = location[-1] in NAME_KEYS and (value in BUILT_IN_MODELS or not is_local(value))
        if not value.startswith((PREFIX, HUB)) and not is_name:
            found.append(FileInput(location=location, path=Path(value).expanduser()))
    for each in function_references(stage.spec):
        file = source_file(each.ref)
        if file and each.location[0] in KINDS[stage.kind].sections:
            found.append(FileInput(location=each.location, path=file, function=each.ref.rpartition(":")[2]))
    return found


def given_functions(stage: StageSpec) -> list[FunctionReference]:
    """The user functions of a stage that were passed to `tidemill.train` and cannot be imported."""
    used = KINDS[stage.kind].sections
    references = function_references(stage.spec)
    return [each for each in references if each.ref.startswith(SESSION) and each.location[0] in used]


def output_values(stage: StageSpec, *, upstream: Mapping[str, str], contents: Mapping[str, str]) -> dict[str, Any]:
    """The values that determine a stage's output, by dotted key, with digests in place of files and stages.

    Args:
        upstream: digests of the stages it depends on, by name.
        contents: digests of the files it reads and of given functions, by dotted key.
    """
    sections: dict[str, Any] = stage.sections()
    for reference in stage.references:
        put(sections, reference.key, {"stage": upstream[reference.stage]})
    for file in file_inputs(stage):
        put(sections, file.location, {"content": contents[file.key], "name": file.function})
    for each in given_functions(stage):
        put(sections, each.location, {"content": contents[dotted(each.location)], "name": each.ref})
    if "model" in sections and stage.spec.model.source != "char":
        sections["model"].pop("char")
    if "supervised" in sections and stage.spec.supervised.epochs:
        sections["trainer"].pop("steps")  # the number of epochs determines the number of steps
    neutral = neutral_keys(stage.kind)
    return {key: value for key, value in flattened(sections).items() if not belongs_to(key, neutral)}


def put(sections: dict[str, Any], location: tuple[str | int, ...], value: Any) -> None:
    """Replace the value at a location of nested tables and arrays."""
    node: Any = sections
    for part in location[:-1]:
        node = node[part]
    node[location[-1]] = value


def stage_digest(stage: StageSpec, values: Mapping[str, Any]) -> str:
    """32 hex digits over the kind and `output_values`, independent of their order."""
    document = msgspec.json.encode([FORMAT, stage.kind, dict(values)], order="deterministic")
    return hashlib.blake2b(document, digest_size=16).hexdigest()


def folder_name(stage: StageSpec, digest: str) -> str:
    """The stage's folder below `stages`: `sft-3f0c9a71b2`."""
    return f"{stage.name}-{digest[:SHORT_DIGEST_CHARS]}"


Action: TypeAlias = Literal["done", "resume", "run", "wait", "leave"]
"""done: finished with this configuration. resume: started. run: not started, all inputs are finished. wait: an input is
not finished. leave: not selected."""


class StageResult(Record):
    """The file stage.json, written last: a stage without it is not finished."""

    name: str
    kind: str
    digest: str
    product: str | None  # the output: a path, relative to the stage's folder unless absolute
    headline: str  # the result in one sentence
    figures: dict[str, Any]
    wall_s: float
    finished: str  # time stamp
    values: dict[str, Any]  # the values under the digest


class FoundStage(Record):
    """A stage's folder on disk."""

    name: str  # of the stage
    result: StageResult | None  # None if it is not finished, or its output is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The stages that may run; the others must be finished where they are needed."""

    only: str | None = None
    start: str | None = None  # this stage and those after it


EVERYTHING = Choice()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage and its action."""

    stage: StageSpec
    digest: str
    folder: str
    action: Action
    values: dict[str, Any]  # the values under the digest
    contents: Mapping[str, str]  # digests of the files it reads, by dotted key
    changed: tuple[str, ...] = ()  # keys that differ from the newest finished result of this stage
    result: StageResult | None = None

    @property
    def due(self) -> bool:
        return self.action in ("resume", "run", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    stages: tuple[PlannedStage, ...]
    stale: tuple[str, ...]  # folders with results of other configurations
    unused: tuple[str, ...] = ()  # messages about sections that no stage uses, and keys without effect
    remarks: tuple[str, ...] = ()  # on rows that are left out or lack values

    @property
    def due(self) -> tuple[PlannedStage, ...]:
        return tuple(planned for planned in self.stages if planned.due)


def make_plan(
    stages: Sequence[StageSpec],
    *,
    contents: Mapping[str, Mapping[str, str]],
    found: Mapping[str, FoundStage],
    choice: Choice = EVERYTHING,
) -> Plan:
    """
    Args:
        stages: in the order in which they run; each depends on earlier ones only.
        contents: digests of the files and given functions of a stage, by stage and dotted key.
        found: the stages on disk, by folder.

    Raises:
        UserError: `choice` names an unknown stage, or one whose input is neither finished nor selected.
    """
    selected = _selected([stage.name for stage in stages], choice)
    digests: dict[str, str] = {}
    finished: set[str] = set()
    planned = []
    for stage in stages:
        values = output_values(stage, upstream=digests, contents=contents[stage.name])
        digest = digests[stage.name] = stage_digest(stage, values)
        folder = folder_name(stage, digest)
        on_disk = found.get(folder)
        result = on_disk.result if on_disk and on_disk.result and on_disk.result.digest == digest else None
        if result:
            finished.add(stage.name)
            action: Action = "done"
        elif stage.name not in selected:
            action = "leave"
        elif not finished.issuperset(stage.needs):
            action = "wait"
        else:
            action = "resume" if on_disk else "run"
        planned.append(
            PlannedStage(
                stage=stage,
                digest=digest,
                folder=folder,
                action=action,
                values=values,
                contents=contents[stage.name],
                changed=() if on_disk else _changed_keys(stage.name, values, found),
                result=result,
            )
        )
    plan = Plan(stages=tuple(planned), stale=tuple(sorted(set(found) - {each.folder for each in planned})))
    for due in plan.due:
        for name in due.stage.needs:
            if name not in finished and name not in selected:
                raise UserError(
                    f"needs stage {name}, which is not finished with its current configuration",
                    where=f"stage {due.stage.name}",
                    hint="run the whole pipeline, or start --from an earlier stage",
                )
    return plan


def _selected(names: Sequence[str], choice: Choice) -> set[str]:
    for option, name in (("--only", choice.only), ("--from", choice.start)):
        if name is not None and name not in names:
            hint = did_you_mean(name, names) or f"stages: {', '.join(names)}"
            raise UserError("no stage of that name", where=f"{option} {name}", hint=hint)
    if choice.only is not None and choice.start is not None:
        raise UserError("mutually exclusive", where="--only, --from", hint="leave one of them out")
    if choice.only is not None:
        return {choice.only}
    return set(names[names.index(choice.start) :] if choice.start is not None else names)


def _changed_keys(name: str, values: Mapping[str, Any], found: Mapping[str, FoundStage]) -> tuple[str, ...]:
    """Keys whose values differ from those of the newest finished result of the stage."""
    results = [each.result for each in found.values() if each.result and each.name == name]
    if not results:
        return ()
    before = max(results, key=lambda result: result.finished).values
    return tuple(key for key in {**before, **values} if before.get(key) != values.get(key))


def contents_of(stages: Sequence[StageSpec]) -> dict[str, dict[str, str]]:
    """The digests of all files that stages read, and of functions that were given to `tidemill.train`, by stage and
    dotted key. A shared file is read once.

    Raises:
        ConfigError: the files that are missing or unreadable, and functions that this process does not have.
    """
    digests: dict[Path, str] = {}
    found: dict[str, dict[str, str]] = {}
    issues: list[ConfigIssue] = []
    for stage in stages:
        found[stage.name] = {}
        for file in file_inputs(stage):
            try:
                digests[file.path] = digests.get(file.path) or content_digest(file.path, where=file.key)
                model = _model_digest(file)
            except UserError as error:
                issues.append(stage_issue(stage, error))
            else:
                found[stage.name][file.key] = digests[file.path] + model
        for each in given_functions(stage):
            try:
                found[stage.name][dotted(each.location)] = resolve(each.ref, each.kind, where=each.key).identity
            except UserError as error:
                issues.append(stage_issue(stage, error))
    if issues:
        raise ConfigError(issues)
    return found


def _model_digest(file: FileInput) -> str:
    """Of the MJCF of a control task; empty for other files. Raises UserError: it cannot be compiled."""
    if file.location != ("robot", "task"):
        return ""
    from tidemill.robots.engine import check_model, model_digest
    from tidemill.robots.tasks import open_task

    return model_digest(check_model(open_task(f"{file.path}:{file.function}")))


def stage_issue(stage: StageSpec, error: UserError) -> ConfigIssue:
    return ConfigIssue(key=error.where, what=error.what, source=f"stage {stage.name}", hint=error.hint)


def content_digest(path: Path, *, where: str) -> str:
    """32 hex digits (xxh3-128) over a file's bytes, or over the names and bytes of a folder's visible files.

    Raises:
        UserError: the path, at `where`, is missing or unreadable.
    """
    digest = xxhash.xxh3_128()
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(path)
            is_hidden = any(part.startswith(".") for part in name.parts)
            if is_hidden or (file != path and not file.is_file()):
                continue
            digest.update(f"{name.as_posix()}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    digest.update(chunk)
    except FileNotFoundError:
        raise UserError("no such file or folder", where=f"{where}: {path}", hint="correct the path") from None
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise UserError(what, where=f"{where}: {path}", hint="make it readable, or name another") from None
    return digest.hexdigest()
