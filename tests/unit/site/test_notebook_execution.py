from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import nbclient.exceptions
import pytest

from scripts.site.notebook_execution import DeadlineMissed, clean_text, cleaned, execute, joined
from scripts.site.notebooks import write_notebook

FOLDER = "/tmp/tutorial-x1"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("10 %\r20 %\rdone\n", "done\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        (f"{FOLDER}/runs/mine in {FOLDER}", "runs/mine in ."),
        ("served at http://127.0.0.1:8301/v1", "served at http://127.0.0.1:PORT/v1"),
        ("at 2026-11-28T14:37:01.5Z, 2026-11-28 14:37", "at TIME, TIME"),
        ("<object at 0x7f12ab34cd56>", "<object at 0x…>"),
        (f"{Path.home()}/.cache", "…/.cache"),
    ],
)
def test_a_text_is_the_same_on_every_machine(text: str, clean: str) -> None:
    assert clean_text(text, folder=FOLDER) == clean


def test_an_output_is_reduced_to_what_a_page_shows() -> None:
    widget = {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}}
    assert cleaned(widget, folder=FOLDER) == {}
    data = {"text/html": "<b>1</b>", "text/plain": "<IPython.core.display.HTML object>"}
    shown = cleaned({"output_type": "display_data", "data": data, "metadata": {"a": 1}}, folder=FOLDER)
    assert shown == {"output_type": "display_data", "data": {"text/html": ["<b>1</b>"]}, "metadata": {}}


def test_a_code_that_was_cut_is_removed() -> None:
    parts = [("stdout", "one\x1b"), ("stdout", "[1m two\n"), ("stderr", "three\n")]
    outputs = joined({"output_type": "stream", "name": name, "text": text} for name, text in parts)
    assert [cleaned(each, folder=FOLDER)["text"] for each in outputs] == [["one two\n"], ["three\n"]]


def notebook_of(tmp_path: Path, *blocks: str) -> dict[str, Any]:
    (tmp_path / "page.md").write_text("\n".join(blocks))
    return write_notebook(tmp_path / "page.md")


def python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def test_a_notebook_is_executed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    code = python('import os, pathlib\npathlib.Path("a").touch()\nprint(os.getcwd(), os.environ["OMP_NUM_THREADS"])\n3')
    notebook = notebook_of(tmp_path, code, "```bash\nls\necho $GIVEN\n```\n")
    assert execute(notebook, threads=1, environment={"GIVEN": "7"}).wall_s > 0
    first, second = notebook["cells"]
    assert first["outputs"][0]["text"] == [". 1\n"]
    assert first["outputs"][1]["data"]["text/plain"] == ["3"]
    assert second["outputs"][0]["text"] == ["a\n", "7\n"]
    assert json.loads(json.dumps(notebook)) == notebook


@pytest.mark.parametrize("block", [python("assert 1 == 2"), "```bash\nfalse\ntrue\n```\n"])
def test_a_cell_that_fails_is_an_error(tmp_path: Path, block: str) -> None:
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        execute(notebook_of(tmp_path, block))


def test_a_notebook_that_hangs_is_stopped(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineMissed, match="more than 4 s"):
        execute(notebook_of(tmp_path, python("import time\ntime.sleep(100)")), deadline_s=4)
    assert time.monotonic() - started < 60


def test_no_process_survives_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.site.notebook_execution.EXIT_GRACE_S", 0.5)
    detached = 'import subprocess\nsubprocess.Popen(["sleep", "1234"], start_new_session=True)'
    with pytest.raises(ChildProcessError, match="sleep 1234"):
        execute(notebook_of(tmp_path, python(detached)))
