"""Chunked scorers over small frozen models, and samples for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedModel

from tests.model_shapes import MODEL_SHAPES, VOCABULARY
from tidemill.core.records import ModelScores, SampleId
from tidemill.models.attention import use_packed_attention
from tidemill.trainer.scoring import ChunkedScorer, LogprobScorer, SampleScorer

CHUNK = 8


def frozen(shape: str = "llama") -> PreTrainedModel:
    model = MODEL_SHAPES[shape]().requires_grad_(False)
    use_packed_attention(model)
    return model


def named(index: int, prompt: str = "p", purpose: str = "train") -> SampleId:
    return SampleId(run_seed=0, purpose=purpose, prompt_id=prompt, epoch=0, index=index)


def tokens(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.int32).tobytes()


def logprob_scorer(model: PreTrainedModel, *, rows: int = 1000) -> LogprobScorer:
    return LogprobScorer(model, temperature=0.7, logits_budget_bytes=rows * VOCABULARY * 4)


def chunked_scorer(model: PreTrainedModel, scorer: SampleScorer | None = None, *, cache: int = 1000) -> ChunkedScorer:
    return ChunkedScorer(model, scorer or logprob_scorer(model), chunk_tokens=CHUNK, cache_tokens=cache)


def score_all(chunked: ChunkedScorer, name: SampleId, ids: bytes, prompt_tokens: int) -> ModelScores:
    while (scores := chunked.score_finished(name, ids, prompt_tokens)) is None:
        pass
    return scores


def growing(chunked: ChunkedScorer, name: SampleId, ids: bytes, prompt_tokens: int) -> Iterator[bool]:
    """Compute ahead after each new token; yields whether anything was computed."""
    for known in range(prompt_tokens, len(ids) // 4 + 1):
        computed = 0
        while chunked.compute_ahead(name, ids[: known * 4], prompt_tokens):
            computed += 1
        yield bool(computed)
