"""Preemptible workers and the local worker share samples: joining, loading weights, and the seeding window."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.doubles.session import FakeWeightSource, Session, granted, small_spec, trained
from tests.small_pool import FLEET, pool, quiet
from tests.virtual_time import run_virtual
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.offload import OffloadState, Seeding
from tidemill.core.errors import WeightsError
from tidemill.core.records import PolicyVersion, Pulled


def test_workers_share_the_samples_without_changing_the_result() -> None:
    session = pool(granted("a"), granted("b"))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert all(session.host.engines[f"lease-{name}"].generated > 20 for name in "ab")
    joins = session.telemetry.named("join")
    assert [fields["worker"] for fields in joins] == ["spot-a", "spot-b"]
    # It boots for 0.2 s, pulls for 0.3 s, and swaps between two ticks.
    assert all(0.5 <= fields["duration_s"] < 0.8 for fields in joins)
    # each worker pulled every version, possibly except the last
    pulls = session.telemetry.named("pull")
    for name in "ab":
        assert {fields["version"] for fields in pulls if fields["worker"] == f"spot-{name}"} >= {0, 1, 2, 3}


def test_a_run_works_without_workers() -> None:
    session = pool()

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.telemetry.named("waiting") == []


def test_preemptible_workers_alone_are_enough() -> None:
    session = pool(granted("a"), seeding_worker=False, config=FLEET.model_copy(update={"seeding": False}))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.engine.generated == 0


def test_a_worker_that_joins_in_the_middle_of_a_step_serves_that_step() -> None:
    session = pool(granted("a"), granted("late", 1.0), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    first = session.telemetry.named("decode")
    assert any(fields["worker"] == "spot-late" and fields["step"] == 1 for fields in first)


def test_a_worker_pulls_a_newer_version_published_meanwhile() -> None:
    session = pool(granted("a"))
    gone: list[int] = []

    class Overtaken(FakeWeightSource):
        async def prepare(self, version: PolicyVersion) -> Pulled:
            """So slow that version 1 is deleted before it is read."""
            if version.number == 1:
                while max(self.publisher.manifests) == 1:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.1)
                gone.append(version.number)
                raise WeightsError("there is no version 1")
            return await super().prepare(version)

    session.host.source_type = Overtaken
    run_virtual(session.run())

    assert (trained(session), gone) == (quiet(), [1])
    assert session.telemetry.named("crash") == []
    assert [fields["version"] for fields in session.telemetry.named("pull")][:2] == [0, 2]


@pytest.mark.parametrize("windows", [{"seed_window_s": 0.35}, {"seed_window_s": 1e3, "known_windows": (0.35,)}])
def test_the_local_worker_stops_generating_after_its_window(windows: dict[str, Any]) -> None:
    config = FLEET.model_copy(update={"window_gain": 1e9, **windows})
    session = pool(granted("a"), config=config, spec=small_spec(batch={"prompts": 12, "group_size": 4}))
    alone = Session(spec=session.spec)

    run_virtual(session.run())
    run_virtual(alone.run())

    assert trained(session) == trained(alone)
    local = [f for f in session.telemetry.named("decode") if f["worker"] == "local" and f["purpose"] == "train"]
    assert session.engine.generated < session.host.engines["lease-a"].generated
    # the window, and the tick that was running; the worker needed at least 8 s for its share
    assert all(fields["duration_s"] < 1.0 for fields in local if fields["step"] >= 2)


def test_with_unfinished_finish_the_local_worker_finishes_its_samples_under_the_old_weights() -> None:
    config = FLEET.model_copy(update={"seed_window_s": 0.35, "window_gain": 1e9})
    spec = small_spec(
        batch={"prompts": 6, "group_size": 3},
        schedule={"max_policy_lag": 2, "unfinished": "finish"},
        sampling={"max_new_tokens": 24},
        eval={"every_steps": 0},
        trainer={"steps": 6},
    )
    session = pool(granted("a"), granted("b"), config=config, spec=spec)

    run_virtual(session.run())

    batches: Any = session.trainer.state.history
    made_by = [{run.version.number for run in sample[7]} for batch in batches for group in batch for sample in group[2]]
    assert len(made_by) == 6 * 6 * 3
    assert all(len(versions) == 1 for versions in made_by)


def test_a_worker_that_finishes_before_a_publish_reaches_it_takes_the_new_weights_at_once() -> None:
    session, busy = Session(), [LOCAL]

    async def publish_while_it_finishes() -> None:
        async with session.fleet as fleet:
            await fleet.publishing.publish(session.trainer.version)
            newer = PolicyVersion(number=1, digest="1" * 32)
            publishing = asyncio.create_task(fleet.publishing.publish(newer, finishing=lambda: busy))
            busy.clear()  # its last report is processed before the task starts
            await publishing
            assert fleet[LOCAL].version == newer

    run_virtual(publish_while_it_finishes())


def test_the_window_adapts_and_the_provider_gets_the_wanted_number() -> None:
    config = FLEET.model_copy(update={"size": "adaptive"})
    session = pool(granted("a"), config=config, spec=small_spec(trainer={"steps": 6}))

    run_virtual(session.run())

    steps = [step.values for step in session.telemetry.steps if step.step]
    assert session.provider.wanted[0] == 1  # the number of reserved engines
    assert len(session.provider.wanted) == 1 + 6
    assert all(wanted >= 0 for wanted in session.provider.wanted)
    assert len({values["seed_window_s"] for values in steps}) > 1
    assert steps[-1]["workers_mean"] == 1.0  # also while it loads new weights


def test_the_whole_pool_is_requested_at_the_start() -> None:
    """An autoscaled cluster starts no machine that nobody has asked for."""
    session = pool(granted("a"), spec=small_spec(trainer={"steps": 2}))
    run_virtual(session.run())
    assert len(session.provider.wanted) == 1
    assert session.provider.wanted[0] >= 10**6  # the provider has its own maximum


def test_the_window_counts_workers_that_are_still_loading_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def remembered(state: OffloadState, workers: int) -> float:
        asked.append(workers)
        return 0.2

    monkeypatch.setattr("tidemill.controller.offload.window", remembered)
    session = pool(granted("a"), granted("b"))

    run_virtual(session.run())

    assert asked[-4:] == [2, 2, 2, 2]  # before and after each of the last two steps


def test_the_metrics_contain_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    begin_step = Seeding.begin_step

    def chosen(seeding: Seeding) -> float:
        begin_step(seeding)
        used.append(0.2 + 0.01 * len(used))
        return used[-1]

    monkeypatch.setattr(Seeding, "begin_step", chosen)
    session = pool(granted("a"))

    run_virtual(session.run())

    assert [step.values["seed_window_s"] for step in session.telemetry.steps if step.step] == used
    assert len(used) == 4


def test_leaving_the_fleet_ends_all_tasks_and_leases() -> None:
    session = pool(granted("a"), granted("b"))

    async def run() -> int:
        await session.run()
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    assert run_virtual(run()) == 0
    ends = {fields["lease"]: fields["cause"] for fields in session.telemetry.named("lease_end")}
    assert ends == dict.fromkeys(("local", "lease-a", "lease-b"), "the run ended")


def test_workers_are_started_only_on_leases() -> None:
    session = pool()

    run_virtual(session.run())

    assert session.host.workers == {}
