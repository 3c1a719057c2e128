"""The import contracts cover every folder that exists: import-linter itself refuses to name one that does not."""

from __future__ import annotations

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# The folders that plan, control and configure; they start in well under a second because they load no tensor library.
TORCH_FREE = {
    "config", "controller", "core", "dashboard", "extensions", "hardware", "planner", "pool", "sim", "telemetry",
    "weights",
}  # fmt: skip


def test_every_torch_free_folder_is_in_the_forbidden_contract() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidden = next(contract for contract in contracts if contract["type"] == "forbidden")
    covered = {name.removeprefix("tidemill.") for name in forbidden["source_modules"]}
    existing = {init.parent.name for init in (REPOSITORY / "src" / "tidemill").glob("*/__init__.py")}

    assert covered == TORCH_FREE & existing
    assert set(forbidden["forbidden_modules"]) == {"torch", "ray", "vllm", "transformers"}


def test_the_pins_of_the_project_and_of_the_constraints_agree() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    constraints = dict(
        line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = [*project["dependencies"], *(pin for extra in project["optional-dependencies"].values() for pin in extra)]

    assert len(pins) > 20
    for pin in pins:
        name, version = pin.split("==")
        assert constraints[name.split("[")[0].lower().replace("_", "-")] == version, pin
