"""The import contracts cover every folder that exists: import-linter itself refuses to name one that does not."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

TESTED_EXTRAS = ("cluster", "data", "gateway", "lora", "tasks")
INSTALLED_ALONE = "smollm2"  # without its dependencies, after all others
REPOSITORY = Path(__file__).resolve().parents[2]
# The folders that plan, control and configure; they start in well under a second because they load no tensor library.
TORCH_FREE = {
    "config", "controller", "core", "dashboard", "deploy", "extensions", "guard", "hardware", "planner", "pool",
    "robots", "sim", "telemetry", "weights",
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


def test_the_images_hold_the_versions_of_the_default_lock_and_differ_in_the_build_of_torch() -> None:
    default, cpu, cuda = (_pins(name) for name in ("default", "image-cpu", "image-cuda"))
    torch = default["torch"]

    assert (cpu.pop("torch"), cuda.pop("torch")) == (f"{torch}+cpu", f"={torch}")
    assert {name for name in cuda if name not in cpu} == {
        name for name in cuda if name.startswith(("triton", "cuda-", "nvidia-"))
    }
    assert cpu.items() <= cuda.items()
    assert {name: version for name, version in cpu.items() if default.get(name, version) != version} == {}


def _pins(lock: str) -> dict[str, str]:
    lines = (REPOSITORY / "locks" / f"{lock}.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if not line.startswith("#"))


def _docstrings(tree: ast.AST) -> set[int]:
    """Identities of the nodes of texts that stand alone: documentation."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def test_no_message_names_a_page_that_is_not_installed() -> None:
    named = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in sorted((REPOSITORY / "src").rglob("*.py"))
        if "docs/" in (text := path.read_text(encoding="utf-8"))
        for tree in [ast.parse(text)]
        for documentation in [_docstrings(tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "docs/" in node.value
        if id(node) not in documentation
    ]
    assert named == []


def test_modules_of_the_api_use_no_private_names_of_others() -> None:
    private = [
        f"{path.name}: {node.module}.{name.name}"
        for path in sorted((REPOSITORY / "src/tidemill/api").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name.startswith("_")
    ]
    assert private == []
