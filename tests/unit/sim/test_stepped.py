"""The polled engine, pass by pass, against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.sim.test_simulated_engine import V0, V1, request, told
from tidemill.hardware.measured_profile import MeasuredEngine
from tidemill.sim.simulated_engine import SteppedEngine
from tidemill.sim.workload import BlankCompletions

COSTS = MeasuredEngine(slots=2, pass_s=1.0, row_s=0.1, context_token_s=0.0, drawn_s=0.0, prefill_token_s=0.01)


def engine(
    lengths: dict[int, int], spent: list[float], *, budget: int = 100, costs: MeasuredEngine = COSTS, **settings: Any
) -> SteppedEngine:
    made = SteppedEngine(
        costs,
        BlankCompletions(lambda sample_id: lengths[sample_id.index]),
        budget_tokens=budget,
        swap_s=0.5,
        spend=spent.append,
        **settings,
    )
    made.load(V0)
    spent.clear()
    return made


def test_a_poll_runs_until_its_deadline() -> None:
    spent: list[float] = []
    one = engine({0: 3, 1: 5, 2: 2}, spent)
    one.submit([request(0), request(1), request(2)])
    # The first pass computes two prompts, 20 tokens, and draws; the next two take both samples on: 1.2 + 1.2 + 1.2.
    assert told(one.poll(3.0)) == [(0, 0, 3, "stop"), (1, 0, 3, None)]
    assert spent == [pytest.approx(1 + 0.2 + 2 * 1.2)]
    # The third comes in beside the second: 1 + 0.1 + 10 * 0.01, and both have one token left.
    assert sorted(told(one.poll(10.0))) == [(1, 3, 2, "stop"), (2, 0, 2, "stop")]
    assert spent[1] == pytest.approx(1.2 + 1.2)
    assert one.poll(10.0) == []
    work = one.status().work
    assert (work.passes, work.rows, work.drawn, work.prefilled) == (5, 7, 10, 30)
    assert work.busy_s == pytest.approx(sum(spent))


@pytest.mark.parametrize(("purpose", "rows"), [("train", 1 + 1.5 + 1.5), ("eval", 6)])
def test_samples_of_a_group_with_equal_tokens_are_computed_once(purpose: str, rows: float) -> None:
    spent: list[float] = []
    one = engine({0: 4, 1: 4}, spent, costs=msgspec.structs.replace(COSTS, new_by_depth=(0.5, 0.75)))
    of_purpose = [
        msgspec.structs.replace(each, sample_id=msgspec.structs.replace(each.sample_id, purpose=purpose))
        for each in (request(0), request(1))
    ]
    one.submit(of_purpose)
    one.poll(10.0)
    # A pass over two prompts of 10 tokens; then both samples have one token, two and three.
    assert spent == [pytest.approx(1 + 0.2 + 3 + 0.1 * rows)]
    one.submit(of_purpose)  # the prompts are in the cache
    one.poll(10.0)
    assert spent[1] == pytest.approx(spent[0] - 0.2)


def test_prompts_beyond_the_pass_budget_wait() -> None:
    spent: list[float] = []
    one = engine({0: 1, 1: 1}, spent, budget=10)
    one.submit([request(0), request(1)])
    assert told(one.poll(0.1)) == [(0, 0, 1, "stop")]
    assert told(one.poll(0.1)) == [(1, 0, 1, "stop")]


def test_a_load_recomputes_the_cache() -> None:
    spent: list[float] = []
    one = engine({0: 5}, spent)
    one.submit([request(0)])
    one.poll(0.1)
    one.load(V1)
    # A prompt of 10 tokens and the first of the sample.
    assert spent[-1] == pytest.approx(0.5 + 11 * 0.01)


def test_a_load_aborts_requests_for_the_old_version() -> None:
    spent: list[float] = []
    one = engine({0: 5}, spent)
    one.load(V1)
    one.submit([request(0, exact_version=0)])
    (delta,) = one.poll(1.0)
    assert (delta.finish, delta.error) == ("aborted", "request needs version 0, engine has 1")
    assert spent == [0.5, 0.0]


@pytest.mark.parametrize(("keep_cache", "recomputed_tokens"), [(False, 11), (True, 0)])
def test_a_load_computes_caches_again_unless_they_are_kept(keep_cache: bool, recomputed_tokens: int) -> None:
    spent: list[float] = []
    one = engine({0: 3}, spent, keep_cache=keep_cache)
    one.submit([request(0)])
    one.poll(0.0)  # a prompt of 10 tokens, and the first of the sample
    one.load(V1)
    assert spent[-1] == pytest.approx(0.5 + recomputed_tokens * 0.01)
    assert one.capabilities.keeps_kv is keep_cache
