"""The configuration keys, derived from the schema: path, accepted values, default, documentation, suggestions."""

from __future__ import annotations

import difflib
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel

from tidemill.config.base import ActiveIf, NameOrFunction, Neutral, Resumable
from tidemill.config.schema import RunSpec

KeyPath = tuple[str, ...]
ITEM = "[]"  # the path component of an element of an array of tables
SCALARS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
BOUNDS = (
    (">=", annotated_types.Ge, "ge"),
    (">", annotated_types.Gt, "gt"),
    ("<=", annotated_types.Le, "le"),
    ("<", annotated_types.Lt, "lt"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key."""

    path: KeyPath
    annotation: Any
    accepts: str  # accepted values, for users
    default: Any
    required: bool
    doc: str
    variant: str = ""  # the `kind` of its section that has this key; empty: every kind
    metadata: tuple[Any, ...] = ()  # of its annotation and those of its sections

    @property
    def active_if(self) -> tuple[ActiveIf, ...]:
        """The conditions under which it has an effect."""
        return tuple(mark for mark in self.metadata if isinstance(mark, ActiveIf))

    @property
    def dotted(self) -> str:
        return dotted(self.path)

    @property
    def optional(self) -> bool:
        return types.NoneType in get_args(self.annotation)

    @property
    def accepts_text(self) -> bool:
        """True for text, paths and choices, whose command-line values need no quotes."""
        kind = without_none(self.annotation)
        return kind in (str, Path) or get_origin(kind) is Literal

    @property
    def is_number(self) -> bool:
        return without_none(self.annotation) in (int, float)

    @property
    def is_flag(self) -> bool:
        """Whether it may be written without a value, for true."""
        kind = without_none(self.annotation)
        return kind is bool or (self.is_union and bool in get_args(kind))

    @property
    def is_union(self) -> bool:
        return _is_union(without_none(self.annotation))

    @property
    def element_type(self) -> Any:
        """Type of an array's elements, or of a free-form table's values."""
        kind = without_none(self.annotation)
        parts = get_args(kind)
        return parts[-1] if get_origin(kind) is dict else parts[0] if parts else kind


def dotted(path: Sequence[str | int]) -> str:
    """`("scoring", "rewards", 0, "kind")` as `scoring.rewards[0].kind`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part == ITEM:
            text += part
        else:
            text += f".{part}" if text else part
    return text


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key; arrays stay whole."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def without_none(annotation: Any) -> Any:
    """`X | None` as `X`; other annotations, wider unions included, unchanged."""
    if _is_union(annotation):
        rest = [part for part in get_args(annotation) if part is not types.NoneType]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_text(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """The values a type accepts: `integer >= 1`, `one of "a", "b"`, `array of text`, `path or none`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(parts[0], [bound for field in parts[1:] for bound in getattr(field, "metadata", [field])])
    if _is_union(annotation):
        return " or ".join("none" if part is types.NoneType else type_text(part, bounds) for part in parts)
    if origin is Literal:
        choices = ", ".join(f'"{part}"' for part in parts)
        return choices if len(parts) == 1 else f"one of {choices}"
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return "array of tables" if is_section(parts[0]) else f"array of {type_text(parts[0])}"
        return f"array of {len(parts)}: {', '.join(type_text(part) for part in parts)}"
    if origin is dict or is_section(annotation):
        return "table"
    if named := [bound.accepts for bound in bounds if isinstance(bound, NameOrFunction)]:
        return named[0]
    limits = [
        f"{sign} {getattr(bound, name)}" for bound in bounds for sign, kind, name in BOUNDS if type(bound) is kind
    ]
    return f"{SCALARS.get(annotation, str(annotation))} {' and '.join(limits)}".rstrip()


@cache
def all_keys() -> tuple[Key, ...]:
    """Every key of a run, in the schema's order. A key of several variants appears once for each."""
    return tuple(_section_keys(RunSpec, ()))


@cache
def keys_by_path() -> dict[KeyPath, tuple[Key, ...]]:
    keys: dict[KeyPath, tuple[Key, ...]] = {}
    for key in all_keys():
        keys[key.path] = (*keys.get(key.path, ()), key)
    return keys


@cache
def neutral_keys(kind: str) -> frozenset[str]:
    """The dotted keys that do not affect the output of stages of a kind."""
    return frozenset(
        key.dotted
        for key in all_keys()
        if any(isinstance(mark, Neutral) and (not mark.kinds or kind in mark.kinds) for mark in key.metadata)
    )


@cache
def resumable_keys() -> frozenset[str]:
    """The dotted keys that may differ when a run is resumed. (Other thread counts or chunk sizes may round
    differently.)"""
    marked = {key.dotted for key in all_keys() if any(isinstance(mark, Resumable) for mark in key.metadata)}
    return neutral_keys("rl") | marked


def belongs_to(name: str, keys: Container[str]) -> bool:
    """Whether a dotted key, or the free-form table that it is in, is one of some keys."""
    return name in keys or name.rpartition(".")[0] in keys


def differ_in_resumable_keys(name: str, old: Any, new: Any) -> bool:
    """Whether two arrays of tables differ only in keys that may differ when a run is resumed."""
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return False
    if not all(isinstance(table, dict) for table in (*old, *new)):
        return False
    pairs = zip(old, new, strict=True)
    changed = {key for before, after in pairs for key in before | after if before.get(key) != after.get(key)}
    return all(f"{name}{ITEM}.{key}" in resumable_keys() for key in changed)


@cache
def sections() -> frozenset[KeyPath]:
    """Every table that is not itself a key: `("model",)`, `("model", "char")`, ..."""
    return frozenset(key.path[:depth] for key in all_keys() for depth in range(1, len(key.path)))


def is_table(path: KeyPath) -> bool:
    """Whether the path is a section rather than a key."""
    return path in sections() and find(path) is None


@cache
def variants() -> dict[str, list[str]]:
    """The sections whose keys depend on their `kind`, with the kinds."""
    return {
        name: [_kind_of(model) for model in get_args(field.annotation)]
        for name, field in RunSpec.model_fields.items()
        if field.discriminator == "kind"
    }


def default_kind(section: str) -> str:
    return str(RunSpec.model_fields[section].get_default().kind)


def find(path: Sequence[str | int], *, kind: str = "") -> Key | None:
    """The key at a path, where an array index matches any element; None if there is none.

    Of the keys of several variants: the key of `kind`, else the first.
    """
    keys = keys_by_path().get(tuple(ITEM if isinstance(part, int) else part for part in path))
    return next((key for key in keys if key.variant == kind), keys[0]) if keys else None


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """A hint with the name that is closest to a misspelt one; empty if none is close."""
    close = difflib.get_close_matches(given, list(names), 1, 0.6)
    return f"did you mean {close[0]}?" if close else ""


def suggest(path: Sequence[str | int], *, kind: str = "") -> str:
    """The key closest to a misspelt path, dotted; empty if none is close.

    In order: the same path with _ or - for dots; for a name without a section the same name in one; a similar name or
    the initials in the same section; the same name in another section; and, if the section is unknown too, the most
    similar path, then a key with a similar name. Keys of other variants than `kind` are excluded; without a kind, only
    the last two steps exclude them.
    """
    names = tuple(part for part in path if isinstance(part, str))
    section, leaf = names[:-1], names[-1].replace("-", "_")
    candidates = [key.path for key in all_keys() if not key.variant or key.variant == kind]
    candidates += [known for known in sorted(sections()) if known != section and known not in candidates]
    joined = {"_".join(part for part in known if part != ITEM): known for known in candidates}
    if known_path := joined.get("_".join(names).replace("-", "_")):
        return dotted(known_path)
    same_name = [key.path for key in all_keys() if key.path[-1] == leaf and (not kind or key.variant in ("", kind))]
    if same_name and not section:
        return dotted(min(same_name, key=lambda known: (len(known), known[0] not in MAIN_SECTIONS)))
    siblings = {known[-1]: known for known in candidates if tuple(p for p in known[:-1] if p != ITEM) == section}
    for close in difflib.get_close_matches(leaf, siblings, 1, 0.6):
        return dotted(siblings[close])
    for name, known in siblings.items():
        if "_" in name and leaf == "".join(word[:1] for word in name.split("_")):
            return dotted(known)
    if same_name:
        return dotted(min(same_name, key=len))
    by_text = {dotted(known).replace(ITEM, ""): known for known in candidates}
    similar = [] if section in sections() else difflib.get_close_matches(".".join(names), by_text, 1, 0.6)
    if similar:
        return dotted(by_text[similar[0]])
    by_name = {known[-1]: known for known in sorted(candidates, key=len, reverse=True)}
    alike = [] if section else difflib.get_close_matches(leaf, by_name, 1, 0.85)
    return dotted(by_name[alike[0]]) if alike else ""


MAIN_SECTIONS = ("run", "model", "task", "gateway", "trainer", "optimizer", "batch", "sampling", "algorithm", "scoring")
"""The sections that a name without a section more probably belongs to."""


def key_hint(closest: str, *, prefix: str = "") -> str:
    """A hint with the key that is closest to a misspelt one, as `suggest` finds it.

    Args:
        prefix: the dashes of an option.
    """
    if not closest:
        return "`tidemill train --help-all` lists every key"
    return f"did you mean {prefix}{closest}{' of `tidemill serve`' if closest.startswith('gateway.') else ''}?"


def _section_keys(
    model: type[BaseModel], prefix: KeyPath, variant: str = "", metadata: tuple[Any, ...] = ()
) -> Iterator[Key]:
    """The keys of a section. Args: metadata: of the sections around it."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        kind = without_none(field.annotation)
        marks = (*metadata, *field.metadata)
        if is_section(kind):
            yield from _section_keys(kind, path, variant, marks)
        elif field.discriminator:
            kinds = {_kind_of(section): section for section in get_args(kind)}
            annotation: Any = Literal[tuple(kinds)]
            yield Key(
                path=(*path, "kind"),
                annotation=annotation,
                accepts=type_text(annotation),
                default=field.get_default().kind,
                required=False,
                doc="Selects which of the keys below exist.",
                metadata=marks,
            )
            for name_of_kind, section in kinds.items():
                keys = _section_keys(section, path, name_of_kind, marks)
                yield from (key for key in keys if key.path[-1] != "kind")
        else:
            yield Key(
                path=path,
                annotation=field.annotation,
                accepts=type_text(field.annotation, field.metadata),
                default=None if field.is_required() else field.get_default(call_default_factory=True),
                required=field.is_required(),
                doc=" ".join((field.description or "").split()),
                variant=variant,
                metadata=marks,
            )
            if get_origin(kind) is tuple and is_section(get_args(kind)[0]):
                yield from _section_keys(get_args(kind)[0], (*path, ITEM), variant, marks)


def _kind_of(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])
