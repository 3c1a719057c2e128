"""Actors of a sharded critic in processes of their own, without Ray: each trainer rank calls one over a socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from tests.rank_processes import DEADLINE_S, fork_context
from tidemill.models.ranks import Ranks
from tidemill.runtime.cluster import rank_group
from tidemill.runtime.cluster.ray_critic import CriticActor, RayCritic
from tidemill.trainer import critic as critics
from tidemill.trainer.update import clip_and_step

GRADIENTS = "critic-gradients.npz"


@contextmanager
def critic_processes(size: int, folder: Path, *, rank_s: float = DEADLINE_S) -> Iterator[list[int]]:
    """Start the actors; yields their process ids. They listen in `folder`, and the first writes the gradients of their
    first step there.

    Args:
        rank_s: deadline of a collective operation.
    """
    context = fork_context()
    processes = [context.Process(target=_serve, args=(folder, index, rank_s), daemon=True) for index in range(size)]
    for process in processes:
        process.start()
    try:
        yield [process.pid or 0 for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_S)


def remote_critic(folder: Path, index: int) -> RayCritic:
    """The critic of a trainer rank, which has not been started."""
    ray.get = lambda answer, timeout: answer()
    while True:
        try:
            handle = ActorThere(Client(str(folder / f"critic-{index}")))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)
            continue
        return RayCritic(handle, index=index, meeting=str(folder / "critic-meeting"))


class ActorThere:
    """A handle as Ray gives, of an actor that answers in order."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._answers: list[bytes] = []
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._send(name, arguments))

    def _send(self, name: str, arguments: tuple[Any, ...]) -> Callable[[], bytes]:
        self._pipe.send((name, arguments))
        number = self._sent
        self._sent += 1

        def answer() -> bytes:
            while len(self._answers) <= number:
                assert self._pipe.poll(DEADLINE_S), f"no answer to `{name}`"
                self._answers.append(self._pipe.recv())
            return self._answers[number]

        return answer


def _serve(folder: Path, index: int, rank_s: float) -> None:
    torch.set_num_threads(1)
    rank_group.RANK_S = rank_s
    actor, written = CriticActor(), folder / GRADIENTS

    def captured(optimizer: torch.optim.Optimizer, *, ranks: Ranks, **settings: Any) -> float:
        if not written.exists():
            gradients = whole_gradients(optimizer, ranks, scale=settings["scale"])
            ranks.barrier()
            if ranks.index == 0:
                np.savez(written, **gradients)  # type: ignore[arg-type]
        return clip_and_step(optimizer, ranks=ranks, **settings)

    critics.clip_and_step = captured  # type: ignore[attr-defined,assignment]
    with Listener(str(folder / f"critic-{index}")) as listener, listener.accept() as pipe:
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(actor, name)(*arguments))


def whole_gradients(optimizer: torch.optim.Optimizer, ranks: Ranks, *, scale: float) -> dict[str, np.ndarray[Any, Any]]:
    """All rows of every gradient, by the number of its parameter."""
    found = dict[str, np.ndarray[Any, Any]]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad
                rows = gradient.full_tensor() if hasattr(gradient, "full_tensor") else ranks.all_sum(gradient)
                found[str(len(found))] = (rows.detach() * scale).clone().numpy()
    return found
