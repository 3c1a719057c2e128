"""The whole loop in virtual time: killed at any instant, a resumed run gives the same weights."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.doubles.journal import HEADER, PowerCut
from tests.doubles.session import Disk, Session, small_spec
from tests.rotation import DAY, daily
from tests.virtual_time import run_virtual
from tidemill.controller.entries import Published, decode
from tidemill.core.records import SampleId

SPEC = small_spec()
ARRIVAL = small_spec(batch={"order": "arrival"})
EVERY = 7  # cuts of the journal: on each day of a week those that follow the last day's


def live(disk: Disk, *, power_cut_after: int | None = None, spec: Any = SPEC) -> Session:
    """Run one process until it ends or the power is cut."""

    async def main() -> Session:
        session = Session(disk=disk, spec=spec, power_cut_after=power_cut_after)
        session.result = await session.run_until_power_cut()
        return session

    return run_virtual(main())


@functools.cache
def quiet_run() -> tuple[Session, tuple[int, ...]]:
    """An undisturbed run, and the size of its journal after each append."""
    ends: list[int] = []

    async def main() -> Session:
        session = Session(spec=SPEC)
        append = session.journal.append

        async def noted(blobs: Any) -> None:
            await append(blobs)
            ends.append(session.journal.written)

        session.journal.append = noted  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    return run_virtual(main()), tuple(ends)


def assert_same_history(session: Session, after: object) -> None:
    reference, _ = quiet_run()
    assert session.result is not None, after
    assert session.result.steps == 4, after
    assert session.trainer.state.history == reference.trainer.state.history, after
    assert session.trainer.version == reference.trainer.version, after
    told = {step: (known.result.greedy_accuracy, known.result.version) for step, known in evaluated(session)}
    assert told == {step: (known.result.greedy_accuracy, known.result.version) for step, known in evaluated(reference)}


def evaluated(session: Session) -> Iterable[tuple[tuple[int, str], Any]]:
    return session.ledger.evaluations.items()


def test_the_uninterrupted_run_exercises_the_journal() -> None:
    reference, ends = quiet_run()

    assert len(reference.trainer.state.history) == 4
    assert reference.trainer.positions == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    finishes = {sample[3] for batch in reference.trainer.state.history for group in batch for sample in group[2]}  # type: ignore[index]
    assert finishes == {"stop", "length"}
    assert len(ends) > 60
    assert_same_history(live(Disk()), "nothing")


@pytest.mark.parametrize("first", daily(range(EVERY), 1))
def test_killed_at_every_journal_write_the_weights_are_the_same(first: int) -> None:
    _, ends = quiet_run()
    # Written but not acknowledged; partial, every other time near its start.
    cuts = [cut for number, end in enumerate(ends) for cut in (end, end - (3, 40)[number % 2])]
    for cut in cuts[first::EVERY]:
        disk = Disk()
        killed = live(disk, power_cut_after=cut)
        assert killed.result is None, cut
        resumed = live(disk)
        assert_same_history(resumed, cut)


def test_no_finished_sample_is_generated_again() -> None:
    _, ends = quiet_run()
    spared = 0
    for cut in ends[3::10]:
        disk = Disk()
        killed = live(disk, power_cut_after=cut)
        resumed = live(disk)
        again = [sample for sample in resumed.engine.submitted if sample.purpose == "train"]
        assert len(set(again)) == len(again)
        done_before = finished_and_durable(killed)
        assert not done_before & set(again), cut
        spared += len(done_before)
    assert spared > 25


def finished_and_durable(session: Session) -> set[SampleId]:
    """Samples that were passed to the scorer, which gets only durable ones."""
    return {sample for sample in session.scorer.scored if sample.purpose == "train"}


@pytest.mark.parametrize("cut_every", [2400, 3000, 5000])
def test_a_run_killed_repeatedly_finishes(cut_every: int) -> None:
    """The largest entry, of an evaluation, has about 2,300 bytes: with smaller limits no process would get past it."""
    disk, lives = Disk(), 1
    while (session := live(disk, power_cut_after=cut_every)).result is None:
        lives += 1
        assert lives < 50, "no progress"

    assert lives > 2
    assert_same_history(session, cut_every)


@pytest.mark.parametrize("write", range(1, 5))
def test_killed_around_a_checkpoint_write_the_weights_are_the_same(write: int) -> None:
    """Two checkpoints, each cut before and after it is durable."""
    disk = Disk()
    calls = 0

    def power() -> None:
        nonlocal calls
        calls += 1
        if calls == write:
            raise PowerCut

    async def main() -> None:
        session = Session(disk=disk, spec=SPEC)
        session.checkpoints.power = power
        assert await session.run_until_power_cut() is None

    run_virtual(main())
    assert len(disk.checkpoints) == write // 2  # before the 1st: none; after it: 1; before the 2nd: 1; after it: 2

    assert_same_history(live(disk), write)


def test_a_resumed_run_has_one_consistent_log() -> None:
    _, ends = quiet_run()
    disk = Disk()
    first = live(disk, power_cut_after=ends[-12])
    second = live(disk)

    assert second.result is not None
    assert second.result.resumed_from == 2
    assert second.telemetry.named("resume") == [{"step": 2}]
    assert [metrics.step for metrics in second.telemetry.steps] == [3, 4]
    assert [metrics.step for metrics in first.telemetry.steps][:3] == [0, 1, 2]
    assert second.telemetry.named("replay") == [{"first_step": 3, "last_step": 2 + second.result.replayed}]
    # tokens found in the journal and those generated again add up to the batch
    reference = {metrics.step: metrics.values for metrics in quiet_run()[0].telemetry.steps}
    for metrics in second.telemetry.steps:
        assert metrics.values["tokens_generated"] == reference[metrics.step]["tokens_generated"]
    assert second.telemetry.steps[0].values["tokens_recovered"] > 0


def test_an_evaluation_after_the_checkpoint_is_logged_again_but_not_rerun() -> None:
    spec = small_spec(checkpoint={"every_steps": 0})  # one checkpoint, at the end
    disk = Disk()

    async def main() -> None:
        session = Session(disk=disk, spec=spec)

        def no_power() -> None:
            raise PowerCut

        session.checkpoints.power = no_power
        assert await session.run_until_power_cut() is None

    run_virtual(main())
    resumed = live(disk, spec=spec)

    assert resumed.result is not None
    assert [known.step for known in resumed.result.evaluations] == [0, 2, 4]
    assert resumed.eval_scorer.scored == []
    assert resumed.engine.submitted == []  # everything was in the journal
    assert [fields["step"] for fields in resumed.telemetry.named("evaluation")] == [0, 2, 4]
    assert {step for step, purpose in resumed.telemetry.sample_files if purpose != "train"} == {2, 4}
    assert resumed.telemetry.steps[-1].values["eval/greedy_accuracy"] == resumed.result.evaluations[-1].greedy_accuracy
    assert_same_history(resumed, "no checkpoint")


def test_slightly_different_retrained_weights_are_evaluated_again() -> None:
    """As on a GPU, or in arrival order: the digest differs."""
    spec = small_spec(checkpoint={"every_steps": 0})
    disk = Disk()

    def no_power() -> None:
        raise PowerCut

    async def main(salt: str, power: Any) -> Session:
        session = Session(disk=disk, spec=spec)
        session.trainer.salt = salt
        session.checkpoints.power = power
        session.result = await session.run_until_power_cut()
        return session

    run_virtual(main("", no_power))
    resumed = run_virtual(main("another processor", lambda: None))

    assert resumed.result is not None
    assert {sample.purpose for sample in resumed.engine.submitted} == {"eval:held_out"}
    assert len(resumed.eval_scorer.scored) == 8  # after steps 2 and 4; the initial weights are the same
    assert resumed.result.evaluations[-1].version == resumed.trainer.version
    foreign = [metrics.values.get("tokens_other_weights", 0.0) for metrics in resumed.telemetry.steps]
    # the first batch was generated by the initial weights, the others by weights that no longer exist
    assert foreign[1] == 0.0
    assert all(count > 0 for count in foreign[2:])


def test_in_arrival_order_every_sample_is_trained_once() -> None:
    disk = Disk()
    while (session := live(disk, power_cut_after=2500, spec=ARRIVAL)).result is None:
        pass

    assert len(session.trainer.state.history) == 4
    for batch in session.trainer.state.history:
        samples = [sample[0] for group in batch for sample in group[2]]  # type: ignore[index]
        assert len(samples) == len(set(samples)) == 6


def test_a_finished_run_reports_it() -> None:
    disk = Disk()
    live(disk)
    again = live(disk)

    assert again.result is not None
    assert again.result.already_finished
    assert (again.result.steps, again.result.tokens_generated) == (4, 0)
    assert again.telemetry.named("already_finished") == [{"step": 4, "steps": 4}]
    assert again.engine.submitted == []
    assert again.checkpoints.saved == []
    assert [known.step for known in again.result.evaluations] == [0, 2, 4]


def test_a_finished_run_continues_with_more_steps() -> None:
    disk = Disk()
    live(disk)
    longer = small_spec(trainer={"steps": 6})

    resumed = live(disk, spec=longer)

    assert resumed.result is not None
    assert (resumed.result.resumed_from, resumed.result.steps) == (4, 6)
    assert resumed.trainer.state.history[:4] == quiet_run()[0].trainer.state.history
    assert run_of_six().trainer.version == resumed.trainer.version


def run_of_six() -> Session:
    return live(Disk(), spec=small_spec(trainer={"steps": 6}))


def ahead(unfinished: str, lag: int = 2) -> Any:
    return small_spec(
        algorithm={"correction": {"kind": "mu_step"}},
        schedule={"max_policy_lag": lag, "unfinished": unfinished},
        sampling={"max_new_tokens": 24},
        trainer={"steps": 5},
        checkpoint={"every_steps": 3},
    )


def writes_beside_publishes(spec: Any) -> list[int]:
    """Journal sizes at which a publish entry is partial at its start, partial after its first round, or complete."""
    cuts: list[int] = []

    async def main() -> None:
        session = Session(spec=spec)
        append = session.journal.append

        async def noted(blobs: Any) -> None:
            before = session.journal.written
            await append(blobs)
            if isinstance(decode(blobs[0][1]), Published):
                cuts.extend((before + 1, before + HEADER.size + len(blobs[0][1]), session.journal.written + 1))

        session.journal.append = noted  # type: ignore[method-assign]
        session.result = await session.run()

    run_virtual(main())
    return cuts


@functools.cache
def quiet_run_ahead(lag: int, unfinished: str) -> Session:
    return live(Disk(), spec=ahead(unfinished, lag))


@pytest.mark.parametrize("lag", [1, *(pytest.param(lag, marks=pytest.mark.slow) for lag in (2, 3))])
def test_killed_before_training_the_weights_are_the_same_with_delayed_publishing(lag: int) -> None:
    spec, quiet = ahead("wait", lag), quiet_run_ahead(lag, "wait")
    assert max(len(sample[8:]) for group in quiet.trainer.state.history[-1] for sample in group[2]) == lag  # type: ignore[index]
    for cut in range(400 + 611 * (DAY % 4), quiet.journal.written, 2444):
        disk = Disk()
        assert live(disk, power_cut_after=cut, spec=spec).result is None, cut
        resumed = live(disk, spec=spec)
        assert resumed.trainer.state == quiet.trainer.state, cut


@pytest.mark.parametrize("tenths", range(5, 205, 8))
def test_stopped_during_a_delayed_publish_the_weights_are_the_same(tenths: int) -> None:
    """The trainer is then one version ahead of the published one: no checkpoint may contain its weights."""
    spec, disk = ahead("wait", 2), Disk()

    async def main() -> Session:
        session = Session(disk=disk, spec=spec)
        session.engine.per_poll = 1  # slow, so that publishes wait for it
        asyncio.get_running_loop().call_later(tenths / 10, session.stop.set)
        session.result = await session.run()
        return session

    stopped = run_virtual(main())
    assert stopped.result is not None and stopped.result.interrupted
    assert all(step == state.version.number for step, state in disk.checkpoints.items())

    assert live(disk, spec=spec).trainer.state == quiet_run_ahead(2, "wait").trainer.state


@pytest.mark.parametrize("unfinished", daily(["continue", "finish", "wait"], 1))
def test_killed_around_a_publish_entry_the_run_repeats_its_steps(unfinished: str) -> None:
    """With a policy lag a run depends on timing; but steps logged before the kill are repeated bit for bit.

    Samples that finish under old weights get tokens that the publish entry does not mention.
    """
    spec, replayed = ahead(unfinished), 0
    for cut in writes_beside_publishes(spec):
        disk = Disk()
        killed = live(disk, power_cut_after=cut, spec=spec)
        resumed = live(disk, spec=spec)
        assert killed.result is None and resumed.result is not None, cut
        told = max(metrics.step for metrics in killed.telemetry.steps)
        assert resumed.trainer.state.history[:told] == killed.trainer.state.history[:told], cut
        for step, batch in enumerate(resumed.trainer.state.history):
            for sample in (sample for group in batch for sample in group[2]):  # type: ignore[index]
                if unfinished != "finish":
                    assert len(sample[8:]) == step - sample[7][0].version.number, cut  # no publish is missing
                replayed += resumed.result.resumed_from <= step < told and len(sample[8:]) > 0
    assert replayed > 10
