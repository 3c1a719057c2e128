"""The user functions of a run: found before it starts, identified in its manifest, and compared when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tidemill.config.functions import function_references
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import another_directory
from tidemill.extensions.registry import TRAINER_KINDS, Extension, resolve


def run_extensions(spec: RunSpec, *, trainer: bool = False) -> list[Extension]:
    """The user functions that decide what a run learns, each once.

    Args:
        trainer: only those that the trainer calls.

    Raises:
        UserError: one does not exist, cannot be imported, or is of another kind.
    """
    extensions = dict[tuple[str, str], Extension]()
    for each in function_references(spec):
        if each.location[0] != "eval" and (each.kind in TRAINER_KINDS or not trainer):
            extensions[each.kind, each.ref] = resolve(each.ref, each.kind, where=each.key)
    return list(extensions.values())


def identities(extensions: list[Extension]) -> dict[str, str]:
    """Identity by `kind reference`, for the manifest. Of a file only the name counts, so a moved one is the same."""
    by_reference = dict[str, str]()
    for each in extensions:
        source, colon, name = each.ref.rpartition(":")
        file_name = source.rpartition("/")[2]
        by_reference[f"{each.kind} {file_name}{colon}{name}"] = each.identity
    return by_reference


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
