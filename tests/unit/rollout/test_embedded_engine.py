from __future__ import annotations

import copy

import pytest
import torch

from tests.adapters import adapted
from tests.engine_requests import VERSION, Collected, Conversation, engine, finish_all, prompts, request
from tests.model_shapes import MODEL_SHAPES, llama
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, count, pack_tokens, unpack_logprobs, unpack_tokens
from tidemill.hardware import engine_profile
from tidemill.models.loading import probe_logprobs
from tidemill.rollout.engines.embedded import EmbeddedEngine


@pytest.fixture(params=MODEL_SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_greedy_tokens_equal_transformers_generate(shape: str, batch_invariant: bool) -> None:
    """Seven samples over four slots: refilled slots, a window of 8, prompts of different lengths."""
    texts = [*prompts(3, length=11, shared=5), *prompts(2, length=4), *prompts(2, length=13, shared=5)]
    reference = MODEL_SHAPES[shape]()
    expected = [
        reference.generate(  # type: ignore[operator]
            torch.tensor([text]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(text) :].tolist()
        for text in texts
    ]
    requests = [request(text, temperature=0.0) for text in texts]
    made = finish_all(engine(MODEL_SHAPES[shape](), batch_invariant=batch_invariant), requests)
    assert [made.tokens[r.sample_id] for r in requests] == expected
    assert set(made.finish.values()) == {"length"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_logprobs_are_those_of_the_sampling_distribution(shape: str, temperature: float) -> None:
    texts = prompts(3, length=10, shared=6)
    requests = [request(text, index=i, temperature=temperature) for text in texts for i in range(3)]
    made = finish_all(engine(MODEL_SHAPES[shape]()), requests)
    reference = MODEL_SHAPES[shape]()
    for one, text in zip(requests, [t for t in texts for _ in range(3)], strict=True):
        completion = made.tokens[one.sample_id]
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([text + completion]), use_cache=False).logits[0]
        logprobs = (logits[len(text) - 1 : -1] / temperature).log_softmax(-1)
        expected = logprobs[torch.arange(len(completion)), torch.tensor(completion)]
        torch.testing.assert_close(torch.tensor(made.logprobs[one.sample_id]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rollout_logprobs_of_an_adapter_equal_a_plain_forward_pass(shape: str, batch_invariant: bool) -> None:
    """Against one forward pass of the same model over each whole sequence."""
    model = adapted(shape)
    texts = prompts(3, length=10, shared=6)
    requests = [request(text, index=i) for text in texts for i in range(3)]
    made = finish_all(engine(model, batch_invariant=batch_invariant), requests)
    for one in requests:
        text, completion = unpack_tokens(one.prompt_ids), made.tokens[one.sample_id]
        scored = unpack_logprobs(probe_logprobs(model, pack_tokens([*text, *completion])))[len(text) - 1 :]
        torch.testing.assert_close(
            torch.tensor(made.logprobs[one.sample_id]), torch.tensor(list(scored)), rtol=0, atol=1e-5
        )


def test_an_adapter_of_zeros_changes_no_token(shape: str) -> None:
    requests = [request(text, index=i) for text in prompts(3, length=10, shared=6) for i in range(2)]
    plain = finish_all(engine(MODEL_SHAPES[shape](), batch_invariant=True), requests)
    made = finish_all(engine(adapted(shape, learned=False), batch_invariant=True), requests)
    assert (made.tokens, made.logprobs) == (plain.tokens, plain.logprobs)


def test_prompts_of_a_group_and_common_headers_are_computed_once() -> None:
    texts = prompts(2, length=10, shared=6)
    subject = engine(llama(), slots=8)
    finish_all(subject, [request(text, index=i) for text in texts for i in range(4)])
    # 6 header tokens + 2 x 4 other prompt tokens; the other 8 x 10 - 14 are shared
    assert (subject.status().prompt_tokens_computed, subject.status().prompt_tokens_reused) == (14, 66)


def test_status_reports_the_work() -> None:
    (text,) = prompts(1, length=10)
    subject = engine(llama(), slots=2)
    made = finish_all(subject, [request(text, index=i, max_new_tokens=3) for i in range(2)])
    one, other = made.tokens.values()
    assert one[0] != other[0]
    work = subject.status().work
    # The first pass computes the prompt and draws two tokens; the next two decode both samples, with context 11 and 12.
    assert (work.passes, work.rows, work.context_tokens, work.drawn, work.prefilled) == (3, 4, 2 * 11 + 2 * 12, 6, 10)
    assert 0 < work.cpu_s <= work.busy_s + 0.01  # the clocks have different resolutions


@pytest.mark.parametrize("temperature", [0.0, 0.15, 1.0])
def test_siblings_are_computed_once_until_they_draw_different_tokens(shape: str, temperature: float) -> None:
    """Each gets what it gets alone; some end earlier than others, and more siblings follow into the freed slots."""
    texts = prompts(2, length=10, shared=6)
    requests = [
        request(text, index=i, temperature=temperature, max_new_tokens=8 + 3 * (i % 3))
        for text in texts
        for i in range(9)
    ]
    subject = engine(MODEL_SHAPES[shape](), slots=6)
    made = finish_all(subject, requests)
    for one in requests:
        alone = finish_all(engine(MODEL_SHAPES[shape](), slots=1), [one])
        assert made.tokens[one.sample_id] == alone.tokens[one.sample_id]
        torch.testing.assert_close(
            torch.tensor(made.logprobs[one.sample_id]), torch.tensor(alone.logprobs[one.sample_id]), rtol=0, atol=1e-4
        )
    work = subject.status().work
    paths = {tuple(texts[at // 9] + made.tokens[one.sample_id]) for at, one in enumerate(requests)}
    distinct = {path[:end] for path in paths for end in range(11, len(path))}
    assert len(distinct) <= work.rows < work.drawn
    if temperature == 0.0:
        assert work.rows < work.drawn / 2


def test_a_sibling_admitted_later_reuses_the_cached_prompt() -> None:
    (text,) = prompts(1, length=10)
    subject = engine(llama(), slots=1)
    finish_all(subject, [request(text, index=i) for i in range(3)])
    assert subject.status().prompt_tokens_computed == 10 + 1 + 1  # each sibling computes the logits of the last token


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(batch_invariant: bool) -> None:
    texts = prompts(2, length=40, shared=35)
    requests = [request(text, index=i) for text in texts for i in range(3)]
    whole = finish_all(engine(llama(), batch_invariant=batch_invariant), requests)
    chunked = engine(llama(), prefill_chunk_tokens=8, batch_invariant=batch_invariant)
    assert finish_all(chunked, requests).tokens == whole.tokens
    if not batch_invariant:  # siblings and the header are still shared: 40 + 5 + at most one token per later sibling
        assert chunked.status().prompt_tokens_computed <= 45 + 5


def test_samples_are_decoded_while_a_long_prompt_is_prefilled() -> None:
    subject = engine(llama(), prefill_chunk_tokens=4)
    first, second = prompts(1, length=3)[0], prompts(1, length=40, seed=5)[0]
    subject.submit([request(first)])
    made = Collected()
    made.add(subject.poll(0.0))
    subject.submit([request(second)])
    for _ in range(3):
        made.add(subject.poll(0.0))
    assert [len(tokens) for tokens in made.tokens.values()] == [4]


def test_tokens_do_not_depend_on_slots_and_order() -> None:
    texts = prompts(4, length=8)
    requests = [request(text, index=i) for text in texts for i in range(2)]
    one = finish_all(engine(llama(), slots=8), requests)
    other = finish_all(engine(llama(), slots=3), requests[::-1])
    assert one.tokens == other.tokens


def test_a_sample_continues_from_its_prefix() -> None:
    (text,) = prompts(1)
    whole = finish_all(engine(llama()), [request(text)])
    (tokens,) = whole.tokens.values()
    continued = finish_all(engine(llama()), [request(text, prefix=tokens[:5])])
    assert list(continued.tokens.values()) == [tokens]
    assert [len(logprobs) for logprobs in continued.logprobs.values()] == [len(tokens) - 5]


def test_stop_tokens_and_strings_end_a_sample_and_are_included() -> None:
    (text,) = prompts(1)
    (tokens,) = finish_all(engine(llama()), [request(text)]).tokens.values()
    at = tokens.index(tokens[4])
    by_id = finish_all(engine(llama()), [request(text, stop_token_ids=(tokens[4],))])
    assert list(by_id.tokens.values()) == [tokens[: at + 1]]
    assert list(by_id.finish.values()) == ["stop"]
    spelled = engine(llama(), decode=lambda ids: "".join(f"<{i}>" for i in ids))
    by_string = finish_all(spelled, [request(text, stop_strings=(f"<{tokens[2]}><{tokens[3]}>",))])
    assert list(by_string.tokens.values()) == [tokens[:4]]


def test_the_context_ends_a_sample() -> None:
    (text,) = prompts(1, length=9)
    made = finish_all(engine(llama(), context=14), [request(text)])
    assert [len(tokens) for tokens in made.tokens.values()] == [5]
    assert list(made.finish.values()) == ["length"]
    with pytest.raises(UserError, match="9 tokens"):
        engine(llama(), context=9).submit([request(text)])


def test_top_k_of_1_and_a_tiny_top_p_are_greedy() -> None:
    (text,) = prompts(1)
    requests = [request(text, index=i, top_k=1, max_new_tokens=5) for i in range(4)]
    nucleus = [request(text, index=i, top_p=1e-6, max_new_tokens=5) for i in range(4)]
    greedy = finish_all(engine(llama()), [request(text, temperature=0.0, max_new_tokens=5)])
    for made in (finish_all(engine(llama()), requests), finish_all(engine(llama()), nucleus)):
        assert list(made.tokens.values()) == [*greedy.tokens.values()] * 4
        assert all(logprobs == [0.0] * 5 for logprobs in made.logprobs.values())  # one kept token has probability 1


def test_new_weights_are_used_from_the_next_token() -> None:
    """Running samples keep their tokens and continue as in a new engine with the new weights."""
    texts = prompts(2)
    requests = [request(text) for text in texts]
    model, after = llama(0), llama(1)
    subject = engine(model)
    subject.submit(requests)
    made = Collected()
    for _ in range(4):
        made.add(subject.poll(0.0))
    before = copy.deepcopy(made.tokens)
    model.load_state_dict(after.state_dict())
    subject.load(PolicyVersion(number=1, digest="next"))
    while subject.status().running or subject.status().queued:
        deltas = subject.poll(0.0)
        assert {delta.version.number for delta in deltas} == {1}
        made.add(deltas)
    continued = finish_all(
        engine(after), [request(text, prefix=before[r.sample_id]) for text, r in zip(texts, requests, strict=True)]
    )
    assert made.tokens == continued.tokens


def test_abort_returns_generated_tokens_and_frees_slots() -> None:
    texts = prompts(3)
    requests = [request(text) for text in texts]
    subject = engine(llama(), slots=2)
    subject.submit(requests)
    made = Collected()
    made.add(subject.poll(0.0))
    made.add(subject.abort([requests[0].sample_id, requests[2].sample_id]))
    assert (subject.status().running, subject.status().queued, subject.status().free_slots) == (1, 0, 1)
    assert made.finish == {requests[0].sample_id: "aborted", requests[2].sample_id: "aborted"}
    while subject.status().running:
        made.add(subject.poll(0.0))
    alone = finish_all(engine(llama()), [requests[1]])
    assert made.tokens[requests[1].sample_id] == alone.tokens[requests[1].sample_id]


def test_required_versions() -> None:
    (text,) = prompts(1)
    subject = engine(llama())
    waits = request(text)
    subject.submit([type(waits)(**{f: getattr(waits, f) for f in waits.__struct_fields__} | {"min_version": 1})])
    assert subject.poll(0.0) == [] and subject.status().queued == 1
    subject.load(PolicyVersion(number=1, digest="next"))
    assert subject.poll(0.0)[0].version.number == 1
    stale = type(waits)(**{f: getattr(waits, f) for f in waits.__struct_fields__} | {"exact_version": VERSION.number})
    subject.submit([stale])
    (refused,) = [delta for delta in subject.poll(0.0) if delta.finish == "aborted"]
    assert "asked for version 0, the engine has 1" in refused.error


def test_a_load_aborts_samples_that_require_the_previous_version() -> None:
    (text,) = prompts(1)
    subject = engine(llama())
    running = request(text)
    fields = {f: getattr(running, f) for f in running.__struct_fields__}
    subject.submit([type(running)(**fields | {"exact_version": VERSION.number})])
    (first,) = subject.poll(0.0)
    assert first.finish is None
    subject.load(PolicyVersion(number=1, digest="next"))
    (last,) = subject.poll(0.0)
    assert (last.finish, last.token_ids) == ("aborted", b"")
    assert "asked for version 0, the engine has 1" in last.error
    assert (subject.status().running, subject.status().queued) == (0, 0)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_probe_does_not_affect_samples_and_uses_current_weights(batch_invariant: bool) -> None:
    texts = prompts(3, length=10)
    requests, model, ids = [request(text) for text in texts], llama(), pack_tokens(prompts(1, length=20, seed=3)[0])
    undisturbed = finish_all(engine(llama(), batch_invariant=batch_invariant), requests)
    subject = engine(model, batch_invariant=batch_invariant)
    subject.submit(requests)
    made = Collected()
    probes = set()
    while subject.status().running + subject.status().queued:
        made.add(subject.poll(0.0))
        probes.add(subject.probe(ids))
    assert made.tokens == undisturbed.tokens
    assert made.logprobs == undisturbed.logprobs
    assert [count(one) for one in probes] == [19]
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    assert subject.probe(ids) not in probes


def run_turns(subject: EmbeddedEngine, conversations: list[Conversation]) -> int:
    """One turn of each, then an observation of three tokens; returns the prompt and prefix tokens reused."""
    before = subject.status().prompt_tokens_reused
    made = finish_all(subject, [each.request() for each in conversations])
    for each in conversations:
        assert each.take(made) == "length"
        each.observe([5, 6, 7])
    return subject.status().prompt_tokens_reused - before


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_parked_turn_survives_other_samples_in_its_slot(batch_invariant: bool) -> None:
    subject = engine(llama(), slots=2, batch_invariant=batch_invariant)
    turns = [Conversation(text, index=i) for i, text in enumerate(prompts(3))]
    run_turns(subject, turns)
    finish_all(subject, [request(text) for text in prompts(4, seed=9)])
    assert run_turns(subject, turns) == 3 * (9 + 5)  # all but the last token of each turn
    assert run_turns(subject, turns) == 3 * (9 + 5 + 4 + 5)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_turns_parked_first_are_overwritten(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_profile, "PARKING_BYTES", 0)
    subject = engine(llama(), slots=2, batch_invariant=batch_invariant)
    first, *others = [Conversation(text, index=i) for i, text in enumerate(prompts(3))]
    for each in (first, *others):
        run_turns(subject, [each])
    assert run_turns(subject, others) == 2 * (9 + 5)
    assert run_turns(subject, [first]) == 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_new_weights_clear_parked_turns(batch_invariant: bool) -> None:
    model = llama(0)
    subject, one = engine(model, batch_invariant=batch_invariant), Conversation(prompts(1)[0])
    run_turns(subject, [one])
    model.load_state_dict(llama(1).state_dict())
    subject.load(PolicyVersion(number=1, digest="next"))
    known = len(one.tokens)
    expected = finish_all(engine(llama(1), batch_invariant=batch_invariant), [one.request()])
    assert run_turns(subject, [one]) == 0
    assert one.tokens[:-3] == expected.tokens[one.request().sample_id]
    assert one.tokens[known:-3] != []


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_turn_after_a_kept_cache_computes_its_context_again(batch_invariant: bool) -> None:
    model = llama(0)
    subject = engine(model, batch_invariant=batch_invariant, keep_cache=True)
    one = Conversation(prompts(1)[0])
    subject.submit([one.request()])
    made = Collected([one.request()])
    made.add(subject.poll(0.0))
    model.load_state_dict(llama(1).state_dict())
    subject.load(PolicyVersion(number=1, digest="next"))
    while subject.status().running:
        made.add(subject.poll(0.0))
    assert one.take(made) == "length"
    one.observe([5, 6, 7])
    expected = finish_all(engine(llama(1), batch_invariant=batch_invariant), [one.request()])
    found = finish_all(subject, [one.request()])
    assert found.tokens == expected.tokens
    (logprobs,), (expected_logprobs,) = found.logprobs.values(), expected.logprobs.values()
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


def test_rows_for_turns_are_allocated_with_the_first_turn() -> None:
    subject = engine(llama(), slots=2)
    finish_all(subject, [request(text) for text in prompts(2)])
    rows = subject._scheduler._cache
    assert rows.rows == 3  # slots and staging row
    run_turns(subject, [Conversation(prompts(1)[0])])
    run_turns(subject, [Conversation(prompts(1)[0], index=1)])
    assert rows.rows == 3 + engine_profile.MOST_PARKING_ROWS


def test_a_prompt_does_not_share_parked_tokens_that_were_decoded() -> None:
    """In batch-invariant mode: the context of a new branch contains the first turn, but as a prompt."""
    subject, one = engine(llama(), batch_invariant=True), Conversation(prompts(1)[0])
    run_turns(subject, [one])
    one.start_branch([*one.prompt, *one.tokens])
    alone = finish_all(engine(llama(), batch_invariant=True), [one.request()])
    made = finish_all(subject, [one.request()])
    assert (made.tokens, made.logprobs) == (alone.tokens, alone.logprobs)
    assert subject.status().prompt_tokens_reused == 9
