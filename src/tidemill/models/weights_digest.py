"""The digest that names the weights of a version. Every rank reads its own rows only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from tidemill.models.lora import adapter_of, frozen_parameters, learned_parameters
from tidemill.models.ranks import ONE_RANK, Ranks, is_sharded, local_rows

_MASK64 = (1 << 64) - 1


def weights_digest(model: nn.Module, ranks: Ranks = ONE_RANK) -> str:
    """32 hex digits (xxh3-128) over name, dtype, shape and rows of every parameter, in the order of named_parameters.

    It does not depend on the number of ranks: the rows of a parameter are hashed one by one (xxh3-64, with the number
    of the row as the seed) and their hashes added modulo 2^64. Tied parameters count once. For a model with an adapter:
    over the base's digest and the adapter's parameters. From a GPU one tensor at a time is copied.
    """
    return _digest(learned_parameters(model), ranks, prefix=base_digest(model, ranks))


def base_digest(model: nn.Module, ranks: Ranks = ONE_RANK) -> str:
    """The digest of the frozen base under an adapter, computed once; empty without an adapter."""
    adapter = adapter_of(model)
    if adapter is None:
        return ""
    adapter.base_digest = adapter.base_digest or _digest(frozen_parameters(model), ranks)
    return adapter.base_digest


def _digest(parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, prefix: str = "") -> str:
    # Every rank holds all rows of a parameter that is not sharded; the first one's count.
    counted = [ranks.index == 0 or is_sharded(parameter) for parameter in parameters.values()]
    hashes = (
        _rows_hash(each.detach()) if counts else 0 for each, counts in zip(parameters.values(), counted, strict=True)
    )
    own = np.fromiter(hashes, np.uint64)
    sums = np.stack([np.frombuffer(each, np.uint64) for each in ranks.gather(own.tobytes())]).sum(0, dtype=np.uint64)
    digest = xxhash.xxh3_128(prefix.encode())
    for (name, parameter), total in zip(parameters.items(), sums.tolist(), strict=True):
        digest.update(f"{name}\0{parameter.dtype}\0{tuple(parameter.shape)}\0{total}\0".encode())
    return digest.hexdigest()


def _rows_hash(tensor: Tensor) -> int:
    """Sum of the hashes of the rows in this process, modulo 2^64."""
    rows, first = local_rows(tensor)
    data = rows.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
    width = len(data) // len(rows) if rows.ndim and len(rows) else len(data)
    starts = range(0, len(data), max(width, 1))
    hashed = xxhash.xxh3_64_intdigest
    return sum(hashed(data[start : start + width], row) for row, start in enumerate(starts, first)) & _MASK64
