"""The critic in an actor, so that it trains at the same time as the policy.

Beside a sharded trainer the critic is sharded over as many actors, and each rank of the trainer calls one of them. The
ranks of the trainer compute equally many microbatches, so the ranks of the critic make the same calls in the same
order, as its collective operations need.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.records import Record
from tidemill.models.catalog import resolve
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.models.token_tree import TokenTree
from tidemill.runtime.cluster.rank_group import join_group
from tidemill.runtime.cluster.ray_calls import describe_ray_error, require_reserved_gpus, trainer_lost
from tidemill.runtime.cluster.wire import RemoteError, answered_in_order, read_answer, signature
from tidemill.runtime.compute import choose_device
from tidemill.runtime.model_bundle import FrozenModels, build_model_critic
from tidemill.trainer.critic import Deferred, ModelCritic
from tidemill.trainer.packing import Microbatch


class SentTokens(Record):
    """A microbatch: a tree of N nodes, of which H predict the T trained tokens."""

    token_ids: bytes  # int64 [N]
    depths: bytes  # int64 [N]
    ends: bytes  # int64 [N]
    head_nodes: bytes  # int64 [H]
    head_rows: bytes  # int64 [T]
    weights: bytes  # float32 [T]
    counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedTokens:
    """Implements `trainer.critic.WeightedPredictions`: a microbatch on the critic's device."""

    tree: TokenTree  # without paths, which values do not need
    head_nodes: Tensor
    head_rows: Tensor
    targets: Tensor  # zeros; values do not depend on them
    weights: Tensor
    counted: bool


def pack_microbatch(microbatch: Microbatch) -> SentTokens:
    tree = microbatch.tree
    return SentTokens(
        token_ids=tree.token_ids.tobytes(),
        depths=tree.depths.tobytes(),
        ends=tree.ends.tobytes(),
        head_nodes=to_bytes(microbatch.head_nodes),
        head_rows=to_bytes(microbatch.head_rows),
        weights=to_bytes(microbatch.weights),
        counted=microbatch.counted,
    )


def unpack_microbatch(tokens: SentTokens, device: torch.device) -> ReceivedTokens:
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
        counted=tokens.counted,
    )


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


def floats(blob: bytes, device: torch.device) -> Tensor:
    """A float32 vector."""
    return torch.from_numpy(_array(blob, np.float32)).to(device)


def _array(blob: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(blob, dtype).copy()  # copied because torch needs writable memory


P = ParamSpec("P")
T = TypeVar("T")

ANSWER_S = 7200.0
"""The deadline that the controller has for a step of the trainer."""


class RayCritic:
    """Implements `trainer.critic.Critic` with a `CriticActor`; used on the trainer's compute thread.

    Only the metrics of a step wait for the critic's updates, so policy and critic train at the same time.

    Args:
        index: of this rank of the trainer, and of its rank of the critic.
        meeting: path of a new file in a folder that all ranks of the critic see; empty for a critic in one actor.
    """

    remote = True

    def __init__(self, handle: Any, *, index: int = 0, meeting: str = "") -> None:
        self._handle, self._index, self._meeting = handle, index, meeting
        self._role = f"critic's rank {index}" if meeting else "critic"
        self._updates: list[Deferred[None]] = []  # since the last step

    def start(self, spec: str, *, threads: int, checkpoints: Path) -> str:
        """Load the critic's model; returns its device.

        Args:
            spec: a RunSpec as JSON.
            checkpoints: a folder that both processes must see.

        Raises:
            UserError: the model cannot be loaded there, or the actor does not see the folder.
        """
        checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=checkpoints, prefix=".seen-") as probe:
            return self._call(CriticActor.start, spec, threads, probe.name, self._index, self._meeting)()

    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        values = self._call(CriticActor.values, pack_microbatch(microbatch))
        device = microbatch.targets.device
        return lambda: floats(values(), device)

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        tokens = pack_microbatch(microbatch)
        self._updates.append(self._call(CriticActor.learn, tokens, to_bytes(returns_T), to_bytes(values_T)))

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        updates, self._updates = self._updates, []
        stepped = self._call(CriticActor.step, float(denominator))

        def metrics() -> dict[str, float]:
            for update in updates:
                update()
            return stepped()

        return metrics

    def state_bytes(self) -> int:
        return self._call(CriticActor.state_bytes)()

    def write_state(self, directory: Path) -> None:
        written = self._call(CriticActor.write_state, str(directory.resolve()))()
        if missing := [name for name in written if not (directory / name).exists()]:
            raise TidemillError(f"the critic wrote {missing[0]}, but the trainer does not see it in {directory}")

    def read_state(self, directory: Path) -> None:
        self._call(CriticActor.read_state, str(directory.resolve()))()

    def _call(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Start a call. The deferred result raises what the method raised, or TrainerLost if the actor died."""
        wire, name = signature(method), method.__name__
        reference = getattr(self._handle, name).remote(*wire.encode(args, kwargs))

        def answer() -> T:
            try:
                result: T = read_answer(ray.get(reference, timeout=ANSWER_S), wire.result)
                return result
            except RemoteError as error:  # of several ranks one may explain the end of another
                error.args = (f"the {self._role} failed in `{name}`: {error}",)
                raise
            except GetTimeoutError as error:
                late = f"no answer to `{name}` within {ANSWER_S:.0f} s"
                raise trainer_lost(late, "check its machine", role=self._role) from error
            except RayError as error:
                raise trainer_lost(*describe_ray_error(error, ""), role=self._role) from error

        return answer


class CriticActor:
    """Serves a `RayCritic`. Its methods are not coroutines, so that Ray runs them in the order of the calls."""

    _critic: ModelCritic | None = None
    _ranks: Ranks = ONE_RANK
    _device = torch.device("cpu")

    @answered_in_order
    def start(self, spec_json: str, threads: int, probe_file: str, index: int = 0, meeting: str = "") -> str:
        """Load the model; returns its device. See `RayCritic.start`.

        Args:
            probe_file: just created by the trainer in the checkpoint folder.
        """
        if not Path(probe_file).exists():
            raise UserError(
                "the critic's machine does not see the run directory, where checkpoints are written",
                where="placement.critic",
                hint='put run.dir on a file system that the machines share, or set placement.critic = "trainer"',
            )
        spec = RunSpec.model_validate_json(spec_json)
        torch.set_num_threads(threads)
        require_reserved_gpus(spec.placement.actor_gpus, "placement.actor_gpus")
        self._device = choose_device(spec.trainer)
        if meeting:
            self._ranks = join_group(spec, self._device, meeting=Path(meeting), index=index)
        self._critic = build_model_critic(
            spec,
            policy_folder=resolve(spec.model, progress=lambda _: None),
            frozen=FrozenModels(self._device),
            progress=lambda _: None,
            ranks=self._ranks,
        )
        return str(self._device)

    @answered_in_order
    def values(self, tokens: SentTokens) -> bytes:
        """float32 [T]"""
        values_T = self._started().values(unpack_microbatch(tokens, self._device))()
        return to_bytes(values_T.float())

    @answered_in_order
    def learn(self, tokens: SentTokens, returns: bytes, values: bytes) -> None:
        microbatch = unpack_microbatch(tokens, self._device)
        self._started().learn(microbatch, floats(returns, self._device), floats(values, self._device))

    @answered_in_order
    def step(self, denominator: float) -> dict[str, float]:
        return self._started().step(denominator)()

    @answered_in_order
    def state_bytes(self) -> int:
        return self._started().state_bytes()

    @answered_in_order
    def write_state(self, directory: str) -> list[str]:
        """The files written, relative to the directory; from the first rank, which is the last to write."""
        self._started().write_state(Path(directory))
        if self._ranks.index:
            return []
        return [str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()]

    @answered_in_order
    def read_state(self, directory: str) -> None:
        self._started().read_state(Path(directory))

    def _started(self) -> ModelCritic:
        if self._critic is None:
            raise TidemillError("this critic has not been started")
        return self._critic
