"""Functions by import path, and what can be wrong with one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import UserError
from tidemill.extensions import loading
from tidemill.extensions.loading import source_file

SOURCE = """
from dataclasses import dataclass

@dataclass
class ScoredCompletion:
    value: float

def score(prompt, completion, answer, metadata):
    return ScoredCompletion(1.0).value

def two(prompt, completion):
    return 0.0

constant = 3
"""


def import_function(path: str) -> Any:
    return loading.import_function(path, where="scoring.rewards.function")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(SOURCE)
    return path


def test_a_file(file: Path) -> None:
    assert import_function(f"{file}:score")("p", "c", "a", {}) == 1.0


def test_files_of_one_name_in_two_folders_do_not_mix(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "rewards.py"
    other.write_text("def score(*args):\n    return 2.0\n")
    assert (import_function(f"{file}:score")(1, 2, 3, 4), import_function(f"{other}:score")(1, 2, 3, 4)) == (1.0, 2.0)


def test_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = file.rename(file.with_name("rewards_of_a_test.py"))
    monkeypatch.syspath_prepend(str(module.parent))
    assert import_function("rewards_of_a_test:score")("p", "c", "a", {}) == 1.0


@pytest.mark.parametrize(
    ("name", "fault", "hint"),
    [
        ("scor", "has no function scor", "did you mean"),
        ("constant", "has no function constant", "define constant"),
    ],
)
def test_a_function_that_does_not_exist(file: Path, name: str, fault: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        import_function(f"{file}:{name}")
    assert fault in caught.value.what
    assert hint in caught.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*none\.py") as caught:
        import_function(f"{tmp_path}/none.py:score")
    assert "paths in a recipe start at the recipe's folder" in caught.value.hint


def test_a_missing_package_differs_from_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        import_function("no_such_package_here.rewards:score")
    assert "install the package" in caught.value.hint
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package_here\n")
    with pytest.raises(UserError) as caught:
        import_function(f"{broken}:score")
    assert "no_such_package_here" in caught.value.what
    assert caught.value.hint == "correct the module"


@pytest.mark.parametrize("source", ["def score(:\n", "1 / 0\n", "raise SystemExit(3)\n"])
def test_a_module_that_fails_while_imported(tmp_path: Path, source: str) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(source)
    with pytest.raises(UserError, match="cannot import"):
        import_function(f"{broken}:score")


def test_a_module_that_does_not_return_from_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(30)\n\ndef score(p, c, a, m): ...\n")
    monkeypatch.setattr("tidemill.extensions.loading.IMPORT_DEADLINE_S", 0.1)
    with pytest.raises(UserError, match=r"takes longer than 0\.1 s"):
        import_function(f"{tmp_path / 'slow.py'}:score")


def test_functions_of_one_file_share_its_module_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "shared.py"
    file.write_text("calls = []\ndef f(): calls.append('f')\ndef g(): return calls\n")
    import_function(f"{file}:f")()
    assert import_function(f"{file}:g")() == ["f"]
    file.write_text("calls = []\ndef g(): return calls\n")
    assert import_function(f"{file}:g")() == []


def test_the_file_of_a_function_is_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_pack" / "inner").mkdir(parents=True)
    for file in ("outer_pack/__init__.py", "outer_pack/inner/__init__.py", "outer_pack/inner/score.py", "alone.py"):
        (tmp_path / file).write_text("raise SystemExit\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_file("alone:f") == tmp_path / "alone.py"
    assert source_file("outer_pack:f") == tmp_path / "outer_pack" / "__init__.py"
    assert source_file("outer_pack.inner.score:f") == tmp_path / "outer_pack" / "inner" / "score.py"
    nested = tmp_path / "outer_pack" / "without_init" / "deeper"
    nested.mkdir(parents=True)
    (nested / "score.py").write_text("")
    assert source_file("outer_pack.without_init.deeper.score:f") == nested / "score.py"
    assert source_file("my/file.py:f") == Path("my/file.py")
    for none in ("outer_pack.nothing:f", "alone.alone:f", "nothing.alone:f", "sys:exit"):
        assert source_file(none) is None, none


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise ValueError('half a pair: \\ud800')", "ValueError: half a pair: \\ud800"),
        ("class Dumb(Exception):\n    __str__ = None\nraise Dumb", "Dumb: its __str__ raised TypeError"),
    ],
)
def test_a_fault_at_import_whose_text_cannot_be_printed(tmp_path: Path, fault: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(fault, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        import_function(f"{tmp_path}/mine.py:score")
    str(caught.value).encode()


def test_a_process_whose_reward_sleeps_at_import_ends(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(3600)\n", encoding="utf-8")
    script = f"""
from tidemill.core.errors import UserError
from tidemill.extensions import loading
loading.IMPORT_DEADLINE_S = 0.2
try:
    loading.import_function({f"{tmp_path}/mine.py:score"!r}, where="")
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "takes longer than 0.2 s" in done.stdout
