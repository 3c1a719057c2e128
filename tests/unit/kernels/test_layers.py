from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.triton_compiler import record
from tests.triton_interpreter import run_cases
from tidemill.kernels import layers


@pytest.mark.timeout(300)
def test_layers_in_the_interpreter() -> None:
    run_cases(Path(__file__).with_name("layers_cases.py"))


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden"),
    [(80, torch.bfloat16, 1024), (90, torch.bfloat16, 1024), (90, torch.bfloat16, 8192), (90, torch.float32, 2560)],
)
def test_the_kernels_compile_and_spill_no_registers(
    capability: int, dtype: torch.dtype, hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = record(monkeypatch, layers, "_rms_norm", "_rotate", "_swiglu")
    states, heads = torch.empty(1, 3, hidden, dtype=dtype), torch.empty(1, 3, 6, 128, dtype=dtype)
    layers.rms_norm(states, torch.empty(hidden, dtype=dtype), 1e-6)
    layers.rms_norm(heads, torch.empty(128, dtype=dtype), 1e-6)
    query, key = heads.transpose(1, 2).split([4, 2], 1)
    layers.rotate(query, key, heads[:, :, 0].contiguous(), heads[:, :, 0].contiguous())
    layers.swiglu(states, states)

    # 3 rows; 3 rows of 6 heads; 3 tokens, 4 + 2 heads; 3 rows in blocks of 1024
    assert [launch.grid for launch in launches] == [(3,), (18,), (3, 6), (-(-3 * hidden // 1024),)]
    norm, *_, rotary, product = [launch.compile(capability) for launch in launches]
    for compiled in (norm, rotary, product):
        assert compiled.usage(tmp_path)["STACK"] == 0
    for compiled in (norm, product):
        assert "ld.global.v4" in compiled.ptx  # 16 bytes at once
    assert "fma.rn.f32" not in rotary.ptx  # both products are rounded, as torch rounds them
