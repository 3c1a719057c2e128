"""The critic in another process, as the trainer sees it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from tidemill.core.errors import TidemillError, TrainerLost
from tidemill.runtime.cluster.critic_tokens import floats, sent, to_bytes
from tidemill.runtime.cluster.plan import CriticPlan
from tidemill.runtime.cluster.remote import in_words, trainer_lost
from tidemill.runtime.cluster.wire import encode, read_answer
from tidemill.trainer.packing import Microbatch
from tidemill.trainer.promised import Promised

T = TypeVar("T")

ANSWER_S = 7200.0
"""As long as the controller waits for a step of the trainer."""


class RayCritic:
    """Implements `trainer.critic.Critic` over a `CriticActor`, for the thread that the trainer computes on.

    What it learns is waited for only with the metrics of a step: policy and critic learn at the same time.
    """

    elsewhere = True

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._learning: list[Promised[None]] = []  # since the last step

    def start(self, spec: str, *, threads: int, checkpoints: Path) -> str:
        """Load its model; returns the device that it is on.

        Args:
            spec: a RunSpec as JSON.
            threads: inside one operation.
            checkpoints: a folder that both processes must see.

        Raises:
            UserError: the model cannot be had there, or the folder is not seen.
        """
        checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=checkpoints, prefix=".seen-") as seen:
            plan = CriticPlan(spec=spec, threads=threads, seen=seen.name)
            return self._ask("start", encode(plan), kind=str)()

    def values(self, microbatch: Microbatch) -> Promised[Tensor]:
        asked, device = self._ask("values", encode(sent(microbatch)), kind=bytes), microbatch.targets.device
        return lambda: floats(asked(), device)

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        figures = (to_bytes(returns_T), to_bytes(values_T))
        self._learning.append(self._ask("learn", encode(sent(microbatch)), *figures, kind=type(None)))

    def step(self, denominator: float) -> Promised[dict[str, float]]:
        learning, self._learning = self._learning, []
        stepped = self._ask("step", float(denominator), kind=dict[str, float])

        def metrics() -> dict[str, float]:
            for learned in learning:
                learned()
            return stepped()

        return metrics

    def state_bytes(self) -> int:
        return self._ask("state_bytes", kind=int)()

    def write_state(self, directory: Path) -> None:
        written = self._ask("write_state", str(directory.resolve()), kind=list[str])()
        if missing := [name for name in written if not (directory / name).exists()]:
            raise TidemillError(f"the critic wrote {missing[0]}, and the trainer does not see it in {directory}")

    def read_state(self, directory: Path) -> None:
        self._ask("read_state", str(directory.resolve()), kind=type(None))()

    def _ask(self, method: str, *args: object, kind: type[T]) -> Promised[T]:
        """Begin a call; the promise raises what it raised, or TrainerLost where its process is gone."""
        reference = getattr(self._handle, method).remote(*args)

        def answer() -> T:
            try:
                return read_answer(ray.get(reference, timeout=ANSWER_S), kind)
            except GetTimeoutError as error:
                raise _lost(f"it has not answered `{method}` for {ANSWER_S:.0f} s", "look at its machine") from error
            except RayError as error:
                raise _lost(*in_words(error, "")) from error

        return answer


def _lost(cause: str, cure: str) -> TrainerLost:
    return trainer_lost(cause, cure, who="critic")
