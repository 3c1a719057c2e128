"""Issues of a configuration: validation errors with source and hint, and settings that cannot work or do nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tidemill.config.foreign_names import explained, ours_of
from tidemill.config.keys import (
    ITEM,
    Key,
    all_keys,
    did_you_mean,
    dotted,
    find,
    flattened,
    is_section,
    key_hint,
    keys_by_path,
    sections,
    suggest,
    type_text,
    variants,
    without_none,
)
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError

Location = tuple[str | int, ...]
Locate = Callable[[Location], str]
"""The source of a key ("recipes/a.toml:3", "command line"); empty if it was not given."""
Purpose: TypeAlias = Literal["train", "eval", "generate", "read"]
"""What a configuration is loaded for; "read" checks only the configuration itself."""

COMMAND_LINE = "command line"
CREDENTIALS = re.compile(r"://[^/\s\"]*@")
MAX_VALUE_CHARS = 60
MAIN_KEYS = {
    "model": "set model.source",
    "algorithm": "set algorithm.name",
    "task": 'set task.path (of task.kind = "file"); a recipe is named as @NAME',
    "data": 'set task.path (of task.kind = "file"), or data.path in sft, reward_model and dpo stages',
    "checkpoint": "set model.source to train from a checkpoint, or run.dir to resume a run",
}
"""What a text that was given for a section probably belongs to."""
REWARDS = ("scoring", "rewards")
EXAMPLE_REWARD = '{ kind = "exact" }'


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigIssue:
    """One error of a configuration."""

    what: str
    key: str = ""  # dotted
    source: str = ""  # file and line, or "command line"
    hint: str = ""

    @property
    def line(self) -> str:
        """`trainer.stpes: unknown key (a.toml:3); did you mean trainer.steps?`"""
        text = f"{self.key}: {self.what}" if self.key else self.what
        text += f" ({self.source})" if self.source else ""
        return f"{text}; {self.hint}" if self.hint else text


class ConfigError(UserError):
    """All issues found in a configuration."""

    def __init__(self, issues: Sequence[ConfigIssue]) -> None:
        self.issues = tuple(issues)
        super().__init__("\n".join(issue.line for issue in issues))


def issues_from(error: ValidationError, data: dict[str, Any], locate: Locate) -> list[ConfigIssue]:
    """The issues in pydantic's error, in the schema's order.

    Args:
        data: the validated input.
    """
    issues: list[ConfigIssue] = []
    for details in error.errors(include_url=False):
        location = details["loc"]
        if len(location) > 1 and location[1] in variants().get(str(location[0]), ()):
            location = (location[0], *location[2:])  # pydantic names the variant: ("task", "file", "path")
        if details["type"] == "too_short" and details["input"]:
            continue  # the invalid elements are reported
        if details["type"] == "value_error":
            source = locate(location) if location else ""
            lines = str(details["ctx"]["error"]).splitlines()
            issues += [split_hint(line, key=dotted(location), source=source) for line in lines]
        elif details["type"] == "extra_forbidden":
            issues += [unknown_key(each, data, locate(each)) for each in _unknown_locations(location, details["input"])]
        else:
            issues.append(_issue(details, location, data, locate))
    return list(dict.fromkeys(issues))  # pydantic reports a value that fits no member of a union once per member


def shown_value(value: Any) -> str:
    """A value as JSON, shortened, and without credentials in URLs."""
    text = CREDENTIALS.sub("://...@", json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def split_hint(line: str, *, key: str = "", source: str = "") -> ConfigIssue:
    """The issue in a validator's message, "what; hint"."""
    what, _, hint = line.partition("; ")
    return ConfigIssue(key=key, what=what, source=source, hint=hint)


def value_for_section(location: Location, given: Any, source: str) -> ConfigIssue:
    """The issue of a plain value where a section is expected."""
    names = list(dict.fromkeys(dotted(path) for path in keys_by_path() if path[: len(location)] == location))
    main = MAIN_KEYS.get(dotted(location)) if isinstance(given, str) else None
    hint = main or f"set its keys: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    what = f"needs a table, was given {shown_value(given)}"
    return ConfigIssue(key=dotted(location), what=what, source=source, hint=hint)


def _issue(details: ErrorDetails, location: Location, data: dict[str, Any], locate: Locate) -> ConfigIssue:
    error, given = details["type"], details["input"]
    if error.startswith("union_tag"):
        location = (*location, "kind")
        given = given.get("kind") if isinstance(given, dict) else given
    if error == "missing" and isinstance(location[-1], int):  # an array shorter than its fixed length
        location, error = location[:-1], "wrong_length"
    if location[-1] == "[key]":  # of a free-form table, whose names are limited, such as task.columns
        location, table = location[:-1], find(location[:-2])
        names = get_args(get_args(without_none(table.annotation))[0]) if table else ()
        hint = f'on the left stands one of {", ".join(names)}, as in {{ {names[0]} = "..." }}' if names else ""
        return ConfigIssue(key=dotted(location), what="unknown name", source=locate(location), hint=hint)
    location, key = _nearest_key(location, _kind(data, location[:1]))
    name, source = dotted(location), locate(location)
    if key is None:
        return value_for_section(location, given, source)
    if error == "missing":
        hint = f"give --{key.dotted} VALUE ({key.accepts})"
        if ITEM in key.path:
            hint = f"add {key.path[-1]} to that table ({key.accepts})"
        elif key.variant:
            kind = f'{dotted(key.path[:-1])}.kind = "{_kind(data, key.path[:-1])}"'
            hint = f"give --{key.dotted} VALUE ({key.accepts}), which {kind} needs"
        return ConfigIssue(key=name, what="missing", source=source, hint=hint)
    if error == "too_short":
        return ConfigIssue(key=name, what="is empty", source=source, hint="give at least one element")
    if error == "string_too_short":
        return ConfigIssue(key=name, what="is empty", source=source, hint="give at least one character or leave it out")
    if len(location) > len(key.path):
        accepts, hint = type_text(key.element_type), _closest_choice(key.element_type, given)
        if is_section(key.element_type) and key.path == REWARDS:
            hint = f"write {_reward_for(given)}"
    else:
        hint = _closest_choice(without_none(key.annotation), given) or _shape_hint(key, given, source)
        accepts = key.accepts
    return ConfigIssue(key=name, what=f"needs {accepts}, was given {shown_value(given)}", source=source, hint=hint)


def _nearest_key(location: Location, kind: str) -> tuple[Location, Key | None]:
    """The location up to the key's element, with the key; None for a section."""
    if (key := find(location, kind=kind)) or location in sections():
        return location, key
    for size in range(len(location) - 1, 0, -1):
        if key := find(location[:size], kind=kind):
            # In a union pydantic adds the name of each member.
            return location[: size if key.is_union else size + 1], key
    return location, None


def unknown_key(location: Location, data: dict[str, Any], source: str = "") -> ConfigIssue:
    """The issue of a key that is not in the schema, with the closest key as hint."""
    path = tuple(ITEM if isinstance(part, int) else part for part in location)
    kind = _kind(data, location[:1]) if path[0] in variants() else ""
    elsewhere = [key for key in keys_by_path().get(path, ()) if key.variant and key.variant != kind]
    if elsewhere:
        what = f'belongs to {path[0]}.kind = "{elsewhere[0].variant}", and kind is "{kind}"'
        return ConfigIssue(key=dotted(location), what=what, source=source, hint="change the kind or leave the key out")
    value = value_at(data, location)
    if source == COMMAND_LINE and isinstance(value, str) and value.endswith(".toml"):
        hint = f"a recipe is an argument without an option: @{value}"
        return ConfigIssue(key=f"--{dotted(location)}", what="unknown option", hint=hint)
    closest = suggest(location, kind=kind)
    foreign = foreign_hint(location, closest)
    is_section_name = len(location) == 1 and not closest.count(".") and not foreign
    what = "unknown section" if is_section_name else "unknown key"
    return ConfigIssue(key=dotted(location), what=what, source=source, hint=foreign or key_hint(closest))


def foreign_hint(location: Location, closest: str) -> str:
    """What an unknown key is if it is one of another framework; empty where `closest`, the closest key, is as good."""
    names = [part for part in location if isinstance(part, str)]
    rows = ours_of(names, certain=bool(closest))
    same_name = all(row.ours == (closest,) for row in rows) and closest.rpartition(".")[2] == names[-1]
    return explained(rows) if rows and not same_name else ""


def _unknown_locations(location: Location, given: Any) -> list[Location]:
    """An unknown key; in the place of a table of another framework (`rollout.n`), each of its keys."""
    if not isinstance(given, dict):
        return [location]
    below = [(*location, *name.split(".")) for name in flattened(given)]
    known = any(ours_of([part for part in each if isinstance(part, str)], certain=True) for each in below)
    return below if known else [location]


ABSENT = object()
"""Tells an absent value from one that is None."""


def value_at(data: Any, location: Location, absent: Any = None) -> Any:
    """The value at a location of nested tables and arrays; `absent` if there is none."""
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return absent
    return data


def _kind(data: dict[str, Any], section: Location) -> str:
    return str(value_at(data, (*section, "kind"), ""))


def _closest_choice(annotation: Any, given: Any) -> str:
    if get_origin(annotation) is not Literal or not isinstance(given, str):
        return ""
    choices = get_args(annotation)
    if given == "gpu" and "cuda" in choices:
        return "did you mean cuda?"
    return did_you_mean(given.lower(), choices)


def _shape_hint(key: Key, given: Any, source: str) -> str:
    """How to write a truth value, a table or an array, where another value was given."""
    kind = without_none(key.annotation)
    if key.is_flag:
        word = str(given).lower()
        if key.is_union and word not in ("false", "no", "off", "0", "true", "yes", "on", "1"):
            return ""
        return f"write {'true' if word in ('true', 'yes', 'on', '1') else 'false'}"
    if get_origin(kind) is dict and isinstance(given, str):
        return 'write a table: { NAME = "..." }'
    if get_origin(kind) is not tuple or isinstance(given, list):
        return ""
    if isinstance(given, dict):
        return f"write [{{ ... }}], or the header [[{key.dotted}]]" if is_section(key.element_type) else ""
    if isinstance(given, str) and given.startswith(("[", "{")) and source.startswith(COMMAND_LINE):
        with suppress(ValueError):
            json.loads(given)
            return f"that is JSON; in TOML a key is followed by =, as in [{EXAMPLE_REWARD}]"
        return "not valid TOML: close every bracket and quote every text"
    if key.path == REWARDS:
        return f"write [{_reward_for(given)}]"
    if is_section(key.element_type):
        return "write an array of tables: [{ KEY = VALUE }]"
    return f"write an array: [{shown_value(given)}]"


def _reward_for(given: Any) -> str:
    """A reward as a table: that of a function, if it names one."""
    if isinstance(given, str) and re.fullmatch(r"[^:]+(\.py)?:\w+", given):
        return f'{{ kind = "python", function = {shown_value(given)} }}'
    kinds = get_args(keys_by_path()[(*REWARDS, ITEM, "kind")][0].annotation)
    return f'{{ kind = "{given}" }}' if given in kinds else EXAMPLE_REWARD


def refuse_untrainable(spec: RunSpec) -> None:
    """Raises ConfigError: training cannot work, or would optimize something else than the configuration states."""
    if issues := list(purpose_issues(spec, "train")):
        raise ConfigError(issues)


def refuse_without_task(spec: RunSpec, where: str) -> None:
    """For a call without a recipe, whose default task would be a surprise.

    Args:
        where: the command ("tidemill train") or function ("tidemill.train").

    Raises:
        UserError: no override has a section [task], and no client sends prompts.
    """
    if "task" not in spec.model_fields_set and not spec.gateway.sessions:
        what = f"there is no recipe, no data, no task and no environment, and no run in {spec.directory}"
        hint = 'give data=rows and rewards=[...], or a recipe such as "char-addition"'
        if " " in where:
            hint = "name a recipe such as @char-addition (`tidemill recipe list`), or --task.kind=file --task.path=FILE"
        raise UserError(what, where=where, hint=hint)


def default_task_remark(spec: RunSpec) -> str:
    """A remark on a configuration without a section [task], whose task the user may not expect; empty if it has one."""
    if "task" in spec.model_fields_set or spec.gateway.sessions:
        return ""
    return (
        "no [task] in the recipe: training the built-in arithmetic task; "
        'set task.kind = "file" and task.path to train on rows of yours, or task.kind = "arithmetic" to confirm it'
    )


def purpose_issues(spec: RunSpec, purpose: Purpose) -> Iterator[ConfigIssue]:
    """The issues that a valid configuration has for this purpose."""
    sampling, context = spec.sampling, spec.model.char.context
    limits = {"sampling.max_new_tokens": sampling.max_new_tokens, "eval.max_new_tokens": spec.eval.max_new_tokens}
    for name, limit in limits.items():
        relevant = purpose in ("train", "eval") or (purpose == "generate" and name.startswith("sampling"))
        if relevant and spec.model.source == "char" and limit >= context:
            what = f"{limit} new tokens leave no room for a prompt in the model's {context} (model.char.context)"
            yield ConfigIssue(key=name, what=what, hint=f"lower {name} or raise model.char.context")
        if relevant and spec.engine.context_tokens and limit >= spec.engine.context_tokens:
            what = (
                f"{limit} new tokens leave no room for a prompt in engine.context_tokens = {spec.engine.context_tokens}"
            )
            yield ConfigIssue(
                key=name, what=what, hint="raise context_tokens, or set it to 0 to take what the task needs"
            )
    compared = [reward.kind for reward in spec.scoring.rewards if reward.kind in ("exact", "numeric", "math_verify")]
    if purpose in ("train", "eval") and spec.task.kind == "environment" and compared:
        what = f'{compared[0]} compares with an answer, and tasks of kind "environment" have none'
        yield ConfigIssue(key="scoring.rewards", what=what, hint='set it to [{ kind = "environment" }]')
    if purpose == "eval" and spec.eval.samples_per_prompt > 1 and sampling.temperature == 0:
        what = f"0 is greedy, so that all {spec.eval.samples_per_prompt} samples of a prompt would be equal"
        hint = "set it above 0, or eval.samples_per_prompt to 0"
        yield ConfigIssue(key="sampling.temperature", what=what, hint=hint)
    if purpose == "train":
        yield from _training_issues(spec)


def _training_issues(spec: RunSpec) -> Iterator[ConfigIssue]:
    sampling, batch = spec.sampling, spec.batch
    for name, value, neutral in (("top_p", sampling.top_p, 1), ("top_k", sampling.top_k, 0)):
        if value != neutral:
            what = f"{value} cannot be used in training: importance ratios are over the whole vocabulary"
            yield ConfigIssue(key=f"sampling.{name}", what=what, hint=f"set sampling.{name} = {neutral}")
    if sampling.temperature == 0:
        what = "0 is greedy, so that all samples of a group would be equal"
        yield ConfigIssue(key="sampling.temperature", what=what, hint="set it above 0, usually to 1")
    if batch.microbatch_budget < sampling.max_new_tokens:
        limit = f"sampling.max_new_tokens = {sampling.max_new_tokens}"
        what = f"{batch.microbatch_budget} tokens are too few for a prompt and a completion of {limit}"
        hint = "raise batch.microbatch_tokens, or lower sampling.max_new_tokens"
        yield ConfigIssue(key="batch.microbatch_tokens", what=what, hint=hint)
    if not any(reward.weight for reward in spec.scoring.rewards):
        what, hint = "every weight is 0, so that all samples have the same reward", "give a reward a weight"
        yield ConfigIssue(key="scoring.rewards", what=what, hint=hint)


def without_effect(spec: RunSpec) -> list[str]:
    """One message for each reason why keys that differ from their defaults have no effect in this run."""
    inactive = dict[str, list[str]]()  # keys by the reason
    for key in all_keys():
        for condition in key.active_if:
            if _is_changed(spec, key) and not condition.holds(spec):
                inactive.setdefault(condition.reason, []).append(key.dotted)
    return [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {reason}"
        for reason, keys in inactive.items()
    ]


def _is_changed(spec: RunSpec, key: Key) -> bool:
    """Whether a key differs from its default; in [algorithm], from the preset."""
    *sections, name = key.path
    node: BaseModel = spec
    for section in sections:
        node = getattr(node, section)
    if sections == ["algorithm"]:
        return name in spec.algorithm.changed_from_preset()
    field = type(node).model_fields.get(name)  # absent in pools of another kind
    return field is not None and getattr(node, name) != field.get_default(call_default_factory=True)
