from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.triton_compiler import record
from tidemill.kernels import draw


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_and_spill_no_registers(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = record(monkeypatch, draw, "_draw_block", "_combine")
    draw.draw_tokens(torch.empty(3, 151_936), torch.empty(3).int(), torch.empty(3).long(), torch.empty(3))

    assert [launch.grid for launch in launches] == [(3, 75), (3,)]  # 151936 / 2048 = 74.2
    for launch in launches:
        compiled = launch.compile(capability)
        assert compiled.usage(tmp_path)["STACK"] == 0
    assert "ld.global.v4" in launches[0].compile(capability).ptx  # logits, 16 bytes at once
