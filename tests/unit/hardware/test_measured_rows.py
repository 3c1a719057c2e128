"""Efficiencies are found again in rows that were made with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gpu_rows import QWEN3, engine_row, train_step_row, write_rows
from tests.unit.hardware.test_engine_profile import GPU
from tidemill.core.errors import UserError
from tidemill.hardware.completion_lengths import log_normal_of_mean
from tidemill.hardware.engine_profile import EngineEfficiency, engine_profile, generation_s, rollout_of
from tidemill.hardware.gpu_catalog import Catalog, load_catalog
from tidemill.hardware.measured_rows import Efficiencies, gpu_of_device, measured_efficiencies
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.model_shape import shape_of_parameters

LARGE = msgspec.structs.replace(GPU, memory_bytes=80e9)
CATALOG = Catalog(gpus={"round": LARGE, "other": msgspec.structs.replace(LARGE, name="other")}, machines={})
SHAPE = shape_of_config(QWEN3, source="")
BATCH = rollout_of(log_normal_of_mean(512, sigma=0, limit=512), samples=256, group_size=8, prompt_tokens=512)


def found(file: Path, **given: Any) -> Efficiencies:
    return measured_efficiencies([file], CATALOG, gpus=[LARGE], **{"shape": SHAPE, **given})[0]["round"]


def test_a_steps_compute_efficiency_by_hand(tmp_path: Path) -> None:
    # 4 prompts and 32 completions of 512 tokens: 18,432 tokens; 2 FLOPs per parameter, and 4 * 28 layers * 2048 for
    # each of 512 earlier tokens on average; 4 passes, because activations are computed twice. The update reads and
    # writes 16 bytes of a parameter at 0.7 TB/s, and takes 5 ms more.
    flops = 18_432 * 4 * (2 * SHAPE.parameters + 4 * 28 * 2048 * 512)
    update_s = 32 * SHAPE.parameters / 0.7e12 + 5e-3
    seconds = flops / (0.4 * 1e14) + update_s
    file = write_rows(tmp_path / "a.json", train_step_row(seconds), device="round")
    assert found(file).trainer.compute == pytest.approx(0.4)
    # without recomputation the same seconds are three passes
    file = write_rows(tmp_path / "a.json", train_step_row(seconds, recomputes=False), device="round")
    assert found(file).trainer.compute == pytest.approx(0.3)


@pytest.mark.parametrize(
    "true",
    [
        EngineEfficiency(bandwidth=0.4, compute=0.3),
        EngineEfficiency(bandwidth=0.96, compute=0.72),
        EngineEfficiency(bandwidth=1.0, compute=0.75, step_s=1e-3),  # 2 ms per step would need more than the peaks
    ],
)
@pytest.mark.parametrize("slots", [256, 64])
def test_an_engines_efficiencies_are_found_again(tmp_path: Path, true: EngineEfficiency, slots: int) -> None:
    seconds = generation_s(engine_profile(SHAPE, LARGE, slots=slots, efficiency=true), BATCH, 256)
    file = write_rows(tmp_path / "a.json", engine_row(seconds, slots=slots), device="round")
    engine = found(file).engine
    assert (engine.bandwidth, engine.compute) == pytest.approx((true.bandwidth, true.compute))
    assert engine.step_s == pytest.approx(true.step_s)


def test_the_nearest_measured_row_of_the_engine_is_used(tmp_path: Path) -> None:
    small = {"config": {**QWEN3, "num_hidden_layers": 7}, "model": "small"}
    file = write_rows(
        tmp_path / "a.json",
        train_step_row(90, **small),
        train_step_row(91, way="unshared"),
        train_step_row(92, lora=True),
        {"row": "train_step", "way": "shared", "lora": False, "status": "failed", "why": "out of memory"},
        train_step_row(93),
        engine_row(94, engine="embedded"),
        engine_row(95, engine="vllm alone"),
        engine_row(96, **small),
        device="round",
    )
    used = found(file)
    assert used.trainer.source == f"measured: {file}, round, row 5 (1.7B, shared)"
    assert used.engine.source == f"measured: {file}, round, row 8 (small, vllm)"
    assert found(file, engines=["embedded"]).engine.source == f"measured: {file}, round, row 6 (1.7B, embedded)"
    few = found(file, shape=shape_of_parameters(0.3e9))
    assert few.trainer.source == f"measured: {file}, round, row 1 (small, shared)"


def test_rows_of_other_gpus_and_missing_rows_are_reported(tmp_path: Path) -> None:
    own = write_rows(tmp_path / "own.json", train_step_row(20), device="Round")
    other = write_rows(tmp_path / "other.json", engine_row(20), device="Other")
    efficiencies, lines = measured_efficiencies([own, other], CATALOG, shape=SHAPE, gpus=[LARGE, LARGE])
    assert list(efficiencies) == ["round"]
    assert efficiencies["round"].engine == EngineEfficiency(source="assumed (no measured row of vllm or embedded)")
    training, engines, unused = lines
    assert training.endswith(f"% of peak FLOP/s, measured: {own}, Round, row 1 (1.7B, shared)")
    assert engines == (
        "round: engines at 80 % of bandwidth, 60 % of peak FLOP/s, 2 ms per step, assumed (no measured row of vllm or "
        "embedded)"
    )
    assert unused == f"{other} is not used: its rows are of other, the machines have round"
    assert measured_efficiencies([], CATALOG, shape=SHAPE, gpus=[LARGE]) == ({}, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a file of measured rows: "),
        ("[1]", "is not a file of measured rows: Expected `object`"),
        ('{"device": "round", "cases": []}', "missing required field `rows`"),
        ('{"device": "round", "rows": []}', "has no measured row of a training step"),
        ('{"device": "round", "rows": [{"row": "matmul", "status": "measured"}]}', "has no measured row"),
        ('{"device": "round", "rows": [{"row": "engine", "engine": "vllm", "status": "skipped"}]}', "no measured row"),
        ('{"device": "cpu", "rows": []}', "the device 'cpu' is no GPU of the catalogue"),
        (
            '{"device": "round", "rows": [{"row": "engine", "engine": "vllm", "status": "measured"}]}',
            "row 1: Object missing required field `model`",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as caught:
        found(tmp_path / "a.json")
    assert said in str(caught.value)
    assert caught.value.where.startswith(str(tmp_path / "a.json"))
    assert caught.value.hint


def test_a_missing_file_and_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        found(tmp_path / "none.json")
    (tmp_path / "a.json").write_bytes(b'{"device": "\xff"}')
    with pytest.raises(UserError, match="is not a file of measured rows"):
        found(tmp_path / "a.json")


@pytest.mark.parametrize("row", [train_step_row(1e-3), engine_row(1e-3)])
def test_rows_faster_than_the_peaks_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    file = write_rows(tmp_path / "a.json", row, device="round")
    with pytest.raises(UserError, match=r"row 1 .* took 0.001 s; the cost model of round allows") as caught:
        found(file)
    assert "measure a larger model" in caught.value.hint


def test_a_step_bound_by_launches_is_refused(tmp_path: Path) -> None:
    # 32 samples of 2 tokens: 2 microbatches * 4 passes * 28 layers * 0.2 ms
    few = train_step_row(0.12, prompt_tokens=1, completion_tokens=1, microbatch_tokens=18)
    with pytest.raises(UserError, match="128 s or more"):
        found(write_rows(tmp_path / "a.json", few, device="round"))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6e", "tpu-v6e"),
    ],
)
def test_device_names_of_torch(device: str, name: str) -> None:
    assert gpu_of_device(device, load_catalog()).name == name


def test_every_gpu_of_the_catalogue_is_found_by_its_name() -> None:
    catalog = load_catalog()
    assert all(gpu_of_device(f"Maker {name.upper()}", catalog).name == name for name in catalog.gpus)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("NVIDIA H100 PCIe", "no GPU of the catalogue"),  # has lower peaks
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "no GPU of the catalogue"),
        ("NVIDIA GH200 480GB", "no GPU of the catalogue"),
        ("NVIDIA L40", "no GPU of the catalogue"),
        ("NVIDIA A100", "a100-80gb or a100-40gb"),
    ],
)
def test_other_devices_are_refused(device: str, said: str) -> None:
    with pytest.raises(UserError, match=f"the device '{device}' is {said}") as caught:
        gpu_of_device(device, load_catalog(), where="a.json")
    assert caught.value.where == "a.json"
    assert "known: h100-80gb, " in caught.value.hint


def test_a_users_gpu_with_more_words_is_preferred() -> None:
    catalog = load_catalog()
    own = msgspec.structs.replace(catalog.gpu("h100"), name="h100-pcie-80gb")
    more = Catalog(gpus={**catalog.gpus, own.name: own}, machines={})
    assert gpu_of_device("NVIDIA H100 PCIe", more).name == "h100-pcie-80gb"
    assert gpu_of_device("NVIDIA H100 80GB HBM3", more).name == "h100-80gb"
