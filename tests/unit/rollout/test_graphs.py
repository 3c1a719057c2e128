"""CUDA graphs of decoding, with a stand-in for torch.cuda that refuses what torch's rules for captures forbid."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.engine_requests import Conversation, engine, finish_all, prompts, request
from tests.model_shapes import llama
from tests.torch_kernels import TORCH_KERNELS
from tidemill.core.records import PolicyVersion
from tidemill.rollout.engines.embedded import EmbeddedEngine, graphs
from tidemill.rollout.engines.embedded.graphs import DecodeGraphs

SLOTS = 5


class FakeStream:
    def __init__(self) -> None:
        self.sees: set[FakeStream] = {self}

    def wait_stream(self, other: FakeStream) -> None:
        self.sees.add(other)


class Graph:
    """Replays the steps that were called during its capture."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.steps = cuda, list[Callable[[], None]]()
        self.addresses: list[int] | None = None

    def replay(self) -> None:
        assert self.cuda.capturing is None
        assert self.addresses == self.cuda.addresses(), "it reads memory that moved"
        assert self.cuda.stream_now is self.cuda.main and self.cuda.side in self.cuda.main.sees
        for step in self.steps:
            step()
        self.cuda.replays += 1


class Cuda:
    """The part of torch.cuda that captures need."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.main = self.stream_now = FakeStream()
        self.side = self.main
        self.capturing: Graph | None = None
        self.warm: list[int] = []  # sizes that ran on the side stream
        self.captured: list[tuple[int, object]] = []
        self.replays = 0
        self.fails = False

    def addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()]

    def Stream(self) -> FakeStream:  # noqa: N802
        assert self.side is self.main, "one stream for all captures"
        self.side = FakeStream()
        return self.side

    def current_stream(self) -> FakeStream:
        return self.stream_now

    def graph_pool_handle(self) -> object:
        self.warm.clear()
        return object()

    def CUDAGraph(self) -> Graph:  # noqa: N802
        return Graph(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: object, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert stream is self.stream_now is self.side and self.capturing is None
        self.capturing, graph.addresses = graph, self.addresses()
        try:
            yield
        finally:
            self.capturing = None
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        (size,) = self.sizes
        assert size == self.warm[-1], "not warmed up"
        self.captured.append((size, pool))

    def step(self, real: Callable[[int], None], size: int) -> None:
        if self.capturing is not None:
            self.sizes = [size]
            self.capturing.steps.append(lambda: real(size))
            return
        if self.stream_now is self.side:
            assert self.main in self.side.sees, "the memory may not be written yet"
            self.warm.append(size)
        real(size)


@pytest.fixture
def model() -> nn.Module:
    return llama()


@pytest.fixture
def cuda(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda(model)
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=stand_in))
    return stand_in


@pytest.fixture
def subject(model: Any, cuda: Cuda) -> EmbeddedEngine:
    made = engine(model, kernels=TORCH_KERNELS, slots=SLOTS)
    inner: Any = made._scheduler
    inner._graphs = DecodeGraphs(lambda size: cuda.step(inner._decode, size), inner._state.sizes)
    return made


REQUESTS = [request(text, index=index, max_new_tokens=5 + 3 * index) for text in prompts(3) for index in range(3)]


def test_tokens_of_replayed_graphs_are_the_same(subject: EmbeddedEngine, cuda: Cuda) -> None:
    made, expected = finish_all(subject, REQUESTS), finish_all(engine(llama()), REQUESTS)
    assert made.tokens == expected.tokens
    assert [size for size, _ in cuda.captured] == [8, 4, 2, 1]
    assert len({pool for _, pool in cuda.captured}) == 1
    work = subject.status().work
    assert cuda.replays == work.passes - 3  # which computed prompts


def test_samples_with_top_p_are_drawn_without_graphs(subject: EmbeddedEngine, cuda: Cuda) -> None:
    restricted = [request(text, top_p=0.8) for text in prompts(2)]
    made, expected = finish_all(subject, restricted), finish_all(engine(llama()), restricted)
    assert made.tokens == expected.tokens
    assert cuda.replays == 0


def test_graphs_are_captured_again_only_if_memory_moved(subject: EmbeddedEngine, cuda: Cuda, model: nn.Module) -> None:
    def run(number: int) -> int:
        """Load during a run; returns how many captures there were since."""
        before = len(cuda.captured)
        subject.load(PolicyVersion(number=number, digest=str(number)))
        finish_all(subject, REQUESTS)
        return len(cuda.captured) - before

    assert run(1) == 4
    model.load_state_dict(llama(1).state_dict())
    assert run(2) == 0
    moved = next(model.parameters())
    moved.data = moved.data.clone()
    assert run(3) == 4
    assert run(4) == 0


def test_rows_for_turns_move_the_cache(subject: EmbeddedEngine, cuda: Cuda) -> None:
    """In the middle of other samples, whose launched tokens are drawn again."""
    long = request(prompts(1, seed=3)[0], max_new_tokens=20)
    one = Conversation(prompts(1)[0])
    made = finish_all(subject, [long, one.request()])
    expected = finish_all(engine(llama()), [long, one.request()])
    assert made.tokens == expected.tokens
    assert len(cuda.captured) == 2 * 4


def test_without_captures_steps_are_computed_directly(
    subject: EmbeddedEngine, cuda: Cuda, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.fails = True
    expected = finish_all(engine(llama()), REQUESTS).tokens
    with caplog.at_level(logging.WARNING):
        assert finish_all(subject, REQUESTS).tokens == expected
        moved = next(model.parameters())
        moved.data = moved.data.clone()
        subject.load(PolicyVersion(number=1, digest="1"))
        assert finish_all(subject, REQUESTS).tokens == expected
    assert len(caplog.records) == 1 and "not permitted" in caplog.text
    assert (cuda.stream_now, cuda.captured, cuda.replays) == (cuda.main, [], 0)


def test_dropped_caches_and_graphs_are_freed_at_once(cuda: Cuda) -> None:
    """Python's collector does not know their size."""
    subject = engine(llama(), kernels=TORCH_KERNELS, slots=SLOTS)
    inner: Any = subject._scheduler
    inner._graphs = DecodeGraphs(partial(cuda.step, inner._decode), inner._state.sizes)
    finish_all(subject, REQUESTS)
    graphs_of_it, cache = weakref.ref(inner._graphs), weakref.ref(inner._cache)
    del inner
    gc.disable()
    try:
        subject.drop_caches()
        assert (graphs_of_it(), cache()) == (None, None)
    finally:
        gc.enable()
