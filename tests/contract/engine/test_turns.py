"""Turns in every engine: observations, stop strings, limits, branches and interruptions."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.contract.engine.engines import CONTEXT, KINDS, SLOTS, TOLERANCE, Contract, letters, open_contract
from tests.engine_requests import Collected, Conversation, prompts

PROMPTS = prompts(6, length=11)
OBSERVED = [[40 + length + at for at in range(length)] for length in (1, 5, 33)]


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest) -> Contract:
    return open_contract(str(request.param), "tied")


@pytest.fixture
def contract(opened: Contract) -> Iterator[Contract]:
    """The engine with weights of seed 1; each test leaves it empty."""
    opened.load(1)
    yield opened
    status = opened.engine.status()
    assert (status.running, status.queued, status.free_slots) == (0, 0, SLOTS)


def run(contract: Contract, conversations: list[Conversation]) -> None:
    """One turn of each, with the tokens and logprobs of the model and the sample's noise."""
    requests = [each.request() for each in conversations]
    collected = contract.run(requests)
    for each, one in zip(conversations, requests, strict=True):
        known = len(each.tokens)
        assert each.take(collected) == "length"
        tokens, logprobs = contract.expected(one, one.limit - known)
        assert each.tokens[known:] == tokens
        assert collected.logprobs[one.sample_id] == pytest.approx(logprobs, abs=TOLERANCE)


def test_tokens_of_several_turns_are_those_of_the_model_and_the_samples_noise(contract: Contract) -> None:
    conversations = [Conversation(prompt, index) for prompt in PROMPTS for index in range(2)]
    for observed in OBSERVED:
        run(contract, conversations)
        for each in conversations:
            each.observe([token + each.index for token in observed])
    run(contract, conversations)
    assert {len(each.tokens) for each in conversations} == {4 * 6 + 1 + 5 + 33}


def test_a_stop_string_in_an_observation_does_not_end_the_next_turn(contract: Contract) -> None:
    one = Conversation(PROMPTS[0])
    run(contract, [one])
    one.observe([30, 31, 32])
    expected, _ = contract.expected(one.request(), 6)
    string = letters([30, 31, 32])
    assert string not in letters(expected)
    assert one.take(contract.run([one.request(stop_strings=(string,))])) == "length"
    assert one.tokens[9:] == expected


def test_a_stop_string_ends_a_later_turn(contract: Contract) -> None:
    one = Conversation(PROMPTS[1])
    run(contract, [one])
    one.observe(OBSERVED[1])
    expected, _ = contract.expected(one.request(), 6)
    string = letters(expected[1:3])
    assert one.take(contract.run([one.request(stop_strings=(string,))])) == "stop"
    assert one.tokens[11:] == expected[: letters(expected).index(string) + 2]


def test_the_limit_and_the_context_count_observations(contract: Contract) -> None:
    short, long = Conversation(PROMPTS[0]), Conversation(PROMPTS[1])
    run(contract, [short, long])
    for each in (short, long):
        each.observe(OBSERVED[2])
    requests = [msgspec.structs.replace(short.request(), limit=41), msgspec.structs.replace(long.request(), limit=500)]
    collected = contract.run(requests)
    assert (short.take(collected), long.take(collected)) == ("length", "length")
    assert (len(short.tokens), len(long.tokens)) == (41, CONTEXT - len(PROMPTS[1]))


def test_a_new_branch_draws_other_noise_and_continues_the_positions(contract: Contract) -> None:
    one, other = Conversation(PROMPTS[0]), Conversation(PROMPTS[0])
    run(contract, [one])
    one.start_branch([*PROMPTS[0], *one.tokens[:3]])  # a context that begins with tokens of the first branch
    run(contract, [one])  # `Collected` checks the positions of the deltas
    other.prompt, other.sample = one.prompt, PROMPTS[0]
    run(contract, [other])
    assert one.offset == 6 + 14
    assert one.tokens != other.tokens
    one.observe(OBSERVED[1])
    run(contract, [one])


def test_a_turn_interrupted_in_the_middle_continues_with_the_same_tokens(contract: Contract) -> None:
    """After new weights, which clear the cache as a new engine would; and in the same engine."""
    conversations = [Conversation(prompt, turn_tokens=8) for prompt in PROMPTS[:3]]
    run(contract, conversations)
    for each in conversations:
        each.observe(OBSERVED[1])
    requests = [each.request() for each in conversations]
    undisturbed = contract.run(requests)
    for reload in (True, False):
        contract.engine.submit(requests)
        collected = Collected(requests)
        while min(len(tokens) for tokens in collected.tokens.values()) < 8 + 5 + 2:
            collected.add(contract.engine.poll(0.0))
        collected.add(contract.engine.abort([one.sample_id for one in requests]))
        if reload:
            contract.load(1)
        for each, one in zip(conversations, requests, strict=True):
            each.tokens = collected.tokens[one.sample_id]
            assert 8 + 5 < len(each.tokens) < 8 + 5 + 8
        assert contract.run([each.request() for each in conversations]).tokens == undisturbed.tokens


def test_a_turn_that_returns_computes_only_what_is_new(contract: Contract) -> None:
    """vLLM keeps whole blocks, so that a short context is computed again."""
    if contract.engine.capabilities.name == "vllm":
        pytest.skip("its blocks are longer than these contexts")
    one = Conversation(PROMPTS[0])
    run(contract, [one])
    one.observe(OBSERVED[1])
    before = contract.engine.status()
    run(contract, [one])
    after = contract.engine.status()
    decoded = contract.engine.capabilities.batch_invariant  # the last token of the first turn
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == 5 + (not decoded)
    assert after.prompt_tokens_reused - before.prompt_tokens_reused == 11 + 5
