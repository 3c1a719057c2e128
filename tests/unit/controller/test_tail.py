"""Which workers finish the tail of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.session import PoolSession, Session, granted, small_spec, trained
from tests.virtual_time import run_virtual
from tidemill.config.pool import FleetConfig
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.router import WorkerLoad, is_tail, select_tail_workers


def loads(**assigned: int) -> list[WorkerLoad]:
    return [WorkerLoad(lease_id=name, slots=8, assigned=number) for name, number in assigned.items()]


@pytest.mark.parametrize(
    ("unfinished", "begins"),
    [(3, False), (2, True), (1, True), (0, False)],  # a fifth of ten
)
def test_is_tail(unfinished: int, begins: bool) -> None:
    assert is_tail(unfinished=unfinished, samples=10, fraction=0.2) is begins


@pytest.mark.parametrize(
    ("assigned", "plateau", "expected"),
    [
        ({"a": 1, "b": 3, "c": 2}, 8, {"b"}),  # six fit on one worker; b has the most
        ({"a": 1, "b": 3, "c": 2}, 4, {"b", "c"}),  # plateau of four: two workers for six
        ({"local": 5, "a": 1, "b": 1}, 8, {"a"}),  # the local worker is freed first
        ({"local": 6, "a": 6}, 8, {"a", "local"}),  # twelve do not fit on one
        ({"a": 6, "b": 1}, 4, {"a", "b"}),  # a has more than the plateau and keeps them; the seventh needs another
        ({"a": 0, "b": 0}, 8, set()),
    ],
)
def test_the_fewest_workers_that_can_finish_are_selected(
    assigned: dict[str, int], plateau: int, expected: set[str]
) -> None:
    assert (
        select_tail_workers(loads(**assigned), unfinished=sum(assigned.values()), plateau=plateau, last={LOCAL})
        == expected
    )


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 8), min_size=1), st.integers(1, 8))
def test_the_other_workers_are_not_needed(assigned: dict[str, int], plateau: int) -> None:
    unfinished = sum(assigned.values())
    kept = select_tail_workers(loads(**assigned), unfinished=unfinished, plateau=plateau, last={LOCAL})

    capacity = {name: max(number, plateau) for name, number in assigned.items()}
    assert sum(capacity[name] for name in kept) >= unfinished
    assert all(sum(capacity[name] for name in kept - {one}) < unfinished for one in kept)


def test_tail_consolidation_does_not_change_the_result() -> None:
    spec = small_spec(batch={"prompts": 6, "group_size": 3}, sampling={"max_new_tokens": 40})
    config = FleetConfig(heartbeat_timeout_s=5.0, tail_fraction=0.2, seed_window_s=60.0)
    session = PoolSession(spec=spec, script=[granted("a"), granted("b"), granted("c")], config=config)
    alone = Session(spec=spec)

    run_virtual(session.run())
    run_virtual(alone.run())

    assert trained(session) == trained(alone)
    left = session.telemetry.named("worker_released")
    assert left
    # the tail is at most 3 of 18 samples, and a worker decodes 3: one worker finishes them all
    assert all(fields["samples"] <= 2 for fields in left)
    assert any(fields["tokens_kept"] for fields in session.telemetry.named("migration"))
