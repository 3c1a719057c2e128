"""Calls to an actor in this process, without Ray: arguments, answers and errors are encoded as between two."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from tidemill.runtime.cluster.wire import read_answer, signature

T = TypeVar("T")


class ActorHere:
    """Implements `runtime.cluster.wire.Caller` with an actor in this process; also a handle as Ray gives."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        answer = getattr(self._actor, method)(*args)
        return read_answer(await answer if inspect.isawaitable(answer) else answer, kind)

    def kill(self) -> None:
        raise NotImplementedError

    async def tell(self, method: Callable[..., None], *args: object) -> None:
        await self.call(method.__name__, *signature(method).encode(args, {}), kind=type(None), timeout_s=60.0)
