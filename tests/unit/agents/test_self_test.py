"""The self-test at the start of a run, and how environments are found."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import agent_environments as envs
from tests.unit.agents.test_pool import open_pool
from tidemill.agents.builtin import Calculator, Guess
from tidemill.agents.find import find_environment
from tidemill.agents.self_test import self_test
from tidemill.config.agent import EnvConfig
from tidemill.core.errors import UserError
from tidemill.extensions.registry import resolve


@pytest.mark.parametrize("environment", [envs.Counter, envs.OnceCounter, Guess, Calculator])
async def test_deterministic_environments_pass(environment: type) -> None:
    async with open_pool(environment) as pool:
        tasks = [{"seed": 3, "prompt": "x", "answer": "1"}, {"seed": 4, "prompt": "y", "answer": "1"}]
        assert await self_test(pool, tasks) == ""


async def test_a_method_with_a_wrong_result_is_refused() -> None:
    async with open_pool(envs.Tools) as pool:
        with pytest.raises(UserError, match=r"Tools\.wrong returned int, and text is needed"):
            await self_test(pool, [{"seed": 3, "prompt": "x", "answer": "1"}])


async def test_others_are_named() -> None:
    async with open_pool(envs.Moody) as pool:
        warning = await self_test(pool, [{"seed": 3}, {"seed": 4}])
    assert "the environment Moody is not deterministic: two runs of seed 3 with the same actions gave" in warning
    assert "'1 (reward 0)' and '2 (reward 0)'" in warning
    async with open_pool(envs.Broken) as pool:
        with pytest.raises(UserError, match=r"Broken\.reset raised ConnectionError: no database"):
            await self_test(pool, [{"seed": 3}])


def test_environments_are_found_by_name_and_identified_by_their_file(tmp_path: Path) -> None:
    found = find_environment(EnvConfig(name="guess", params={"guesses": 5}))
    assert (found.function, bool(found.path)) == (Guess, True)
    assert find_environment(EnvConfig(name="calculator")).function is Calculator
    file = tmp_path / "mine.py"
    text = Path(envs.__file__).read_text()
    file.write_text(text)
    one = resolve(f"{file}:Counter", "environment", where="env.name")
    file.write_text(text + "\n")
    assert resolve(f"{file}:Counter", "environment", where="env.name").identity != one.identity


@pytest.mark.parametrize(
    ("methods", "what"),
    [
        ("    def step(action): return Step()\n", r"Wrong\.step: .*\n  write def step\(self, action\)"),
        ("    def step(self, guess): return Step()\n", r"Wrong\.step: .*\n  write def step\(self, action\)"),
        ("    def step(self): return Step()\n", r"Wrong\.step: .*\n  write def step\(self, action\)"),
        ("    def reset(self): return ''\n", r"Wrong\.reset: .*\n  write def reset\(self, task, seed\)"),
        ("    def demonstrate(): return ''\n", r"Wrong\.demonstrate: .*\n  write def demonstrate\(self\)"),
        ("    @staticmethod\n    def step(action): return Step()\n", ""),
        ("    @classmethod\n    async def step(cls, action, more=1): return Step()\n", ""),
    ],
)
def test_a_method_that_does_not_take_its_arguments_is_refused(methods: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    base = "    def reset(self, task, seed): return ''\n    def step(self, action): return Step()\n"
    head = f"from tidemill import Environment, Step\nclass Base(Environment):\n{base}"
    file.write_text(f"{head}class Wrong(Base):\n{methods}")
    with pytest.raises(UserError, match=what) if what else nullcontext():
        find_environment(EnvConfig(name=f"{file}:Wrong"))


@pytest.mark.parametrize(
    ("name", "params", "what"),
    [
        ("guess", {"gueses": 5}, "gueses"),
        (f"{envs.__file__}:Literal", {}, "is not an environment"),
        (f"{envs.__file__}:ToolEnvironment", {}, "has no tools"),
        (f"{envs.__file__}:Environment", {}, "has no method step"),
        (f"{envs.__file__}:Missing", {}, "no function Missing"),
    ],
)
def test_what_is_no_environment_is_refused(name: str, params: dict[str, int], what: str) -> None:
    with pytest.raises(UserError, match=what):
        find_environment(EnvConfig(name=name, params=params))
