from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import pytest

from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind, recipe_of
from tidemill.core.errors import UserError
from tidemill.deploy.recipe_files import LIMIT

FILES = (
    RECIPE
    + """
[task]
kind = "file"
path = "rows.jsonl"
[eval]
sets = [{ name = "more", path = "other/rows.jsonl" }]
[scoring]
rewards = [{ kind = "python", function = "mine.py:right" }]
"""
)
ROW = '{"prompt": "1+1=", "answer": "2"}\n'


def write_files(folder: Path, rows: bytes = ROW.encode()) -> None:
    (folder / "rows.jsonl").write_bytes(rows)
    (folder / "other").mkdir()
    (folder / "other" / "rows.jsonl").write_text(ROW)
    (folder / "mine.py").write_text("def right(completion: str) -> float:\n    return 1.0\n")


def test_files_and_functions_travel(rendered: RenderRecipe, tmp_path: Path) -> None:
    write_files(tmp_path)
    result = rendered(recipe=FILES)
    data = by_kind(result, "ConfigMap")["data"]
    assert list(data) == ["recipe.toml", "mine.py", "other-rows.jsonl", "rows.jsonl"]
    assert data["rows.jsonl"] == ROW
    recipe = recipe_of(result)
    assert 'path = "/etc/tidemill/rows.jsonl"' in recipe
    assert 'path = "/etc/tidemill/other-rows.jsonl"' in recipe
    assert 'function = "/etc/tidemill/mine.py:right"' in recipe
    assert str(tmp_path) not in recipe
    assert [each for each in result.notes if "modules that they import" in each]


def test_names_are_keys_of_a_config_map(rendered: RenderRecipe, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "other").rename(tmp_path / "façade 2")
    (tmp_path / "façade 2" / "rows.jsonl").rename(tmp_path / "façade 2" / "mine.py")
    result = rendered(recipe=FILES.replace("other/rows.jsonl", "façade 2/mine.py"))
    assert list(by_kind(result, "ConfigMap")["data"]) == ["recipe.toml", "fa-ade-2-mine.py", "mine.py", "rows.jsonl"]


def test_files_that_are_not_text(rendered: RenderRecipe, tmp_path: Path) -> None:
    write_files(tmp_path, b"\xff\xfe\x00")
    assert b64decode(by_kind(rendered(recipe=FILES), "ConfigMap")["binaryData"]["rows.jsonl"]) == b"\xff\xfe\x00"


def test_files_on_the_storage_stay_there(rendered: RenderRecipe, tmp_path: Path) -> None:
    write_files(tmp_path)
    result = rendered("--task.path=/runs/rows.jsonl", "--model.source=/models/llama", recipe=FILES)
    assert 'path = "/runs/rows.jsonl"' in recipe_of(result) and 'source = "/models/llama"' in recipe_of(result)


@pytest.mark.parametrize(("more", "refused"), [(-5000, False), (1, True)])
def test_the_limit(rendered: RenderRecipe, tmp_path: Path, more: int, refused: bool) -> None:
    write_files(tmp_path, b"x" * (LIMIT + more))
    if not refused:
        assert rendered(recipe=FILES).files
        return
    with pytest.raises(UserError, match=r"513 KiB, and 512 KiB travel with it") as raised:
        rendered(recipe=FILES)
    assert "/runs/rows.jsonl" in raised.value.hint


def test_a_token_in_a_function_is_refused(rendered: RenderRecipe, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "mine.py").write_text('TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"\n')
    with pytest.raises(UserError, match=r"mine\.py: contains a secret"):
        rendered(recipe=FILES)
