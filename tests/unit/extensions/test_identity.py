"""The identity of a function changes with what decides its results, and with nothing else."""

from __future__ import annotations

import functools
import linecache
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill.core.errors import UserError
from tidemill.extensions.identity import function_identity, path_identity

FACTOR = 2.0


def helper(value: float) -> float:
    return value * FACTOR


def uses_helper(completion: str) -> float:
    return helper(len(completion))


def identity(function: Callable[..., Any], version: str = "") -> str:
    return function_identity(function, where="rewards", version=version)


def closed_over(value: Any) -> Callable[..., Any]:
    def score(completion: str) -> Any:
        return value

    return score


def with_default(value: Any) -> Callable[..., Any]:
    def score(completion: str, *, weight: Any = value) -> Any:
        return weight

    return score


class Judge:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completion: str) -> float:
        return self.scale


VALUES = [
    1,
    2,
    1.0,
    "a",
    None,
    (1, 2),
    [1, 2],
    {"a": 1},
    {1, 2},
    np.arange(2),
    np.arange(3),
    Path("a"),
    Judge(1),
    Judge(2),
]


@pytest.mark.parametrize("make", [closed_over, with_default])
def test_it_depends_on_closure_and_defaults(make: Callable[[Any], Callable[..., Any]]) -> None:
    found = [identity(make(value)) for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found == [identity(make(value)) for value in VALUES]


def test_it_depends_on_functions_and_constants_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(uses_helper)
    assert identity(uses_helper) == before
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert identity(uses_helper) != before


def test_functions_that_call_each_other_have_one() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    assert identity(even) == identity(even)


def test_partials_methods_and_objects_have_one() -> None:
    assert identity(functools.partial(helper, 1.0)) != identity(functools.partial(helper, 2.0))
    assert identity(Judge(1).__call__) != identity(Judge(2).__call__)


def made_class(source: str) -> type:
    """A class of a notebook: nothing but its functions has a source."""
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "cells"}
    exec(compile(source, name, "exec"), names)
    found = names["Env"]
    assert isinstance(found, type)
    return found


def test_a_class_depends_on_its_methods_attributes_bases_and_constants() -> None:
    base = "LIMIT = 1\nclass Base:\n    def size(self): return LIMIT\n"
    source = base + "class Env(Base):\n    stop = (1,)\n    def __init__(self): super().__init__()\n"
    first = identity(made_class(source))
    assert identity(made_class(source)) == first
    others = [source.replace("(1,)", "(2,)"), source.replace("LIMIT = 1", "LIMIT = 2")]
    others += [source.replace("return LIMIT", "return 1"), source + "    def more(self): return 1\n"]
    assert len({first, *(identity(made_class(each)) for each in others)}) == 5


def test_what_cannot_be_determined_needs_a_version() -> None:
    locked = closed_over(threading.Lock())
    with pytest.raises(UserError) as caught:
        identity(locked)
    assert "`value`, of type lock" in caught.value.what
    assert "version" in caught.value.hint
    assert identity(locked, version="1") != identity(locked, version="2")


def test_a_file_identifies_its_functions(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(): ...\ndef g(): ...\n")
    first = path_identity(f"{file}:f")
    assert path_identity(f"{file}:g") != first
    file.rename(tmp_path / "moved.py")
    assert path_identity(f"{tmp_path}/moved.py:f") == first
    (tmp_path / "moved.py").write_text("def f(): return 1\n")
    assert path_identity(f"{tmp_path}/moved.py:f") != first
    assert path_identity(f"{tmp_path}/moved.py:f", version="1") == path_identity(f"{file}:f", version="1")
    assert path_identity("builtins:max") == path_identity("builtins:max")
