"""The scripts for GPUs run on a CPU with tiny sizes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import pytest
import torch

from benchmarks import measuring
from benchmarks.gpu import engine, matmul, runs, train_step, tree_attention
from benchmarks.gpu.check_rows import Skip
from benchmarks.gpu.device_peaks import decoding_bytes
from benchmarks.gpu.qwen_shapes import SHAPES, TINY, matrix_parameters, random_model
from benchmarks.gpu.rows import Rows
from tidemill.hardware.gpu_catalog import Catalog, load_catalog
from tidemill.hardware.measured_rows import TrainStepRow, read_rows


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tree_attention_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["tree_attention", "--device", "cpu", "--tiny"])
    assert tree_attention.main() == 0
    (record,) = json.loads((tmp_path / "gpu_tree_attention-quick.json").read_text())["trees"]
    assert record["nodes"] == 60
    assert record["output_difference"] < 1e-6


def rows_of(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of a script, run on a CPU with tiny sizes."""
    monkeypatch.setattr(measuring, "RESULTS", folder)
    name = script.__name__.rsplit(".", 1)[-1]
    monkeypatch.setattr("sys.argv", [name, "--device", "cpu", "--tiny"])
    assert script.main() == 0
    rows: list[dict[str, Any]] = json.loads((folder / f"gpu_{name}-quick.json").read_text())["rows"]
    return rows


def test_matrix_products_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(matmul, tmp_path, monkeypatch)

    *products, memory = rows
    assert [row["dtype"] for row in products] == ["bf16", "fp32"]
    assert all(row["tflops"] > 0 for row in products)
    assert memory["copy_tb_per_s"] > 0 and memory["read_tb_per_s"] > 0


def test_bytes_of_decoding_by_hand() -> None:
    # 2 layers of 2 heads of 16: a token has 2 * 2 * 2 * 16 keys and values of 2 bytes. 3 steps read the weights and two
    # prompts of 12; six samples have 0, 1 and 2 tokens of their own.
    token, weights = 256, 2 * matrix_parameters(TINY)
    assert decoding_bytes(TINY, 2, 3, 12, 3) == 3 * weights + token * (3 * 2 * 12 + 6 * (0 + 1 + 2))


def test_training_steps_compute_the_same_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["way"]: row for row in rows_of(train_step, tmp_path, monkeypatch)}

    assert {row["status"] for row in rows.values()} == {"measured"}
    assert rows["shared"]["computed_tokens"] == 2 * (12 + 3 * 8)
    assert rows["unshared"]["computed_tokens"] == rows["padded"]["computed_tokens"] == 2 * 3 * 20
    for way in ("unshared", "padded"):
        assert rows[way]["mean_logprob"] == pytest.approx(rows["shared"]["mean_logprob"], abs=1e-5)


@pytest.mark.slow  # test_standard_runs.py compares runs
def test_whole_runs_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUNS", {name: runs.RUNS[name] for name in ("embedded, colocated", "shards, offload")})
    colocated, offload = rows_of(runs, tmp_path, monkeypatch)

    assert (colocated["status"], colocated["same_weights"]) == ("measured", True)
    assert (offload["status"], offload["why"]) == ("skipped", "offload needs GPUs")


def test_engines_generate_and_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["engine"]: row for row in rows_of(engine, tmp_path, monkeypatch)}

    assert rows["embedded"]["tokens"] == 2 * 3 * 8
    assert rows["embedded"]["swap_s"] > 0
    assert rows["transformers"]["tokens"] == 2 * 3 * 8
    assert rows["embedded"]["share_of_bound"] == pytest.approx(
        rows["embedded"]["bound_s"] / rows["embedded"]["seconds"]
    )
    for name in ("vllm", "vllm alone"):
        assert rows[name]["status"] == "skipped"
        assert "vllm" in rows[name]["why"]


def test_rows_have_the_fields_that_planning_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, engines = rows_of(train_step, tmp_path, monkeypatch), rows_of(engine, tmp_path, monkeypatch)
    cpu = msgspec.structs.replace(load_catalog().gpu("h100"), name="cpu")
    catalog = Catalog(gpus={"cpu": cpu}, machines={})
    (step,) = read_rows(tmp_path / "gpu_train_step-quick.json", catalog)
    (generation,) = read_rows(tmp_path / "gpu_engine-quick.json", catalog)
    with torch.device("meta"):
        model = random_model(TINY, torch.device("meta"), torch.bfloat16)
    assert step.shape.parameters == generation.shape.parameters == model.num_parameters()
    for found in (step, generation):
        work = found.rollout
        assert (work.samples, work.group_size, work.prompt_tokens, work.lengths) == (2 * 3, 3, 12, (8,))
    assert (step.kind, generation.kind) == ("shared", "embedded")
    assert isinstance(step.row, TrainStepRow)
    assert not step.row.recomputes  # on a CPU
    assert steps[0]["computed_tokens"] == step.rollout.tokens + 2 * 12
    assert generation.row.seconds == pytest.approx(generation.rollout.tokens / engines[0]["tokens_per_s"])


def test_missing_packages_and_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    rows = Rows("gpu_some", argparse.Namespace(device="cpu", tiny=True))

    def missing() -> dict[str, Any]:
        raise ImportError("no vllm")

    def fails() -> dict[str, Any]:
        raise RuntimeError("out of memory\nmore")

    rows.measure("a", missing)
    assert rows.finish() == 0
    rows.measure("b", fails)
    rows.measure("c", lambda: {"figure": 1})

    found = json.loads((tmp_path / "gpu_some-quick.json").read_text())["rows"]
    assert [(row["status"], row.get("why")) for row in found] == [
        ("skipped", "no vllm"),
        ("failed", "RuntimeError: out of memory"),
        ("measured", None),
    ]
    assert rows.finish() == 1


def test_a_row_that_cannot_be_written_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path / "missing" / "results")
    rows = Rows("gpu_some", argparse.Namespace(device="cpu", tiny=True))
    assert rows.measure("a", lambda: {"figure": 1})["status"] == "measured"
    assert "gpu_some-quick was not written" in capsys.readouterr().err
    assert rows.finish() == 1
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    rows.measure("b", lambda: {"figure": 2})
    assert len(json.loads((tmp_path / "gpu_some-quick.json").read_text())["rows"]) == 2
    assert rows.finish() == 0


@pytest.mark.parametrize("name", [name for name, (_, arguments) in runs.RUNS.items() if {"vllm", "ray"} & {*arguments}])
def test_runs_without_their_packages_are_skipped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    gpus, arguments = runs.RUNS[name]
    with pytest.raises(Skip, match="is not installed"):
        runs.twice(tmp_path, name, gpus, arguments, cuda=False, tiny=True)


def test_rounded_weights_leave_rotary_frequencies_exact() -> None:
    model = random_model(TINY, torch.device("cpu"), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_swap_ends_with_the_first_token() -> None:
    polled: list[float] = []

    class Engine:
        def load(self, version: object) -> None: ...
        def submit(self, requests: object) -> None: ...
        def abort(self, samples: object) -> None: ...
        def poll(self, deadline_s: float) -> list[object]:
            polled.append(deadline_s)
            return [object()]

    (request,) = engine.requests(TINY, 1, 1, 4, 64)
    engine.swap(cast(Any, Engine()), lambda: None, request, torch.device("cpu"))
    assert polled == [0.0]


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.6), ("1.7B", 1.7), ("4B", 4.0), ("8B", 8.2)])
def test_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = random_model(shape, torch.device("meta"), torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    assert parameters == pytest.approx(billions * 1e9, rel=0.03)
    embedding = shape.vocabulary * shape.hidden
    assert matrix_parameters(shape) == pytest.approx(parameters - (0 if shape.tied else embedding), rel=0.001)


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tree_attention"])
    assert tree_attention.main() == 2
    assert "no GPU" in capsys.readouterr().err
