"""How often a sample's tokens depend on its neighbours, in fast and in batch-invariant mode.

    python -m benchmarks.batch_shapes [--prompts 8] [--new-tokens 48]

SmolLM2 in fp32 generates the same samples twice: over 64 slots, and over 6 slots in another order, where each sample is
interrupted at a random point and continued by a new engine. Sampling noise belongs to the sample, so a token differs
only if rounding changes a choice. Tokens are compared up to the first difference of a sample. In batch-invariant mode
(with equal slots on both sides, as required) everything must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measuring import write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from tidemill.core.records import (
    GenerateRequest,
    PolicyVersion,
    SampleId,
    SamplingParams,
    count,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.models.codec import load_codec
from tidemill.models.loading import load_model
from tidemill.rollout.engines.embedded import EmbeddedEngine

VERSION = PolicyVersion(number=0, digest="measured")
OPENINGS = ("Once upon a time", "The capital of France", "7+8=15\n9+4=13\n2+6=", "def add(a, b):", "Dear Sir or Madam,",
            "In 1969 the first", "Water boils at", "My favourite recipe is")  # fmt: skip
GROUP = 8

Samples = dict[SampleId, tuple[list[int], list[float]]]


class Bench:
    """Model, samples and engines."""

    def __init__(self, folder: Path, *, prompts: int, new_tokens: int) -> None:
        self.model = load_model(folder, device=torch.device("cpu"))
        self.codec = load_codec(folder)
        self.prompts = [self.codec.encode(text) for text in OPENINGS[:prompts]]
        self.context = max(map(len, self.prompts)) + new_tokens
        self.sampling = SamplingParams(max_new_tokens=new_tokens)

    def request(self, prompt: int, index: int, prefix: Sequence[int] = ()) -> GenerateRequest:
        return GenerateRequest(
            sample_id=SampleId(run_seed=0, purpose="bench", prompt_id=str(prompt), epoch=0, index=index),
            lease_id="bench",
            attempt=0,
            prompt_ids=pack_tokens(self.prompts[prompt]),
            prefix_ids=pack_tokens(prefix),
            sampling=self.sampling,
        )

    def generate(self, requests: Sequence[GenerateRequest], *, slots: int, batch_invariant: bool) -> Samples:
        engine = EmbeddedEngine(
            self.model,
            decode=self.codec.decode,
            slots=slots,
            context=self.context,
            version=VERSION,
            batch_invariant=batch_invariant,
        )
        engine.submit(requests)
        made: Samples = {request.sample_id: ([], []) for request in requests}
        while engine.status().running or engine.status().queued:
            for delta in engine.poll(1.0):
                made[delta.sample_id][0].extend(unpack_tokens(delta.token_ids))
                made[delta.sample_id][1].extend(unpack_logprobs(delta.logprobs))
        return made

    def compare(self, *, slots: int, other_slots: int, batch_invariant: bool) -> dict[str, float]:
        names = [(prompt, index) for prompt in range(len(self.prompts)) for index in range(GROUP)]
        began = time.process_time()
        whole = self.generate([self.request(*name) for name in names], slots=slots, batch_invariant=batch_invariant)
        seconds = time.process_time() - began
        source = random.Random(0)
        cuts = {name: source.randrange(self.sampling.max_new_tokens) for name in names}
        source.shuffle(names)
        continued = [self.request(*n, prefix=whole[self.request(*n).sample_id][0][: cuts[n]]) for n in names]
        check_interrupted(continued, new_tokens=self.sampling.max_new_tokens)
        second = self.generate(continued, slots=other_slots, batch_invariant=batch_invariant)
        compared = differing = unequal_logprobs = 0
        for name in names:
            sample = self.request(*name).sample_id
            expected = [values[cuts[name] :] for values in whole[sample]]
            tokens, logprobs = second[sample]
            same = next(
                (at for at, pair in enumerate(zip(tokens, expected[0], strict=True)) if pair[0] != pair[1]), None
            )
            length = len(tokens) if same is None else same
            compared += length + (same is not None)
            differing += same is not None
            unequal_logprobs += sum(a != b for a, b in zip(logprobs[:length], expected[1][:length], strict=True))
        tokens_made = sum(len(tokens) for tokens, _ in whole.values())
        return {
            "tokens_compared": compared,
            "tokens_differing": differing,
            "rate": differing / compared,
            "logprobs_unequal_in_the_last_bit": unequal_logprobs,
            "tokens_per_cpu_s": tokens_made / seconds,
        }


def check_interrupted(requests: Sequence[GenerateRequest], *, new_tokens: int) -> None:
    """Raises RuntimeError: no sample is continued after some of its tokens, and none that has more to generate."""
    check_counts(
        "the second engine", interrupted_samples=sum(0 < count(one.prefix_ids) < new_tokens for one in requests)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=len(OPENINGS))
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    bench = Bench(smollm2(), prompts=options.prompts, new_tokens=options.new_tokens)
    fast = bench.compare(slots=64, other_slots=6, batch_invariant=False)
    fixed = bench.compare(slots=16, other_slots=16, batch_invariant=True)
    for name, figures in (("fast", fast), ("batch-invariant", fixed)):
        print(f"{name:16}", ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    write_result("batch_shapes", {"fast": fast, "batch_invariant": fixed})
    return 0 if fixed["tokens_differing"] == fixed["logprobs_unequal_in_the_last_bit"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
