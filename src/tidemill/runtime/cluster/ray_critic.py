"""The critic in an actor."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, TrainerLost, UserError
from tidemill.core.records import Record
from tidemill.models.attention import TokenTree
from tidemill.models.catalog import resolve
from tidemill.runtime.cluster.ray_calls import describe_ray_error, trainer_lost
from tidemill.runtime.cluster.wire import CriticPlan, answered, decode, encode, read_answer
from tidemill.runtime.compute import choose_device, choose_precision, require_reserved_gpus
from tidemill.runtime.model_bundle import FrozenModels, build_model_critic
from tidemill.trainer.critic import Deferred, ModelCritic
from tidemill.trainer.packing import Microbatch


class SentTokens(Record):
    """N nodes, of which H predict the T trained tokens."""

    token_ids: bytes  # int64 [N]
    depths: bytes  # int64 [N]
    ends: bytes  # int64 [N]
    head_nodes: bytes  # int64 [H]
    head_rows: bytes  # int64 [T]
    weights: bytes  # float32 [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedTokens:
    """Implements `trainer.critic.WeightedPredictions`."""

    tree: TokenTree  # without paths: no sample is looked for
    head_nodes: Tensor
    head_rows: Tensor
    targets: Tensor  # not known here, and of no meaning to a value
    weights: Tensor


def sent(microbatch: Microbatch) -> SentTokens:
    tree = microbatch.tree
    return SentTokens(
        token_ids=tree.token_ids.tobytes(),
        depths=tree.depths.tobytes(),
        ends=tree.ends.tobytes(),
        head_nodes=to_bytes(microbatch.head_nodes),
        head_rows=to_bytes(microbatch.head_rows),
        weights=to_bytes(microbatch.weights),
    )


def received(tokens: SentTokens, device: torch.device) -> ReceivedTokens:
    """On the critic's device, bit for bit."""
    rows = _array(tokens.head_rows, np.int64)
    return ReceivedTokens(
        tree=TokenTree(
            token_ids=_array(tokens.token_ids, np.int64),
            depths=_array(tokens.depths, np.int64),
            ends=_array(tokens.ends, np.int64),
            paths=(),
        ),
        head_nodes=torch.from_numpy(_array(tokens.head_nodes, np.int64)).to(device),
        head_rows=torch.from_numpy(rows).to(device),
        targets=torch.zeros(len(rows), dtype=torch.int64, device=device),
        weights=floats(tokens.weights, device),
    )


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


def floats(blob: bytes, device: torch.device) -> Tensor:
    """float32, as many as there are."""
    return torch.from_numpy(_array(blob, np.float32)).to(device)


def _array(blob: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(blob, dtype).copy()  # torch wants memory that may be written


T = TypeVar("T")

ANSWER_S = 7200.0
"""As long as the controller waits for a step of the trainer."""


class RayCritic:
    """Implements `trainer.critic.Critic` over a `CriticActor`, for the thread that the trainer computes on.

    What it learns is waited for only with the metrics of a step: policy and critic learn at the same time.
    """

    remote = True

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._learning: list[Deferred[None]] = []  # since the last step

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

    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        asked, device = self._ask("values", encode(sent(microbatch)), kind=bytes), microbatch.targets.device
        return lambda: floats(asked(), device)

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        figures = (to_bytes(returns_T), to_bytes(values_T))
        self._learning.append(self._ask("learn", encode(sent(microbatch)), *figures, kind=type(None)))

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
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

    def _ask(self, method: str, *args: object, kind: type[T]) -> Deferred[T]:
        """Begin a call; the promise raises what it raised, or TrainerLost where its process is gone."""
        reference = getattr(self._handle, method).remote(*args)

        def answer() -> T:
            try:
                return read_answer(ray.get(reference, timeout=ANSWER_S), kind)
            except GetTimeoutError as error:
                raise _lost(f"it has not answered `{method}` for {ANSWER_S:.0f} s", "look at its machine") from error
            except RayError as error:
                raise _lost(*describe_ray_error(error, "")) from error

        return answer


def _lost(cause: str, hint: str) -> TrainerLost:
    return trainer_lost(cause, hint, who="critic")


class CriticActor:
    """Behind `critic.RayCritic`. Its methods are no coroutines: what the trainer asks for is done in that order."""

    def __init__(self) -> None:
        self._critic: ModelCritic | None = None
        self._device = torch.device("cpu")

    @answered
    def start(self, plan: bytes) -> str:
        """Load the model; returns the device that it is on.

        Raises:
            UserError: it cannot be had here, or this machine does not see the run directory.
        """
        planned = decode(plan, CriticPlan)
        _require_checkpoints(planned)
        spec = RunSpec.model_validate_json(planned.spec)
        torch.set_num_threads(planned.threads)
        require_reserved_gpus(spec.placement.actor_gpus, "placement.actor_gpus")
        self._device = choose_device(spec.trainer)
        self._critic = build_model_critic(
            spec,
            policy_folder=resolve(spec.model, progress=lambda _: None),
            frozen=FrozenModels(self._device),
            device=self._device,
            autocast=choose_precision(spec.trainer, self._device),
            progress=lambda _: None,
        )
        return str(self._device)

    @answered
    def values(self, tokens: bytes) -> bytes:
        """float32 [T]"""
        values_T = self._ready().values(received(decode(tokens, SentTokens), self._device))()
        return to_bytes(values_T.float())

    @answered
    def learn(self, tokens: bytes, returns: bytes, values: bytes) -> None:
        microbatch = received(decode(tokens, SentTokens), self._device)
        self._ready().learn(microbatch, floats(returns, self._device), floats(values, self._device))

    @answered
    def step(self, denominator: float) -> dict[str, float]:
        return self._ready().step(denominator)()

    @answered
    def state_bytes(self) -> int:
        return self._ready().state_bytes()

    @answered
    def write_state(self, directory: str) -> list[str]:
        """The files written, relative to the directory."""
        self._ready().write_state(Path(directory))
        return [str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()]

    @answered
    def read_state(self, directory: str) -> None:
        self._ready().read_state(Path(directory))

    def _ready(self) -> ModelCritic:
        if self._critic is None:
            raise TidemillError("this critic has not been started")
        return self._critic


def _require_checkpoints(plan: CriticPlan) -> None:
    if not Path(plan.seen).exists():
        raise UserError(
            "the critic's machine does not see the run directory, where checkpoints are written",
            where="placement.critic",
            hint='put run.dir on a file system that the machines share, or set placement.critic = "trainer"',
        )
