"""Calls between processes, encoded by the annotations of the called method.

`calls` makes a client's method out of a method of a protocol, and `serves` the actor's method that answers it; `invoke`
and `served` do so for a method of the actor itself. An argument with a record in its annotation is encoded; everything
else (bytes, numbers, texts, handles and references of Ray) travels as it is, so that buffers are not copied.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_args, get_type_hints

import msgspec

from tidemill.core import errors
from tidemill.core.errors import TidemillError
from tidemill.core.records import Record

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def decode(blob: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(blob, type=kind)


class Signature:
    """The annotations of a method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        hints = get_type_hints(method)
        self.result: Any = hints["return"]
        self._signature = inspect.signature(method)
        _, *self._parameters = self._signature.parameters.values()  # without `self`
        self._encoded = {name: kind for name, kind in hints.items() if name != "return" and _has_record(kind)}

    def encode(self, arguments: Sequence[object], keywords: dict[str, object]) -> list[object]:
        """All arguments in the order of the parameters."""
        bound = self._signature.bind(None, *arguments, **keywords)
        bound.apply_defaults()
        values = [bound.arguments[parameter.name] for parameter in self._parameters]
        return [
            encode(value) if parameter.name in self._encoded else value
            for parameter, value in zip(self._parameters, values, strict=True)
        ]

    def decode(self, sent: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional arguments and keywords."""
        arguments, keywords = list[Any](), dict[str, Any]()
        for parameter, value in zip(self._parameters, sent, strict=False):  # the rest has defaults
            kind = self._encoded.get(parameter.name)
            received = value if kind is None else decode(value, kind)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                keywords[parameter.name] = received
            else:
                arguments.append(received)
        return arguments, keywords


@functools.cache
def signature(method: Callable[..., Any]) -> Signature:
    return Signature(inspect.unwrap(getattr(method, "served", method)))


def _has_record(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return True
    return any(_has_record(part) for part in get_args(kind))


class RemoteError(TidemillError):
    """An unexpected exception in another process; its traceback is in the notes."""


class RemoteFailure(Record):
    """An exception as it crosses processes."""

    kind: str  # its class in `core.errors`; empty for a bug
    message: str
    fields: dict[str, Any] = {}  # arguments of the class, if it has a constructor of its own
    traceback: str = ""  # of a bug


class Answer(Record):
    """Result of a remote call."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    failure: RemoteFailure | None = None


def read_answer(blob: bytes, kind: type[T]) -> T:
    """Raises what the remote call raised: the same error of `core.errors`, or RemoteError for a bug."""
    answer = decode(blob, Answer)
    failure = answer.failure
    if failure is None:
        return decode(bytes(answer.value), kind)
    if failure.traceback:
        error = RemoteError(failure.message)
        error.add_note(failure.traceback)
        raise error
    raised: type[TidemillError] = getattr(errors, failure.kind)
    raise raised(**failure.fields) if failure.fields else raised(failure.message)


def _failure(error: Exception) -> RemoteFailure:
    if isinstance(error, RemoteError):  # received from a third process
        return RemoteFailure(kind="", message=str(error), traceback="\n".join(error.__notes__))
    if not isinstance(error, TidemillError):
        what = f"{type(error).__name__}: {error}"
        return RemoteFailure(kind="", message=what, traceback="".join(traceback.format_exception(error)))
    kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
    constructor = next(vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each))
    own = inspect.isfunction(constructor)  # otherwise that of `Exception`, which takes the message
    names = list(inspect.signature(constructor).parameters)[1:] if own else []
    return RemoteFailure(kind=kind.__name__, message=str(error), fields={name: getattr(error, name) for name in names})


def _on_the_wire(method: F, answer: Callable[..., Any]) -> F:
    """Name `answer` as the method that it serves.

    Ray changes the signature of whatever an actor's method wraps, here of a protocol: it must not find that.
    """
    functools.update_wrapper(answer, method)
    del answer.__wrapped__  # type: ignore[attr-defined]
    answer.served = method  # type: ignore[attr-defined]
    return cast(F, answer)


def answered_in_order(method: F) -> F:
    """Serve a plain method of an actor: it returns an encoded `Answer`, also when it raises.

    Ray runs plain methods one at a time, in the order in which a process calls them.
    """

    def answer(self: object, *sent: Any) -> bytes:
        try:
            arguments, keywords = signature(method).decode(sent)
            return encode(Answer(value=msgspec.Raw(encode(method(self, *arguments, **keywords)))))
        except Exception as error:  # noqa: BLE001 - raised in the calling process
            return encode(Answer(failure=_failure(error)))

    return _on_the_wire(method, answer)


def served(method: F) -> F:
    """Serve a coroutine of an `AsyncActor`: it returns an encoded `Answer`, also when it raises.

    Ray runs coroutines of an actor concurrently.
    """

    async def answer(self: AsyncActor, *sent: Any) -> bytes:
        self.calls_in_flight += 1
        try:
            arguments, keywords = signature(method).decode(sent)
            return encode(Answer(value=msgspec.Raw(encode(await method(self, *arguments, **keywords)))))
        except Exception as error:  # noqa: BLE001 - raised in the calling process
            return encode(Answer(failure=_failure(error)))
        finally:
            self.calls_in_flight -= 1
            self.last_call_s = time.monotonic()

    return _on_the_wire(method, answer)


def serves(method: F, part: str) -> F:
    """Serve a method of a protocol by calling it on a part of an `AsyncActor`."""

    async def call(self: AsyncActor, *arguments: Any, **keywords: Any) -> Any:
        result = getattr(self.part(part), method.__name__)(*arguments, **keywords)
        return await result if inspect.isawaitable(result) else result

    return cast(F, served(functools.update_wrapper(call, method)))


class AsyncActor:
    """Base of actors whose methods are coroutines."""

    def __init_subclass__(cls) -> None:
        for name, method in vars(cls).items():
            if inspect.iscoroutinefunction(method):  # Ray sends a method by its name if that is its place
                method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"

    def __init__(self) -> None:
        super().__init__()
        self.calls_in_flight = 0
        self.last_call_s = time.monotonic()  # when the last call ended

    @property
    def idle_s(self) -> float:
        """Seconds without any call."""
        return 0.0 if self.calls_in_flight else time.monotonic() - self.last_call_s

    async def exit_when_orphaned(self, orphan_s: float) -> None:
        """End the process after this time without a call: its controller is gone, or has replaced this worker while the
        machine was suspended."""
        while self.idle_s < orphan_s:  # noqa: ASYNC110 - there is no event for the absence of calls
            await asyncio.sleep(orphan_s / 4)
        os._exit(0)

    def part(self, name: str) -> Any:
        """Raises TidemillError: the actor was not started, or was started without this part."""
        found = getattr(self, name)
        if found is None:
            raise TidemillError(f"this actor has no {name}")
        return found


class Caller(Protocol):
    """Calls on one actor, or on all ranks of a sharded trainer."""

    def kill(self) -> None:
        """End the process, or all of them, now."""

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        """Raises TidemillError: what the method raised, or that the actor died or did not answer in time."""


async def invoke(
    remote: Caller,
    timeout_s: float,
    method: Callable[Concatenate[Any, P], Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call a method of an actor, or of a protocol that the actor serves."""
    found = signature(method)
    result: T = await remote.call(method.__name__, *found.encode(args, kwargs), kind=found.result, timeout_s=timeout_s)
    return result


def calls(method: F, *, timeout_s: float) -> F:
    """The method of a client that calls a protocol's method on its `_remote`."""

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await invoke(self._remote, timeout_s, method, *args, **kwargs)

    return cast(F, functools.update_wrapper(call, method))


def asks(method: F) -> F:
    """Like `calls`, for a plain method whose answer nobody awaits."""

    def ask(self: Any, *args: Any, **kwargs: Any) -> None:
        self._remote.ask(method.__name__, *signature(method).encode(args, kwargs))

    return cast(F, functools.update_wrapper(ask, method))
