"""`tidemill env`: what it lists and describes, and names that it does not know."""

from __future__ import annotations

import json

from tests.commands import run_here
from tidemill.agents.adapters.install import NAMES


def test_all_environments_are_listed() -> None:
    found = json.loads(run_here("env", "list", "--json").out)["environments"]

    assert {"guess", "calculator", "python", *NAMES} == {each["name"] for each in found}
    assert all(each["about"] for each in found)


def test_the_parameters_of_an_environment_are_described() -> None:
    shown = run_here("env", "show", "mcp")

    assert "command = (required)" in shown.out
    assert "server_python: interpreter" in shown.out
    assert json.loads(run_here("env", "show", "guess", "--json").out)["params"] == {"guesses": 4, "careful": 0.2}


def test_unknown_names_are_refused() -> None:
    for command in ("show", "install"):
        refused = run_here("env", command, "textarean")

        assert refused.code == 2
        assert "did you mean textarena" in refused.err
