"""Who finishes a batch when little of it is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_pool import PoolSession, granted, trained
from tests.fake_session import Session, small_spec
from tests.virtual_time import run_virtual
from tidemill.config.pool import FleetConfig
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.router import Load, select_tail_workers, tail_begins


def loads(**assigned: int) -> list[Load]:
    return [Load(lease_id=name, slots=8, assigned=number) for name, number in assigned.items()]


@pytest.mark.parametrize(
    ("unfinished", "begins"),
    [(3, False), (2, True), (1, True), (0, False)],  # a fifth of ten is two
)
def test_when_the_tail_begins(unfinished: int, begins: bool) -> None:
    assert tail_begins(unfinished=unfinished, samples=10, fraction=0.2) is begins


@pytest.mark.parametrize(
    ("assigned", "plateau", "expected"),
    [
        ({"a": 1, "b": 3, "c": 2}, 8, {"b"}),  # six fit one; b has the most
        ({"a": 1, "b": 3, "c": 2}, 4, {"b", "c"}),  # four at once pay: two workers for six
        ({"local": 5, "a": 1, "b": 1}, 8, {"a"}),  # the reserved engine is freed first, whatever it has
        ({"local": 6, "a": 6}, 8, {"a", "local"}),  # twelve do not fit one
        ({"a": 6, "b": 1}, 4, {"a", "b"}),  # a has more than pays, and keeps it; the seventh needs another
        ({"a": 0, "b": 0}, 8, set()),
    ],
)
def test_the_fewest_that_can_finish_it(assigned: dict[str, int], plateau: int, expected: set[str]) -> None:
    assert (
        select_tail_workers(loads(**assigned), unfinished=sum(assigned.values()), plateau=plateau, last={LOCAL})
        == expected
    )


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 8), min_size=1), st.integers(1, 8))
def test_who_is_left_can_be_done_without(assigned: dict[str, int], plateau: int) -> None:
    unfinished = sum(assigned.values())
    kept = select_tail_workers(loads(**assigned), unfinished=unfinished, plateau=plateau, last={LOCAL})

    capacity = {name: max(number, plateau) for name, number in assigned.items()}
    assert sum(capacity[name] for name in kept) >= unfinished
    assert all(sum(capacity[name] for name in kept - {one}) < unfinished for one in kept)


def test_a_batch_is_finished_on_one_worker_and_learned_from_as_ever() -> None:
    spec = small_spec(batch={"prompts": 6, "group_size": 3}, sampling={"max_new_tokens": 40})
    config = FleetConfig(heartbeat_timeout_s=5.0, tail_fraction=0.2, seed_window_s=60.0)
    session = PoolSession(spec=spec, script=[granted("a"), granted("b"), granted("c")], config=config)
    alone = Session(spec=spec)

    run_virtual(session.run())
    run_virtual(alone.run())

    assert trained(session) == trained(alone)
    left = session.telemetry.named("worker_released")
    assert left
    # at most 3 of 18 samples are the tail, and a worker decodes 3 at once: one keeps what it has and gets the others'
    assert all(fields["samples"] <= 2 for fields in left)
    assert any(fields["tokens_kept"] for fields in session.telemetry.named("migration"))
