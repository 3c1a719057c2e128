"""Arguments are encoded by the annotations of the called method, and buffers and references are not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import ray
from ray import cloudpickle

from tests.actors_here import ActorHere
from tidemill.core.errors import TidemillError
from tidemill.core.protocols import Worker
from tidemill.core.records import PolicyVersion, TokenBuffer
from tidemill.runtime.cluster.ray_frozen_scorer import FrozenScorerActor
from tidemill.runtime.cluster.ray_supervised import SupervisedRank
from tidemill.runtime.cluster.ray_trainer import TrainerActor
from tidemill.runtime.cluster.ray_worker import RolloutActor
from tidemill.runtime.cluster.wire import AsyncActor, calls, invoke, served, serves, signature

VERSION = PolicyVersion(number=3, digest="abc")


class Part:
    """What a client calls in another process."""

    def __init__(self) -> None:
        self.received: Any = None

    async def mixed(
        self, ids: TokenBuffer, versions: Sequence[PolicyVersion], *, score: float | None, handle: Any = None
    ) -> PolicyVersion:
        self.received = (ids, versions, score, handle)
        return versions[0]

    async def optional(self, version: PolicyVersion | None = None, blobs: Sequence[TokenBuffer] = ()) -> int:
        self.received = (version, blobs)
        return len(blobs)


class Actor(AsyncActor):
    def __init__(self, thing: Part | None) -> None:
        super().__init__()
        self.thing = thing

    mixed = serves(Part.mixed, "thing")
    optional = serves(Part.optional, "thing")

    @served
    async def busy(self) -> int:
        return self.calls_in_flight


class Client:
    def __init__(self, actor: Actor) -> None:
        self._remote = ActorHere(actor)

    mixed: Any = calls(Part.mixed, timeout_s=1.0)
    optional: Any = calls(Part.optional, timeout_s=1.0)


async def test_a_part_receives_what_the_client_passed() -> None:
    part, handle, ids = Part(), object(), b"\1\0\0\0"
    client = Client(Actor(part))
    assert await client.mixed(ids, [VERSION], score=None, handle=handle) == VERSION
    assert part.received == (ids, [VERSION], None, handle)
    assert part.received[0] is ids
    assert part.received[3] is handle
    assert await client.optional(blobs=[ids, ids]) == 2
    assert part.received == (None, [ids, ids])
    await client.optional(VERSION)
    assert part.received == (VERSION, ())


def test_only_arguments_with_records_are_encoded() -> None:
    ids = b"\1\0\0\0"
    sent = signature(Part.mixed).encode((ids, [VERSION]), {"score": 0.5})
    assert [type(value) for value in sent] == [bytes, bytes, float, type(None)]
    assert sent[0] is ids


async def test_a_part_that_was_not_started_is_named_and_a_call_shows_that_the_caller_is_alive() -> None:
    actor = Actor(None)
    with pytest.raises(TidemillError, match="this actor has no thing"):
        await Client(actor).optional()
    assert await invoke(ActorHere(actor), 1.0, Actor.busy) == 1
    assert actor.calls_in_flight == 0


@pytest.mark.parametrize("actor", [TrainerActor, RolloutActor, FrozenScorerActor, SupervisedRank])
def test_an_actor_is_sent_by_name_and_not_with_its_code(actor: type) -> None:
    sent = cloudpickle.dumps(ray.remote(actor).__ray_metadata__.modified_class)
    assert b"msgspec" not in sent
    assert "_ray_trace_ctx" not in inspect.signature(Worker.load).parameters  # Ray adds it to what it finds
