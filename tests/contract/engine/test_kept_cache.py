"""Engines that keep the keys and values of running samples across versions (`schedule.keep_cache`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from transformers import DynamicCache

from tests.contract.engine.engines import ADAPTER, KINDS, NO_ADAPTER, SLOTS, TOLERANCE, Contract, open_contract
from tests.engine_requests import Collected, prompts, request
from tidemill.core.records import GenerateRequest, pack_tokens, unpack_tokens
from tidemill.rollout.sampling import gumbel, noise_key

TOKENS, PER_VERSION = 24, 6
PROMPTS = prompts(SLOTS, length=150)  # vLLM on a CPU shares blocks of 128 tokens


@pytest.fixture(
    scope="module", params=[f"{kind}-{variant}" for kind in KINDS for variant in ("untied", "tied-adapter")]
)
def contract(request: pytest.FixtureRequest) -> Contract:
    kind, shape, *adapter = str(request.param).split("-")
    return open_contract(kind, shape, lora=ADAPTER if adapter else NO_ADAPTER, context=200, keep_cache=True)


@dataclass
class Reference:
    """A sample in transformers: each token by the weights of its time, from keys and values that are never computed
    again."""

    request: GenerateRequest
    cache: DynamicCache = field(default_factory=DynamicCache)
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @torch.inference_mode()
    def generate(self, contract: Contract, tokens: int) -> None:
        known = unpack_tokens(self.request.prompt_ids)
        for _ in range(tokens):
            inputs = [*known, *self.drawn][self.cache.get_seq_length() :]
            output = contract.model(torch.tensor([inputs]), past_key_values=self.cache, use_cache=True)
            logits = output.logits[0, -1].float()
            key = noise_key(self.request.sample_id.seed(), len(known) + len(self.drawn) - 1)
            token = int((logits + gumbel([key], len(logits), logits.device)[0]).argmax())
            self.drawn.append(token)
            self.logprobs.append(float(logits.log_softmax(-1)[token]))


def test_running_samples_keep_keys_of_older_weights_and_new_ones_never_read_them(contract: Contract) -> None:
    """Three versions; the new samples have the prompts of running ones."""
    contract.load(1)
    running = [request(prompt, max_new_tokens=TOKENS) for prompt in PROMPTS[: SLOTS - 1]]
    references = [Reference(one) for one in running]
    contract.engine.submit(running)
    collected = Collected(running)
    for version in (2, 3):
        goal = (version - 1) * PER_VERSION
        while min(len(collected.tokens[one.sample_id]) for one in running) < goal:
            collected.add(contract.engine.poll(0.0))
        for reference in references:
            reference.generate(contract, len(collected.tokens[reference.request.sample_id]) - len(reference.drawn))
        contract.load(version)
        before = contract.engine.status().prompt_tokens_reused
        fresh = request(PROMPTS[0], index=version, max_new_tokens=4)
        contract.engine.submit([fresh])
        while fresh.sample_id not in collected.finish:
            collected.add(contract.engine.poll(0.0))
        assert contract.engine.status().prompt_tokens_reused == before
        assert_by_newest_weights(contract, fresh, collected)
    contract.finish(collected)
    for reference in references:
        name = reference.request.sample_id
        reference.generate(contract, TOKENS - len(reference.drawn))
        assert collected.tokens[name] == reference.drawn
        assert collected.logprobs[name] == pytest.approx(reference.logprobs, abs=TOLERANCE)
        # Recomputed keys and values would give another logprob, so the comparison above tells them apart.
        last = msgspec.structs.replace(reference.request, prefix_ids=pack_tokens(reference.drawn[:-1]))
        _, (recomputed,) = contract.expected(last, 1)
        assert abs(recomputed - reference.logprobs[-1]) > 1e-3


def assert_by_newest_weights(contract: Contract, one: GenerateRequest, collected: Collected) -> None:
    tokens, logprobs = contract.expected(one, one.sampling.max_new_tokens)
    assert collected.tokens[one.sample_id] == tokens
    assert collected.logprobs[one.sample_id] == pytest.approx(logprobs, abs=TOLERANCE)


def test_a_prefix_is_shared_within_a_version(contract: Contract) -> None:
    contract.load(1)
    before = contract.engine.status().prompt_tokens_reused
    for index in range(2):
        sibling = request(PROMPTS[0], index=index, max_new_tokens=4)
        assert_by_newest_weights(contract, sibling, contract.run([sibling]))
    assert contract.engine.status().prompt_tokens_reused >= before + 128


def test_a_sample_without_a_token_starts_again(contract: Contract) -> None:
    contract.load(1)
    waits = request(PROMPTS[0], max_new_tokens=4)
    contract.engine.submit([waits])
    collected = Collected()
    if contract.engine.capabilities.name == "embedded":
        collected.add(contract.engine.poll(0.0))  # computes a part of the prompt
        assert not collected.tokens
    contract.load(2)
    assert_by_newest_weights(contract, waits, contract.finish(collected))


def test_a_sample_of_one_version_ends_with_it(contract: Contract) -> None:
    contract.load(1)
    pinned = msgspec.structs.replace(request(PROMPTS[0]), exact_version=contract.version)
    other = request(PROMPTS[1], max_new_tokens=TOKENS)
    contract.engine.submit([pinned, other])
    collected = Collected()
    while len(collected.tokens.get(pinned.sample_id, [])) < 2:
        collected.add(contract.engine.poll(0.0))
    contract.load(2)
    contract.finish(collected)
    assert (collected.finish[pinned.sample_id], collected.finish[other.sample_id]) == ("aborted", "length")


def test_the_capability_is_declared(contract: Contract) -> None:
    assert contract.engine.capabilities.keeps_kv
