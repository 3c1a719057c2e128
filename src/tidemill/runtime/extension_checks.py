"""The user functions of a run: found before it starts, identified in its manifest, and compared when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tidemill.config.functions import FunctionReference, function_references
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import another_directory
from tidemill.extensions.registry import TRAINER_KINDS, Extension, resolve


def run_extensions(spec: RunSpec) -> list[Extension]:
    """The user functions that decide what a run learns, each once.

    Raises:
        UserError: one does not exist, cannot be imported, or is of another kind.
    """
    found = {(each.kind, each.ref): resolve(each.ref, each.kind, where=each.key) for each in _references(spec)}
    return list(found.values())


def trainer_extensions(spec: RunSpec) -> list[Extension]:
    """Those that the trainer calls. Raises UserError: as `run_extensions`."""
    return [resolve(each.ref, each.kind, where=each.key) for each in _references(spec) if each.kind in TRAINER_KINDS]


def identities(extensions: list[Extension]) -> dict[str, str]:
    """Identity by `kind reference`, for the manifest. Of a file only the name counts, so a moved one is the same."""
    return {f"{each.kind} {_file_name(each.ref)}": each.identity for each in extensions}


def refuse_changed(stored: Mapping[str, str], current: Mapping[str, str], *, where: str) -> None:
    """Refuse to resume with a function or a file that differs from the one the run began with.

    Raises:
        UserError: names those that changed.
    """
    changed = [name for name, identity in stored.items() if current.get(name) != identity]
    if changed:
        verb = "have" if len(changed) > 1 else "has"
        raise UserError(
            f"{', '.join(changed)} {verb} changed since this run started",
            where=where,
            hint=f"restore the previous source, or {another_directory(Path(where))}",
        )


def _references(spec: RunSpec) -> Iterator[FunctionReference]:
    return (each for each in function_references(spec) if each.location[0] != "eval")


def _file_name(ref: str) -> str:
    source, colon, name = ref.rpartition(":")
    return f"{source.rpartition('/')[2]}{colon}{name}"
