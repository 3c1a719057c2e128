"""Copies through two buffers; the CPU stands in for the GPU, and an event checks when a buffer is written to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tidemill.models.host_copies import Slot, copy_tensors, copy_through

CPU = torch.device("cpu")


class SlowGpu:
    """The GPU is done with a buffer only when its event has been waited for."""

    def __init__(self, buffer: Tensor, log: list[str], name: str) -> None:
        self._buffer, self._log, self._name = buffer, log, name
        self._in_use: Tensor | None = None

    def record(self) -> None:
        assert self._in_use is None, "used again before it was waited for"
        self._in_use = self._buffer.clone()
        self._log.append(f"start {self._name}")

    def synchronize(self) -> None:
        if self._in_use is not None:
            assert torch.equal(self._buffer, self._in_use), "written to while the GPU used it"
            self._log.append(f"end {self._name}")
        self._in_use = None


def slots(nbytes: int, log: list[str]) -> list[Slot]:
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    return [Slot(buffer, SlowGpu(buffer, log, name)) for buffer, name in zip(buffers, "ab", strict=True)]


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=4),
    st.sampled_from([8, 24, 64, 4096]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_every_tensor_arrives_in_the_dtype_of_its_target(
    shapes: list[list[int]], nbytes: int, source: torch.dtype, target: torch.dtype, download: bool
) -> None:
    sources = [torch.randn(shape).to(source) for shape in shapes]
    targets = [torch.full(shape, torch.nan, dtype=target) for shape in shapes]
    copy_through(slots(nbytes, []), zip(targets, sources, strict=True), download=download)
    for found, wanted in zip(targets, sources, strict=True):
        assert torch.equal(found, wanted.to(target))


@pytest.mark.parametrize("download", [False, True])
def test_one_buffer_is_filled_while_the_other_travels(download: bool) -> None:
    log: list[str] = []
    source, target = torch.arange(10, dtype=torch.float32), torch.zeros(10)
    copy_through(slots(16, log), [(target, source)], download=download)
    assert torch.equal(target, source)  # 4 + 4 + 2 numbers
    assert log == ["start a", "start b", "end a", "start a", "end a", "end b"]


def test_a_source_may_be_strided() -> None:
    source, target = torch.arange(12.0).view(3, 4).t(), torch.zeros(4, 3)
    copy_through(slots(20, []), [(target, source)], download=True)
    assert torch.equal(target, source)


def test_without_a_gpu_tensors_are_copied_at_once() -> None:
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    copy_tensors([(target, torch.ones(2, 3))], CPU)
    assert torch.equal(target, torch.ones(2, 3, dtype=torch.bfloat16))
