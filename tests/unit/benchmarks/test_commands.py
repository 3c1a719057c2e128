"""`make bench` measures every published result again."""

from __future__ import annotations

import json

from benchmarks.__main__ import COMMANDS
from benchmarks.measuring import RESULTS
from benchmarks.origin import PACKAGES, origin_of
from benchmarks.simulator.__main__ import PARTS

ELSEWHERE = {"benchmarks.engine_parity"}
"""Needs vLLM."""


def test_every_published_result_has_a_command() -> None:
    modules = {f"benchmarks.{command.split()[0]}" for command in COMMANDS} | {
        f"benchmarks.simulator.{name}" for name in PARTS
    }
    for path in sorted(RESULTS.glob("*.json")):
        if not path.stem.endswith(("-quick", "-partial")):
            module = origin_of(path, json.loads(path.read_bytes()))["module"]
            assert module in modules | ELSEWHERE, f"{path.name} is of {module}"


def test_every_command_exists() -> None:
    for command in COMMANDS:
        place = PACKAGES["benchmarks"].joinpath(*command.split()[0].split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), command
