"""Turns of agents: limits, observations, branches, and runs whose environments, workers and controller are killed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.doubles.environments import LIMITS, FakeEnvironments
from tests.doubles.samples import PROMPTS, SAMPLING, V3, FakeCodec, make_id, make_prompt
from tests.doubles.session import Disk, Session, small_spec
from tests.virtual_time import run_virtual
from tidemill.controller.collector import collect_samples
from tidemill.controller.in_flight import InFlight, SamplingPlan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.turns import AgentLimits
from tidemill.core.errors import TidemillError
from tidemill.core.protocols import CallLog, LoopClock
from tidemill.core.records import (
    Episode,
    EpisodeEnd,
    GenerateRequest,
    Observation,
    SampleId,
    Segment,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)


def acting(tokens: list[int], limits: AgentLimits = LIMITS) -> Sample:
    """A sample of the prompt [112, 48] whose first turn has ended."""
    sample = Sample(sample_id=make_id(), ordinal=0, prompt=make_prompt("p0"))
    sample.assign("lease", 3)
    generate(sample, tokens, limits)
    return sample


def generate(sample: Sample, tokens: list[int], limits: AgentLimits = LIMITS) -> None:
    sample.extend(pack_tokens(tokens), pack_logprobs([-1.0] * len(tokens)), V3)
    sample.end_attempt("stop", "", SAMPLING, limits)


def observe(sample: Sample, tokens: list[int], limits: AgentLimits = LIMITS, **fields: object) -> None:
    answer = Observation(token_ids=pack_tokens(tokens), **fields)  # type: ignore[arg-type]
    sample.observe(answer, SAMPLING, limits)


def next_request(sample: Sample, limits: AgentLimits = LIMITS) -> GenerateRequest:
    sample.assign("lease", 3)
    return sample.request(SAMPLING, None, limits)


def test_an_observation_is_part_of_the_prefix_and_never_trained() -> None:
    sample = acting([5, 6])
    assert sample.state is SampleState.ACTING
    observe(sample, [7, 8, 9])
    request = next_request(sample)
    assert unpack_tokens(request.prefix_ids) == [5, 6, 7, 8, 9]
    assert (request.observations, request.turn_start, request.resumes) == (((2, 5),), 5, True)
    generate(sample, [4])
    observe(sample, [], end="done", reward=1.0)

    trajectory = sample.trajectory(lambda tokens: str(list(tokens)))
    assert trajectory.segments == (
        Segment(role="prompt", start=0, end=2, trained=False),
        Segment(role="action", start=2, end=4, trained=True),
        Segment(role="observation", start=4, end=7, trained=False),
        Segment(role="action", start=7, end=8, trained=True),
    )
    assert unpack_logprobs(trajectory.rollout_logprobs) == [-1.0, -1.0, -1.0]
    assert [(turn.start, turn.end, turn.text) for turn in trajectory.turns] == [(0, 2, "[5, 6]"), (5, 6, "[4]")]
    assert (trajectory.final, trajectory.turns[1].reward, trajectory.finish) == ("[4]", 1.0, "stop")


def test_failures_are_counted_for_each_turn() -> None:
    sample = acting([5])
    observe(sample, [7])
    for _ in range(2):
        next_request(sample)
        sample.end_attempt("error", "the engine failed", SAMPLING, LIMITS)
    assert sample.failures == 2
    next_request(sample)
    generate(sample, [4])
    assert sample.failures == 0


def test_a_limit_is_absolute_however_often_a_turn_is_interrupted() -> None:
    sample = acting([5, 6, 7])
    observe(sample, [1, 1, 1, 1])
    # 8 tokens may be generated, 3 are: 5 left, which is also the limit of a turn; it starts at 7
    assert next_request(sample).limit == 12
    sample.extend(pack_tokens([2, 2]), pack_logprobs([0.0, 0.0]), V3)
    sample.end_attempt("aborted", "", SAMPLING, LIMITS)
    assert next_request(sample).limit == 12
    sample.extend(pack_tokens([2, 2, 2]), pack_logprobs([0.0] * 3), V3)
    sample.end_attempt("length", "", SAMPLING, LIMITS)
    assert (sample.state, sample.finish, sample.turns.episode_end) == (SampleState.FINISHED, "length", "tokens")


def test_a_turn_at_its_own_limit_does_not_end_the_episode() -> None:
    sample = Sample(sample_id=make_id(), ordinal=0, prompt=make_prompt("p0"))
    assert next_request(sample).limit == 5
    sample.extend(pack_tokens([1] * 5), pack_logprobs([0.0] * 5), V3)
    sample.end_attempt("length", "", SAMPLING, LIMITS)
    assert sample.state is SampleState.ACTING
    observe(sample, [2])
    assert next_request(sample).limit == 9  # 6 tokens, and 3 of 8 left


def test_a_new_branch_replaces_the_context() -> None:
    sample = acting([5, 6])
    observe(sample, [112, 48, 6, 9], new_branch=True)
    request = next_request(sample)
    assert unpack_tokens(request.prompt_ids) == [112, 48, 6, 9]
    assert (request.prefix_ids, request.branch, request.offset, request.limit) == (b"", 1, 6, 5)
    generate(sample, [3])
    observe(sample, [8])
    request = next_request(sample)
    assert (unpack_tokens(request.prefix_ids), request.observations) == ([3, 8], ((1, 2),))
    assert (request.offset, request.limit) == (6, 7)  # a turn starts after 2 tokens; 3 of 8 are generated
    roles = [(segment.role, segment.start, segment.end) for segment in sample.turns.segments(2, sample.length)]
    assert roles == [
        ("prompt", 0, 2),
        ("action", 2, 4),
        ("context", 4, 8),
        ("action", 8, 9),
        ("observation", 9, 10),
    ]


@pytest.mark.parametrize(("added", "end"), [(5, ""), (6, "context")])
def test_an_observation_that_fills_the_context_ends_the_episode(added: int, end: str) -> None:
    limits = AgentLimits(context_tokens=10)
    sample = acting([5, 6], limits)  # 4 tokens with the prompt
    observe(sample, [1] * added, limits)
    assert sample.turns.episode_end == end
    assert sample.length == 2 + (0 if end else added)  # an observation that nothing follows is left out


@pytest.mark.parametrize(
    ("end", "finish", "truncated"),
    [
        ("done", "stop", False),
        ("failure", "stop", False),
        ("fault", "stop", False),
        ("tokens", "length", True),
        ("turns", "turns", False),
        ("calls", "calls", False),
        ("seconds", "seconds", False),
    ],
)
def test_only_a_text_that_was_cut_is_truncated(end: EpisodeEnd, finish: str, truncated: bool) -> None:
    sample = acting([5, 6])
    sample.observe(Observation(end=end), SAMPLING, LIMITS)
    assert (sample.finish, sample.trajectory(lambda _: "").truncated) == (finish, truncated)


def test_an_answer_that_its_environment_cancels_ends_the_run_at_once() -> None:
    class Cancelling(FakeEnvironments):
        async def act(self, episode: Episode, calls: CallLog) -> Observation:
            raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(TidemillError, match="cancelled its own answer"):
            await Session(spec=small_spec(eval={"every_steps": 0}), environments=Cancelling()).run()
        assert LoopClock().now() < 60

    run_virtual(main())


def test_collecting_ends_after_abandoned_environments() -> None:
    ended: list[SampleId] = []

    class Late(FakeEnvironments):
        async def act(self, episode: Episode, calls: CallLog) -> Observation:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                await asyncio.sleep(1.0)
                ended.append(episode.sample_id)
            return Observation(end="done")

    async def main() -> None:
        session = Session(environments=Late())
        plan = SamplingPlan(purpose="train", run_seed=0, group_size=2, sampling=SAMPLING, agent=LIMITS)
        in_flight = InFlight(plan, version_number=0)
        in_flight.open(plan_groups(PROMPTS[:1], first_position=0, from_version=0), [PROMPTS[0][1]])
        rollout = RolloutContext(
            fleet=session.fleet,
            ledger=Ledger(None),
            scorer=session.scorer,
            codec=FakeCodec(),
            telemetry=session.telemetry,
            clock=LoopClock(),
            stop=session.stop,
            environments=session.environments,
            agent=LIMITS,
        )
        async with session.fleet, collect_samples(in_flight, rollout, endless=True) as collector:
            while in_flight.acting < 2:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)
            collector.acting.forget(list(in_flight))
            in_flight.restart(list(in_flight))
        assert len(ended) == 2
        await session.worker.close()

    run_virtual(main())


def test_answers_of_environments_are_counted_with_the_evaluation_of_their_step() -> None:
    async def main() -> None:
        session = Session(spec=small_spec(), environments=FakeEnvironments())
        await session.run()
        lines = session.telemetry.steps
        assert session.environments is not None
        assert session.environments.answered == sum(line.values["env_calls"] for line in lines)
        assert lines[0].step == 0 and lines[0].values["env_calls"] > 0
        # Answers take 0, 0.25, 0.5, 0.75 or 1 s after their calls, which take up to 0.75 s.
        assert all(0.25 < line.values["time_env_answer_s"] < 1.75 for line in lines[1:])

    run_virtual(main())


@pytest.mark.parametrize("lag", [0, 2])
def test_killed_at_every_write_a_run_learns_the_same_and_repeats_no_call(lag: int) -> None:
    spec = small_spec(schedule={"max_policy_lag": lag, **({"unfinished": "wait"} if lag else {})})

    async def main() -> None:
        quiet = Session(spec=spec, environments=FakeEnvironments())
        await quiet.run()
        interrupted = 0
        for after in range(1, quiet.journal.written, quiet.journal.written // 25):
            disk, executed = Disk(), Counter[str]()
            cut: int | None = after
            while True:
                environments = FakeEnvironments(executed=executed)
                session = Session(spec=spec, disk=disk, power_cut_after=cut, environments=environments)
                if await session.run_until_power_cut() is not None:
                    break
                cut = None
            assert all(made == 1 for call, made in executed.items() if call.startswith("train") and call.endswith("/1"))
            if "a call was interrupted" in repr(session.trainer.state.history):
                interrupted += 1
            else:
                assert session.trainer.state == quiet.trainer.state, f"killed after {after} bytes"
        assert interrupted  # some kills met a call that must not be repeated

    run_virtual(main())
