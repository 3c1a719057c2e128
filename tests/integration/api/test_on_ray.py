"""Functions of a session on Ray: the trainer's process gets them by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tidemill as tm

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(300), pytest.mark.slow]


def test_session_functions_run_in_the_trainers_process(tmp_path: Path) -> None:
    scale = 2.0

    @tm.advantage
    def scaled(rewards: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return scale * (rewards - rewards[valid].mean()) * valid

    @tm.loss_term
    def zero(logprobs: torch.Tensor) -> torch.Tensor:
        return 0.0 * logprobs

    overrides: dict[str, Any] = {"trainer.steps": 2, "eval.every_steps": 0, "pool.kind": "static"}
    run = tm.train("ray-local", advantage=scaled, loss_terms=[zero], overrides=overrides, run_dir=tmp_path / "run")
    assert run.finished
    assert run.config.algorithm.advantage == "session:scaled"
