"""`eval` and `generate` on a run directory whose run saves and deletes checkpoints continuously."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.conftest import REPOSITORY
from tidemill.config.model import ModelConfig
from tidemill.models.catalog import resolve
from tidemill.trainer.checkpoint_store import CheckpointStore

ALPHABET = "0123456789+=\n"
SMALL = (
    "--task.kind=arithmetic", "--task.digits=1", "--task.shots=0", "--trainer.threads=1", "--eval.prompts=4",
    "--sampling.max_new_tokens=3",
)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, session_cache: Path) -> Iterator[Path]:
    """A run directory in which another process writes checkpoints as fast as the disk allows."""
    model = resolve(ModelConfig.model_validate({"source": "char", "char": {"alphabet": ALPHABET}}), progress=print)
    root = tmp_path / "run" / "checkpoints"
    command = [sys.executable, "-m", "tests.integration.endless_retention", str(model), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "step 1\n"
            yield root.parent
            assert writer.poll() is None, "it still writes"
        finally:
            writer.kill()
    assert CheckpointStore(root, keep_last=1).latest().checkpoint is not None


def test_eval_and_generate_while_checkpoints_are_deleted(run_dir: Path) -> None:
    newest = set[int]()
    for _ in range(4):
        generated = run_here("generate", "1+1=", "--checkpoint", str(run_dir), *SMALL, "--json")
        assert generated.code == 0, generated.err
        compared = run_here("eval", "--checkpoint", str(run_dir), "--compare", str(run_dir), *SMALL, "--json")
        assert compared.code == 0, compared.err
        assert compared.data["compared_with"]["weights_digest"] == compared.data["weights_digest"]
        newest |= {int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*")}
    assert len(newest) > 4, "checkpoints were written and deleted meanwhile"
