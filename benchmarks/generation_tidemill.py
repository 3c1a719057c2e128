"""Our side of the generation benchmark: the embedded engine with all samples submitted at once, and a logprob check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.generation_hf import prompt_ids
from benchmarks.turns import Turns
from benchmarks.workload import Workload
from tidemill.core.records import (
    GenerateRequest,
    PolicyVersion,
    Record,
    SampleId,
    SamplingParams,
    TokenDelta,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.models.auto import quiet
from tidemill.models.loading import load_model
from tidemill.rollout.engines.embedded import EmbeddedEngine

VERSION = PolicyVersion(number=0, digest="benchmark")
CHECKED_SAMPLES = 32


class Completion(Record):
    """Data of one sample for the logprob check."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def tidemill_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    """Settings: model (folder), workload, completions (output file of the last turn)."""
    workload: Workload = settings["workload"]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = load_model(Path(settings["model"]), device=torch.device("cpu"))
    prompts = prompt_ids(workload, tokenizer)
    engine = EmbeddedEngine(
        model,
        decode=lambda _: "",  # no stop strings
        slots=workload.slots,
        context=max(len(prompt) for prompt in prompts) + max(workload.lengths),
        version=VERSION,
    )
    warm_up = requests(workload, prompts, seed=0)[: workload.slots]
    run(engine, [_shortened(request) for request in warm_up])
    seed = 0
    while True:
        seed += 1
        asked = requests(workload, prompts, seed=seed)
        engine.load(VERSION)  # clears the cache of the previous turn
        before = engine.status()
        turns.begin()
        deltas = run(engine, asked)
        after = engine.status()
        check_generated(after.tokens_generated - before.tokens_generated, workload)
        computed = after.prompt_tokens_computed - before.prompt_tokens_computed
        turns.end(workload.work(prompts), prompt_tokens_computed=computed)
        Path(settings["completions"]).write_bytes(msgspec.json.encode(_completions(asked, deltas)))


def check_generated(tokens: int, workload: Workload) -> None:
    """Raises RuntimeError: not the number of tokens that both sides are asked for."""
    if tokens != sum(workload.lengths):
        raise RuntimeError(f"generated {tokens} tokens, expected {sum(workload.lengths)}")


def requests(workload: Workload, prompts: Sequence[Sequence[int]], *, seed: int) -> list[GenerateRequest]:
    """One request per sample, group by group."""
    return [
        GenerateRequest(
            sample_id=SampleId(
                run_seed=seed,
                purpose="benchmark",
                prompt_id=str(index // workload.group_size),
                epoch=0,
                index=index % workload.group_size,
            ),
            lease_id="benchmark",
            attempt=0,
            prompt_ids=pack_tokens(prompts[index // workload.group_size]),
            sampling=SamplingParams(max_new_tokens=length),
        )
        for index, length in enumerate(workload.lengths)
    ]


def run(engine: EmbeddedEngine, asked: Sequence[GenerateRequest]) -> list[TokenDelta]:
    """All deltas until every sample is finished, flushed as often as in a real run."""
    engine.submit(asked)
    deltas: list[TokenDelta] = []
    unfinished = {request.sample_id for request in asked}
    while unfinished:
        news = engine.poll(0.1)
        unfinished -= {delta.sample_id for delta in news if delta.finish is not None}
        deltas += news
    return deltas


def _shortened(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, sampling=SamplingParams(max_new_tokens=2))


def _completions(asked: Sequence[GenerateRequest], deltas: Sequence[TokenDelta]) -> list[Completion]:
    tokens: dict[SampleId, list[int]] = {request.sample_id: [] for request in asked}
    logprobs: dict[SampleId, list[float]] = {request.sample_id: [] for request in asked}
    for delta in deltas:
        tokens[delta.sample_id] += unpack_tokens(delta.token_ids)
        logprobs[delta.sample_id] += unpack_logprobs(delta.logprobs)
    return [
        Completion(
            prompt=unpack_tokens(request.prompt_ids),
            tokens=tokens[request.sample_id],
            logprobs=logprobs[request.sample_id],
        )
        for request in asked
    ]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Our rollout logprobs and those of the stock model on the same tokens."""

    samples: int
    tokens: int
    largest_difference: float


@torch.inference_mode()
def check_logprobs(model_folder: str, completions: Path) -> Agreement:
    """Teacher-force the stock model, one sample at a time, over an even choice of the completions."""
    done = msgspec.json.decode(completions.read_bytes(), type=list[Completion])
    chosen = done[:: max(1, len(done) // CHECKED_SAMPLES)]
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    largest, tokens = 0.0, 0
    for completion in chosen:
        ids = torch.tensor([completion.prompt + completion.tokens])
        logits = model(input_ids=ids).logits[0, len(completion.prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        largest = max(largest, float((expected - torch.tensor(completion.logprobs)).abs().max()))
        tokens += len(completion.tokens)
    return Agreement(samples=len(chosen), tokens=tokens, largest_difference=largest)
