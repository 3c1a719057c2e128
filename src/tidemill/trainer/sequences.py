"""Prompts and completions as one token tree, without anything of reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.algos.samples import Samples
from tidemill.core.buffers import TokenBuffer
from tidemill.models.token_tree import Tokens, TokenTree, build_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCompletions:
    """The T completion tokens of S sequences over the tree of everything that precedes them; `Predictions`."""

    tree: TokenTree
    head_nodes: Tensor  # int64 [H], distinct nodes that predict a completion token, ascending
    head_rows: Tensor  # int64 [T], which of them predicts the token, ascending
    targets: Tensor  # int64 [T]
    samples: Samples  # which of the S sequences each of the T tokens belongs to
    unpacked_tokens: int  # what the sequences would cost without sharing


def tokens_of(buffer: TokenBuffer) -> Tokens:
    """int32 [T]."""
    return np.frombuffer(buffer, np.int32)


def pack_completions(pairs: Sequence[tuple[TokenBuffer, TokenBuffer]], device: torch.device) -> PackedCompletions:
    """(prompt, completion) pairs in one tree. The very first token of a sequence without a prompt is not trained:
    nothing predicts it."""
    whole = [tokens_of(prompt + completion) for prompt, completion in pairs]
    tree = build_tree([sequence[:-1] for sequence in whole])
    starts = [max(len(tokens_of(prompt)), 1) for prompt, _ in pairs]
    nodes = np.concatenate([path[start - 1 :] for path, start in zip(tree.paths, starts, strict=True)])
    lengths = [len(sequence) - start for sequence, start in zip(whole, starts, strict=True)]
    order = np.argsort(nodes, kind="stable")
    head_nodes, head_rows = np.unique(nodes[order], return_inverse=True)
    targets = np.concatenate([sequence[start:] for sequence, start in zip(whole, starts, strict=True)])
    owners = np.repeat(np.arange(len(whole)), lengths)
    return PackedCompletions(
        tree=tree,
        head_nodes=torch.from_numpy(head_nodes).to(device),
        head_rows=torch.from_numpy(head_rows).to(device),
        targets=torch.from_numpy(targets[order].astype(np.int64)).to(device),
        samples=Samples(torch.from_numpy(owners[order]).to(device), len(whole)),
        unpacked_tokens=sum(len(sequence) - 1 for sequence in whole),
    )
