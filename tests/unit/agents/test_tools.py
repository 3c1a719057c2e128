"""Schemas of tools, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest

from tidemill.agents.environment import ToolEnvironment, tool
from tidemill.agents.tools import MistakeError, tools_of
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError


class Search(ToolEnvironment):
    offer_finish = True

    @tool(timeout_s=3, idempotent=False)
    def search(self, query: str, schema: Literal["web", "news"], limit: int = 5, tags: list[str] | None = None) -> str:
        """Search documents.

        The best one is first.

        Args:
            query: What to search,
                in a few words.
            limit (int): Most results.

        Returns:
            The results.
        """
        return ""

    @tool
    def title(self, title: dict[str, float]) -> str:
        """A property named title."""
        return ""


def test_a_schema_comes_from_hints_and_docstring() -> None:
    tools = tools_of(Search, {}, SandboxConfig())
    assert list(tools) == ["search", "title", "finish"]
    assert tools["search"].schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search documents.\n\nThe best one is first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to search, in a few words."},
                    "schema": {"enum": ["web", "news"], "type": "string"},
                    "limit": {"type": "integer", "default": 5, "description": "Most results."},
                    "tags": {
                        "anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["query", "schema"],
            },
        },
    }
    assert (tools["search"].options.timeout_s, tools["search"].options.idempotent) == (3, False)
    titles = tools["title"].schema["function"]["parameters"]["properties"]
    assert titles == {"title": {"type": "object", "additionalProperties": {"type": "number"}}}
    assert list(tools["finish"].schema["function"]["parameters"]["properties"]) == ["answer"]


@pytest.mark.parametrize(
    ("arguments", "checked"),
    [
        ('{"query": "a", "schema": "web"}', '{"query":"a","schema":"web"}'),
        ('{"query": "a", "schema": "web", "tags": ["b"], "limit": 99999999999999999999}', None),
        ('{"query": "a", "schema": "mail"}', "search: schema: Input should be 'web' or 'news'"),
        ('{"query": "a", "schema": "web", "limit": 1.5}', "search: limit: Input should be a valid integer"),
        ("[]", "search: Input should be an object"),
        ("{", "search: Invalid JSON"),
        ('{"query": "\\ud800", "schema": "web"}', "search: "),
    ],
)
def test_arguments_are_checked(arguments: str, checked: str | None) -> None:
    if checked is None or checked.startswith("{"):
        found = tools_of(Search, {}, SandboxConfig())["search"].check(arguments)
        assert found == (checked or '{"query":"a","schema":"web","limit":99999999999999999999,"tags":["b"]}')
    else:
        with pytest.raises(MistakeError) as caught:
            tools_of(Search, {}, SandboxConfig())["search"].check(arguments)
        assert str(caught.value).startswith(checked)


def refused(body: str, tmp_path: Path) -> UserError:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from __future__ import annotations\nfrom tidemill.agents.environment import ToolEnvironment, tool\n" + body
    )
    names: dict[str, Any] = {"__name__": "wrong"}
    try:
        exec(compile(file.read_text(), str(file), "exec"), names)
        tools_of(names["Env"], {}, SandboxConfig())
    except UserError as error:
        return error
    pytest.fail("it was not refused")


DOC = '        "Doc."\n'


@pytest.mark.parametrize(
    ("body", "what", "line"),
    [
        (
            f"    @tool\n    def a(x: int) -> str:\n{DOC}",
            "the tool a has the first parameter x: 'int' instead of self",
            4,
        ),
        (f"    @tool\n    def a(x) -> str:\n{DOC}", "the tool a has the first parameter x instead of self", 4),
        (f"    @tool\n    async def a(*, x: int):\n{DOC}", "the first parameter x: 'int' instead of self", 4),
        (f"    @tool\n    def a() -> str:\n{DOC}", "the tool a has no parameter instead of self", 4),
        (f"    @tool\n    def a(*x: int):\n{DOC}", "the first parameter *x: 'int' instead of self", 4),
        (f"    @tool\n    def a(self, x) -> str:\n{DOC}", "the parameter x of the tool a has no type hint", 4),
        ("    @tool\n    def a(self) -> str:\n        return ''\n", "the tool a has no docstring", 4),
        (f"    @tool\n    def a(self, x: bytes):\n{DOC}", "the parameter x of the tool a has the type bytes", 4),
        (f"    @tool\n    def a(self, x: list[set[int]]):\n{DOC}", "has the type list[set[int]]", 4),
        (f"    @tool\n    def a(self, x: Missing):\n{DOC}", "the type hints of the tool a cannot be read", 4),
        (f"    @tool\n    def a(self, *x: int):\n{DOC}", "the tool a has the parameter *x", 4),
        (f"    @tool\n    def a(self):\n{DOC}    @tool\n    def a(self):\n{DOC}", "two tools are named a", 7),
        (f"    @tool\n    def a(self):\n{DOC}    @tool()\n    def a(self):\n{DOC}", "two tools are named a", 7),
        (f"    offer_finish = True\n    @tool\n    def finish(self):\n{DOC}", "two tools are named finish", 5),
        (f"    @tool\n    def close(self):\n{DOC}", "a tool cannot be named close", 4),
        (f"    @tool\n    def a(self) -> int:\n{DOC}", "the tool a returns int", 4),
        (f"    @staticmethod\n    @tool\n    def a(x: int):\n{DOC}", "the tool a is not a method", 4),
        (f"    @tool\n    @classmethod\n    def a(cls):\n{DOC}", "the tool a is not a method", 4),
    ],
)
def test_a_wrong_tool_is_refused_with_its_line(body: str, what: str, line: int, tmp_path: Path) -> None:
    error = refused(f"class Env(ToolEnvironment):\n{body}", tmp_path)
    assert what in error.what
    assert error.where == f"{tmp_path}/wrong.py:{line}"
    assert error.hint


@pytest.mark.parametrize("given", [functools.partialmethod(print), functools.partial(print), property(print)])
def test_what_is_not_a_method_is_not_marked(given: Any) -> None:
    with pytest.raises(UserError, match="@tool cannot mark"):
        tool(given)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_deadline_is_above_0(timeout_s: float) -> None:
    with pytest.raises(UserError, match="timeout_s"):
        tool(timeout_s=timeout_s)


def test_a_subclass_may_replace_a_tool_but_two_bases_may_not_share_one(tmp_path: Path) -> None:
    class More(Search):
        @tool
        def title(self, title: dict[str, float]) -> str:
            """Another one."""
            return ""

    assert tools_of(More, {}, SandboxConfig())["title"].schema["function"]["description"] == "Another one."
    body = "".join(f"class {name}(ToolEnvironment):\n    @tool\n    def a(self):\n{DOC}" for name in "AB")
    assert "two tools are named a" in refused(body + "class Env(A, B): pass\n", tmp_path).what
