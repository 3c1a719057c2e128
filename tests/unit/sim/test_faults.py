"""The controller among faults: some hundred seeds, those that once found something, and whether they find at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from benchmarks.simulator.planted_defects import DEFECTS, found, planted
from tests.fault_simulation import __main__ as command
from tests.fault_simulation.chunks import simulate_chunk_faults
from tests.fault_simulation.guarding import Disk
from tests.fault_simulation.invariants import Invariants
from tests.fault_simulation.scenario import draw, has_guard, has_tail, has_worker_ranks
from tests.fault_simulation.seed_run import Simulation, simulate_faults
from tests.fault_simulation.world import World
from tests.rotation import DAY, daily, share_of_the_day
from tidemill.controller import ledger
from tidemill.controller.chunks import FleetChunks
from tidemill.controller.ledger import Ledger
from tidemill.core.evidence import GuardDecision
from tidemill.core.records import Episode, Group, PolicyVersion
from tidemill.sim.simulated_trainer import SimulatedTrainer
from tidemill.telemetry.events import GOLD, GUARD

CHUNK, CHUNKS = 40, 5

FOUND = {
    "dynamic sampling gave up a group that a recorded batch had": 67,
    "queued samples were begun under weights older than the lag allows": 305,
    "a worker was lost for pulling a version that was not kept any more": 386,
    "a pause waited for ever for a worker that had forgotten its samples": 498,
    "a journal went on from a checkpoint that was lost": 684,
    "after a lost checkpoint groups were learned from twice, and others never": 6129,
    "tokens that came during a publish were not counted": 19,
    "a torn read of the last snapshot ended a publish": 3,
    "a lease that was granted twice had two lives": 4,
    "an evaluation began although the journal had failed while samples were handed back": 5478,
    "what a worker did was told in an order that depended on the process": 1007,
    "an environment of a dropped sample went on after the run had ended": 3629,
    "machines that lived shorter than a recomputation moved samples for ever": 7,
    "tail batching: a redrawn prompt stayed in the queue": 97,
    "tail batching: a closed round was started again": 416,
    "tail batching: a trained group was generated again after a worker was found to compute wrongly": 229,
    "tail batching: the ranking waited for samples set aside before a worker was found to compute wrongly": 31,
    "tail batching: an environment of a sample that was set aside was never forgotten": 38,
    "tail batching: after a lost checkpoint the groups of a round were started with other prompts": 2029,
    "tail batching: whether a sample had ended depended on when its last token arrived": 27,
}
"""Seeds that violated something when they were first run, by what was wrong. (What a seed asks for may have changed
since.)"""


def chunks() -> list[list[int]]:
    return [list(range(first, first + CHUNK)) for first in range(0, CHUNK * CHUNKS, CHUNK)]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(share_of_the_day(range(CHUNK * CHUNKS), CHUNK // 2), id=f"day {DAY}"),
        *(pytest.param(chunk, id=f"from {chunk[0]}", marks=pytest.mark.slow) for chunk in chunks()),
    ],
)
def test_no_seed_violates_an_invariant(seeds: list[int]) -> None:
    outcomes = [simulate_faults(seed) for seed in seeds]

    assert [(outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation] == []
    assert sum(outcome.lives for outcome in outcomes) > len(seeds)  # controllers were killed
    assert min(outcome.looks for outcome in outcomes) > 0


@pytest.mark.parametrize("chunk", daily(range(12), 1))
def test_with_unfinished_wait_each_sample_has_one_version(chunk: int) -> None:
    seeds = range(chunk * CHUNK // 4, (chunk + 1) * CHUNK // 4)
    for seed in (seed for seed in seeds if not has_tail(seed)):
        scenario = draw(seed)
        schedule = scenario.sections["schedule"]
        waits = {**schedule, "max_policy_lag": schedule["max_policy_lag"] or 2, "unfinished": "wait"}
        changed = msgspec.structs.replace(scenario, sections={**scenario.sections, "schedule": waits})

        assert (seed, Simulation(changed).run().violation) == (seed, "")


@pytest.mark.parametrize("what", FOUND)
def test_known_defects_stay_fixed(what: str) -> None:
    assert simulate_faults(FOUND[what]).violation == ""


def test_a_seed_is_replayed_exactly() -> None:
    seed = 305
    first, again = Simulation(draw(seed)), Simulation(draw(seed))

    assert first.run() == again.run()
    assert first.log == again.log
    assert len({outcome.digest for outcome in (first.run(), simulate_faults(306))}) == 2


FIRST = {
    "counts a token twice": 30,
    "learns from a group twice": 58,
    "acts before it is durable": 30,
    "does not journal observations": 29,
    "reuses calls of an earlier turn": 43,
    "lets the other ranks run on": 66,
    "leaves a rank of a worker at its version": 45,
    "does not lock what it pulled": 122,
    "moves a sample for ever": 72,
    "loses a returned prompt": 60,
    "closes a round early": 93,
    "ranks groups by arrival": 27,
}
"""Seeds from which on the defects are searched for: quick ones that found them."""


@pytest.mark.parametrize("name", FIRST)
def test_a_planted_defect_is_found(name: str) -> None:
    assert found(DEFECTS[name], range(FIRST[name], FIRST[name] + 15)) is not None


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_can_be_planted(name: str) -> None:
    with planted(DEFECTS[name]):  # its function has the part that the defect replaces
        pass


def test_a_violation_prints_the_replay_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defect = DEFECTS["counts a token twice"]
    monkeypatch.setattr(defect.owner, defect.name, defect.wrong(getattr(defect.owner, defect.name)))
    monkeypatch.setattr(command, "many", lambda seeds, processes, simulate: map(simulate, seeds))

    assert command.run_many(range(2), 1) == 1
    said = capsys.readouterr().out
    assert "python -m tests.fault_simulation --seed 0 --log" in said
    assert "2 seeds in" in said

    assert command.run_one(0, log=True) == 1
    assert "violation    the run reports" in capsys.readouterr().out


def test_every_scenario_ends_with_an_undisturbed_life() -> None:
    scenarios = [draw(seed) for seed in range(300)]

    assert all(scenario.lives[-1].fault is None for scenario in scenarios)
    assert len({scenario.sections["schedule"].get("membership") for scenario in scenarios}) == 3  # or tail batching
    assert any(scenario.tick_s == math.inf for scenario in scenarios)
    apply = {f.kind for s in scenarios for life in s.lives for machine in life.machines for f in machine.faults}
    assert len(apply) == 14


def test_seeds_with_agents_reach_every_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[str] = set()
    acts = Invariants.acts

    def noted(self: Invariants, episode: Episode) -> None:
        acts(self, episode)
        reached.update(name for name in ("finished", "started") if getattr(episode, name))

    def learned(self: SimulatedTrainer, group: Group) -> object:
        for one in group.trajectories:
            reached.update([one.episode_end, *(segment.role for segment in one.segments)])
        return accumulate(self, group)

    accumulate = SimulatedTrainer.accumulate
    monkeypatch.setattr(Invariants, "acts", noted)
    monkeypatch.setattr(SimulatedTrainer, "accumulate", learned)
    ends = {"done", "tokens", "context", "turns", "failure", "fault"}
    every = {*ends, "finished", "started", "prompt", "action", "observation", "context"}
    for seed in (seed for seed in range(65, 165) if draw(seed).agent is not None):
        if reached == every:
            break
        assert (seed, simulate_faults(seed).violation) == (seed, "")

    assert reached == every


def test_seeds_with_tail_batching_reach_every_part_of_it() -> None:
    reached = Counter[str]()
    for seed in filter(has_tail, range(42, 200)):
        if len(reached) == 7:
            break
        simulation = Simulation(draw(seed))
        assert (seed, simulation.run().violation) == (seed, "")
        assert simulation.invariants.tail is not None
        for closed in simulation.invariants.durable.rounds.values():
            extra = [group.first_in_short for group in closed.returned]
            reached["redrawn"] += len(closed.redrawn)
            reached["set aside"] += len(closed.set_aside)
            reached["extra groups return"] += sum(extra)
            reached["others return"] += len(extra) - sum(extra)
        reached["checked"] += simulation.invariants.tail.rounds
        reached["tainted"] += simulation.invariants.tail.was_tainted
        reached["more steps"] += simulation.scenario.early_steps > 0
        reached += Counter()  # without zeros

    assert len(reached) == 7, reached


def test_seeds_with_ranks_of_workers_reach_every_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[tuple[str, str]] = set()
    check = World._check_leases

    def noted(self: World, *, finished: bool) -> None:
        for worker in self.ranked.values():
            if worker.fault is not None:
                moment = "load" if worker.fault.load else "step" if worker.blocked_s < math.inf else "idle"
                reached.add((worker.fault.kind, moment))
                reached.update([("mixed", moment)] if len(set(worker.ranks.versions)) > 1 else [])
        check(self, finished=finished)

    monkeypatch.setattr(World, "_check_leases", noted)
    every = {(kind, moment) for kind in ("dies", "hangs") for moment in ("load", "step")} | {("mixed", "load")}
    for seed in filter(has_worker_ranks, range(115, 200)):
        if reached >= every:
            break
        assert (seed, simulate_faults(seed).violation) == (seed, "")

    assert reached >= every


def test_seeds_with_a_guard_reach_every_part_of_it() -> None:
    every = {"rollback", "rollback to the start", "stop to the start", "gold", "gold is missing"}
    reached: set[str] = set()
    for seed in filter(has_guard, range(127, 200)):
        if reached == every:
            break
        simulation = Simulation(draw(seed))
        assert (seed, simulation.run().violation) == (seed, "")
        for _, _, name, fields in simulation.log:
            if name == GUARD:
                reached.add(fields["action"] + (" to the start" if fields["target"] == 0 else ""))
            elif name == GOLD:
                reached |= {"gold is missing"} if fields.get("missing") else {"gold"}

    assert reached == every


def no_retention(self: Disk, step: int, version: PolicyVersion, pinned: int | None) -> None:
    self.checkpoints = {step: version}


def no_forgetting(self: Ledger, decision: GuardDecision) -> None:
    self.decisions.append(decision)


async def no_journal(self: Ledger, decision: GuardDecision) -> None:
    self._apply_decision(decision)


@pytest.mark.parametrize(
    ("seed", "owner", "name", "wrong"),
    [
        (25, ledger, "since_rollback", lambda entries: (list(entries), False)),
        (11, Ledger, "_apply_decision", no_forgetting),
        (11, Ledger, "record_decision", no_journal),
        (51, Disk, "keep", no_retention),
    ],
)
def test_a_planted_defect_of_a_rollback_is_found(
    seed: int, owner: object, name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)

    assert simulate_faults(seed).violation


def test_chunks_survive_faults() -> None:
    assert [simulate_chunk_faults(seed).violation for seed in range(30)] == [""] * 30


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_wait_again", lambda chunks, lease_id: None),  # forgets the chunks of a lost worker
        ("_lost", lambda chunks, outcome: None),  # does not notice that a worker is lost
    ],
)
def test_a_planted_defect_of_chunks_is_found(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(FleetChunks, name, wrong)

    assert any(simulate_chunk_faults(seed).violation for seed in range(10))


def test_a_violation_of_chunks_prints_its_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FleetChunks, "_wait_again", lambda chunks, lease_id: None)
    monkeypatch.setattr(command, "many", lambda seeds, processes, simulate: map(simulate, seeds))

    assert command.run_many(range(4), 1, simulate_chunk_faults) == 1
    assert "--chunks" in capsys.readouterr().out
