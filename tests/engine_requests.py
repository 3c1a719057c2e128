"""Requests to an embedded engine, and running it until all samples are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
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


@dataclass
class Conversation:
    """A sample with turns: tokens after the prompt of its current branch, and which of them are observations."""

    prompt: list[int]
    index: int = 0
    turn_tokens: int = 6
    branch: int = 0
    offset: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    observations: list[tuple[int, int]] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)  # prompt of the first branch, which identifies the sample

    def request(self, **sampling: Any) -> GenerateRequest:
        """The rest of the current turn."""
        one = request(self.sample or self.prompt, index=self.index, prefix=self.tokens, **sampling)
        start = self.observations[-1][1] if self.observations else 0
        return msgspec.structs.replace(
            one,
            prompt_ids=pack_tokens(self.prompt),
            branch=self.branch,
            offset=self.offset,
            observations=tuple(self.observations),
            limit=start + self.turn_tokens,
            resumes=True,
        )

    def observe(self, tokens: Sequence[int]) -> None:
        self.observations.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens

    def start_branch(self, context: list[int]) -> None:
        """Replace everything before the next turn by `context`."""
        self.sample = self.sample or self.prompt
        self.prompt, self.branch = context, self.branch + 1
        self.offset += len(self.tokens) + len(context)
        self.tokens, self.observations = [], []

    def take(self, collected: Collected) -> str | None:
        """Add generated tokens; returns the finish."""
        sample_id = self.request().sample_id
        self.tokens = collected.tokens[sample_id][self.offset :]
        self.logprobs += collected.logprobs.get(sample_id, [])
        return collected.finish.get(sample_id)


class Collected:
    """Joins the deltas of each sample after the tokens of its request (-1 for those before `offset`), and checks that
    they are contiguous."""

    def __init__(self, requests: Sequence[GenerateRequest] = ()) -> None:
        self.tokens = {one.sample_id: [-1] * one.offset + unpack_tokens(one.prefix_ids) for one in requests}
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
    collected = Collected(requests)
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
