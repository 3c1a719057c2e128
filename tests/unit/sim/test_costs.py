"""Profiles as costs of factories, against sums done by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.samples import make_id
from tests.unit.hardware.test_engine_profile import PLAIN
from tidemill.core.records import Group, Segment, Trajectory, pack_tokens
from tidemill.hardware.engine_profile import EngineProfile
from tidemill.hardware.trainer_profile import TrainerProfile
from tidemill.sim.costs import ProfiledEngine, ProfiledTrainer

TRAINER = TrainerProfile(gpus=8, ranks=4, token_s=1e-3, pair_s=1e-6, gather_s=2.0, update_s=7.0, hidden=0.5)


@given(
    running=st.integers(1, 50),
    cached=st.integers(0, 2000),
    steps=st.integers(0, 40),
    sample_s=st.floats(1e-6, 1e-2),
    attended_s=st.floats(0, 1e-5),
    moved_s=st.floats(0, 1e-5),
    expert_share=st.sampled_from([0.0, 0.25]),
)
def test_decode_time_is_additive(
    running: int, cached: int, steps: int, sample_s: float, attended_s: float, moved_s: float, expert_share: float
) -> None:
    profile = EngineProfile(
        slots=100,
        cache_tokens=1e6,
        step_s=0.001,
        weights_s=0.01,
        cached_token_s=moved_s,
        sample_s=sample_s,
        attended_token_s=attended_s,
        prefill_token_s=1e-5,
        experts_s=0.02,
        expert_share=expert_share,
    )
    one_by_one = sum(profile.decode_step_s(running, cached + step * running) for step in range(steps))
    assert profile.decode_s(running, cached, steps) == pytest.approx(one_by_one, abs=1e-12)


def test_several_engines_share_equally() -> None:
    two = ProfiledEngine(profile=PLAIN, engines=2)
    assert (two.slots, two.cache_tokens, two.longest_sample) == (200, 2000, 1000)
    # 10 samples with 400 tokens are 5 with 200 on each; the same of three tokens.
    assert two.decode_s(10, 400, 3) == pytest.approx(
        PLAIN.decode_step_s(5, 200) + PLAIN.decode_step_s(5, 205) + PLAIN.decode_step_s(5, 210)
    )
    # A single one is on one engine, and as slow there as if there were no other.
    assert two.decode_s(1, 100, 1) == PLAIN.decode_step_s(1, 100)
    # Four contexts of 50 tokens, two on each engine.
    assert two.prefill_s(200, 4) == pytest.approx(2 * PLAIN.prefill_s(50))
    assert (two.decode_s(0, 0, 5), two.prefill_s(0, 0)) == (0.0, 0.0)


def trajectory(prompt: int, completion: int) -> Trajectory:
    segments = (
        Segment(role="prompt", start=0, end=prompt, trained=False),
        Segment(role="action", start=prompt, end=prompt + completion, trained=True),
    )
    return Trajectory(
        sample_id=make_id(),
        token_ids=pack_tokens([1] * (prompt + completion)),
        segments=segments,
        rollout_logprobs=b"",
        versions=(),
        finish="stop",
    )


def test_a_group_costs_its_share_of_a_microbatch() -> None:
    group = Group(position=0, prompt_id="p", trajectories=(trajectory(100, 100), trajectory(100, 300)))
    trainer = ProfiledTrainer(profile=TRAINER, passes=3, microbatch_tokens=250)
    # 500 tokens, the prompt once; sequences of 200 and 400 tokens are 333 long, a token's mean. Computing takes
    # 500 * 3 * (1 ms + 167 µs) = 1.75 s. A microbatch of 250 tokens on 4 ranks is 1000: half of one is gathered, 3 s
    # in 3 passes, of which half of the computing hides 0.875 s.
    assert trainer.accumulate_s(group) == pytest.approx(1.75 + 3 - 0.875)
    assert trainer.commit_s() == 7.0
    # Launching takes 5 s a pass of a microbatch: for half of one 7.5 s, of which a half hides gathering, and when the
    # batch is over for what is left of it.
    launching = msgspec.structs.replace(trainer, profile=msgspec.structs.replace(TRAINER, launch_s=5.0))
    assert launching.accumulate_s(group) == pytest.approx(7.5)
    assert launching.commit_s() == pytest.approx(7.0 + 3 * 5.0)
