"""A microbatch as a critic in another process needs it: what is predicted where, and how much it weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.core.records import Record
from tidemill.models.token_tree import TokenTree
from tidemill.trainer.packing import Microbatch


class SentTokens(Record):
    """N nodes, of which H predict the T trained tokens."""

    token_ids: bytes  # int64 [N]
    depths: bytes  # int64 [N]
    ends: bytes  # int64 [N]
    head_nodes: bytes  # int64 [H]
    head_rows: bytes  # int64 [T]
    weights: bytes  # float32 [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedTokens:
    """Implements `trainer.critic.Weighed`."""

    tree: TokenTree  # without paths: no sample is looked for
    head_nodes: Tensor
    head_rows: Tensor
    targets: Tensor  # not known here, and of no meaning to a value
    weights: Tensor


def sent(microbatch: Microbatch) -> SentTokens:
    tree = microbatch.tree
    return SentTokens(
        token_ids=tree.token_ids.tobytes(),
        depths=tree.depths.tobytes(),
        ends=tree.ends.tobytes(),
        head_nodes=to_bytes(microbatch.head_nodes),
        head_rows=to_bytes(microbatch.head_rows),
        weights=to_bytes(microbatch.weights),
    )


def received(tokens: SentTokens, device: torch.device) -> ReceivedTokens:
    """On the critic's device, bit for bit."""
    rows = _array(tokens.head_rows, np.int64)
    return ReceivedTokens(
        tree=TokenTree(
            token_ids=_array(tokens.token_ids, np.int64),
            depths=_array(tokens.depths, np.int64),
            ends=_array(tokens.ends, np.int64),
            paths=(),
        ),
        head_nodes=torch.from_numpy(_array(tokens.head_nodes, np.int64)).to(device),
        head_rows=torch.from_numpy(rows).to(device),
        targets=torch.zeros(len(rows), dtype=torch.int64, device=device),
        weights=floats(tokens.weights, device),
    )


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


def floats(blob: bytes, device: torch.device) -> Tensor:
    """float32, as many as there are."""
    return torch.from_numpy(_array(blob, np.float32)).to(device)


def _array(blob: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(blob, dtype).copy()  # torch wants memory that may be written
