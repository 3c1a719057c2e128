from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.triton_compiler import record
from tidemill.kernels import head
from tidemill.kernels.head import HeadStatistics, HeadTokens, head_gradient, head_statistics

ROWS, TOKENS = 3, 5


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_and_spill_no_registers(
    capability: int, softcap: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = record(monkeypatch, head, "_statistics", "_gradient")
    logits, grads = torch.empty(ROWS, 151_936), torch.empty(TOKENS)
    tokens = HeadTokens(torch.empty(ROWS + 1).long(), torch.empty(TOKENS).long())
    found = HeadStatistics.empty(ROWS, TOKENS, torch.device("cpu"))
    head_statistics(logits, 0, tokens, found, temperature=0.7, softcap=softcap)
    for dtype, of_entropy in ((torch.bfloat16, grads), (torch.float32, None)):
        head_gradient(
            logits, 0, tokens, found.normalizers, found.entropy, grads, of_entropy,
            temperature=0.7, softcap=softcap, dtype=dtype,
        )  # fmt: skip

    assert [launch.grid for launch in launches] == [(3,), (3, 75), (3, 75)]  # 151936 / 2048 = 74.2
    for launch in launches:
        compiled = launch.compile(capability)
        assert compiled.usage(tmp_path)["STACK"] == 0
        assert "ld.global.v4" in compiled.ptx  # logits, 16 bytes at once
