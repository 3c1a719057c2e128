"""Generation ahead of training: lags, membership, and unfinished samples at a publish. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.samples import logprobs_of, number
from tests.doubles.session import Disk, Session, small_spec
from tests.virtual_time import run_virtual
from tidemill.config.issues import without_effect
from tidemill.controller.in_flight import PlannedGroup
from tidemill.core.records import Completion, Prompt, Reward, SampleId, Trajectory, pack_tokens

STEPS, GROUPS, SIZE = 6, 3, 2


def spec(algorithm: dict[str, Any] | None = None, **schedule: Any) -> Any:
    return small_spec(
        schedule=schedule,
        algorithm=algorithm or {},
        trainer={"steps": STEPS},
        batch={"prompts": GROUPS, "group_size": SIZE},
        sampling={"max_new_tokens": 24},
        checkpoint={"every_steps": 2},
        eval={"every_steps": 3},
    )


def run(algorithm: dict[str, Any] | None = None, *, rewards: Any = None, **schedule: Any) -> Session:
    async def main() -> Session:
        session = Session(spec=spec(algorithm, **schedule), slots=4)
        if rewards:
            session.scorer.score = rewards  # type: ignore[method-assign]
        session.result = await session.run()
        session.ended_s = asyncio.get_running_loop().time()  # type: ignore[attr-defined]
        return session

    return run_virtual(main())


def lags(session: Session) -> list[list[int]]:
    """By batch: the lag of each sample."""
    return [
        [step - min(run.version.number for run in sample[7]) for group in batch for sample in group if sample[7]]
        for step, batch in enumerate(history(session))
    ]


def history(session: Session) -> list[list[list[Any]]]:
    """By batch and group: the samples, as `tests.doubles.session.seen` has them."""
    batches: Any = session.trainer.state.history
    return [[list(group[2]) for group in batch] for batch in batches]


def names(session: Session) -> list[list[Any]]:
    """The prompts of each batch."""
    batches: Any = session.trainer.state.history
    return [[group[1] for group in batch] for batch in batches]


def learned(session: Session) -> list[SampleId]:
    return [sample[0] for batch in history(session) for group in batch for sample in group]


def mixed(batch: list[list[Any]]) -> list[Any]:
    """Samples with tokens of more than one version."""
    return [sample for group in batch for sample in group if len(sample[7]) > 1]


def totals(session: Session, name: str) -> float:
    return sum(step.values.get(name, 0.0) for step in session.telemetry.steps)


def check(session: Session, max_lag: int) -> None:
    """Checks that hold in every schedule."""
    assert [len(batch) for batch in history(session)] == [GROUPS] * STEPS
    assert len(set(learned(session))) == STEPS * GROUPS * SIZE
    assert max(lag for batch in lags(session) for lag in batch) <= max_lag
    for batch in history(session):
        for group in batch:
            for sample in group:
                assert sample[1]
                ends = [(each.start, each.end) for each in sample[7]]
                assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
                assert ends[-1][1] == len(sample[1])
    assert session.engine.jobs == {}


def planned() -> list[list[str]]:
    source = Session(spec=spec()).source
    return [[prompt.prompt_id for _, prompt in source.train_batch(step)] for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_generation_runs_ahead_as_far_as_the_lag_allows(lag: int) -> None:
    on_policy, ahead = run(), run(max_policy_lag=lag)

    check(ahead, lag)
    assert max(max(batch) for batch in lags(ahead)) > 0
    assert {one for batch in lags(on_policy) for one in batch} == {0}
    assert ahead.ended_s < on_policy.ended_s  # type: ignore[attr-defined]
    assert names(ahead) == planned()
    assert totals(ahead, "time_trainer_idle_s") < totals(on_policy, "time_trainer_idle_s")


def test_samples_scored_before_a_step_add_no_scoring_time() -> None:
    # Groups are trained on one by one, 0.1 s each; with two batches in flight a batch is scored before its step.
    waited = [step.values["time_score_s"] for step in run(max_policy_lag=4).telemetry.steps if step.step]
    assert min(waited) == 0.0


def test_an_unfinished_sample_continues_under_new_weights() -> None:
    session = run(max_policy_lag=2)

    assert any(mixed(batch) for batch in history(session))


def test_an_unfinished_sample_finishes_under_its_first_weights() -> None:
    session = run(max_policy_lag=2, unfinished="finish")

    check(session, 2)
    # except samples aborted for an evaluation
    after_evaluation = {3, 4, 5}
    for step, batch in enumerate(history(session)):
        if step not in after_evaluation:
            assert not mixed(batch)
    assert max(max(batch) for batch in lags(session)) > 0


def test_an_unfinished_sample_restarts() -> None:
    session = run(max_policy_lag=2, unfinished="restart")

    check(session, 2)
    assert totals(session, "samples_restarted") > 0
    assert totals(session, "tokens_discarded") > 0
    assert not any(mixed(batch) for batch in history(session))


PACES = (1, 2, 5)  # tokens per sample and tick


def at_pace(pace: int, **changes: Any) -> Session:
    async def main() -> Session:
        session = Session(spec=spec(**changes), slots=4)
        session.engine.per_poll = pace
        session.result = await session.run()
        return session

    return run_virtual(main())


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_with_unfinished_wait_the_position_determines_the_version_of_each_token(lag: int) -> None:
    sessions = [at_pace(pace, max_policy_lag=lag, unfinished="wait") for pace in PACES]

    for session in sessions:
        check(session, lag)
        # The groups of step s start when version s - 1 - lag is published, and finish before the next publish.
        for step, batch in enumerate(history(session), 1):
            made_by = {tuple(run.version.number for run in sample[7]) for group in batch for sample in group}
            assert made_by == {(max(0, step - 1 - lag),)}
    assert len({session.trainer.version.digest for session in sessions}) == 1


@pytest.mark.parametrize(
    "schedule", [{"overcommit": 1}, {"overcommit": 4}, {"overcommit": "adaptive"}, {"fresh_fraction": 0.5}]
)
def test_with_unfinished_wait_worker_speed_does_not_change_the_result(
    schedule: dict[str, Any],
) -> None:
    sessions = [at_pace(pace, max_policy_lag=2, unfinished="wait", **schedule) for pace in PACES]

    for session in sessions:
        check(session, 2)
        assert not any(mixed(batch) for batch in history(session))
    assert len({session.trainer.version.digest for session in sessions}) == 1


@pytest.mark.parametrize("unfinished", ["continue", "finish", "restart"])
def test_without_unfinished_wait_worker_speed_decides_the_versions(
    unfinished: str,
) -> None:
    sessions = [at_pace(pace, max_policy_lag=2, unfinished=unfinished) for pace in PACES]

    assert len({session.trainer.version.digest for session in sessions}) > 1
    prompts = [names(session) for session in sessions]
    assert prompts == [planned()] * len(PACES)


@pytest.mark.parametrize("redraws", [1, 3])
def test_with_unfinished_wait_redrawn_groups_use_the_version_of_those_they_replace(redraws: int) -> None:
    algorithm = {"dynamic_sampling": True, "max_redraws": redraws}
    session = run(algorithm, max_policy_lag=2, unfinished="wait")

    check(session, 2)
    assert totals(session, "groups_redrawn") > 0
    assert not any(mixed(batch) for batch in history(session))


def renewed(batch: list[list[Any]], step: int) -> int:
    """Groups of a batch whose tokens are all of the version it was trained from."""
    return sum(all(run.version.number == step for sample in group for run in sample[7]) for group in batch)


def test_fresh_fraction_renews_half_of_each_batch() -> None:
    session = run(max_policy_lag=2, fresh_fraction=0.5)

    check(session, 2)
    assert [renewed(batch, step) for step, batch in enumerate(history(session))] == [3, 2, 2, 2, 2, 2]


MU_STEP = {"correction": {"kind": "mu_step"}}


@pytest.mark.parametrize("unfinished", ["continue", "restart"])
def test_each_publish_stores_logprobs_of_samples_in_flight(unfinished: str) -> None:
    session = run(MU_STEP, max_policy_lag=3, unfinished=unfinished)

    check(session, 3)
    digests = [metrics.version for metrics in session.telemetry.steps]  # of version 0, 1, ...
    noted = younger = 0
    for trained_by, batch in enumerate(history(session)):
        for sample in (sample for group in batch for sample in group):
            (sample_id, tokens, rollout), versions = sample[:3], sample[7]
            prompt = pack_tokens(list(sample_id.prompt_id.encode()))
            whole = Completion(prompt_ids=prompt, token_ids=pack_tokens(tokens))
            expected = []
            for version in range(versions[0].version.number + 1, trained_by + 1):
                older = sum(each.end - each.start for each in versions if each.version.number < version)
                said = logprobs_of(whole, digests[version])
                expected.append(said[: 4 * older] + rollout[4 * older :])
                younger += 0 < older < len(tokens)
            assert list(sample[8:]) == expected
            noted += len(expected)
    assert noted > 10
    assert totals(session, "time_publish_logprobs_s") > 0
    assert (younger > 0) == (unfinished == "continue")  # tokens generated between two publishes


@pytest.mark.parametrize(
    ("algorithm", "lag"),
    [({"correction": {"kind": "tis"}}, 2), (MU_STEP, 0), (MU_STEP | {"proximal": "rollout"}, 2)],
    ids=["tis", "on policy", "without a correction"],
)
def test_publish_logprobs_are_computed_only_if_needed(algorithm: dict[str, Any], lag: int) -> None:
    session = run(algorithm, max_policy_lag=lag)

    assert {sample[8:] for batch in history(session) for group in batch for sample in group} == {()}
    assert not any("time_publish_logprobs_s" in metrics.values for metrics in session.telemetry.steps)


@pytest.mark.parametrize(
    ("lag", "idle"),
    [
        (0, {"fresh_fraction": 0.5}),
        (0, {"membership": "first_finished"}),
        (0, {"unfinished": "restart"}),
        (0, {"unfinished": "finish"}),
        (0, {"on_lag_limit": "drop", "membership": "first_finished"}),
        (2, {"on_lag_limit": "drop"}),
        (2, {"on_lag_limit": "restart"}),
    ],
)
def test_keys_documented_without_effect_have_none(lag: int, idle: dict[str, Any]) -> None:
    plain, changed = (
        run(max_policy_lag=lag, rewards=Slow(every=4)),
        run(max_policy_lag=lag, rewards=Slow(every=4), **idle),
    )

    assert without_effect(spec(max_policy_lag=lag, **idle)) != []
    assert changed.trainer.state == plain.trainer.state


def test_max_redraws_has_no_effect_without_dynamic_sampling() -> None:
    plain, changed = (run(algorithm, max_policy_lag=2, rewards=Slow(every=4)) for algorithm in ({}, {"max_redraws": 0}))

    assert without_effect(spec({"max_redraws": 0}, max_policy_lag=2)) != []
    assert changed.trainer.state == plain.trainer.state


class Slow:
    """A scorer that is slow for some groups: stragglers."""

    def __init__(self, *, every: int) -> None:
        self.every = every

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        slow = number("slow", trajectory.sample_id.group) % self.every == 0
        await asyncio.sleep(8.0 if slow else 0.05)
        return Reward(value=float(number("r", trajectory.sample_id.key) % 2))


@pytest.mark.parametrize("on_limit", ["wait", "restart", "drop"])
@pytest.mark.parametrize("order", ["canonical", "arrival"])
def test_stragglers_join_a_later_batch_within_the_lag_limit(on_limit: str, order: str) -> None:
    async def main() -> Session:
        configured = spec(max_policy_lag=2, membership="first_finished", on_lag_limit=on_limit)
        configured = configured.model_copy(update={"batch": configured.batch.model_copy(update={"order": order})})
        session = Session(spec=configured, slots=4)
        session.scorer.score = Slow(every=4)  # type: ignore[method-assign]
        session.result = await session.run()
        return session

    session = run_virtual(main())

    check(session, 2)
    told = names(session)
    assert told != planned()
    if on_limit == "drop":
        assert totals(session, "groups_dropped") > 0
    if on_limit == "restart":
        assert totals(session, "samples_restarted") > 0
    if on_limit == "wait":
        assert totals(session, "groups_dropped") == totals(session, "samples_restarted") == 0
        assert sorted(chain(*told)) == sorted(chain(*planned()))


def test_groups_without_signal_are_redrawn_up_to_max_redraws() -> None:
    async def same(prompt: Prompt, trajectory: Trajectory) -> Reward:
        """Half of the groups have no signal."""
        await asyncio.sleep(0.01)
        dull = number("dull", trajectory.sample_id.group) % 2
        return Reward(value=1.0 if dull else float(trajectory.sample_id.index % 2))

    session = run({"dynamic_sampling": True}, rewards=same)

    check(session, 0)
    assert totals(session, "groups_redrawn") > 0
    rewards = [{sample[5][0] for sample in group} for batch in history(session) for group in batch]
    assert all(len(values) == 2 for values in rewards)


def test_redrawing_ends_if_no_group_has_signal() -> None:
    async def dull(prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=1.0)

    session = run({"dynamic_sampling": True, "max_redraws": 2}, rewards=dull)

    check(session, 0)
    told = [step.values["groups_redrawn"] for step in session.telemetry.steps if step.step]
    assert told == [2 * GROUPS] * STEPS


def test_a_replayed_batch_keeps_its_groups_without_signal() -> None:
    """Killed right after the batch was journalled: groups redrawn `max_redraws` times are not redrawn again."""

    async def dull(prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=1.0)

    disk, configured = Disk(), spec({"dynamic_sampling": True, "max_redraws": 1})

    async def life(cut: int | None) -> Session:
        session = Session(spec=configured, slots=4, disk=disk, power_cut_after=cut)
        session.scorer.score = dull  # type: ignore[method-assign]
        session.result = await session.run_until_power_cut()
        return session

    written = run_virtual(life(None)).journal.written
    disk.journal, disk.checkpoints = b"", {}
    for cut in range(written // 8, written, written // 8):
        run_virtual(life(cut))
        done = run_virtual(life(None))
        check(done, 0)
        disk.journal, disk.checkpoints = b"", {}


def test_tokens_generated_during_a_publish_are_counted() -> None:
    session = run(max_policy_lag=2)
    assert session.result is not None

    trained_tokens = sum(len(sample[1]) for batch in history(session) for group in batch for sample in group)
    assert session.result.tokens_generated == trained_tokens


def begun(session: Session, found: dict[int, int]) -> None:
    """Record the version under which each group starts."""
    opening = session.ledger.open

    async def noted(in_flight: Any, groups: Sequence[PlannedGroup], prompts: Any) -> None:
        found.update({group.position: group.from_version for group in groups})
        await opening(in_flight, groups, prompts)

    session.ledger.open = noted  # type: ignore[method-assign]


async def improving(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """Improves from epoch to epoch, of three steps each."""
    await asyncio.sleep(0.01)
    return Reward(value=float(trajectory.sample_id.epoch))


@pytest.mark.parametrize("share", [0.65, 0.72])  # fraction of the bytes written: both in the second half of the run
def test_a_resumed_run_keeps_the_reward_trend_of_adaptive_overcommit(share: float) -> None:
    configured = spec(max_policy_lag=4, overcommit="adaptive")
    configured = configured.model_copy(update={"trainer": configured.trainer.model_copy(update={"steps": 16})})

    async def live(disk: Disk, found: dict[int, int], cut: int | None = None) -> Session:
        session = Session(spec=configured, slots=4, disk=disk, power_cut_after=cut)
        session.scorer.score = improving  # type: ignore[method-assign]
        begun(session, found)
        session.result = await session.run_until_power_cut()
        return session

    alone, interrupted, disk = dict[int, int](), dict[int, int](), Disk()
    written = run_virtual(live(Disk(), alone)).journal.written
    run_virtual(live(disk, interrupted, int(share * written)))
    resumed = run_virtual(live(disk, interrupted))

    assert resumed.result is not None
    assert resumed.result.resumed_from >= 8  # there is no trend in the first 8 steps
    assert interrupted == alone
    # Group 3 v is the first of the batch trained from version v; from step 9 on, 12 // 8 = 1 more per step.
    assert max(position - GROUPS * version for position, version in alone.items()) >= GROUPS + 4


SCHEDULES = st.fixed_dictionaries(
    {
        "max_policy_lag": st.sampled_from([1, 2, 3]),
        "overcommit": st.sampled_from([None, 1, 3, "adaptive"]),
        "fresh_fraction": st.sampled_from([0.0, 0.5, 1.0]),
        "membership": st.sampled_from(["planned", "first_finished"]),
        "unfinished": st.sampled_from(["continue", "finish", "restart", "wait"]),
        "on_lag_limit": st.sampled_from(["wait", "restart", "drop"]),
    }
).filter(lambda schedule: not (schedule["fresh_fraction"] and isinstance(schedule["overcommit"], int)))


@settings(max_examples=20)
@given(SCHEDULES, st.lists(st.integers(50, 3000), max_size=3), st.booleans())
def test_a_killed_run_resumes_within_the_lag_limit_in_every_schedule(
    schedule: dict[str, Any], cuts: list[int], redraw: bool
) -> None:
    disk = Disk()
    configured = spec({"dynamic_sampling": redraw}, **schedule)

    async def live(cut: int | None) -> Session:
        session = Session(spec=configured, slots=4, disk=disk, power_cut_after=cut)
        session.scorer.score = Slow(every=5)  # type: ignore[method-assign]
        session.result = await session.run_until_power_cut()
        return session

    for cut in cuts:
        run_virtual(live(cut))
    session = run_virtual(live(None))

    assert session.result is not None
    check(session, schedule["max_policy_lag"])
    for step, batch in enumerate(history(session)):
        assert renewed(batch, step) >= schedule["fresh_fraction"] * GROUPS
