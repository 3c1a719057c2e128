from __future__ import annotations

import pytest
import torch

from tidemill.kernels import availability

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "interpreter", "absent", "capability", "reason"),
    [
        (CUDA, "0", "", (9, 0), None),
        (CUDA, "0", "", (8, 0), None),
        (CUDA, "0", "", (7, 5), "compute capability 7.5, and Triton's kernels need 8.0"),
        (CUDA, "0", "triton", (9, 0), "Triton is not installed"),
        (CUDA, "0", "compiler", (9, 0), "needs a C compiler"),
        (CPU, "0", "", None, "no kernels for a CPU"),
        (CPU, "1", "", None, None),
        (CPU, "1", "triton", None, "Triton is not installed"),
    ],
)
def test_why_kernels_cannot_run(
    device: torch.device,
    interpreter: str,
    absent: str,
    capability: tuple[int, int] | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(availability, "find_spec", lambda name: None if name == absent else object())
    monkeypatch.setattr("shutil.which", lambda name: None if absent == "compiler" else f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    missing = availability.missing(device)
    assert missing is None if reason is None else reason in str(missing)
