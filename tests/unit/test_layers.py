"""The import contracts cover every folder that exists: import-linter itself refuses to name one that does not."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

TESTED_EXTRAS = ("cluster", "data", "gateway", "lora", "tasks")
INSTALLED_ALONE = "smollm2"  # without its dependencies, after all others
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


def test_the_locks_are_within_the_ranges_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = [*project["dependencies"], *(each for name in TESTED_EXTRAS for each in extras[name])]
    locked = [each for name, extra in extras.items() if name != INSTALLED_ALONE for each in extra]
    every = [*project["dependencies"], *locked]
    for lock, wanted in (("default", every), ("lowest", runtime), ("highest", runtime)):
        lines = (REPOSITORY / "locks" / f"{lock}.txt").read_text().splitlines()
        versions = dict(line.split("==") for line in lines if "==" in line)
        for requirement in map(Requirement, wanted):
            version = versions[requirement.name.lower().replace("_", "-")]
            assert version in requirement.specifier, (lock, str(requirement))
    assert len(every) > 20
