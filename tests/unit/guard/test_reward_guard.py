"""Gold scores in the background: which samples get one, and what happens to those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from tests.fabricated_run import make_prompt, make_trajectory
from tests.virtual_time import run_virtual
from tidemill.config.guard import AmendConfig, GuardConfig
from tidemill.core.evidence import Evidence, GoldPair
from tidemill.core.records import Prompt, Reward, Trajectory
from tidemill.guard.reward_guard import RewardGuard


class Gold:
    """Scores 1 for an even index, after `seconds`."""

    def __init__(self, seconds: Callable[[Trajectory], float] = lambda _: 0.1) -> None:
        self.seconds, self.asked = seconds, list[Trajectory]()
        self.closed = False

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        self.asked.append(trajectory)
        await asyncio.sleep(self.seconds(trajectory))
        if trajectory.sample_id.index == 7:
            raise RuntimeError("no answer")
        if trajectory.sample_id.index == 9:
            return Reward(value=0.0, valid=False, reason="unreadable")
        return Reward(value=float(trajectory.sample_id.index % 2 == 0))

    async def close(self) -> None:
        self.closed = True


def batch(count: int, *, invalid: int = 0) -> list[tuple[Prompt, Trajectory]]:
    """Samples of one prompt; sample i has the reward i."""
    prompt = make_prompt("1+1=", "2")
    rewards = [Reward(value=float(index), valid=index >= invalid) for index in range(count)]
    return [(prompt, make_trajectory(prompt, "2", index=index, reward=reward)) for index, reward in enumerate(rewards)]


def observed(guard: RewardGuard, samples: list[tuple[Prompt, Trajectory]], step: int = 1) -> Evidence:
    async def main() -> Evidence:
        guard.begin(step, samples, {})
        found = await guard.evidence()
        await guard.close()
        return found

    return run_virtual(main())


def config(**changes: object) -> GuardConfig:
    return GuardConfig.model_validate({"gold_share": 1.0, "gold_most": 100, **changes})


def test_evidence_has_both_scores_of_each_chosen_sample() -> None:
    gold = Gold()
    found = observed(RewardGuard(config(), gold), batch(4))

    assert found.pairs == tuple(
        GoldPair(prompt_id="p-1+1=", index=index, step=1, proxy=float(index), gold=float(index % 2 == 0))
        for index in range(4)
    )
    assert (found.proxy_mean, found.samples, found.missing) == (1.5, 4, 0)
    assert found.proxy_spread == pytest.approx(1.25**0.5)
    assert gold.closed


def test_samples_without_a_gold_score_are_missing_with_the_first_reason() -> None:
    found = observed(RewardGuard(config(), Gold()), batch(10))

    assert sorted(pair.index for pair in found.pairs) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert (found.missing, found.why_missing) == (2, "RuntimeError: no answer")


def test_gold_that_is_slow_is_missing_after_its_deadline() -> None:
    gold = Gold(lambda each: 60.0 if each.sample_id.index else 0.1)
    found = observed(RewardGuard(config(gold_timeout_s=5.0), gold), batch(3))

    assert [pair.index for pair in found.pairs] == [0]
    assert (found.missing, found.why_missing) == (2, "no score within 5 s")


def test_invalid_rewards_are_no_evidence() -> None:
    found = observed(RewardGuard(config(), Gold()), batch(4, invalid=3))

    assert [pair.index for pair in found.pairs] == [3]
    assert (found.proxy_mean, found.samples) == (3.0, 1)


def test_a_batch_without_valid_rewards_has_no_pairs() -> None:
    found = observed(RewardGuard(config(), Gold()), batch(2, invalid=2))

    assert (found.pairs, found.samples, found.proxy_mean) == ((), 0, 0.0)


def test_canaries_are_evidence_of_the_next_step() -> None:
    async def main() -> Evidence:
        guard = RewardGuard(config(), Gold())
        guard.measure(batch(3)[2:])
        guard.begin(5, batch(1), {})
        found = await guard.evidence()
        await guard.close()
        return found

    pairs = run_virtual(main()).pairs
    assert [(pair.source, pair.index, pair.step) for pair in pairs] == [("canary", 2, 5), ("batch", 0, 5)]


def test_without_waiting_what_is_not_scored_yet_is_missing() -> None:
    async def main() -> Evidence:
        guard = RewardGuard(config(), Gold())
        guard.begin(1, batch(2), {})
        found = await guard.evidence(at_once=True)
        await guard.close()
        return found

    found = run_virtual(main())
    assert (found.missing, found.why_missing) == (2, "the run was told to stop")


def test_the_reward_of_an_episode_does_not_replace_gold() -> None:
    gold, (prompt, sample) = Gold(), batch(1)[0]
    observed(RewardGuard(config(), gold), [(prompt, msgspec.structs.replace(sample, outcome=1.0))])

    assert gold.asked[0].outcome is None


@pytest.mark.parametrize("action", ["rollback", "warn"])
def test_a_checkpoint_and_disputed_pairs_are_kept_before_the_decision_is_carried_out(action: str) -> None:
    kept = list[Sequence[GoldPair]]()
    amend = AmendConfig(kl_beta=0.1)
    guard = RewardGuard(config(action=action, amend=amend), None, keep_disputed=kept.append)
    for step in range(1, 30):
        hacked = step > 15
        pairs = tuple(
            GoldPair(
                prompt_id="p", index=index, step=step, proxy=index % 4 + 2 * hacked, gold=0.0 if hacked else index % 4
            )
            for index in range(16)
        )
        guard.add(Evidence(step=step, proxy_mean=1.5 + 2 * hacked, proxy_spread=1.0, samples=64, pairs=pairs))
        if guard.decision is not None:
            break

    assert guard.decision is not None
    assert guard.decision.onset <= step
    assert guard.earliest_onset == guard.decision.onset
    steps = {pair.step for pairs in kept for pair in pairs}
    assert steps == (set() if action == "warn" else set(range(guard.decision.onset, step + 1)))
    guard.forget()
    assert guard.decision is None
