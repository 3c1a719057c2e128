from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tidemill.config.foreign_names import PAGE, TABLE, ForeignName, foreign_names

DOCUMENTS = Path(__file__).resolve().parents[3] / "docs" / "coming-from"
FRAMEWORKS = tuple(dict.fromkeys(row.framework for row in foreign_names()))


def update_document(text: str, framework: str) -> str:
    """The text of docs/coming-from/FRAMEWORK.md with its tables replaced by the current ones."""
    begin, end = f"<!-- {framework}: generated -->\n", f"\n<!-- end of {framework} -->"
    rows = [row for row in foreign_names() if row.framework == framework and row.on_page]
    return re.sub(f"(?s){begin}.*?{end}", lambda _: begin + "\n\n".join(_tables(rows)) + end, text)


def _tables(rows: Sequence[ForeignName]) -> list[str]:
    """A table for each place."""
    return [
        _table(place, [row for row in rows if row.place == place]) for place in dict.fromkeys(row.place for row in rows)
    ]


def _table(title: str, rows: Sequence[ForeignName]) -> str:
    """A heading and a table, with one line for the names that share keys and note."""
    names: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for row in rows:
        names.setdefault((row.ours, row.note), []).append(f"`{row.shown}`")
    lines = [
        [", ".join(shown), ", ".join(f"`{key}`" for key in ours), note.replace("|", "\\|")]
        for (ours, note), shown in names.items()
    ]
    head = [f"### {title}", "", "| name | here | value |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_tables_of_the_page_are_generated_from_the_table(framework: str) -> None:
    page = DOCUMENTS / f"{framework.lower()}.md"
    text = page.read_text(encoding="utf-8")
    if (current := update_document(text, framework)) != text:
        page.write_text(current, encoding="utf-8")
        pytest.fail(f"the tables of docs/coming-from/{page.name} were updated; look at them and run again")
    assert text.count(f"<!-- {framework}: generated -->") == 1
    shown = [row for row in foreign_names() if row.on_page and row.framework == framework]
    assert [row.name for row in shown if f"`{row.shown}`" not in text] == []


def test_the_names_of_the_page_are_rows_of_their_place() -> None:
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    listed = {
        (framework, place, name)
        for framework, places in tables.items()
        for place, rows in places.items()
        for name in rows.get(PAGE, "").split()
    }
    assert listed - {(row.framework, row.place, row.shown) for row in foreign_names()} == set()


def fields_of(module: str, name: str) -> set[str]:
    """The parameters of a class's `__init__` and its annotated fields, without importing the module."""
    found = find_spec(module.partition(".")[0])
    assert found is not None and found.origin is not None
    file = Path(found.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    (definition,) = (
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    arguments = {
        argument.arg
        for node in definition.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for argument in node.args.args
    }
    annotated = (node.target for node in definition.body if isinstance(node, ast.AnnAssign))
    return arguments | {target.id for target in annotated if isinstance(target, ast.Name)}


def test_the_scripts_of_trl_use_arguments_that_it_has() -> None:
    text = (DOCUMENTS / "trl.md").read_text(encoding="utf-8")
    scripts = re.findall(r"<!-- not run: [^\n]* -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(scripts) == 2
    of_arguments = fields_of("transformers.training_args", "TrainingArguments")
    known = {
        "GRPOConfig": of_arguments | fields_of("trl.trainer.grpo_config", "GRPOConfig"),
        "GRPOTrainer": fields_of("trl.trainer.grpo_trainer", "GRPOTrainer"),
    }
    calls = [
        node
        for script in scripts
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known
    ]
    assert len(calls) == 4
    for call in calls:
        assert isinstance(call.func, ast.Name)
        assert {str(keyword.arg) for keyword in call.keywords} - known[call.func.id] == set()
