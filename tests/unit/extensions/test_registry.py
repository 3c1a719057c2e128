"""How a configuration names a user function, and where it is found."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.config_issues import issues_of
from tidemill.config.pipeline import load_overridden
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.extensions import registry
from tidemill.extensions.registry import Mark, given_function, mark, provide, resolve


def test_a_function_of_this_session_is_found_by_its_reference() -> None:
    def score() -> float:
        return 1.0

    extension = given_function(score, "reward", where="rewards")
    provide([extension])
    assert extension.ref == "session:score"
    assert not extension.path
    assert resolve(extension.ref, "reward", where="rewards").function is score
    with pytest.raises(UserError, match="this session does not have it"):
        resolve("session:score", "advantage", where="x")


def test_an_importable_function_is_named_by_its_file_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_of_a_test.py").write_text("def score(completion): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rewards_of_a_test  # type: ignore[import-not-found]

    extension = given_function(my_rewards_of_a_test.score, "reward", where="rewards")
    assert extension.ref == f"{tmp_path}/my_rewards_of_a_test.py:score"
    assert extension.path
    assert resolve(extension.ref, "reward", where="rewards").identity == extension.identity
    del sys.modules["my_rewards_of_a_test"]


def test_an_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_of_a_test.py").write_text("def advantage(rewards): return rewards\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("plain", "plugin_of_a_test:advantage", "tidemill.advantages")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    assert resolve("plain", "advantage", where="algorithm.advantage").name == "plain"
    spec = load_overridden("char-addition", {"algorithm.advantage": "plain"})
    assert isinstance(spec, RunSpec)
    assert spec.algorithm.advantage == "plain"
    with pytest.raises(UserError) as caught:
        resolve("other", "advantage", where="algorithm.advantage")
    assert "installed: plain" in caught.value.what


@pytest.mark.parametrize("given", ["grp", "a b", "file.py", ":f", "x.py:", "1:f"])
def test_a_name_that_is_neither_built_in_nor_a_reference_is_refused(given: str) -> None:
    (issue,) = issues_of(lambda: load_overridden("char-addition", {"algorithm.advantage": given}))
    assert issue.key == "algorithm.advantage"
    assert "path/file.py:function" in issue.hint


def test_a_function_of_another_kind_is_refused() -> None:
    def score() -> None: ...

    mark(score, Mark(kind="reward"))
    with pytest.raises(UserError) as caught:
        given_function(score, "advantage", where="advantage")
    assert "decorated as a reward" in caught.value.what


def test_two_functions_of_one_name_are_refused() -> None:
    def made(value: float) -> Any:
        def score() -> float:
            return value

        return given_function(score, "reward", where="rewards")

    with pytest.raises(UserError, match="two different functions are named score"):
        provide([made(1.0), made(2.0)])


def test_an_object_without_attributes_cannot_be_marked() -> None:
    with pytest.raises(UserError, match="cannot mark"):
        mark(max, Mark(kind="reward"))
