"""Calls to all ranks of a sharded trainer: which error is raised, and that no rank is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, TrainerLost, UserError
from tidemill.runtime.cluster import rank_group
from tidemill.runtime.cluster.rank_group import RankGroup, join_group
from tidemill.sim.virtual_time import run_virtual


class Rank:
    """Answers with a value, raises an error, or never answers (`None`), after some seconds."""

    def __init__(self, outcome: object, seconds: float = 0.0) -> None:
        self.outcome, self.seconds, self.killed = outcome, seconds, False

    async def call(self, method: str, *args: object, kind: type[Any], timeout_s: float) -> Any:
        await asyncio.sleep(self.seconds)
        if self.outcome is None:
            await asyncio.Event().wait()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def kill(self) -> None:
        self.killed = True


def call(ranks: Sequence[Rank]) -> object:
    return run_virtual(RankGroup(ranks, late_s=30.0).call("commit", kind=str, timeout_s=1e9))


def test_the_first_rank_answers_when_all_have() -> None:
    ranks = [Rank("first"), Rank("second", seconds=29.0)]
    assert call(ranks) == "first"
    assert not any(rank.killed for rank in ranks)


BROKEN = TidemillError("RuntimeError: connection closed by peer")
LOST = TrainerLost("the trainer's rank 1 died")
BAD_INPUT = UserError("no such column", where="data")
TIMED_OUT = TidemillError("RuntimeError: timed out waiting for a peer")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([Rank(BROKEN), Rank(LOST, seconds=2.0)], "the trainer's rank 1 died"),  # the cause, though it came later
        ([Rank(BAD_INPUT, seconds=1.0), Rank(BROKEN)], "no such column"),
        ([Rank(BROKEN), Rank("ok")], "connection closed by peer"),
        ([Rank(BROKEN), Rank(None)], "connection closed by peer"),  # the other waits for it
        ([Rank("ok"), Rank(None)], "rank 1 died: no answer to `commit` within 30 s of the others"),
        ([Rank(None), Rank("ok")], "rank 0 died: no answer"),
        ([Rank(TIMED_OUT, seconds=31.0), Rank(None)], "rank 1 died: no answer"),  # not the collective's own error
    ],
)
def test_the_error_names_the_cause_and_every_rank_is_ended(ranks: list[Rank], message: str) -> None:
    with pytest.raises(TidemillError, match=message):
        call(ranks)
    assert all(rank.killed for rank in ranks)


def test_the_cause_is_awaited_for_a_few_seconds_only() -> None:
    ranks = [Rank(BROKEN), Rank(LOST, seconds=rank_group.CAUSE_S + 1)]
    with pytest.raises(TidemillError, match="connection closed"):
        call(ranks)


@pytest.mark.parametrize("other", [b"2048 True", b"4096 False", b"2048 False"])
def test_ranks_with_other_automatic_settings_do_not_start(other: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        def gather(self, value: bytes) -> list[bytes]:
            return [value, other]

    monkeypatch.setattr(rank_group, "join_ranks", lambda *_, **__: Ranks())
    settings = {"batch": {"microbatch_tokens": 2048}, "trainer": {"activation_checkpointing": False}}
    join = (RunSpec.model_validate(settings), torch.device("cpu"))
    if other == b"2048 False":
        join_group(*join, meeting=Path(), index=0)
        return
    with pytest.raises(UserError, match="have different memory") as caught:
        join_group(*join, meeting=Path(), index=0)
    assert "batch.microbatch_tokens" in str(caught.value.hint)
