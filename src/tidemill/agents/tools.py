"""Schemas of tools from type hints and docstrings, and the check of a call's arguments."""

from __future__ import annotations

import inspect
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, create_model

from tidemill.agents.environment import TOOL_MARK, Environment, ToolEnvironment, ToolOptions
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError, exception_text
from tidemill.extensions.results import place_of

PLAIN = (str, int, float, bool, type(None))
SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$")
ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
FINISH = "finish"


class MistakeError(Exception):
    """A call cannot be made as the agent wrote it."""


class AnyArguments(RootModel[dict[str, Any]]):
    """Arguments of a served tool, which its server checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    options: ToolOptions
    schema: dict[str, Any]  # in the OpenAI function format
    model: type[BaseModel]  # of its arguments

    def check(self, arguments: str) -> str:
        """Arguments as JSON, without unknown or missing ones.

        Raises:
            MistakeError: they do not match the schema.
        """
        try:
            return self.model.model_validate_json(arguments).model_dump_json(by_alias=True, exclude_unset=True)
        except ValidationError as error:
            problems = []
            for each in error.errors():
                place = ".".join(map(str, each["loc"]))
                problems.append(f"{place}: {each['msg']}" if place else each["msg"])
            raise MistakeError(f"{self.name}: {'; '.join(problems)}") from None
        except ValueError as error:  # text that is not Unicode
            raise MistakeError(f"{self.name}: {exception_text(error)}") from None


def finish(self: Any, answer: str) -> str:
    """End the episode with the final answer.

    Args:
        answer: The final answer.
    """
    return answer


def tools_of(environment: type[Environment], params: dict[str, Any], sandbox: SandboxConfig) -> dict[str, Tool]:
    """The tools of a class by name, in the order of their definition, and those that it serves with these arguments.
    Classes other than `ToolEnvironment` have none.

    Raises:
        UserError: a tool without `self` or docstring, a parameter without type hint or of a type that JSON schemas do
            not have, two tools of one name.
    """
    if not issubclass(environment, ToolEnvironment):
        return {}
    functions: dict[str, Any] = {}
    owners: dict[str, type] = {}
    for owner in reversed(environment.__mro__):
        for name, value in vars(owner).items():
            wraps = isinstance(value, (staticmethod, classmethod))
            if wraps and (hasattr(value, TOOL_MARK) or hasattr(value.__func__, TOOL_MARK)):
                hint = "remove @staticmethod or @classmethod"
                raise UserError(f"the tool {name} is not a method", where=place_of(value.__func__), hint=hint)
            if not hasattr(value, TOOL_MARK):
                functions.pop(name, None)
                continue
            if hasattr(ToolEnvironment, name):
                what = f"a tool cannot be named {name}: environments have a method of that name"
                raise UserError(what, where=place_of(value), hint="rename it")
            if name in functions and not issubclass(owner, owners[name]):
                what = f"two tools are named {name}; the other is at {place_of(functions[name])}"
                raise UserError(what, where=place_of(value), hint="rename one of them")
            functions[name], owners[name] = value, owner
    if environment.offer_finish:
        if FINISH in functions:
            hint = "rename it, or set offer_finish = False"
            raise UserError("two tools are named finish", where=place_of(functions[FINISH]), hint=hint)
        functions[FINISH] = finish
    tools = {name: _tool(name, function) for name, function in functions.items()}
    for each in environment.served_tools(params, sandbox):
        schema = {"type": "function", "function": {key: each[key] for key in ("name", "description", "parameters")}}
        options = ToolOptions(timeout_s=None, idempotent=each["idempotent"])
        tools[each["name"]] = Tool(name=each["name"], options=options, schema=schema, model=AnyArguments)
    return tools


def _tool(name: str, function: Any) -> Tool:
    where = place_of(function)
    description, descriptions = _docstring(function)
    if not description:
        raise UserError(f"the tool {name} has no docstring", where=where, hint="describe what it does in one sentence")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # noqa: BLE001 -- hints are expressions of the user's
        what = f"the type hints of the tool {name} cannot be read: {exception_text(error)}"
        raise UserError(what, where=where, hint="use types that the module imports") from None
    if hints.get("return", str) is not str:
        what = f"the tool {name} returns {inspect.signature(function).return_annotation}"
        raise UserError(what, where=where, hint="return text, and write -> str")
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(_after_self(name, function)):
        argument = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"the tool {name} has the parameter {parameter}", where=where, hint="name each parameter")
        if argument not in hints:
            what = f"the parameter {argument} of the tool {name} has no type hint"
            raise UserError(what, where=where, hint=f"write {argument}: str")
        if not _in_json(hints[argument]):
            what = f"the parameter {argument} of the tool {name} has the type {parameter.annotation}"
            hint = "use str, int, float, bool, Literal, list, dict[str, …] or | None of them"
            raise UserError(what, where=where, hint=hint)
        default = ... if parameter.default is parameter.empty else parameter.default
        # The alias keeps names such as `schema`, which a pydantic model has itself.
        field = Field(default, alias=argument, description=descriptions.get(argument))
        fields[f"argument_{number}"] = (hints[argument], field)
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model = create_model(name, __config__=config, **fields)
    given = _untitled(model.model_json_schema())
    parameters = {"type": "object", "properties": given["properties"] if fields else {}}
    parameters["required"] = given.get("required", [])
    schema = {"name": name, "description": description, "parameters": parameters}
    options = getattr(function, TOOL_MARK, ToolOptions(timeout_s=None, idempotent=True))
    return Tool(name=name, options=options, schema={"type": "function", "function": schema}, model=model)


def _after_self(name: str, function: Any) -> list[inspect.Parameter]:
    """Raises UserError: the first parameter is not `self`, so that the instance would take the place of an argument."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].name != "self":
        first = f"the first parameter {parameters[0]}" if parameters else "no parameter"
        what = f"the tool {name} has {first} instead of self"
        raise UserError(what, where=place_of(function), hint=f"write def {name}(self, ...)")
    return parameters[1:]


def _in_json(hint: Any) -> bool:
    """Whether a type has a JSON schema without references."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return all(isinstance(each, (str, int, bool)) for each in arguments)
    if origin in (Union, types.UnionType, list):
        return all(_in_json(each) for each in arguments)
    if origin is dict:
        return arguments[0] is str and _in_json(arguments[1])
    return hint in PLAIN or hint in (list, dict)


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic derives from names; a property named `title` is a dict."""
    if isinstance(schema, dict):
        return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return schema


def _docstring(function: Any) -> tuple[str, dict[str, str]]:
    """Description of a function and of its arguments, from a docstring in Google's style."""
    described: list[str] = []
    arguments: dict[str, str] = {}
    section, argument, indent = "", "", None
    for line in (inspect.getdoc(function) or "").splitlines():
        if found := SECTION.match(line):
            section = found[1]
        elif not section:
            described.append(line)
        elif section in ("Args", "Arguments") and (text := line.strip()):
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            if depth == indent and (found := ARGUMENT.match(text)):
                argument = found[1]
                arguments[argument] = found[2]
            elif argument:
                arguments[argument] = f"{arguments[argument]} {text}".strip()
    return "\n".join(described).strip(), arguments
