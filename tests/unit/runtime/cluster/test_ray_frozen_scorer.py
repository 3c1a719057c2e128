"""The lost process of a frozen model is replaced, and its samples are scored again, a limited number of times."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.frozen_scorers import named
from tidemill.core.errors import ScorerLost, TrainerLost
from tidemill.core.records import ModelScores, NewTokens
from tidemill.runtime.cluster.ray_calls import Remote, trainer_lost
from tidemill.runtime.cluster.ray_frozen_scorer import MAX_CONCURRENT, MAX_RESTARTS, RayFrozenScorer, frozen_scorer_lost
from tidemill.runtime.cluster.wire import decode

SCORES = ModelScores(values=b"\0\0\0\0", tokens_ahead=3, tokens_late=5)


class FakeRemote(Remote):
    """Answers `calls` calls, then its process is lost."""

    def __init__(self, calls: int, *, who: str = "reference") -> None:
        super().__init__(None, lost=partial(frozen_scorer_lost, who))
        self.calls, self.asked, self.under_way, self.most = calls, list[tuple[str, Any]](), 0, 0

    async def call(self, method: str, *args: object, kind: type[Any], timeout_s: float) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.calls == 0:
            raise self._lost("its process was killed (SIGKILL or out of memory)", "")
        self.calls -= 1
        return SCORES

    def ask(self, method: str, *args: object) -> asyncio.Future[bytes]:
        self.asked.append((method, *args))  # type: ignore[arg-type]
        return asyncio.get_running_loop().create_future()


class Spares:
    """Replacements for lost actors."""

    def __init__(self, *remotes: FakeRemote) -> None:
        self.remotes, self.started = list(remotes), 0

    async def another(self, lost: ScorerLost) -> Remote:
        self.started += 1
        await asyncio.sleep(0)
        return self.remotes.pop(0)


async def score(model: RayFrozenScorer, index: int = 0) -> ModelScores:
    return await model.score(named(index), b"\1\0\0\0", 1)


async def test_samples_in_flight_are_scored_by_the_replacement() -> None:
    spares = Spares(FakeRemote(100))
    model = RayFrozenScorer(FakeRemote(2), restart=spares.another)
    found = await asyncio.gather(*(score(model, index) for index in range(20)))
    assert found == [SCORES] * 20
    assert spares.started == 1  # one for all failed calls
    assert model.take_counts() == (60, 100)
    await model.close()


async def test_the_number_of_concurrent_samples_is_limited() -> None:
    remote = FakeRemote(1000)
    model = RayFrozenScorer(remote)
    await asyncio.gather(*(score(model, index) for index in range(30)))
    assert remote.most == MAX_CONCURRENT


async def test_repeated_losses_end_the_run_with_an_error() -> None:
    spares = Spares(*(FakeRemote(0) for _ in range(MAX_RESTARTS + 1)))
    model = RayFrozenScorer(FakeRemote(0), restart=spares.another)
    with pytest.raises(ScorerLost, match="the reference died: its process was killed") as caught:
        await score(model)
    assert "run the same command again" in str(caught.value)
    assert spares.started == MAX_RESTARTS
    with pytest.raises(ScorerLost):
        await score(model)
    assert spares.started == MAX_RESTARTS


async def test_a_scored_sample_resets_the_number_of_restarts() -> None:
    spares = Spares(*(FakeRemote(1) for _ in range(2 * MAX_RESTARTS)))
    model = RayFrozenScorer(FakeRemote(1), restart=spares.another)
    for index in range(2 * MAX_RESTARTS):
        await score(model, index)
    assert spares.started == 2 * MAX_RESTARTS - 1


async def test_a_failed_restart_is_raised_for_every_sample() -> None:
    async def none(lost: ScorerLost) -> Remote:
        await asyncio.sleep(0)
        raise ScorerLost("it cannot be restarted")

    model = RayFrozenScorer(FakeRemote(0), restart=none)
    results = await asyncio.gather(*(score(model, index) for index in range(3)), return_exceptions=True)
    assert {str(result) for result in results} == {"it cannot be restarted"}
    await model.close()


async def test_a_model_in_the_trainers_process_is_not_restarted() -> None:
    remote = FakeRemote(0)
    remote._lost = trainer_lost
    with pytest.raises(TrainerLost, match="the trainer died"):
        await score(RayFrozenScorer(remote))


async def test_new_tokens_are_sent_without_waiting() -> None:
    remote = FakeRemote(1)
    model = RayFrozenScorer(remote)
    added = NewTokens(sample_id=named(0), prompt_tokens=1, start=0, token_ids=b"\1\0\0\0")
    model.receive([added])
    model.forget([named(1)])
    (receive, told), (forget, _) = remote.asked
    assert (receive, forget) == ("receive", "forget")
    assert decode(told, list[NewTokens]) == [added]
