"""Which functions may run as copies in other processes."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle
import pytest

from tidemill.extensions import portable
from tidemill.extensions.portable import UnportableError, target_of


@dataclass(frozen=True)
class Limits:
    longest: int
    words: Any = ()


@dataclass
class Counter:
    calls: int = 0


COUNT = 0


def portable_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    words, pattern, table = ("a", ("b", 1.0)), re.compile("a"), MappingProxyType({"a": 1})
    limits, half = Limits(3), functools.partial(pow, 2)
    yield "constants", lambda text: text in words and pattern.match(text) and table[text] and limits.longest
    yield "functions", lambda text: half(len(text)) + threading.active_count()
    yield "imported classes", lambda text: Limits(len(text))
    yield "itself", _recursive()


def _recursive() -> Callable[[int], int]:
    def factorial(number: int) -> int:
        return number * factorial(number - 1) if number else 1

    return factorial


@pytest.mark.parametrize("function", [pytest.param(each, id=name) for name, each in portable_functions()])
def test_a_function_of_constants_travels_by_value(function: Callable[..., Any]) -> None:
    assert target_of(function, "", name="score").pickled


def unportable_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    seen: list[str] = []
    table = {"a": 1}
    lock, counter, count = threading.Lock(), Counter(), 0
    limits = Limits(3, words=["a"])

    def helper(text: str) -> None:
        seen.append(text)

    def assigns(text: str) -> int:
        nonlocal count
        count += 1
        return count

    def assigns_global(text: str) -> int:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return COUNT

    yield "list", lambda text: seen.append(text + text), "`seen` (list)"
    yield "dict", lambda text: table[text], "`table` (dict)"
    yield "lock", lambda text: lock.locked(), "`lock` (lock)"
    yield "object", lambda text: counter.calls, "`counter` (Counter)"
    yield "field", lambda text: limits.words, "`words` (list)"
    yield "helper", lambda text: helper(text + text), "`seen` (list)"
    yield "bound method", counter.__eq__, "Counter"
    yield "partial", functools.partial(lambda text, known: text, known=seen), "object of type list"
    yield "default", lambda text, known=seen: known, "object of type list"
    yield "nonlocal", assigns, "`count`, which it assigns"
    yield "global", assigns_global, "`COUNT`, which it assigns"
    yield "large", lambda text, known=b"x" * portable.LARGEST_BYTES: known, "bytes, and 16,000,000 are the limit"


@pytest.mark.parametrize(
    ("function", "says"), [pytest.param(each, says, id=name) for name, each, says in unportable_functions()]
)
def test_what_a_copy_does_not_share_is_named(
    function: Callable[..., Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "_is_importable", lambda given: isinstance(given, type))  # as in a notebook
    with pytest.raises(UnportableError) as caught:
        target_of(function, "", name="score")
    assert says in str(caught.value)


def test_a_function_may_be_copied_with_all_it_uses() -> None:
    words = ["a"]
    copy = cloudpickle.loads(target_of(lambda text: text in words, "", name="score", copy_shared=True).pickled)
    assert copy("a")


def test_a_class_travels_with_its_attributes_and_is_refused_for_what_its_methods_share() -> None:
    seen: list[str] = []

    class Own:
        words = ["a"]

        def step(self, action: str) -> bool:
            return action in self.words

    class Shares:
        def step(self, action: str) -> None:
            seen.append(action)

    @dataclass
    class Fields(Own):
        known: list[str] = field(default_factory=list)

    assert cloudpickle.loads(target_of(Own, "", name="Own").pickled)().step("a")
    assert cloudpickle.loads(target_of(Fields, "", name="Fields").pickled)().known == []
    with pytest.raises(UnportableError, match="seen"):
        target_of(Shares, "", name="Shares")


def test_other_systems_than_linux_have_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "AVAILABLE", False)
    with pytest.raises(UnportableError, match="need Linux"):
        target_of(len, "builtins:len", name="len")


def test_definitions_of_a_module_that_an_import_does_not_find_travel_by_value(tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    file.write_text("class Score:\n    def __call__(self, text: str) -> float:\n        return float(text)\n")
    spec = importlib.util.spec_from_file_location("hidden_scores", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["hidden_scores"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        pickled = target_of(functools.partial(module.Score.__call__, None), "", name="score").pickled
    finally:
        del sys.modules["hidden_scores"]
    assert cloudpickle.loads(pickled)("2") == 2
