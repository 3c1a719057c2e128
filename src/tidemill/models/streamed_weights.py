"""Writes a safetensors file tensor by tensor, so that a sharded model is never in one process as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tidemill.models.ranks import whole

STORED_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in safetensors files."""
_ALIGNMENT = 8


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name; tied ones once."""
    names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if names[id(tensor)] == name}


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Gather sharded tensors one at a time and write them to a file, byte for byte as `safetensors.torch.save_file`.

    Args:
        path: None on all ranks but the first, which gather without writing.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if path is None:
        for name in names:
            whole(tensors[name])
        return
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            rows = whole(tensors[name]).contiguous().cpu()
            file.write(rows.view(-1).view(torch.uint8).numpy().data)
