"""What a pipeline has to do: the address of each stage, whether it is finished, and its dependencies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import xxhash

from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.keys import dotted
from tidemill.config.load import PREFIX, flattened
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.pipeline import KINDS, NEUTRAL, StageSpec, asked_for, did_you_mean
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.envs.text.rewards import source_file
from tidemill.models.folder import is_local

FORMAT = 2
"""Raised when stages of equal configuration begin to give something else."""
SHORT_CHARS = 10
NAMED = ("source", "compare_with")
"""Keys that take the name of a model as well as its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInput:
    """A file or folder that a stage reads, other than another stage's product."""

    location: tuple[str | int, ...]
    path: Path

    @property
    def key(self) -> str:
        return dotted(self.location)


def file_inputs(stage: StageSpec) -> list[FileInput]:
    """Every file and folder it reads: data, models named by a path, and the files that hold reward
    functions. What such a file imports in turn is not looked at."""
    found = []
    for location, value in asked_for(stage.spec, stage.kind):
        is_name = location[-1] in NAMED and (value in BUILT_IN_MODELS or not is_local(value))
        if not value.startswith(PREFIX) and not is_name:
            found.append(FileInput(location=location, path=Path(value).expanduser()))
    if "scoring" in KINDS[stage.kind].sections:
        for index, reward in enumerate(stage.spec.scoring.rewards):
            if reward.function and (file := source_file(reward.function)):
                found.append(FileInput(location=("scoring", "rewards", index, "function"), path=file))
    return found


def effective(stage: StageSpec, *, upstream: Mapping[str, str], contents: Mapping[str, str]) -> dict[str, Any]:
    """What decides what the stage gives: values by dotted key, files as their contents, stages as their digests.

    Args:
        upstream: digests of the stages it takes from, by name.
        contents: digests of the files it reads, by the dotted key that names them.
    """
    sections: dict[str, Any] = stage.sections()
    for reference in stage.references:
        _put(sections, reference.key, {"stage": upstream[reference.stage]})
    for file in file_inputs(stage):
        name = file.location[-1]
        # Where a file lies is of no consequence; which function in it is.
        rest = (
            stage.spec.scoring.rewards[int(file.location[2])].function.rpartition(":")[2] if name == "function" else ""
        )
        _put(sections, file.location, {"content": contents[file.key], "name": rest})
    if stage.spec.model.source != "char":
        sections["model"].pop("char")  # how a model is built that is not asked for
    if "supervised" in sections and stage.spec.supervised.epochs:
        sections["trainer"].pop("steps")  # epochs decide
    neutral = (*NEUTRAL, *KINDS[stage.kind].neutral)
    return {key: value for key, value in flattened(sections).items() if not key.startswith(neutral)}


def stage_digest(stage: StageSpec, values: Mapping[str, Any]) -> str:
    """32 hex digits of kind and `effective` values, whatever their order."""
    document = msgspec.json.encode([FORMAT, stage.kind, dict(values)], order="deterministic")
    return hashlib.blake2b(document, digest_size=16).hexdigest()


def folder_name(stage: StageSpec, digest: str) -> str:
    """`sft-3f0c9a71b2`: its folder below `stages`."""
    return f"{stage.name}-{digest[:SHORT_CHARS]}"


def _put(sections: dict[str, Any], location: tuple[str | int, ...], value: Any) -> None:
    node: Any = sections
    for part in location[:-1]:
        node = node[part]
    node[location[-1]] = value


Action: TypeAlias = Literal["done", "resume", "run", "wait", "leave"]
"""done: finished as it is now asked for. resume: begun. run: everything it takes is there. wait: for an earlier stage
that is not finished. leave: not chosen."""


class StageResult(Record):
    """Written last into a finished stage's folder: without it, the stage is not finished."""

    name: str
    kind: str
    digest: str
    product: str | None  # what it gives: a path, relative to the stage's folder unless absolute
    headline: str  # what it achieved, in a sentence
    figures: dict[str, Any]
    wall_s: float
    finished: str  # time stamp
    values: dict[str, Any]  # what its digest is of


class FoundStage(Record):
    """A folder of a stage on the disk."""

    name: str  # of the stage
    mark: StageResult | None  # None when begun, or when its product is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which stages may be run now; the others must be finished where they are needed."""

    only: str | None = None
    start: str | None = None  # this one and those after it


EVERYTHING = Choice()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage and what will happen to it."""

    stage: StageSpec
    digest: str
    folder: str
    action: Action
    values: dict[str, Any]  # what its digest is of
    contents: Mapping[str, str]  # of the files it reads, by the key that names them
    changed: tuple[str, ...] = ()  # keys whose values differ from those of an earlier result of this stage
    mark: StageResult | None = None  # of a finished one

    @property
    def due(self) -> bool:
        return self.action in ("resume", "run", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    stages: tuple[PlannedStage, ...]
    stale: tuple[str, ...]  # folders with results that nothing here asks for any more
    unused: tuple[str, ...] = ()  # in words: sections that no stage has a use for, and keys that do nothing

    @property
    def due(self) -> tuple[PlannedStage, ...]:
        return tuple(planned for planned in self.stages if planned.due)


@dataclass(slots=True)
class _Progress:
    digests: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


def make_plan(
    stages: Sequence[StageSpec],
    *,
    contents: Mapping[str, Mapping[str, str]],
    found: Mapping[str, FoundStage],
    choice: Choice = EVERYTHING,
) -> Plan:
    """
    Args:
        stages: in the order they run; each takes from earlier ones only.
        contents: by stage and key, digests of the files it reads.
        found: by folder, what is on the disk.

    Raises:
        UserError: `choice` names no stage, or one whose input is neither finished nor chosen.
    """
    chosen = _chosen([stage.name for stage in stages], choice)
    progress, planned = _Progress(), []
    for stage in stages:
        values = effective(stage, upstream=progress.digests, contents=contents[stage.name])
        digest = stage_digest(stage, values)
        folder = folder_name(stage, digest)
        here = found.get(folder)
        mark = here.mark if here and here.mark and here.mark.digest == digest else None
        if mark:
            progress.finished.add(stage.name)
        progress.digests[stage.name] = digest
        planned.append(
            PlannedStage(
                stage=stage,
                digest=digest,
                folder=folder,
                action=_action(stage, mark, here, progress.finished, chosen),
                values=values,
                contents=contents[stage.name],
                changed=() if here else _changed(stage.name, values, found),
                mark=mark,
            )
        )
    plan = Plan(stages=tuple(planned), stale=tuple(sorted(set(found) - {each.folder for each in planned})))
    _check_inputs(plan, progress.finished, chosen)
    return plan


def _chosen(names: Sequence[str], choice: Choice) -> set[str]:
    for option, name in (("--only", choice.only), ("--from", choice.start)):
        if name is not None and name not in names:
            hint = did_you_mean(name, names) or f"stages: {', '.join(names)}"
            raise UserError("no stage of that name", where=f"{option} {name}", hint=hint)
    if choice.only is not None and choice.start is not None:
        raise UserError("choose one of the two", where="--only, --from", hint="leave one of them out")
    if choice.only is not None:
        return {choice.only}
    return set(names[names.index(choice.start) :] if choice.start is not None else names)


def _action(
    stage: StageSpec, mark: StageResult | None, here: FoundStage | None, finished: set[str], chosen: set[str]
) -> Action:
    if mark:
        return "done"
    if stage.name not in chosen:
        return "leave"
    if not finished.issuperset(stage.needs):
        return "wait"
    return "resume" if here else "run"


def _changed(name: str, values: Mapping[str, Any], found: Mapping[str, FoundStage]) -> tuple[str, ...]:
    """What is different from the newest finished result of the stage of this name."""
    marks = [each.mark for each in found.values() if each.mark and each.name == name]
    if not marks:
        return ()
    before = max(marks, key=lambda mark: mark.finished).values
    return tuple(key for key in {**before, **values} if before.get(key) != values.get(key))


def _check_inputs(plan: Plan, finished: set[str], chosen: set[str]) -> None:
    for planned in plan.due:
        for name in planned.stage.needs:
            if name not in finished and name not in chosen:
                raise UserError(
                    f"takes from stage {name}, which is not finished as it is now configured",
                    where=f"stage {planned.stage.name}",
                    hint="run the whole pipeline, or begin --from an earlier stage",
                )


_CHUNK_BYTES = 4 << 20


def contents_of(stages: Sequence[StageSpec]) -> dict[str, dict[str, str]]:
    """By stage and dotted key, the digest of every file it reads; a file that several read is read once.

    Raises:
        ConfigError: some are missing or cannot be read.
    """
    known: dict[Path, str] = {}
    found: dict[str, dict[str, str]] = {}
    faults: list[ConfigIssue] = []
    for stage in stages:
        found[stage.name] = {}
        for file in file_inputs(stage):
            try:
                known[file.path] = known.get(file.path) or content_digest(file.path, where=file.key)
            except UserError as error:
                faults.append(fault_of_stage(stage, error))
            else:
                found[stage.name][file.key] = known[file.path]
    if faults:
        raise ConfigError(faults)
    return found


def fault_of_stage(stage: StageSpec, error: UserError) -> ConfigIssue:
    return ConfigIssue(key=error.where, what=error.what, source=f"stage {stage.name}", hint=error.hint)


def content_digest(path: Path, *, where: str) -> str:
    """32 hex digits (xxh3-128) of a file's bytes, or of names and bytes of all visible files of a folder.

    Raises:
        UserError: naming `where` and the path.
    """
    digest = xxhash.xxh3_128()
    try:
        for file in _files(path):
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
    except FileNotFoundError:
        raise UserError("no such file or folder", where=f"{where}: {path}", hint="correct the path") from None
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise UserError(what, where=f"{where}: {path}", hint="make it readable, or name another") from None
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file
