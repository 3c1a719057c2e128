"""Engines that have their parts of a batch beforehand, against the same parts on engines of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import pytest

from tests.doubles.samples import make_id
from tests.unit.hardware.test_engine_profile import PLAIN
from tests.unit.sim.test_simulation import PLANT, VARIED, spec_of
from tidemill.core.records import GenerateRequest, PolicyVersion, SamplingParams, pack_tokens
from tidemill.sim.baselines import ChunkedEngines, chunked_components
from tidemill.sim.costs import ProfiledEngine
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulation import simulate_run
from tidemill.sim.workload import BlankCompletions

V0, V1 = PolicyVersion(number=0, digest="a"), PolicyVersion(number=1, digest="b")
TWO, ONE = ProfiledEngine(profile=PLAIN, engines=2), ProfiledEngine(profile=PLAIN)
LENGTHS = {"p0": 40, "p1": 30, "p2": 3, "p3": 2, "p4": 2}


def request(prompt: str, index: int = 0) -> GenerateRequest:
    return GenerateRequest(
        sample_id=make_id(prompt, index),
        lease_id="lease",
        attempt=1,
        prompt_ids=pack_tokens([1] * 10),
        prefix_ids=b"",
        sampling=SamplingParams(max_new_tokens=50),
    )


def made(kind: type[SimulatedEngine], costs: ProfiledEngine) -> SimulatedEngine:
    engine = kind(costs, BlankCompletions(lambda sample_id: LENGTHS[sample_id.prompt_id]), now_s=0.0)
    engine.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    return engine


def ends(engine: SimulatedEngine) -> dict[str, float]:
    """When each prompt's samples end, told as it happens."""
    found: dict[str, float] = {}
    while engine.running:
        now_s = engine.next_change_s()
        engine.advance(now_s)
        found |= {delta.sample_id.prompt_id: now_s for delta in engine.take_ended()}
    return found


def batch() -> list[GenerateRequest]:
    return [request(prompt, index) for prompt in ("p0", "p1", "p2", "p3") for index in (0, 1)]


def test_each_engine_has_a_fixed_part() -> None:
    parts = [made(SimulatedEngine, ONE) for _ in range(2)]
    parts[0].submit(batch()[:4], 0.0)
    parts[1].submit(batch()[4:], 0.0)
    both = made(ChunkedEngines, TWO)
    both.submit(batch(), 0.0)

    assert (both.running, both.queued) == (8, 0)
    assert both.tokens_per_s == pytest.approx(sum(part.tokens_per_s for part in parts))
    assert ends(both) == pytest.approx(ends(parts[0]) | ends(parts[1]))
    assert both.generated == sum(part.generated for part in parts) == 2 * (40 + 30 + 3 + 2)
    assert (both.prefilled, both.reused) == (40, 40)
    # Even parts are through sooner: here half of the GPUs have nothing to do after three tokens.
    together = made(SimulatedEngine, TWO)
    together.submit(batch(), 0.0)
    assert max(ends(together).values()) < max(ends(made_and_given()).values())


def made_and_given() -> SimulatedEngine:
    engine = made(ChunkedEngines, TWO)
    engine.submit(batch(), 0.0)
    return engine


def test_abort_and_pause_reach_every_engine() -> None:
    both = made_and_given()
    both.advance(0.5)
    both.abort([one.sample_id for one in batch()], 0.5)

    assert {delta.sample_id for delta in both.take_ended()} == {one.sample_id for one in batch()}
    assert (both.running, both.next_change_s()) == (0, math.inf)
    both.pause(0.5)
    both.submit([request("p4")], 0.6)
    assert (both.running, both.queued) == (0, 1)
    both.resume(2.0)
    assert (both.running, both.queued) == (1, 0)
    both.load(V1, computes_with=V1, swap_s=1.0, now_s=2.0)
    assert min(ends(both).values()) > 3.0
    assert both.version == V1


def test_a_later_group_goes_to_the_least_loaded_engine() -> None:
    now_s = ends(made_and_given())["p2"]
    both, alone = made_and_given(), made(SimulatedEngine, ONE)
    for engine in (both, alone):
        engine.advance(now_s)
        engine.take_ended()
        assert engine.running == (4 if engine is both else 0)  # p2 and p3, of the second engine, have ended
        engine.submit([request("p4")], now_s)

    assert ends(both)["p4"] == pytest.approx(ends(alone)["p4"])


def test_every_batch_is_partitioned_again() -> None:
    both, fresh = made_and_given(), made(ChunkedEngines, TWO)
    now_s = max(ends(both).values())
    again = [request(prompt) for prompt in ("p2", "p3", "p4", "p0")]  # p0 was the first engine's
    both.submit(again, now_s)
    fresh.advance(now_s)
    fresh.submit(again, now_s)

    assert ends(both) == pytest.approx(ends(fresh))


def test_chunked_engines_ignore_known_lengths() -> None:
    batches: list[list[str]] = []

    class Told(ChunkedEngines):
        def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
            requests = list(requests)
            batches.append(list(dict.fromkeys(request.sample_id.prompt_id for request in requests)))
            super().submit(requests, now_s)

    cost_model = msgspec.structs.replace(PLANT, reserved=TWO)
    work = msgspec.structs.replace(VARIED, different_prompts=4, prompt_correlation=0.9, prompt_tokens=10)
    spec = spec_of(batch={"prompts": 4, "group_size": 2}, trainer={"steps": 4}, pool={"kind": "static", "workers": 0})
    simulate_run(spec, cost_model, work, factories=msgspec.structs.replace(chunked_components(), engine=Told))

    assert len(batches) == 4
    assert all(batch == batches[0] for batch in batches)


def test_a_resubmitted_sample_joins_its_group() -> None:
    both = made_and_given()
    both.abort([make_id("p3", 1)], 0.0)
    both.take_ended()
    both.submit([request("p3", 1)], 0.0)

    alone = made(SimulatedEngine, ONE)
    alone.submit(batch()[4:], 0.0)
    alone.abort([make_id("p3", 1)], 0.0)
    alone.take_ended()
    alone.submit([request("p3", 1)], 0.0)
    found = ends(both)
    assert {prompt: found[prompt] for prompt in ("p2", "p3")} == pytest.approx(ends(alone))
