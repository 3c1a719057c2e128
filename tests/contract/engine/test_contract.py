"""What every engine must do. `make test` runs it on the embedded engine, `make test-vllm` on vLLM, too."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.contract.engine.engines import (
    ADAPTER,
    CONTEXT,
    KINDS,
    MODELS,
    NO_ADAPTER,
    SLOTS,
    TOLERANCE,
    Contract,
    letters,
    model,
    open_contract,
)
from tests.engine_requests import Collected, prompts, request
from tidemill.core.errors import UserError
from tidemill.core.records import GenerateRequest, pack_tokens, unpack_logprobs, unpack_tokens
from tidemill.models.loading import probe_logprobs
from tidemill.rollout.sampling import NOISE

PROMPTS = prompts(6, length=11)


VARIANTS = ("tied", "untied", "tied-adapter")


@pytest.fixture(scope="module", params=[f"{kind}-{variant}" for kind in KINDS for variant in VARIANTS])
def opened(request: pytest.FixtureRequest) -> Contract:
    kind, shape, *adapter = str(request.param).split("-")
    return open_contract(kind, shape, lora=ADAPTER if adapter else NO_ADAPTER)


@pytest.fixture
def contract(opened: Contract) -> Iterator[Contract]:
    """The engine with weights of seed 1; each test leaves it empty."""
    opened.load(1)
    yield opened
    status = opened.engine.status()
    assert (status.running, status.queued, status.free_slots) == (0, 0, SLOTS)


def assert_expected(contract: Contract, requests: list[GenerateRequest], collected: Collected) -> None:
    for one in requests:
        prefix = unpack_tokens(one.prefix_ids)
        tokens, logprobs = contract.expected(one, len(collected.tokens[one.sample_id]) - len(prefix))
        assert collected.tokens[one.sample_id] == prefix + tokens
        assert collected.logprobs[one.sample_id] == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_tokens_and_logprobs_are_those_of_the_model_and_the_samples_noise(
    contract: Contract, temperature: float
) -> None:
    requests = [request(prompt, index=index, temperature=temperature) for prompt in PROMPTS for index in range(2)]
    collected = contract.run(requests)
    assert set(collected.finish.values()) == {"length"}
    assert all(len(tokens) == 12 for tokens in collected.tokens.values())
    assert_expected(contract, requests, collected)


def test_order_and_neighbours_do_not_matter(contract: Contract) -> None:
    requests = [request(prompt, index=index) for prompt in PROMPTS for index in range(2)]
    together, reverse = contract.run(requests), contract.run(requests[::-1])
    alone = contract.run(requests[:1])
    assert together.tokens == reverse.tokens
    assert alone.tokens[requests[0].sample_id] == together.tokens[requests[0].sample_id]


def test_a_sample_continues_from_its_prefix(contract: Contract) -> None:
    whole = request(PROMPTS[0])
    tokens = contract.run([whole]).tokens[whole.sample_id]
    for cut in (1, 5, 11):
        rest = request(PROMPTS[0], prefix=tokens[:cut])
        assert contract.run([rest]).tokens[rest.sample_id] == tokens


def test_limits_of_new_tokens_and_context(contract: Contract) -> None:
    short, long = request(PROMPTS[0], max_new_tokens=1), request(PROMPTS[1], max_new_tokens=500)
    collected = contract.run([short, long])
    assert len(collected.tokens[short.sample_id]) == 1
    assert len(collected.tokens[long.sample_id]) == CONTEXT - len(PROMPTS[1])
    assert set(collected.finish.values()) == {"length"}


def test_stop_tokens_and_stop_strings_end_a_sample(contract: Contract) -> None:
    free = request(PROMPTS[2], max_new_tokens=30)
    tokens = contract.run([free]).tokens[free.sample_id]
    by_token = request(PROMPTS[2], max_new_tokens=30, stop_token_ids=(tokens[6],))
    collected = contract.run([by_token])
    assert collected.tokens[by_token.sample_id] == tokens[: tokens.index(tokens[6]) + 1]
    assert collected.finish[by_token.sample_id] == "stop"
    text = letters(tokens)
    string = text[7:10]
    by_string = request(PROMPTS[2], max_new_tokens=30, stop_strings=(string,))
    ended = contract.run([by_string]).tokens[by_string.sample_id]
    assert ended == tokens[: text.index(string) + 3]
    for cut in (len(ended) - 2, len(ended) - 1):  # the string is in two attempts
        rest = request(PROMPTS[2], prefix=tokens[:cut], max_new_tokens=30, stop_strings=(string,))
        assert contract.run([rest]).tokens[rest.sample_id] == ended


def test_a_prompt_that_is_empty_or_fills_the_context_is_refused(contract: Contract) -> None:
    for tokens in ([], list(range(2, 2 + CONTEXT))):
        with pytest.raises(UserError):
            contract.engine.submit([request(tokens)])


def test_abort_returns_the_tokens_so_far(contract: Contract) -> None:
    requests = [request(prompt, index=index, max_new_tokens=60) for prompt in PROMPTS for index in range(2)]
    collected = Collected()
    contract.engine.submit(requests)
    for _ in range(6):
        collected.add(contract.engine.poll(0.0))
    half = [one.sample_id for one in requests[::2]]
    collected.add(contract.engine.abort(half))
    contract.finish(collected)
    assert {collected.finish[name] for name in half} == {"aborted"}
    assert {collected.finish[one.sample_id] for one in requests[1::2]} == {"length"}
    assert_expected(contract, [one for one in requests if one.sample_id in collected.tokens], collected)


def test_new_weights_count_from_the_next_token(contract: Contract) -> None:
    running = [request(prompt, max_new_tokens=30) for prompt in PROMPTS[:SLOTS]]
    collected = Collected()
    contract.engine.submit(running)
    for _ in range(5):
        collected.add(contract.engine.poll(0.0))
    before = {one.sample_id: list(collected.tokens[one.sample_id]) for one in running}
    contract.load(2)
    contract.finish(collected)
    for one in running:
        rest = msgspec.structs.replace(one, prefix_ids=pack_tokens(before[one.sample_id]))
        tokens, _ = contract.expected(rest, 30 - len(before[one.sample_id]))
        assert collected.tokens[one.sample_id] == before[one.sample_id] + tokens
    fresh = [request(prompt, index=1) for prompt in PROMPTS]
    assert_expected(contract, fresh, contract.run(fresh))


def test_streamed_weights_after_a_sleep_are_the_models(contract: Contract) -> None:
    requests = [request(prompt) for prompt in PROMPTS]
    before = contract.run(requests).tokens
    for seed in (2, 3):
        contract.load(seed, asleep=True)
        collected = contract.run(requests)
        assert collected.tokens != before
        assert_expected(contract, requests, collected)
        before = collected.tokens


def test_required_versions(contract: Contract) -> None:
    now = contract.version
    exact = msgspec.structs.replace(request(PROMPTS[0], max_new_tokens=40), exact_version=now)
    later = msgspec.structs.replace(request(PROMPTS[1]), min_version=now + 1)
    wrong = msgspec.structs.replace(request(PROMPTS[2]), exact_version=now + 7)
    collected = Collected()
    contract.engine.submit([exact, wrong, later])
    for _ in range(3):
        collected.add(contract.engine.poll(0.0))
    assert collected.finish == {wrong.sample_id: "aborted"}
    assert not collected.tokens.get(later.sample_id)
    contract.load(2)
    contract.finish(collected)
    assert collected.finish[exact.sample_id] == "aborted"
    assert collected.finish[later.sample_id] == "length"
    assert_expected(contract, [later], collected)


def test_a_probe_is_the_models_and_leaves_samples_alone(contract: Contract) -> None:
    requests = [request(prompt, max_new_tokens=30) for prompt in PROMPTS[:3]]
    collected = Collected()
    contract.engine.submit(requests)
    for _ in range(4):
        collected.add(contract.engine.poll(0.0))
    probed = unpack_logprobs(contract.engine.probe(pack_tokens(PROMPTS[5])))
    from tidemill.models.attention import use_packed_attention

    contract.finish(collected)
    assert_expected(contract, requests, collected)
    use_packed_attention(contract.model)
    expected = unpack_logprobs(probe_logprobs(contract.model, pack_tokens(PROMPTS[5])))
    assert probed == pytest.approx(expected, abs=TOLERANCE)


def test_capabilities_are_those_that_recovery_needs(contract: Contract) -> None:
    capabilities = contract.engine.capabilities
    assert capabilities.logprobs
    assert capabilities.draws == NOISE
    assert capabilities.lora or not contract.lora.enabled


@pytest.mark.parametrize("shape", sorted(set(MODELS) - {"qwen3_moe"}))  # torch does not multiply experts in fp64
def test_the_rounding_of_a_model_is_less_than_the_tolerance(shape: str) -> None:
    fp32, fp64 = model(shape, 1), model(shape, 1).double()
    input_ids = torch.randint(fp32.config.vocab_size, (4, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs, exact = (one(input_ids).logits.log_softmax(-1) for one in (fp32, fp64))
    assert 0 < (logprobs - exact).abs().max() < TOLERANCE
