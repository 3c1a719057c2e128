"""The scripts for GPUs run on a CPU with tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import measuring
from benchmarks.gpu import tree_attention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tree_attention_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["tree_attention", "--device", "cpu", "--tiny"])
    assert tree_attention.main() == 0
    (record,) = json.loads((tmp_path / "gpu_tree_attention-quick.json").read_text())["trees"]
    assert record["nodes"] == 60
    assert record["output_difference"] < 1e-6


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tree_attention"])
    assert tree_attention.main() == 2
    assert "no GPU" in capsys.readouterr().err
