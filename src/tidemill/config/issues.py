"""Issues of a configuration: invalid values, and values that training needs."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidemill.config.keys import (
    ITEM,
    Key,
    dotted,
    element_type,
    element_words,
    find,
    is_section,
    keys_by_path,
    sections,
    suggest,
    variants,
    without_none,
)
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError

Location = tuple[str | int, ...]
Locate = Callable[[Location], str]
"""Where a key was given ("recipes/a.toml:3", "command line"); empty when it was not given at all."""

COMMAND_LINE = "command line"
CREDENTIALS = re.compile(r"://[^/\s\"]*@")
SHOWN_VALUE_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigIssue:
    """One thing wrong: the key, what about it, the file and line or flag that says so, and the hint."""

    what: str
    key: str = ""
    source: str = ""
    hint: str = ""

    @property
    def line(self) -> str:
        """`trainer.stpes: unknown key (a.toml:3); did you mean trainer.steps?`"""
        text = f"{self.key}: {self.what}" if self.key else self.what
        text += f" ({self.source})" if self.source else ""
        return f"{text}; {self.hint}" if self.hint else text


class ConfigError(UserError):
    """Every fault found in a configuration, a line each. `faults` holds them one by one."""

    def __init__(self, faults: Sequence[ConfigIssue]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(fault.line for fault in faults))


def translate(error: ValidationError, data: dict[str, Any], locate: Locate) -> list[ConfigIssue]:
    """The faults in pydantic's report, in the order of the schema; `data` is what was validated."""
    faults: list[ConfigIssue] = []
    for details in error.errors(include_url=False):
        location = without_tags(details["loc"], data)
        if details["type"] == "too_short" and details["input"]:
            continue  # its elements are at fault, and reported
        if details["type"] == "value_error":
            source = locate(location) if location else ""
            lines = str(details["ctx"]["error"]).splitlines()
            faults += [split_hint(line, key=dotted(location), source=source) for line in lines]
        else:
            faults.append(_fault(details, location, data, locate))
    return list(dict.fromkeys(faults))  # a value that fits no member of a union is reported once for each


def without_tags(location: Location, data: dict[str, Any]) -> Location:
    """pydantic names the variant inside a location: ("task", "jsonl", "path") is the key task.path."""
    for table, kinds in variants().items():
        size = len(table)
        if location[:size] == table and len(location) > size and location[size] in kinds:
            return location[:size] + location[size + 1 :]
    return location


def shown(value: Any) -> str:
    """A value nearly as the user wrote it, shortened, and without the credentials of a URL."""
    text = CREDENTIALS.sub("://...@", json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= SHOWN_VALUE_CHARS else text[: SHOWN_VALUE_CHARS - 3] + "..."


def split_hint(line: str, *, key: str = "", source: str = "") -> ConfigIssue:
    """The fault in a validator's line, "what; hint"."""
    what, _, hint = line.partition("; ")
    return ConfigIssue(key=key, what=what, source=source, hint=hint)


def no_table(location: Location, given: Any, source: str) -> ConfigIssue:
    """The fault of a value in place of a section."""
    what = f"is a table of settings, was given {shown(given)}"
    hint = f"set its keys one by one: {_first_keys(location)}"
    return ConfigIssue(key=dotted(location), what=what, source=source, hint=hint)


def _fault(details: ErrorDetails, location: Location, data: dict[str, Any], locate: Locate) -> ConfigIssue:
    kind, given = details["type"], details["input"]
    if kind == "extra_forbidden":
        return unknown_key(location, data, locate(location))
    if kind.startswith("union_tag"):
        location = (*location, "kind")
        given = given.get("kind") if isinstance(given, dict) else given
    if kind == "missing" and isinstance(location[-1], int):  # an array too short for its fixed length
        location, given, kind = location[:-1], details["input"], "too_few"
    location, key = _owner(location, _kind(data, location[:1]))
    name, source = dotted(location), locate(location)
    if key is None:
        return no_table(location, given, source)
    if kind == "missing":
        return ConfigIssue(
            key=name, what="not given, and there is no default", source=source, hint=_how_to_give(key, data)
        )
    if kind == "too_short":
        return ConfigIssue(key=name, what="is empty", source=source, hint="give at least one")
    if kind == "string_too_short":
        return ConfigIssue(
            key=name, what="is empty", source=source, hint="give at least one character, or leave it out"
        )
    if len(location) > len(key.path):
        words, hint = element_words(key), _closest(element_type(key), given)
    else:
        words, hint = key.words, _closest(without_none(key.annotation), given) or _as_array(key, given, source)
    return ConfigIssue(key=name, what=f"needs {words}, was given {shown(given)}", source=source, hint=hint)


def _owner(location: Location, kind: str) -> tuple[Location, Key | None]:
    """The location cut to what a user can name, and the key it is or is part of; None for a section."""
    if (key := find(location, kind=kind)) or location in sections():
        return location, key
    for size in range(len(location) - 1, 0, -1):
        if key := find(location[:size], kind=kind):
            return location[: size + 1], key
    return location, None


def unknown_key(location: Location, data: dict[str, Any], source: str = "") -> ConfigIssue:
    """The fault of a key that is not in the schema, with what was probably meant."""
    plain = tuple(ITEM if isinstance(part, int) else part for part in location)
    table = next((table for table in variants() if plain[: len(table)] == table), None)
    kind = _kind(data, table) if table else ""
    elsewhere = [key for key in keys_by_path().get(plain, ()) if key.variant and key.variant != kind]
    if table and elsewhere:
        what = f'belongs to {dotted(table)}.kind = "{elsewhere[0].variant}", and the kind here is "{kind}"'
        return ConfigIssue(key=dotted(location), what=what, source=source, hint="change the kind or leave the key out")
    meant = suggest(location, kind=kind)
    what = "unknown section" if len(location) == 1 and not meant.count(".") else "unknown key"
    hint = f"did you mean {meant}?" if meant else "`tidemill train --help` lists every key"
    return ConfigIssue(key=dotted(location), what=what, source=source, hint=hint)


def _kind(data: dict[str, Any], table: Location) -> str:
    node: Any = data
    for part in table:
        node = node.get(part, {}) if isinstance(node, dict) else {}
    return str(node.get("kind", "")) if isinstance(node, dict) else ""


def _how_to_give(key: Key, data: dict[str, Any]) -> str:
    if ITEM in key.path:
        return f"add {key.path[-1]} to that table ({key.words})"
    needed = ""
    if key.variant:
        needed = f', which {dotted(key.path[:-1])}.kind = "{_kind(data, key.path[:-1])}" needs'
    return f"give --{key.dotted} VALUE ({key.words}{needed})"


def _first_keys(section: Location) -> str:
    names = list(dict.fromkeys(dotted(path) for path in keys_by_path() if path[: len(section)] == section))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _closest(annotation: Any, given: Any) -> str:
    """The choice that a misspelt one was probably meant to be."""
    choices = [str(choice) for choice in get_args(annotation)] if get_origin(annotation) is Literal else []
    close = difflib.get_close_matches(given, choices, 1, 0.6) if isinstance(given, str) else []
    return f'did you mean "{close[0]}"?' if close else ""


def _as_array(key: Key, given: Any, source: str) -> str:
    """How to write an array, given something else."""
    if get_origin(without_none(key.annotation)) is not tuple or isinstance(given, (list, dict)):
        return ""
    if isinstance(given, str) and given.startswith(("[", "{")) and source.startswith(COMMAND_LINE):
        return "it is not valid TOML: close every bracket and quote every text"
    if is_section(element_type(key)):
        return "write each table in braces, and brackets around them: [{ KEY = VALUE }]"
    return f"write it in brackets: [{shown(given)}]"


Purpose: TypeAlias = Literal["train", "eval", "generate", "read"]
"""What a configuration is loaded for; "read" only wants to know what it says."""


def refuse_untrainable(spec: RunSpec) -> None:
    """Raises ConfigError if training on `spec` could not work or would optimise something else than it says."""
    if faults := contradictions(spec, "train"):
        raise ConfigError(faults)


def contradictions(spec: RunSpec, purpose: Purpose) -> list[ConfigIssue]:
    """What is wrong with `spec` for this purpose, beyond what is wrong with it for any."""
    faults = list[ConfigIssue]()
    if purpose in ("train", "generate", "eval"):
        faults += _context_faults(spec, purpose)
    if purpose == "eval" and spec.eval.samples_per_prompt > 1 and spec.sampling.temperature == 0:
        what = f"0 is greedy: all {spec.eval.samples_per_prompt} samples of a prompt would be the same"
        faults.append(
            ConfigIssue(key="sampling.temperature", what=what, hint="set it above 0, or eval.samples_per_prompt to 0")
        )
    if purpose == "train":
        faults += _sampling_faults(spec) + _batch_faults(spec)
    return faults


def _context_faults(spec: RunSpec, purpose: Purpose) -> list[ConfigIssue]:
    limits = {"sampling.max_new_tokens": spec.sampling.max_new_tokens}
    if purpose != "generate":
        limits["eval.max_new_tokens"] = spec.eval.max_new_tokens
    context = spec.model.char.context
    return [
        ConfigIssue(
            key=name,
            what=f"{limit} new tokens leave no room for a prompt in the model's {context} (model.char.context)",
            hint=f"lower {name} or raise model.char.context",
        )
        for name, limit in limits.items()
        if spec.model.source == "char" and limit >= context
    ]


def _sampling_faults(spec: RunSpec) -> list[ConfigIssue]:
    sampling, faults = spec.sampling, []
    why = "the loss takes importance ratios over the whole vocabulary, and a cut-off distribution is another one"
    if sampling.top_p < 1:
        hint = "set sampling.top_p = 1 (evaluation is greedy in any case)"
        faults.append(
            ConfigIssue(key="sampling.top_p", what=f"{sampling.top_p} cannot be trained on: {why}", hint=hint)
        )
    if sampling.top_k > 0:
        hint = "set sampling.top_k = 0 (evaluation is greedy in any case)"
        faults.append(
            ConfigIssue(key="sampling.top_k", what=f"{sampling.top_k} cannot be trained on: {why}", hint=hint)
        )
    if sampling.temperature == 0:
        what = "0 is greedy: every sample of a group would be the same and none better than its siblings"
        faults.append(ConfigIssue(key="sampling.temperature", what=what, hint="set it above 0, usually to 1"))
    return faults


def _batch_faults(spec: RunSpec) -> list[ConfigIssue]:
    faults = []
    if spec.batch.microbatch_tokens < spec.sampling.max_new_tokens:
        what = (
            f"{spec.batch.microbatch_tokens} tokens cannot hold one completion of "
            f"sampling.max_new_tokens = {spec.sampling.max_new_tokens}, let alone its prompt"
        )
        hint = "raise batch.microbatch_tokens well above it, or lower sampling.max_new_tokens"
        faults.append(ConfigIssue(key="batch.microbatch_tokens", what=what, hint=hint))
    if not any(reward.weight for reward in spec.scoring.rewards):
        what = "every weight is 0, so that all samples score alike and nothing is learned"
        faults.append(ConfigIssue(key="scoring.rewards", what=what, hint="give at least one reward a weight"))
    return faults
