from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts.site.notebooks import (
    MAX_PICTURE_BYTES,
    cells_of,
    keep_outputs,
    page_with_outputs,
    problems_of,
    settings_of,
    write_notebook,
)

PAGE = """---
description: A page.
tutorial: {threads: 1}
---
# Title

!!! note "Memory"
    Two lines
    of a note.

Text before.

```python
x = 1
```

<!-- picture: A line
     that rises. -->
```python
draw(x)
```
<!-- not run: needs a GPU -->
```bash
nvidia-smi
```

```toml
[run]
```

```bash
ls
tidemill doctor
```
"""
STREAM = {"output_type": "stream", "name": "stdout", "text": ["one\n", "two  \n"]}


def picture(size: int = 8) -> dict[str, Any]:
    return {
        "output_type": "display_data",
        "data": {"image/png": "x" * size, "text/plain": ["<Figure>"]},
        "metadata": {},
    }


def result(html: str) -> dict[str, Any]:
    return {"output_type": "execute_result", "data": {"text/html": [html]}, "metadata": {}, "execution_count": 1}


@pytest.fixture
def md(tmp_path: Path) -> Path:
    path = tmp_path / "first.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def written(md: Path, *outputs: list[dict[str, Any]]) -> Path:
    """The notebook of a page, with the outputs of its cells of code."""
    notebook = write_notebook(md)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, shown in zip(code, outputs, strict=False):
        cell |= {"outputs": shown, "execution_count": 1}
    path = md.with_suffix(".ipynb")
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def test_the_cells_of_a_page() -> None:
    cells = cells_of(PAGE)
    assert [(cell.kind, cell.first_line, cell.last_line) for cell in cells] == [
        ("markdown", 5, 11),
        ("python", 13, 15),
        ("markdown", 17, 18),
        ("python", 19, 21),
        ("markdown", 22, 29),
        ("bash", 31, 34),
    ]
    assert cells[0].source.endswith("> **Memory**\n>\n> Two lines\n> of a note.\n\nText before.")
    assert cells[3].picture == "A line that rises."
    assert "nvidia-smi" in cells[4].source and "[run]" in cells[4].source, "code that is not run is text"
    assert settings_of(PAGE) == {"threads": 1} and settings_of("# Title\n") == {}


def test_a_notebook_is_valid_and_its_ids_depend_on_the_text_only(md: Path) -> None:
    notebook = write_notebook(md)
    nbformat.validate(nbformat.reads(json.dumps(notebook), as_version=4))
    assert notebook["cells"][-1]["source"] == ["%%bash -e\n", "ls\n", "tidemill doctor"]
    md.write_text(PAGE.replace("Text before.", "Other text.") + "\n```bash\nls\ntidemill doctor\n```\n")
    ids, others = ([cell["id"] for cell in each["cells"]] for each in (notebook, write_notebook(md)))
    assert others[0] != ids[0] and others[1:6] == ids[1:], "an id changes with the text of its cell"
    assert others[6] == f"{ids[5]}-2", "equal cells have different ids"


def test_outputs_are_kept_up_to_the_first_changed_cell_of_code(md: Path) -> None:
    committed = json.loads(written(md, [STREAM], [picture()], [STREAM]).read_text())
    md.write_text(PAGE.replace("Text before.", "Other text.").replace("draw(x)", "draw(2)"))
    notebook = write_notebook(md)
    keep_outputs(notebook, committed)
    assert [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"] == [[STREAM], [], []]


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("", "", 0, ""),
        ("Text before.", "Other text.", 5, "another cell"),
        ("x = 1", "x = 2", 13, "another cell"),
        ("```toml", "````toml", 22, "another cell"),
        ("\n```bash\nls\ntidemill doctor\n```\n", "", 1, "cells behind those of the page"),
    ],
)
def test_a_difference_is_reported_with_its_line(md: Path, old: str, new: str, line: int, what: str) -> None:
    written(md, [STREAM], [], [])
    md.write_text(PAGE.replace(old, new) if old else PAGE, encoding="utf-8")
    problems = list(problems_of(md))
    assert len(problems) == (1 if what else 0)
    assert all(what in each and each.startswith(f"{md}:{line}: ") for each in problems)


def test_a_notebook_that_is_missing_or_was_not_executed_is_reported(md: Path) -> None:
    (missing,) = problems_of(md)
    assert missing == f"{md}:1: the page has no notebook; python -m scripts.site.notebooks first --execute"
    written(md, [STREAM])
    (not_executed,) = problems_of(md)
    assert not_executed.startswith(f"{md}:19: the notebook has no output of this cell; ")


def test_a_page_has_the_outputs_below_its_blocks(md: Path) -> None:
    panel = result('<pre style="x"><b>step</b> 3 &lt; 4</pre>')
    path = written(md, [STREAM, panel], [picture(), result("<table><tr><td>7</td></tr></table>")], [])
    page = page_with_outputs(md, path)
    assert "x = 1\n```\n\n```text\none\ntwo\n```\n\n```text\nstep 3 < 4\n```\n\n<!-- picture" in page
    assert '<img alt="A line that rises." src="data:image/png;base64,xxxxxxxx">\n\n<table>' in page
    assert page.startswith("---\ndescription") and page.endswith("ls\ntidemill doctor\n```\n")


def test_a_page_refuses_large_pictures_and_the_notebook_of_another_page(md: Path) -> None:
    path = written(md, [], [picture(MAX_PICTURE_BYTES + 1)], [])
    with pytest.raises(ValueError, match=r"first\.md:19: the picture has 60001 bytes"):
        page_with_outputs(md, path)
    md.write_text("# Title\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"3 cells of code, .* 0"):
        page_with_outputs(md, path)
