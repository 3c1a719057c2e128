"""A GPU that does not exist: the "meta" device, whose tensors have shapes and no numbers, and which says it is a GPU.

`.item()`, `.tolist()`, `nonzero()`, a branch on a tensor and a copy to the host raise there. (FakeTensorMode's "cuda"
has no backward pass in a build of torch for CPUs.) FlexAttention's compiled call is replaced by dense attention, and
the Triton kernels of the output layer by functions that only allocate their results.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tidemill.kernels.head import HeadStatistics, HeadTokens
from tidemill.models import fused_logprobs, token_logprobs, transfer, tree_attention

GPU = torch.device("meta")


class Operations(TorchDispatchMode):
    """Counts operations, which on a GPU are launches, and refuses copies to it that the host waits for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        if func is torch.ops.aten._to_copy.default and args[0].device != result.device:
            assert (kwargs or {}).get("non_blocking"), f"the host waits for a copy of {tuple(args[0].shape)}"
        return result


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the paths of a GPU on the meta device until the test ends."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return (query @ key.transpose(2, 3) * scale).softmax(-1) @ value

    def head_statistics(logits: Tensor, first: int, tokens: HeadTokens, out: HeadStatistics, **_: Any) -> None:
        out.normalizers[first : first + len(logits)] = logits.logsumexp(-1)

    def head_gradient(logits: Tensor, *_: Any, dtype: torch.dtype, **__: Any) -> Tensor:
        return torch.empty_like(logits, dtype=dtype)

    def on_device(array: Any, device: torch.device) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    # The meta device has no autocast.
    autocast, enabled = torch.autocast, torch.is_autocast_enabled
    monkeypatch.setattr(torch, "autocast", lambda device_type, *args, **kwargs: autocast("cpu", *args, **kwargs))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: enabled("cpu"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.device == GPU), raising=False)
    monkeypatch.setattr(tree_attention, "_compiled", lambda: attend)
    monkeypatch.setattr(fused_logprobs, "head_statistics", head_statistics)
    monkeypatch.setattr(fused_logprobs, "head_gradient", head_gradient)
    monkeypatch.setattr(token_logprobs, "missing", lambda device: None)
    real = transfer.on_device
    for module in [each for name, each in sys.modules.items() if name.startswith("tidemill.")]:
        if getattr(module, "on_device", None) is real:
            monkeypatch.setattr(module, "on_device", on_device)
