from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.triton_compiler import record
from tidemill.kernels import decode
from tidemill.kernels.decode import DecodeLayout


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "repeats", "window"),
    [
        (80, torch.bfloat16, 128, 4, None),
        (90, torch.bfloat16, 128, 4, None),
        (90, torch.bfloat16, 64, 7, 4096),
        (90, torch.float32, 128, 2, None),
        (90, torch.float32, 16, 1, None),
    ],
)
def test_the_kernels_compile_and_spill_no_registers(
    capability: int,
    dtype: torch.dtype,
    width: int,
    repeats: int,
    window: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = record(monkeypatch, decode, "_attend_part", "_combine_parts")
    cache = torch.empty(4, 2, 4096, width, dtype=dtype)
    whole = torch.zeros(3, dtype=torch.int32)
    layout = DecodeLayout(
        rows=whole.long(), lengths=whole, prefix_rows=whole.long(), prefix_lengths=whole, group_first=whole,
        group_size=whole,
    )  # fmt: skip
    query = torch.empty(3, 2 * repeats, width, dtype=dtype)
    decode.decode(query, cache, cache, layout, scaling=1.0, window=window)

    assert [launch.grid for launch in launches] == [(8, 2, 3), (3, 2 * repeats)]
    compiled = [launch.compile(capability) for launch in launches]
    assert [each.usage(tmp_path)["STACK"] for each in compiled] == [0, 0]
    assert 3 * compiled[0].usage(tmp_path)["REG"] * 128 <= 65536  # three programs on a multiprocessor
    assert 3 * compiled[0].shared_bytes <= 163 << 10  # of an A100
    assert "cp.async.cg.shared.global" in compiled[0].ptx  # keys and values, 16 bytes at once
    assert ("mma.sync" in compiled[0].ptx) == (dtype == torch.bfloat16)
