"""CUDA graphs of the decoding step. Written by torch's rules for captures; not run on a GPU yet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

log = logging.getLogger(__name__)


class DecodeGraphs:
    """A graph of `step` for each number of entries, which replays its kernels with one call.

    `step` reads and writes memory at the same addresses each time, and does not wait for the device. The graphs share
    one pool, in which only `step`'s own intermediate results are: they are replayed one at a time, in order.

    Args:
        sizes: numbers of entries, largest first, so that the others find memory in the pool.
    """

    def __init__(self, step: Callable[[int], None], sizes: Seq[int]) -> None:
        self._step, self._sizes = step, sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._addresses: list[int] = []
        self._failed = False
        self._stream = torch.cuda.Stream()  # the same for all captures, as torch asks for graphs that share a pool

    def outdated(self, addresses: list[int]) -> bool:
        """Whether the graphs must be captured, because there are none, or they read memory at other addresses."""
        before, self._addresses = self._addresses, addresses
        return before != addresses and not self._failed

    def capture(self) -> None:
        """Capture all graphs again. Each step runs once before, with the entries that are in memory."""
        self._graphs.clear()
        pool = torch.cuda.graph_pool_handle()
        here, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):  # also left if the end of a capture fails
                for size in self._sizes:
                    # On the same stream: compiles kernels, and allocates cuBLAS' workspace outside the pool.
                    self._step(size)
                    graph = torch.cuda.CUDAGraph()
                    # Other threads may use the device meanwhile.
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        self._step(size)
                    self._graphs[size] = graph
        except RuntimeError as error:
            self._graphs.clear()
            self._failed = True
            log.warning("no CUDA graphs of decoding, which is slower without: %s", error)
        here.wait_stream(stream)

    def run(self, size: int) -> None:
        """Compute the step of `size` entries on the current stream."""
        if (graph := self._graphs.get(size)) is not None:
            graph.replay()
        else:
            self._step(size)
