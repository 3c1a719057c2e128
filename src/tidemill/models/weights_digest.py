"""The digest that names the weights of a version, from integer sums of their bits.

The sums are computed where the weights are; a few bytes leave the device. They are integers modulo 2^64, so neither the
device nor the order of the additions nor the ranks that hold the rows change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from tidemill.models.lora import adapter_of, frozen_parameters, learned_parameters
from tidemill.models.ranks import ONE_RANK, Ranks, is_sharded, local_rows

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_CPU_BYTES, _GPU_BYTES = 1 << 20, 64 << 20
"""Rows at a time: what fits the cache of a core, and what keeps a GPU busy."""


def weights_digest(model: nn.Module, ranks: Ranks = ONE_RANK) -> str:
    """32 hex digits (xxh3-128) over name, dtype and shape of every parameter and the `bit_sum` of all.

    In the order of named_parameters. It depends neither on the device nor on the number of ranks. Tied parameters count
    once. For a model with an adapter: over the base's digest and the adapter's parameters.
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
    own = int(bit_sum(list(parameters.values()), ranks)) & _MASK64  # the only wait for a GPU
    total = sum(int.from_bytes(each, "little") for each in ranks.gather(own.to_bytes(8, "little"))) & _MASK64
    digest = xxhash.xxh3_128(prefix.encode())
    for name, parameter in parameters.items():
        digest.update(f"{name}\0{parameter.dtype}\0{tuple(parameter.shape)}\0".encode())
    digest.update(f"{total}\0".encode())
    return digest.hexdigest()


@torch.no_grad()
def bit_sum(tensors: Sequence[Tensor], ranks: Ranks = ONE_RANK) -> Tensor:
    """Sum over the rows in this process of a hash of the row and of its number among the rows of all tensors.

    Each change of one number of 32 bits or fewer changes the hash of its row; other changes do but for chance.

    Returns:
        int64 [], on the device of the tensors; the sum over the ranks is that of the whole tensors.
    """
    words, firsts, start = list[Tensor](), list[int](), 0
    for tensor in tensors:
        # Every rank holds all rows of a parameter that is not sharded; the first one's count.
        if ranks.index == 0 or is_sharded(tensor):
            rows, first = local_rows(tensor)
            if rows.numel():
                words.append(_words(rows))
                firsts.append(start + first)
        start += len(tensor) if tensor.ndim else 1
    if not words:
        return torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    hashes = torch.cat(_row_hashes(words))
    numbers = [torch.arange(at, at + len(rows), device=rows.device) for at, rows in zip(firsts, words, strict=True)]
    return _mixed(hashes + torch.cat(numbers) * _GOLDEN).sum()


def _words(rows: Tensor) -> Tensor:
    """[rows, words]: the bits of each row as the widest integers that divide its bytes."""
    matrix = rows.contiguous().view(len(rows) if rows.ndim else 1, -1)
    width = matrix.shape[1] * matrix.element_size()
    return matrix.view(next(dtype for dtype in _WORDS if width % dtype.itemsize == 0))


def _row_hashes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """int64 [rows] of each matrix of words.

    A dot product modulo 2^64 of the 32-bit halves of the words with 64-bit keys (Lemire and Kaser 2014), computed as
    that of the words and that of the words between them, from the middle of one to the middle of the next: a product
    of words alone would keep their highest bits, which are signs, only where those of two columns cancel.
    """
    device = tensors[0].device
    widest = max(words.shape[1] for words in tensors)
    numbers = torch.arange(1, 1 + 2 * widest, 2, device=device)
    keys = _mixed(numbers * _GOLDEN) | 1, _mixed((numbers + 1) * _GOLDEN) | 1
    hashes = [torch.empty(len(words), dtype=torch.int64, device=device) for words in tensors]
    on_cpu = device.type == "cpu"
    nbytes = _CPU_BYTES if on_cpu else _GPU_BYTES
    blocks = [
        block
        for words, out in zip(tensors, hashes, strict=True)
        for size in [max(1, nbytes // (8 * words.shape[1]))]
        for block in zip(words.split(size), out.split(size), strict=True)
    ]
    if not on_cpu:
        for words, out in blocks:
            _hash_on_gpu(words, keys, out)
        return hashes

    def share(thread: int) -> None:
        for words, out in blocks[thread::threads]:
            _hash_on_cpu(words, keys, out)

    # Not the threads of torch's operations: these wait for each other after every block, also if a core is busy.
    threads = min(torch.get_num_threads(), len(blocks))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))
    return hashes


def _hash_on_gpu(words: Tensor, keys: tuple[Tensor, Tensor], out: Tensor) -> None:
    words, between = words.to(torch.int64), words.shape[1] - 1
    torch.sum(words * keys[0].narrow(0, 0, words.shape[1]), 1, out=out)
    lower = (words.narrow(1, 0, between) >> 32) & _MASK32
    out += ((lower + (words.narrow(1, 1, between) << 32)) * keys[1].narrow(0, 0, between)).sum(1)


def _hash_on_cpu(words: Tensor, keys: tuple[Tensor, Tensor], out: Tensor) -> None:
    """As `_hash_on_gpu`, in two passes over memory."""
    words, (rows, width) = words.to(torch.int64), words.shape
    torch.mv(words, keys[0][:width], out=out)
    if width > 1:
        between = np.ndarray((rows, width - 1), np.int64, words.numpy().data, 4, (8 * width, 8))
        out.addmv_(torch.from_numpy(between), keys[1][: width - 1])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _mixed(values: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of int64 that spreads every bit."""
    for shift, factor in _ROUNDS:
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values
