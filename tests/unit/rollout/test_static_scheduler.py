"""The static scheduler on a CPU, against the packed one: tokens equal, logprobs to 1e-5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine_requests import VERSION, Collected, Conversation, engine, finish_all, prompts, request
from tests.model_shapes import MODEL_SHAPES, llama
from tests.torch_kernels import TORCH_KERNELS
from tests.triton_interpreter import run_cases
from tidemill.core.records import GenerateRequest, PolicyVersion
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.rollout.engines.embedded.static_scheduler import StaticScheduler

NEXT = PolicyVersion(number=1, digest="next")
(TEXT,) = prompts(1, length=10)


@pytest.fixture(params=MODEL_SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def static(shape: str = "llama", **settings: object) -> EmbeddedEngine:
    return engine(MODEL_SHAPES[shape](), kernels=TORCH_KERNELS, **settings)


def scheduler(subject: EmbeddedEngine) -> StaticScheduler:
    assert isinstance(subject._scheduler, StaticScheduler)
    return subject._scheduler


def assert_as_packed(made: Collected, requests: Sequence[GenerateRequest], shape: str = "llama") -> None:
    """The same tokens, and those logprobs that belong to them, as if each sample were generated alone."""
    packed = finish_all(engine(MODEL_SHAPES[shape](), slots=len(requests)), requests)
    for one in requests:
        name = one.sample_id
        assert (made.tokens[name], made.finish[name]) == (packed.tokens[name], packed.finish[name])
        assert made.logprobs[name] == pytest.approx(packed.logprobs[name], abs=1e-5)


def poll_until(subject: EmbeddedEngine, made: Collected, tokens: int) -> None:
    while min(map(len, made.tokens.values()), default=0) < tokens:
        made.add(subject.poll(0.0))


def poll_all(subject: EmbeddedEngine, made: Collected) -> Collected:
    while subject.status().running or subject.status().queued:
        made.add(subject.poll(0.0))
    made.add(subject.poll(0.0))
    return made


@pytest.mark.parametrize("slots", [1, 3, 8, 40])
def test_tokens_are_those_of_the_packed_scheduler(shape: str, slots: int) -> None:
    """Groups, common headers, samples that end one after the other, and more samples than slots."""
    texts = [*prompts(3, length=10, shared=6), *prompts(2, length=4), *prompts(1, length=30, seed=2)]
    requests = [
        request(text, index=index, temperature=(1.0, 0.7, 0.0)[index % 3], max_new_tokens=1 + 5 * (index % 4))
        for text in texts
        for index in range(6)
    ]
    subject = static(shape, slots=slots, prefill_chunk_tokens=25)
    assert_as_packed(finish_all(subject, requests), requests, shape)
    assert subject.status().free_slots == slots


@pytest.mark.timeout(300)
def test_tokens_by_the_kernels_in_the_interpreter() -> None:
    run_cases(Path(__file__).with_name("static_engine_cases.py"))


def test_prompts_of_a_group_and_common_headers_are_computed_once() -> None:
    subject = static(slots=8)
    finish_all(subject, [request(text, index=i) for text in prompts(2, length=10, shared=6) for i in range(4)])
    # 6 header tokens + 2 x 4 other prompt tokens; the other 8 x 10 - 14 are shared
    assert (subject.status().prompt_tokens_computed, subject.status().prompt_tokens_reused) == (14, 66)


def test_status_reports_the_work() -> None:
    subject = static(slots=2)
    finish_all(subject, [request(TEXT, index=i, max_new_tokens=3) for i in range(2)])
    work = subject.status().work
    # The prompt, then two steps of both samples, with context 11 and 12; none is launched after the last token.
    assert (work.passes, work.rows, work.context_tokens, work.drawn, work.prefilled) == (3, 4, 2 * 11 + 2 * 12, 6, 10)


def test_the_token_after_a_stop_token_is_computed_and_dropped() -> None:
    free = finish_all(static(), [request(TEXT)])
    (tokens,) = free.tokens.values()
    stop = next(at for at in range(3, 10) if tokens[at] not in tokens[:at])
    stopped, other = request(TEXT, stop_token_ids=(tokens[stop],)), request(prompts(1, seed=3)[0], index=1)
    subject = static()
    made = finish_all(subject, [stopped, other])
    assert_as_packed(made, [stopped, other])
    assert made.tokens[stopped.sample_id] == tokens[: stop + 1]
    work = subject.status().work
    assert (work.drawn, work.rows) == (stop + 1 + 12, stop + 11 + 1)  # the first tokens are drawn with the prompts


def test_an_owner_that_ends_hands_its_prompt_to_a_sibling() -> None:
    """Its row is used by another prompt then, which would change what the siblings read."""
    group = [request(TEXT, index=index, max_new_tokens=(2, 14, 16)[index]) for index in range(3)]
    others = [request(text, max_new_tokens=20) for text in prompts(2, length=20, seed=4)]
    subject = static(slots=3)
    subject.submit(group)
    made = Collected()
    while group[0].sample_id not in made.finish:
        made.add(subject.poll(0.0))
    readers = scheduler(subject)._running
    assert {each.prefix_row for each in readers} == {readers[0].row}
    before = subject.status().prompt_tokens_computed
    late = request(TEXT, index=3, max_new_tokens=9)
    subject.submit([late, *others])
    poll_all(subject, made)
    assert_as_packed(made, [*group, late, *others])
    assert subject.status().prompt_tokens_computed == before + 1 + 2 * 20  # the late sibling reads the heir's row


def test_a_late_sibling_reads_the_prompt_of_a_running_one() -> None:
    first, late = request(TEXT), request(TEXT, index=1)
    subject = static()
    subject.submit([first])
    made = Collected()
    made.add(subject.poll(0.0))
    subject.submit([late])
    made.add(subject.poll(0.0))
    owner, reader = scheduler(subject)._running
    assert (reader.prefix_row, reader.prefix_length, reader.complete) == (owner.row, 10, False)
    assert_as_packed(poll_all(subject, made), [first, late])


@pytest.mark.parametrize("running", [True, False])
def test_a_continued_sample_joins_its_siblings(running: bool) -> None:
    """It was interrupted elsewhere; two of them may have the same tokens so far."""
    first = request(TEXT, max_new_tokens=14)
    tokens = finish_all(static(), [request(TEXT, index=1), request(TEXT, index=2, temperature=0.0)]).tokens
    one, greedy = tokens.values()
    rest = [
        request(TEXT, index=1, prefix=one[:5]),
        request(TEXT, index=2, prefix=greedy[:4], temperature=0.0),
        request(TEXT, index=3, prefix=greedy[:4], temperature=0.0),
    ]
    subject = static(slots=5)
    made = Collected([first, *rest])
    subject.submit([first])
    if running:
        made.add(subject.poll(0.0))
    subject.submit(rest)
    assert_as_packed(poll_all(subject, made), [first, *rest])
    assert [made.tokens[one.sample_id] for one in rest] == [one, greedy, greedy]


def test_siblings_that_continue_together_read_one_prompt() -> None:
    """After new weights they are computed again in one step, when none is running."""
    group = [request(TEXT, index=index, max_new_tokens=20 - 5 * index) for index in range(3)]
    subject = static()
    subject.submit(group)
    made = Collected(group)
    poll_until(subject, made, 4)
    subject.load(VERSION)
    made.add(subject.poll(0.0))
    first, *others = scheduler(subject)._running
    assert [each.prefix for each in others] == [(first.row, len(TEXT))] * 2
    assert_as_packed(poll_all(subject, made), group)


def test_the_next_turns_of_siblings_read_one_prompt() -> None:
    """Each continues from its own parked row."""
    subject = static()
    turns = [Conversation(TEXT, index=index) for index in range(3)]
    made = finish_all(subject, [one.request() for one in turns])
    for one in turns:
        one.take(made)
        one.observe([5, 6, 7])
    subject.submit([one.request() for one in turns])
    subject.poll(0.0)
    assert len({each.prefix_row for each in scheduler(subject)._running}) == 1


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.7)])
def test_top_k_and_top_p_beside_samples_without(name: str, value: float) -> None:
    """They begin and end between others, so that steps of both kinds follow each other."""
    requests = [request(TEXT, index=index, max_new_tokens=6 + 3 * index) for index in range(3)]
    restricted: dict[str, Any] = {name: value}
    requests += [request(TEXT, index=3, max_new_tokens=8, **restricted)]
    assert_as_packed(finish_all(static(), requests), requests)


def test_a_step_that_was_launched_is_dropped_when_weights_change() -> None:
    group = [request(TEXT, index=index, max_new_tokens=20) for index in range(3)]
    model = llama(0)
    subject = engine(model, kernels=TORCH_KERNELS)
    subject.submit(group)
    made = Collected(group)
    poll_until(subject, made, 5)
    assert scheduler(subject)._draws is not None
    before = {name: list(tokens) for name, tokens in made.tokens.items()}
    model.load_state_dict(llama(1).state_dict())
    subject.load(NEXT)
    poll_all(subject, made)
    rest = [
        request(TEXT, index=each.sample_id.index, max_new_tokens=20, prefix=before[each.sample_id]) for each in group
    ]
    expected = finish_all(engine(llama(1)), rest)
    assert made.tokens == expected.tokens
    for each in group:
        name = each.sample_id
        assert made.logprobs[name][5:] == pytest.approx(expected.logprobs[name], abs=1e-5)


def test_memory_stays_where_it_is_when_weights_change() -> None:
    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in (*cache._keys, *cache._values, *state._columns.values())]

    subject = static()
    cache, state = scheduler(subject)._cache, scheduler(subject)._state
    finish_all(subject, [request(TEXT)])
    before = places()
    subject.load(NEXT)
    finish_all(subject, [request(text, max_new_tokens=30) for text in prompts(5, length=20)])
    assert places() == before
    assert len(before) > 10


def test_a_kept_cache_keeps_the_positions_before_the_dropped_step() -> None:
    """With unchanged weights nothing may change: a lost or repeated position would change every later token."""
    group = [request(TEXT, index=index, max_new_tokens=6 * index + 6) for index in range(3)]
    subject = static(keep_cache=True)
    subject.submit(group)
    made = Collected(group)
    poll_until(subject, made, 3)
    subject.load(VERSION)
    poll_until(subject, made, 5)
    subject.load(VERSION)
    assert_as_packed(poll_all(subject, made), group)


def test_an_abort_drops_the_launched_token_of_its_samples_only() -> None:
    group = [request(TEXT, index=index, max_new_tokens=20) for index in range(4)]
    subject = static()
    subject.submit(group)
    made = Collected(group)
    poll_until(subject, made, 4)
    made.add(subject.abort([group[0].sample_id, group[2].sample_id]))
    aborted = {each.sample_id: len(made.tokens[each.sample_id]) for each in group[::2]}
    newer = [request(text, max_new_tokens=20) for text in prompts(2, length=20, seed=4)]  # into the freed rows
    subject.submit(newer)
    poll_all(subject, made)
    assert {made.finish[name] for name in aborted} == {"aborted"}
    assert {name: len(made.tokens[name]) for name in aborted} == aborted
    assert_as_packed(made, [*group[1::2], *newer])


def test_turns_of_siblings_are_read_from_their_parked_rows() -> None:
    """Those that read another's prompt get it before their row is parked; the owner of the prompt ends last."""
    subject, packed = static(slots=3), engine(llama(), slots=3)
    turns = [[Conversation(TEXT, index=index, turn_tokens=6 - index) for index in range(3)] for _ in range(2)]
    for _ in range(3):
        for conversations, each in zip(turns, (subject, packed), strict=True):
            made = finish_all(each, [one.request() for one in conversations])
            for one in conversations:
                one.take(made)
                one.observe([5, 6, 7])
            finish_all(each, [request(text) for text in prompts(3, seed=9)])  # overwrites the rows
        mine, theirs = turns
        assert [one.tokens for one in mine] == [one.tokens for one in theirs]
        assert [one.logprobs for one in mine] == [pytest.approx(one.logprobs, abs=1e-5) for one in theirs]
    assert subject.status().prompt_tokens_reused == packed.status().prompt_tokens_reused
    assert subject.status().prompt_tokens_computed == packed.status().prompt_tokens_computed


def test_a_group_larger_than_a_tile_is_several_groups() -> None:
    requests = [request(TEXT, index=index) for index in range(37)]
    subject = static(slots=40)
    made = Collected()
    subject.submit(requests)
    for _ in range(3):
        made.add(subject.poll(0.0))
    layout = scheduler(subject)._state.entries(48).layout
    assert layout.group_first.tolist()[:4] == [0, 16, 32, 0]
    assert layout.group_size.tolist()[:4] == [16, 16, 5, 0]
    assert_as_packed(poll_all(subject, made), requests)


def test_the_next_step_is_launched_before_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a sample without a second token to draw is not launched at all."""
    order: list[str] = []
    subject = static()
    inner = scheduler(subject)
    launch = inner._decode

    def launched(size: int) -> None:
        order.append("launch")
        launch(size)

    monkeypatch.setattr(inner, "_decode", launched)
    one = request(TEXT, max_new_tokens=4)
    subject.submit([one, msgspec.structs.replace(request(TEXT, index=1, max_new_tokens=1))])
    for _ in range(6):
        order += ["token"] * sum(len(delta.token_ids) // 4 for delta in subject.poll(0.0))
    assert order == ["token", "token", "launch", "launch", "token", "launch", "token", "token"]
