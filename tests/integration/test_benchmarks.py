"""The generation benchmark runs, on a tiny shape, and its check of the logprobs passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_generation_benchmark_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.generation", "--quick", "--only", "geometric"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads((REPOSITORY / "benchmarks" / "results" / "generation-quick.json").read_text())
    assert len(result["cases"]) == 1
    for case in result["cases"]:
        assert case["details"]["completion_tokens"] > 0
        assert 0 <= case["details"]["largest_logprob_difference"] <= 1e-4
        assert case["details"]["logprobs_checked"] > 0
