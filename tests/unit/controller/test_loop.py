"""The training loop: logging, order of training, stopping and errors. Kills are in tests/integration."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests.doubles.samples import FakePrompts, make_prompt
from tests.doubles.session import Disk, Session, small_spec
from tests.virtual_time import run_virtual
from tidemill.controller.entries import NEVER_PRUNED, EvalResult
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError, GuardStop, UserError
from tidemill.core.records import Group, Prompt, Reward, StepMetrics, Trajectory


def run(spec: Any = None, **settings: Any) -> Session:
    async def main() -> Session:
        session = Session(spec=spec or small_spec(), **settings)
        session.result = await session.run()
        return session

    return run_virtual(main())


def test_a_run_from_the_first_step_to_the_last() -> None:
    session = run()

    result = session.result
    assert result is not None
    assert (result.steps, result.version.number, result.interrupted, result.resumed_from) == (4, 4, False, 0)
    assert [known.step for known in result.evaluations] == [0, 2, 4]
    assert session.checkpoints.saved == [
        (2, result.evaluations[1].reward_mean),
        (4, result.evaluations[2].reward_mean),
    ]
    assert [metrics.step for metrics in session.telemetry.steps] == [0, 1, 2, 3, 4]
    assert session.telemetry.named("resume") == [{"step": 0}]
    assert session.engine.version == session.trainer.version
    assert session.telemetry.progressed.count(("training", 0, 1)) == 4
    assert result.tokens_generated == sum(m.values.get("tokens_generated", 0) for m in session.telemetry.steps)


def test_a_checkpoint_prunes_the_journal() -> None:
    session = run()

    async def steps() -> set[int]:
        return {step for step, _ in await session.journal.load()}

    assert run_virtual(steps()) == {NEVER_PRUNED}  # the figures of evaluations


def test_a_steps_metrics_include_the_trainers_and_the_controllers() -> None:
    metrics = run().telemetry.steps[2]

    assert metrics.version.number == 2
    assert metrics.values["loss"] == 1.0  # the trainer's
    names = {"reward_mean", "reward_std", "completion_tokens_mean", "truncated_fraction", "samples_invalid"}
    times = {"time_rollout_s", "time_train_s", "time_score_s", "time_eval_s", "tokens_per_s", "tokens_generated"}
    assert names | times | {"eval/greedy_accuracy", "eval/n"} <= set(metrics.values)
    assert metrics.values["time_train_s"] > 0.3  # three groups and a commit, 0.1 s each
    assert metrics.values["prompt_tokens_computed"] == 6 * 2


def test_samples_are_written_in_canonical_order() -> None:
    session = run()

    assert set(session.telemetry.sample_files) == {
        *((step, "train") for step in range(1, 5)),
        *((step, "eval:held_out") for step in (0, 2, 4)),
    }
    prompts = [prompt.prompt_id for _, prompt in session.source.train_batch(3)]
    written = [(s.prompt_id, s.index) for s in session.telemetry.sample_files[3, "train"]]
    assert written == [(prompt, index) for prompt in prompts for index in range(2)]


def test_equal_seeds_give_equal_runs() -> None:
    assert run().trainer.state == run().trainer.state
    assert run().trainer.state != run(small_spec(run={"seed": 1})).trainer.state


MANY = {"batch": {"prompts": 8, "group_size": 2}, "trainer": {"steps": 2}}


def test_canonical_order_is_strict_and_arrival_order_is_not() -> None:
    canonical = run(small_spec(**MANY), slots=16)  # all concurrently, so that some finish before the first
    arrival = run(small_spec(**{**MANY, "batch": {"prompts": 8, "group_size": 2, "order": "arrival"}}), slots=16)

    assert canonical.trainer.positions == [list(range(8)), list(range(8, 16))]
    assert [sorted(positions) for positions in arrival.trainer.positions] == canonical.trainer.positions
    assert arrival.trainer.positions != canonical.trainer.positions


def test_groups_are_trained_on_while_others_are_generated() -> None:
    in_flight: list[int] = []

    async def main() -> Session:
        session = Session(spec=small_spec(**MANY))
        accumulate = session.trainer.accumulate

        async def watched(group: Group) -> None:
            in_flight.append(len(session.engine.jobs))
            await accumulate(group)

        session.trainer.accumulate = watched  # type: ignore[method-assign]
        await session.run()
        return session

    run_virtual(main())

    assert in_flight[0] > 0  # FakeTrainer asserts that nothing is in flight at a commit
    assert in_flight[-1] == 0


def test_three_steps_without_a_valid_reward_end_the_run_after_a_checkpoint() -> None:
    disk = Disk()

    async def main(*, broken_from: int) -> Session:
        session = Session(spec=small_spec(trainer={"steps": 9}, checkpoint={"every_steps": 0}), disk=disk)
        score = session.scorer.score

        async def broken(prompt: Prompt, trajectory: Trajectory) -> Reward:
            if session.trainer.version.number + 1 not in (broken_from, broken_from + 1, broken_from + 2):
                return await score(prompt, trajectory)
            return Reward(value=0.0, valid=False, reason="reward mine: nobody answers")

        session.scorer.score = broken  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    with pytest.raises(
        GuardStop,
        match=r"last 3 steps got a valid reward.*first reason: reward mine: nobody answers",
    ):
        run_virtual(main(broken_from=2))
    assert max(disk.checkpoints) == 4  # steps 2, 3 and 4 had no valid reward
    resumed = run_virtual(main(broken_from=3))  # steps 3 and 4 are done; a single step does not end the run
    assert resumed.result is not None
    assert resumed.result.steps == 9


@pytest.mark.parametrize("stop_after", [None, 1])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_run_without_valid_rewards_ends_by_a_guard_after_every_resume(steps: int, stop_after: int | None) -> None:
    disk = Disk()

    async def main(*, broken: bool = True, stop_after: int | None = None) -> Session:
        session = Session(spec=small_spec(trainer={"steps": steps}, checkpoint={"every_steps": 1}), disk=disk)

        async def fails(prompt: Prompt, trajectory: Trajectory) -> Reward:
            if session.trainer.version.number == stop_after:
                session.stop.set()
            return Reward(value=0.0, valid=False, reason="reward mine: nobody answers")

        if broken:
            session.scorer.score = fails  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    if stop_after is not None and steps > stop_after:
        stopped = run_virtual(main(stop_after=stop_after))
        assert stopped.result is not None and stopped.result.interrupted
    with pytest.raises(GuardStop, match="got a valid reward, so nothing was learned"):
        run_virtual(main())
    if max(disk.checkpoints) == steps:
        with pytest.raises(GuardStop, match="no sample of this run got a valid reward"):
            run_virtual(main())  # a finished run without valid rewards fails as well
    else:
        assert run_virtual(main(broken=False)).result is not None


def test_one_valid_reward_is_enough_for_a_run_to_finish() -> None:
    async def main() -> Session:
        session = Session(spec=small_spec(trainer={"steps": 2}))
        score = session.scorer.score

        async def fails_first(prompt: Prompt, trajectory: Trajectory) -> Reward:
            if session.trainer.version.number == 0:
                return Reward(value=0.0, valid=False, reason="reward mine: nobody answers")
            return await score(prompt, trajectory)

        session.scorer.score = fails_first  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    result = run_virtual(main()).result
    assert result is not None and result.steps == 2


@pytest.mark.parametrize(("steps", "broken_from", "last"), [(9, 4, 6), (2, 1, 2)])
def test_a_run_without_finite_gradients_ends(steps: int, broken_from: int, last: int) -> None:
    disk = Disk()

    async def main() -> None:
        session = Session(spec=small_spec(trainer={"steps": steps}), disk=disk)
        commit = session.trainer.commit

        async def skips(step: int) -> StepMetrics:
            metrics = await commit(step)
            if step < broken_from and step != 2:
                return metrics
            return msgspec.structs.replace(metrics, optimizer_steps=0, values={"optimizer_steps_skipped": 1.0})

        session.trainer.commit = skips  # type: ignore[method-assign]
        await session.run()

    with pytest.raises(GuardStop, match=f"no gradient was finite in {min(3, steps)} consecutive steps"):
        run_virtual(main())
    assert max(disk.checkpoints) == last  # the second step alone does not end the run


async def stop_at(session: Session, seconds: float) -> Session:
    asyncio.get_running_loop().call_later(seconds, session.stop.set)
    session.result = await session.run()
    return session


@pytest.mark.parametrize("tenths", range(0, 110, 3))
def test_a_run_stopped_at_any_time_resumes_to_the_same_weights(tenths: int) -> None:
    disk = Disk()
    stopped = run_virtual(stop_at(Session(disk=disk), tenths / 10))

    assert stopped.result is not None
    if stopped.result.interrupted:
        assert stopped.engine.jobs == {}
        assert max(disk.checkpoints, default=0) == stopped.result.steps == stopped.trainer.version.number
        assert all("error" not in fields for _, fields in stopped.telemetry.events)
        steps = [metrics.step for metrics in stopped.telemetry.steps]
        assert [step for step in steps if step] == list(range(1, stopped.result.steps + 1))
    resumed = run_virtual(stop_at(Session(disk=disk), 10**6))

    assert resumed.result is not None
    assert not resumed.result.interrupted
    assert resumed.trainer.state == run().trainer.state
    assert [known.step for known in resumed.result.evaluations] == [0, 2, 4]


def test_stopping_before_the_first_batch_writes_no_checkpoint() -> None:
    stopped = run_virtual(stop_at(Session(), 0.0))

    assert stopped.result is not None
    assert (stopped.result.interrupted, stopped.result.steps) == (True, 0)
    assert stopped.checkpoints.saved == []


@pytest.mark.parametrize("hanging", ["accumulate", "commit", "save", "publish"])
def test_a_hanging_trainer_does_not_prevent_stopping(hanging: str) -> None:
    disk = Disk()

    async def main() -> tuple[Session, float]:
        session = Session(disk=disk)

        async def hang(*_: object, **__: object) -> None:
            await asyncio.sleep(10**6)

        def begin() -> None:  # in the third step, after the checkpoint of the second
            owner = {"save": session.checkpoints, "publish": session.fleet.publishing}.get(hanging, session.trainer)
            setattr(owner, hanging, hang)

        record_batch = session.ledger.record_batch

        async def noted(in_flight: Any, step: int, *more: Any, **others: Any) -> Any:
            if step == 3 - (hanging == "accumulate"):
                asyncio.get_running_loop().call_soon(begin)
                asyncio.get_running_loop().call_later(20.0, session.stop.set)
            return await record_batch(in_flight, step, *more, **others)

        session.ledger.record_batch = noted  # type: ignore[method-assign]
        session.result = await session.run()
        return session, asyncio.get_running_loop().time()

    stopped, ended_s = run_virtual(main())

    assert stopped.result is not None
    assert stopped.result.interrupted
    assert ended_s < 20.0 + 2 * stopped.timeouts.stop_s
    (event,) = stopped.telemetry.named("wait_abandoned")
    assert event["waited_s"] == stopped.timeouts.stop_s
    assert "no checkpoint after step" in event["lost"]
    resumed = run_virtual(stop_at(Session(disk=disk), 10**6))
    assert resumed.trainer.state == run().trainer.state
    assert [metrics.step for metrics in resumed.telemetry.steps][-1] == 4


def test_a_trainer_that_hangs_meets_a_deadline() -> None:
    async def main() -> None:
        session = Session(timeouts=Timeouts(notice_s=10.0, trainer_s=50.0))

        async def hang(step: int) -> StepMetrics:
            await asyncio.sleep(10**6)
            raise AssertionError

        session.trainer.commit = hang  # type: ignore[method-assign]
        with pytest.raises(DeadlineError, match=r"waited 50.0 s for the trainer to commit step 1; look at the trainer"):
            await session.run()
        assert len(session.telemetry.named("waiting")) == 4

    run_virtual(main())


def test_a_worker_that_hangs_meets_a_deadline() -> None:
    async def main() -> None:
        session = Session(timeouts=Timeouts(notice_s=10.0, worker_s=50.0))
        session.engine.slots = 0
        with pytest.raises(DeadlineError, match=r"tokens of 4 samples of step 0 \(eval:held_out\)"):
            await session.run()

    run_virtual(main())


def test_a_trainer_error_ends_the_run() -> None:
    async def main() -> None:
        session = Session()

        async def burst(group: Group) -> None:
            raise MemoryError("out of memory")

        session.trainer.accumulate = burst  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            await session.run()
        assert session.telemetry.named("rollout")[0]["error"] == "MemoryError"

    run_virtual(main())


def test_a_full_disk_at_a_checkpoint_keeps_the_last_good_one_and_the_run_resumes() -> None:
    disk = Disk()

    async def main() -> None:
        session = Session(disk=disk)
        saves = 0

        def full() -> None:
            nonlocal saves
            saves += 1
            if saves == 3:  # before the second checkpoint is durable
                raise UserError("the disk is full")

        session.checkpoints.power = full
        with pytest.raises(UserError, match="the disk is full"):
            await session.run()

    run_virtual(main())
    assert set(disk.checkpoints) == {2}

    resumed = run_virtual(stop_at(Session(disk=disk), 10**6))
    assert resumed.trainer.state == run().trainer.state
    assert resumed.engine.submitted == []


def test_a_resume_with_other_sampling_settings_is_refused() -> None:
    disk = Disk()
    stopped = run_virtual(stop_at(Session(disk=disk), 1.8))
    assert stopped.result is not None
    assert stopped.result.steps == 0

    with pytest.raises(UserError, match=r"step 1 .*different: sampling\)"):
        run_virtual(stop_at(Session(disk=disk, spec=small_spec(sampling={"max_new_tokens": 5})), 10**6))


def test_invalid_and_masked_samples_carry_no_weight() -> None:
    session = run(small_spec(scoring={"truncated": "masked"}, **MANY))

    samples = [sample for batch in session.trainer.state.history for group in batch for sample in group[2]]  # type: ignore[index]
    kinds = {(finish, bool(reward and reward[1]), weight) for _, _, _, finish, _, reward, weight, *_ in samples}
    assert ("length", True, 0.0) in kinds
    assert ("stop", True, 1.0) in kinds
    assert all(weight == 0.0 for finish, valid, weight in kinds if finish == "length" or not valid)


def test_a_task_without_held_out_prompts_is_not_evaluated() -> None:
    async def main() -> Session:
        session = Session()
        session.source = FakePrompts(3, held_out=0)
        session.result = await session.run()
        return session

    session = run_virtual(main())
    assert session.result is not None
    assert session.result.evaluations == ()
    assert session.checkpoints.saved == [(2, None), (4, None)]


def test_the_evaluation_uses_its_own_scorer() -> None:
    async def main() -> Session:
        session = Session()

        async def always(prompt: object, trajectory: object) -> Reward:
            return Reward(value=1.0, correct=True)

        session.eval_scorer.score = always  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    session = run_virtual(main())
    assert session.result is not None
    assert [known.greedy_accuracy for known in session.result.evaluations] == [1.0] * 3
    assert all(sample.purpose == "train" for sample in session.scorer.scored)


def test_graded_rewards_have_a_mean_in_metrics_events_and_checkpoints_and_no_accuracy() -> None:
    async def main() -> Session:
        session = Session()
        grades = {0: 0.9, 2: 1.5, 4: 0.5}

        async def graded(prompt: object, trajectory: Trajectory) -> Reward:
            return Reward(value=grades[trajectory.versions[0].version.number])

        session.eval_scorer.score = graded  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    session = run_virtual(main())
    assert session.checkpoints.saved == [(2, 1.5), (4, 0.5)]
    values = {one.step: one.values for one in session.telemetry.steps}
    assert [values[step]["eval/reward_mean"] for step in (0, 2, 4)] == [0.9, 1.5, 0.5]
    assert [event["reward_mean"] for event in session.telemetry.named("evaluation")] == [0.9, 1.5, 0.5]
    assert all("eval/greedy_accuracy" not in each for each in values.values())


def test_the_prompts_of_a_step_are_requested_once() -> None:
    asked: list[int] = []

    async def main() -> None:
        session = Session(spec=small_spec(**MANY))
        train_batch = session.source.train_batch

        def counted(step: int) -> Any:
            asked.append(step)
            return train_batch(step)

        session.source.train_batch = counted  # type: ignore[method-assign]
        await session.run()

    run_virtual(main())

    assert asked == [1, 2]


DRAWN = {"eval": {"every_steps": 2, "prompts": 4, "samples_per_prompt": 2}}
SETS = {"math": [make_prompt(f"m{at}") for at in range(3)], "code": [make_prompt("c0")]}


def test_every_set_has_its_own_figures_samples_and_events() -> None:
    session = run(small_spec(**DRAWN), eval_sets=SETS)

    assert session.result is not None
    names = [(known.step, known.name, known.n) for known in session.result.evaluations]
    assert names == [(step, *each) for step in (0, 2, 4) for each in (("held_out", 4), ("math", 3), ("code", 1))]
    main, math, _ = session.result.evaluations[6:]
    values = session.telemetry.steps[-1].values
    assert values["eval/pass_at_2"] == main.pass_at[2] and values["eval/drawn_reward_mean"] == main.drawn_reward_mean
    assert values["eval/math/pass_at_1"] == math.pass_at[1] and values["eval/math/n"] == 3
    assert values["eval/math/reward_mean"] == math.reward_mean and "eval/code/reward_mean" in values
    total = sum(known.duration_s for known in session.result.evaluations[6:])
    assert values["time_eval_s"] == pytest.approx(total)
    assert [event.get("set") for event in session.telemetry.named("evaluation")] == [None, "math", "code"] * 3
    assert len(session.telemetry.sample_files[4, "eval:math:drawn"]) == 6
    # The best checkpoint is chosen by the held-out prompts of the task.
    assert session.checkpoints.saved[-1] == (4, main.reward_mean)


@pytest.mark.parametrize("schedule", [{}, {"max_policy_lag": 1}])
def test_evaluations_do_not_change_what_is_learned(schedule: dict[str, Any]) -> None:
    plain, evaluated = run(small_spec(schedule=schedule)), run(small_spec(schedule=schedule, **DRAWN), eval_sets=SETS)

    assert plain.trainer.positions == evaluated.trainer.positions
    if not schedule:  # else timing decides which version generates a token
        assert plain.trainer.state == evaluated.trainer.state
    new = {name for name in evaluated.telemetry.steps[-1].values if name.startswith("eval/")}
    old = {name for name in plain.telemetry.steps[-1].values if name.startswith("eval/")}
    assert old == {"eval/reward_mean", "eval/reward_stderr", "eval/greedy_accuracy", "eval/n"} < new


def test_a_resumed_run_does_not_repeat_finished_evaluations() -> None:
    """The power is cut at step 2, when the held-out prompts are evaluated and the first set is not."""
    ends: list[int] = []

    async def until_the_end() -> None:
        session = Session(spec=small_spec(**DRAWN), eval_sets=SETS)
        record = session.ledger.record_evaluation

        async def noted(result: EvalResult, samples: Any) -> None:
            await record(result, samples)
            ends.append(session.journal.written)

        session.ledger.record_evaluation = noted  # type: ignore[method-assign]
        await session.run()

    run_virtual(until_the_end())
    disk = Disk()

    async def live(power_cut_after: int | None) -> Session:
        session = Session(disk=disk, spec=small_spec(**DRAWN), eval_sets=SETS, power_cut_after=power_cut_after)
        session.result = await session.run_until_power_cut()
        return session

    assert run_virtual(live(ends[3] + 1)).result is None
    resumed = run_virtual(live(None))
    counts = Counter(sample.purpose for sample in resumed.engine.submitted if sample.purpose != "train")
    # Four held-out prompts at step 4; the sets at steps 2 and 4, with two drawn samples per prompt.
    assert counts == {
        "eval:held_out": 4,
        "eval:held_out:drawn": 8,
        "eval:math": 6,
        "eval:math:drawn": 12,
        "eval:code": 2,
        "eval:code:drawn": 4,
    }
    assert resumed.result is not None and len(resumed.result.evaluations) == 9
