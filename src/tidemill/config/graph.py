"""Which stage takes what from which: a circle, a stage that is missing or comes too late, the wrong kind of thing."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence

from tidemill.config.faults import Fault
from tidemill.config.keys import ITEM, dotted
from tidemill.config.layers import PREFIX, STAGES
from tidemill.config.pipeline import ASKED, KINDS, Reference, StageKind, StageSpec


def graph_faults(stages: Sequence[StageSpec], *, faulty: Container[str] = ()) -> list[Fault]:
    """What is wrong with who takes what from whom.

    Args:
        faulty: names of further stages, of which nothing else is known.
    """
    kinds = {stage.name: stage.kind for stage in stages}
    faults = list[Fault]()
    if circle := _circle({stage.name: stage.needs for stage in stages}):
        what = f"the stages {' → '.join(circle)} wait for one another"
        return [Fault(key=STAGES, what=what, cure="let one of them take its input from elsewhere")]
    earlier: list[str] = []
    for stage in stages:
        for reference in (each for each in stage.references if each.stage not in faulty):
            faults += _reference_faults(stage, reference, kinds, earlier)
        earlier.append(stage.name)
    return faults


def _reference_faults(
    stage: StageSpec, reference: Reference, kinds: Mapping[str, StageKind], earlier: Sequence[str]
) -> list[Fault]:
    name = reference.stage
    given = f"{PREFIX}{name}"
    key = f"{STAGES}.{stage.name}.{dotted(reference.key)}"
    if name not in kinds:
        cure = did_you_mean(name, kinds) or f"stages before it: {', '.join(earlier) or 'none'}"
        return [Fault(key=key, what=f'"{given}" names no stage', cure=cure)]
    if name not in earlier:
        what = f'"{given}" comes later in the recipe, and stages run in its order'
        return [Fault(key=key, what=what, cure=f"move stage {name} before stage {stage.name}")]
    asked = ASKED[tuple(ITEM if isinstance(part, int) else part for part in reference.key)]
    wanted = asked or KINDS[stage.kind].learns_from
    gives = KINDS[kinds[name]].gives
    if gives == wanted:
        return []
    what = f'asks for {wanted}, and "{given}", a stage of kind {kinds[name]}, gives {gives or "none"}'
    able = [kind for kind, row in KINDS.items() if row.gives == wanted]
    cure = f"name a stage of kind {' or '.join(able)}" if able else "name a file"
    return [Fault(key=key, what=what, cure=cure)]


def _circle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of stages that need one another, the first one again at the end; empty if there are none."""
    settled: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for other in needs.get(path[-1], ()):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in settled and (found := search([*path, other])):
                return found
        settled.add(path[-1])
        return []

    return next((found for name in needs if (found := search([name]))), [])


def did_you_mean(given: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(names), 1, 0.6)
    return f"did you mean {close[0]}?" if close else ""
