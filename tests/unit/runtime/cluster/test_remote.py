"""Messages for the death of an actor."""

from __future__ import annotations

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayError,
)

from tidemill.runtime.cluster.ray_calls import describe_ray_error

# Messages of Ray 2.60.
KILLED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: ..."
NODE = "The actor died because its node has died. Node Id: 12\n\tthe actor's node was terminated unexpectedly: ..."
UNAVAILABLE = "its process cannot be reached; its node spot-2 may be gone"
ENDED = "The actor is dead because it was killed by `ray.kill`."


def _died(message: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(error_message=message, actor_id=b"\0" * 16))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (_died(KILLED), "its process was killed (SIGKILL or out of memory)"),
        (_died(NODE), "its node spot-2 died"),
        (_died(ENDED), "it was ended"),
        (ActorUnavailableError("cut", b"\0" * 16), UNAVAILABLE),
        (ActorUnschedulableError("no"), "no node has the resources it requests"),
        (OutOfMemoryError("many bytes"), "its node ran out of memory and Ray killed it"),
        (GetTimeoutError("late\nvery"), "GetTimeoutError: late"),
    ],
)  # fmt: skip
def test_the_cause_of_an_actors_death(error: RayError, cause: str) -> None:
    assert describe_ray_error(error, "spot-2")[0] == cause


def test_a_preempted_node_is_reported_as_announced() -> None:
    taken = NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED)
    error = ActorDiedError(ActorDiedErrorContext(error_message=NODE, actor_id=b"\0" * 16, node_death_info=taken))
    assert describe_ray_error(error, "") == ("its node was taken away, as announced", "")
