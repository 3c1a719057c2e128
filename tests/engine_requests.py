"""Requests to an embedded engine, and running it until all samples are finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from tidemill.core.records import (
    GenerateRequest,
    PolicyVersion,
    SampleId,
    SamplingParams,
    TokenDelta,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.models.attention import use_packed_attention
from tidemill.rollout.engines.embedded import EmbeddedEngine

VERSION = PolicyVersion(number=0, digest="start")


def engine(model: PreTrainedModel, **settings: Any) -> EmbeddedEngine:
    """An engine with `model`, by default with 4 slots of 64 tokens."""
    use_packed_attention(model)
    merged: dict[str, Any] = {"slots": 4, "context": 64, "version": VERSION, "decode": str, **settings}
    return EmbeddedEngine(model, **merged)


def request(prompt: Sequence[int], *, index: int = 0, prefix: Sequence[int] = (), **sampling: Any) -> GenerateRequest:
    """A request for sample `index` of a prompt."""
    return GenerateRequest(
        sample_id=SampleId(run_seed=7, purpose="train", prompt_id=str(list(prompt)), epoch=0, index=index),
        lease_id="local",
        attempt=0,
        prompt_ids=pack_tokens(prompt),
        prefix_ids=pack_tokens(prefix),
        sampling=SamplingParams(**{"max_new_tokens": 12, **sampling}),
    )


class Collected:
    """Joins the deltas of each sample, and checks that they are contiguous."""

    def __init__(self) -> None:
        self.tokens: dict[SampleId, list[int]] = {}
        self.logprobs: dict[SampleId, list[float]] = {}
        self.finish: dict[SampleId, str] = {}

    def add(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            tokens = self.tokens.setdefault(delta.sample_id, [])
            assert delta.start == len(tokens)
            tokens += unpack_tokens(delta.token_ids)
            self.logprobs.setdefault(delta.sample_id, []).extend(unpack_logprobs(delta.logprobs))
            if delta.finish is not None:
                assert delta.sample_id not in self.finish
                self.finish[delta.sample_id] = delta.finish


def finish_all(engine: EmbeddedEngine, requests: Sequence[GenerateRequest], *, steps: int = 500) -> Collected:
    """Run until every sample has finished, one step per poll."""
    collected = Collected()
    for one in requests:
        collected.tokens[one.sample_id] = unpack_tokens(one.prefix_ids)
    engine.submit(requests)
    for _ in range(steps):
        collected.add(engine.poll(0.0))
        status = engine.status()
        if not status.running and not status.queued:
            return collected
    raise AssertionError(f"not finished after {steps} steps: {engine.status()}")


def prompts(count: int, *, length: int = 9, vocabulary: int = 128, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Random prompts whose first `shared` tokens are the same."""
    rng = np.random.default_rng(seed)
    header = rng.integers(2, vocabulary, shared).tolist()
    return [header + rng.integers(2, vocabulary, length - shared).tolist() for _ in range(count)]
