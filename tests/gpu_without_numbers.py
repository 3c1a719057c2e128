"""Tensors on a GPU that does not exist: they have shapes and no numbers, so that reading a number raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)


class Operations(TorchDispatchMode):
    """Counts the operations that start a kernel, by name: not views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        without_kernels = ("empty", "unsafe_view", "prim::device", "promote_types")
        if not is_view and not any(name in func.name() for name in without_kernels):
            self.names[func.name()] += 1
        copied = func.name() in ("aten::_to_copy", "aten::copy_")
        tensors = [each for each in (*args, result) if isinstance(each, Tensor)]
        devices = {each.device for each in tensors if each.ndim or copied}
        assert len(devices) < 2, f"{func} copies between {devices}"
        return result


class _Indexing(TorchFunctionMode):
    """`tensor[...]`, `copy_` and `contiguous` by operations: torch without CUDA cannot select a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            view, indices = _indexed(args[0], args[1])
            return view if not any(each is not None for each in indices) else torch.ops.aten.index.Tensor(view, indices)
        if func is Tensor.__setitem__:
            view, indices = _indexed(args[0], args[1])
            value = args[2] if isinstance(args[2], Tensor) else torch.full((), args[2], device=view.device)
            if any(each is not None for each in indices):
                torch.ops.aten.index_put_.default(view, indices, value)
            else:
                torch.ops.aten.copy_.default(view, value)
            return None
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        if func is Tensor.contiguous and not args[0].is_contiguous():
            return torch.ops.aten.clone.default(args[0], memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view by slices, integers and None, and the tensors that index each of its dimensions."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [each for each in parts if not isinstance(each, Tensor)]:
        at = next(number for number, each in enumerate(parts) if each is Ellipsis)
        missing = tensor.ndim - sum(each is not None and each is not Ellipsis for each in parts)
        parts[at : at + 1] = [slice(None)] * missing
    indices: list[Tensor | None] = []
    for each in parts:
        dimension = len(indices)
        if isinstance(each, int):
            tensor = tensor.select(dimension, each)
            continue
        if each is None:
            tensor = tensor.unsqueeze(dimension)
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dimension, each.start, each.stop, each.step or 1)
        indices.append(each if isinstance(each, Tensor) else None)
    return tensor, indices


@contextmanager
def gpu_without_numbers() -> Iterator[None]:
    with FakeTensorMode(), _Indexing(), torch.no_grad():
        yield


def move_to_gpu(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace all parameters and buffers, inside `gpu_without_numbers`."""
    for part in module.modules():
        for name, each in part._parameters.items():
            if each is not None:
                moved = torch.empty(each.shape, dtype=dtype, device=GPU)
                part._parameters[name] = nn.Parameter(moved, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
