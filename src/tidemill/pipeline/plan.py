"""What is to be done: each stage's address, whether it is finished, and what waits for what. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tidemill.config.graph import did_you_mean
from tidemill.config.pipeline import StageSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.pipeline.digest import effective, folder_name, stage_digest

Action: TypeAlias = Literal["done", "resume", "run", "wait", "leave"]
"""done: finished as it is now asked for. resume: begun. run: everything it takes is there. wait: for an earlier stage
that is not finished. leave: not chosen."""


class Mark(Record):
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


class Found(Record):
    """A folder of a stage on the disk."""

    name: str  # of the stage
    mark: Mark | None  # None when begun, or when its product is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which stages may be run now; the others must be finished where they are needed."""

    only: str | None = None
    start: str | None = None  # this one and those after it


EVERYTHING = Choice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One stage and what will happen to it."""

    stage: StageSpec
    digest: str
    folder: str
    action: Action
    values: dict[str, Any]  # what its digest is of
    contents: Mapping[str, str]  # of the files it reads, by the key that names them
    changed: tuple[str, ...] = ()  # keys whose values differ from those of an earlier result of this stage
    mark: Mark | None = None  # of a finished one

    @property
    def due(self) -> bool:
        return self.action in ("resume", "run", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    stages: tuple[Planned, ...]
    stale: tuple[str, ...]  # folders with results that nothing here asks for any more
    unused: tuple[str, ...] = ()  # in words: sections that no stage has a use for, and keys that do nothing

    @property
    def due(self) -> tuple[Planned, ...]:
        return tuple(planned for planned in self.stages if planned.due)


@dataclass(slots=True)
class _Progress:
    digests: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


def make_plan(
    stages: Sequence[StageSpec],
    *,
    contents: Mapping[str, Mapping[str, str]],
    found: Mapping[str, Found],
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
            Planned(
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
            cure = did_you_mean(name, names) or f"stages: {', '.join(names)}"
            raise UserError("no stage of that name", where=f"{option} {name}", cure=cure)
    if choice.only is not None and choice.start is not None:
        raise UserError("choose one of the two", where="--only, --from", cure="leave one of them out")
    if choice.only is not None:
        return {choice.only}
    return set(names[names.index(choice.start) :] if choice.start is not None else names)


def _action(stage: StageSpec, mark: Mark | None, here: Found | None, finished: set[str], chosen: set[str]) -> Action:
    if mark:
        return "done"
    if stage.name not in chosen:
        return "leave"
    if not finished.issuperset(stage.needs):
        return "wait"
    return "resume" if here else "run"


def _changed(name: str, values: Mapping[str, Any], found: Mapping[str, Found]) -> tuple[str, ...]:
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
                    cure="run the whole pipeline, or begin --from an earlier stage",
                )
