"""Records and errors survive the way between processes."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.core.errors import (
    DeadlineError,
    GuardStop,
    TidemillError,
    TrainerLost,
    UserError,
    WeightsError,
    WorkerLost,
)
from tidemill.core.records import PolicyVersion
from tidemill.runtime.cluster.wire import AsyncActor, RemoteError, answered_in_order, read_answer, served


async def _through(outcome: object, kind: Any = None) -> Any:
    class Actor(AsyncActor):
        @served
        async def method(self) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    return read_answer(await Actor().method(), kind or type(outcome))


async def test_records_and_nothing() -> None:
    version = PolicyVersion(number=3, digest="abc")
    assert await _through(version) == version
    assert await _through([version, version], list[PolicyVersion]) == [version, version]
    assert await _through(None) is None


async def test_a_user_error_keeps_its_fields() -> None:
    fault = UserError("the disk is full", where="runs/a", hint="free some space")
    with pytest.raises(UserError) as caught:
        await _through(fault)
    assert (caught.value.what, caught.value.where, caught.value.hint) == (
        "the disk is full",
        "runs/a",
        "free some space",
    )
    assert str(caught.value) == str(fault)


class MissingFolder(UserError):
    """An error of another module."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (WorkerLost("its node died", hint="wait"), WorkerLost),
        (TrainerLost("the critic died"), TrainerLost),
        (GuardStop("the loss is not finite"), GuardStop),
        (WeightsError("version 3 is torn"), WeightsError),
        (DeadlineError("a place", waited_s=3.0, look_at="the cluster"), DeadlineError),
        (TidemillError("waited long"), TidemillError),
        (MissingFolder("gone", where="run.dir"), UserError),
    ],
)
async def test_an_error_keeps_its_type_and_its_fields(raised: TidemillError, kind: type[TidemillError]) -> None:
    with pytest.raises(kind) as caught:
        await _through(raised)
    assert type(caught.value) is kind
    assert str(caught.value) == str(raised)
    assert vars(caught.value) == vars(raised)


async def test_an_unexpected_exception_brings_its_traceback() -> None:
    with pytest.raises(RemoteError) as caught:
        await _through(ZeroDivisionError("no"))
    assert str(caught.value) == "ZeroDivisionError: no"
    assert "raise outcome" in caught.value.__notes__[0]


async def test_a_traceback_survives_a_second_process() -> None:
    with pytest.raises(RemoteError) as first:
        await _through(ZeroDivisionError("no"))
    with pytest.raises(RemoteError) as second:
        await _through(first.value)
    assert (str(second.value), second.value.__notes__) == (str(first.value), first.value.__notes__)


def test_plain_methods_answer_like_coroutines() -> None:
    class Actor:
        @answered_in_order
        def half(self, number: int) -> Any:
            if number % 2:
                raise UserError("odd", where="number", hint="give an even one")
            return number // 2

    assert read_answer(Actor().half(6), int) == 3
    with pytest.raises(UserError, match="odd"):
        read_answer(Actor().half(5), int)
