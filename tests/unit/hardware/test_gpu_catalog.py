from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.errors import UserError
from tidemill.hardware.gpu_catalog import load_catalog

ROW = """
[gpus.mine]
title = "Mine"
memory_bytes = 10e9
bandwidth_bytes_per_s = 1e12
flops_per_s = { bf16 = 1e14 }
interconnect = "none"
link_bytes_per_s = 1e9
gpus_per_machine = 1
source = "me"
"""
MACHINE = '[machines.box]\ngpu = "mine"\ngpus = 2\nnetwork_gbit_per_s = 8\npriced = "now"\nprice_source = "me"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_built_in_gpus_and_machines() -> None:
    catalog = load_catalog()
    families = ("h100", "h200", "b200", "a100", "l40s", "mi300x", "tpu-v5p", "tpu-v6e")
    assert all(any(name.startswith(family) for name in catalog.gpus) for family in families)
    assert catalog.gpu("h100-80gb").memory_bytes == 80e9
    assert catalog.gpu("a100-40gb").memory_bytes == 40e9
    for machine in catalog.machines.values():
        assert catalog.gpu(machine.gpu).name == machine.gpu
        assert machine.price_source
        assert machine.priced
        assert machine.usd_per_hour or machine.preemptible_usd_per_hour
    # the published system's prices
    assert catalog.machine("rlboost-8xh100").usd_per_hour == 83.79
    assert catalog.machine("rlboost-2xh100").preemptible_usd_per_hour == 5.32
    assert catalog.machine("rlboost-2xh100").network_bytes_per_s == 6.25e9  # 50 Gbit/s


def test_links_are_slower_than_memory() -> None:
    for gpu in load_catalog().gpus.values():
        assert gpu.link_bytes_per_s < gpu.bandwidth_bytes_per_s
        assert gpu.flops_per_s.get("fp8", 1e18) > gpu.peak_flops("bf16") > gpu.flops_per_s.get("fp32", 0)


def test_names_and_aliases_in_any_case() -> None:
    assert load_catalog().gpu("H100").name == "h100-80gb"
    assert load_catalog().gpu("v5p").name == "tpu-v5p"


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("h100-80g", "h100-80gb"), ("a100-80", "a100-80gb"), ("mi300", "mi300x"), ("tpu-v6", "tpu-v6e"), ("l40", "l40s")],
)
def test_an_unknown_gpu_suggests_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"no GPU '{asked}'") as caught:
        load_catalog().gpu(asked)
    assert caught.value.hint.startswith(f"did you mean {meant}? known: h100-80gb, ")
    with pytest.raises(UserError, match="no machine"):
        load_catalog().machine("aws")


def test_a_user_file_adds_and_replaces_rows(tmp_path: Path) -> None:
    catalog = load_catalog(write(tmp_path, ROW + MACHINE + ROW.replace("gpus.mine", "gpus.h100-80gb")))
    assert catalog.gpu("mine").flops_per_s == {"bf16": 1e14}
    assert catalog.machine("box").gpus == 2
    assert catalog.gpu("h100-80gb").title == "Mine"
    assert catalog.gpu("h200").memory_bytes == 141e9
    assert load_catalog().gpu("h100").title != "Mine"


def test_a_dtype_without_flops(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no fp8 FLOP/s"):
        load_catalog(write(tmp_path, ROW)).gpu("mine").peak_flops("fp8")


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (ROW.replace("10e9", '"much"'), "own.toml: gpus.mine.memory_bytes", "expected `float`, got `str`"),
        (ROW.replace("10e9", "-1"), "own.toml: gpus.mine.memory_bytes", ">= 100000000"),
        (ROW.replace("10e9", "1e-300"), "own.toml: gpus.mine.memory_bytes", ">= 100000000"),
        (ROW.replace("10e9", "inf"), "own.toml: gpus.mine.memory_bytes", "<= 1000000000000000"),
        (ROW.replace("10e9", "nan"), "own.toml: gpus.mine.memory_bytes", ">= 100000000"),
        (ROW.replace("1e12", "1e-9"), "own.toml: gpus.mine.bandwidth_bytes_per_s", ">= 1000000"),
        (ROW.replace("1e9", "1e-9"), "own.toml: gpus.mine.link_bytes_per_s", ">= 1000000"),
        (ROW.replace("bf16 = 1e14", ""), "own.toml: gpus.mine.flops_per_s", "length >= 1"),
        (ROW.replace("1e14", "inf"), "own.toml: gpus.mine.flops_per_s", "<= 1e+18"),
        (ROW + MACHINE + "usd_per_hour = inf", "own.toml: machines.box.usd_per_hour", "<= 1000000"),
        (ROW.replace("memory_bytes = 10e9", ""), "own.toml: gpus.mine", "missing required field `memory_bytes`"),
        (ROW + "colour = 3", "own.toml: gpus.mine", "unknown field `colour`"),
        (ROW.replace("1e14", "0"), "own.toml: gpus.mine.flops_per_s", ">= 1000000000"),
        (MACHINE, "own.toml: machines.box.gpu", "no GPU 'mine'"),
        ("[gpu.x]", "own.toml", "unknown table 'gpu'"),
        ("gpus = 3", "own.toml: gpus", "not a table"),
        ("[gpus]\nx = 3", "own.toml: gpus.x", "not a table"),
        ("[gpus\n", "own.toml", "not valid TOML"),
        ("gpus = " + "1" * 5000, "own.toml", "not valid TOML"),
    ],
)
def test_a_catalogue_error_names_row_and_field(tmp_path: Path, text: str, where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        load_catalog(write(tmp_path, text))
    assert caught.value.where.endswith(where) or where in caught.value.where
    assert what in caught.value.what
    assert caught.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the catalogue"):
        load_catalog(tmp_path / "none.toml")
