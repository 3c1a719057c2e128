"""`tidemill generate`: try a prompt on a model or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.buffers import pack_tokens, unpack_logprobs, unpack_tokens
from tidemill.core.records import GenerateRequest, Message, PolicyVersion, SampleId, SamplingParams
from tidemill.models.loading import weights_digest
from tidemill.runtime.parts import Parts, load_parts

POLL_S = 0.2


def generate(
    spec: RunSpec,
    *,
    model_folder: Path | None = None,
    prompts: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One completion per prompt, drawn as `spec.sampling` says from random numbers named by `spec.run.seed`.

    Args:
        model_folder: a model or checkpoint instead of the configured one.

    Raises:
        UserError: a fault of the input, a prompt longer than the context among them.
    """
    parts = load_parts(spec, progress=progress, folder=model_folder)
    encoded = [_encode(parts, prompt) for prompt in prompts]
    sampling = SamplingParams(
        max_new_tokens=spec.sampling.max_new_tokens,
        temperature=spec.sampling.temperature,
        top_k=spec.sampling.top_k,
        top_p=spec.sampling.top_p,
        stop_token_ids=parts.codec.stop_token_ids,
        stop_strings=spec.sampling.stop,
    )
    version = PolicyVersion(number=0, digest=weights_digest(parts.model))
    engine = parts.engine(version, prompt_tokens=max(map(len, encoded)))
    requests = [
        GenerateRequest(
            sample_id=SampleId(run_seed=spec.run.seed, purpose="generate", prompt_id=text, epoch=0, index=index),
            lease_id="local",
            attempt=0,
            prompt_ids=pack_tokens(token_ids),
            sampling=sampling,
        )
        for index, (text, token_ids) in enumerate(zip(prompts, encoded, strict=True))
    ]
    engine.submit(requests)
    tokens: dict[SampleId, list[int]] = {request.sample_id: [] for request in requests}
    logprobs: dict[SampleId, list[float]] = {request.sample_id: [] for request in requests}
    finish: dict[SampleId, str] = {}
    while len(finish) < len(requests):  # ends: every sample stops at max_new_tokens
        for delta in engine.poll(POLL_S):
            tokens[delta.sample_id] += unpack_tokens(delta.token_ids)
            logprobs[delta.sample_id] += unpack_logprobs(delta.logprobs)
            if delta.finish is not None:
                finish[delta.sample_id] = delta.finish
        progress(f"{sum(map(len, tokens.values()))} tokens, {len(finish)} of {len(requests)} completions finished")
    return [
        {
            "prompt": text,
            "completion": parts.codec.decode(tokens[request.sample_id]),
            "finish": finish[request.sample_id],
            "tokens": len(tokens[request.sample_id]),
            "logprob": sum(logprobs[request.sample_id]),
        }
        for text, request in zip(prompts, requests, strict=True)
    ]


def _encode(parts: Parts, prompt: str) -> list[int]:
    if parts.spec.model.chat_template:
        return parts.codec.encode_chat([Message(role="user", content=prompt)])[1]
    return parts.codec.encode(prompt)
