"""The space of configuration keys, read off the schema: paths, types in words, defaults, documentation, suggestions."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tidemill.config.schema import RunSpec

KeyPath = tuple[str, ...]
ITEM = "[]"  # the path component that stands for any element of an array of tables
SCALARS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One settable key. `variant` is the value of `kind` it belongs to, empty where it belongs to all."""

    path: KeyPath
    annotation: Any
    words: str  # what it accepts, for people
    default: Any
    required: bool
    doc: str
    variant: str = ""

    @property
    def dotted(self) -> str:
        return dotted(self.path)

    @property
    def optional(self) -> bool:
        return types.NoneType in get_args(self.annotation)

    @property
    def accepts_text(self) -> bool:
        """True for text, paths and choices: a command-line value is then taken as it stands."""
        kind = without_none(self.annotation)
        return kind in (str, Path) or get_origin(kind) is Literal

    @property
    def is_number(self) -> bool:
        return without_none(self.annotation) in (int, float)

    @property
    def is_flag(self) -> bool:
        return without_none(self.annotation) is bool


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


def without_none(annotation: Any) -> Any:
    """`X | None` as `X`; anything else, a wider union included, as it is."""
    if is_union(annotation):
        rest = [part for part in get_args(annotation) if part is not types.NoneType]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_words(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """What a key accepts, in words: `integer >= 1`, `one of "a", "b"`, `array of text`, `path or none`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(parts[0], [bound for field in parts[1:] for bound in getattr(field, "metadata", [field])])
    if is_union(annotation):
        return " or ".join("none" if part is types.NoneType else type_words(part, bounds) for part in parts)
    if origin is Literal:
        choices = ", ".join(f'"{part}"' for part in parts)
        return choices if len(parts) == 1 else f"one of {choices}"
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return "array of tables" if is_section(parts[0]) else f"array of {type_words(parts[0])}"
        return f"array of {len(parts)}: {', '.join(type_words(part) for part in parts)}"
    if origin is dict or is_section(annotation):
        return "table"
    limits = " and ".join(words for words in map(bound_words, bounds) if words)
    return f"{SCALARS.get(annotation, str(annotation))} {limits}".rstrip()


def element_type(key: Key) -> Any:
    """The type of one element of an array, or of one value of a free table."""
    kind = without_none(key.annotation)
    parts = get_args(kind)
    return parts[-1] if get_origin(kind) is dict else parts[0] if parts else kind


def element_words(key: Key) -> str:
    """What one element of an array or one value of a free table accepts, in words."""
    return type_words(element_type(key))


def bound_words(bound: Any) -> str:
    """`Ge(ge=1)` as `>= 1`; empty for metadata that is no bound."""
    for sign, kind, name in (
        (">=", annotated_types.Ge, "ge"),
        (">", annotated_types.Gt, "gt"),
        ("<=", annotated_types.Le, "le"),
        ("<", annotated_types.Lt, "lt"),
    ):
        if isinstance(bound, kind):
            return f"{sign} {getattr(bound, name)}"
    return ""


@cache
def all_keys() -> tuple[Key, ...]:
    """Every key of a run, in the schema's order; a key that several variants share appears once for each."""
    return tuple(_section_keys(RunSpec, ()))


@cache
def keys_by_path() -> dict[KeyPath, tuple[Key, ...]]:
    found: dict[KeyPath, tuple[Key, ...]] = {}
    for key in all_keys():
        found[key.path] = (*found.get(key.path, ()), key)
    return found


@cache
def sections() -> frozenset[KeyPath]:
    """Every table that is not itself a key: `("model",)`, `("model", "char")`, ..."""
    return frozenset(key.path[:depth] for key in all_keys() for depth in range(1, len(key.path)))


def is_table(path: KeyPath) -> bool:
    """Whether it is a section, whose keys are set one by one, rather than a key."""
    return path in sections() and find(path) is None


@cache
def variants() -> dict[KeyPath, dict[str, type[BaseModel]]]:
    """The tables whose keys depend on their `kind`: path -> kind -> model."""
    found: dict[KeyPath, dict[str, type[BaseModel]]] = {}
    for name, field in RunSpec.model_fields.items():
        if field.discriminator == "kind":
            found[(name,)] = {_kind_of(model): model for model in get_args(field.annotation)}
    return found


def default_kind(table: KeyPath) -> str:
    """The kind of a table that names none."""
    return str(RunSpec.model_fields[table[0]].get_default().kind)


def find(path: Sequence[str | int], *, kind: str = "") -> Key | None:
    """The key at a path (array positions match any element), or None. Of several kinds' keys that of `kind`, else the
    first."""
    found = keys_by_path().get(tuple(ITEM if isinstance(part, int) else part for part in path))
    return next((key for key in found if key.variant == kind), found[0]) if found else None


def suggest(path: Sequence[str | int], *, kind: str = "") -> str:
    """The key someone who wrote `path` most likely meant, dotted; empty if nothing is close.

    A slip or initials in the last word come first, then the same word in another section; then, if the section is
    unknown too, whatever looks alike as a whole. Keys of other kinds than `kind` are not offered.
    """
    plain = tuple(part for part in path if isinstance(part, str))
    section, leaf = plain[:-1], plain[-1].replace("-", "_")
    offered = [key.path for key in all_keys() if not key.variant or key.variant == kind]
    offered += [known for known in sorted(sections()) if known != section and known not in offered]
    flat = {dotted(known).replace(ITEM, ""): known for known in offered}
    siblings = {known[-1]: known for known in offered if tuple(p for p in known[:-1] if p != ITEM) == section}
    for close in difflib.get_close_matches(leaf, siblings, 1, 0.6):
        return dotted(siblings[close])
    for name, known in siblings.items():
        if "_" in name and leaf == "".join(word[:1] for word in name.split("_")):
            return dotted(known)
    same_word = [known for known in offered if known[-1] == leaf and known not in sections()]
    if same_word:
        return dotted(min(same_word, key=len))
    alike = [] if section in sections() else difflib.get_close_matches(".".join(plain), flat, 1, 0.6)
    return dotted(flat[alike[0]]) if alike else ""


def _section_keys(model: type[BaseModel], prefix: KeyPath, variant: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path, kind = (*prefix, name), without_none(field.annotation)
        if is_section(kind):
            yield from _section_keys(kind, path, variant)
        elif field.discriminator:
            models = get_args(kind)
            choices = ", ".join(f'"{_kind_of(each)}"' for each in models)
            yield Key(
                path=(*path, "kind"),
                annotation=Literal[tuple(_kind_of(each) for each in models)],
                words=f"one of {choices}",
                default=field.get_default().kind,
                required=False,
                doc="Decides which of the keys below there are.",
            )
            for each in models:
                rest = _section_keys(each, path, _kind_of(each))
                yield from (key for key in rest if key.path[-1] != "kind")
        else:
            yield _field_key(field, path, variant)
            if get_origin(kind) is tuple and is_section(get_args(kind)[0]):
                yield from _section_keys(get_args(kind)[0], (*path, ITEM), variant)


def _field_key(field: FieldInfo, path: KeyPath, variant: str) -> Key:
    return Key(
        path=path,
        annotation=field.annotation,
        words=type_words(field.annotation, field.metadata),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        required=field.is_required(),
        doc=" ".join((field.description or "").split()),
        variant=variant,
    )


def _kind_of(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])
