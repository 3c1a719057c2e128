"""Messages between a sandbox's owner and the launcher, in MessagePack."""

from __future__ import annotations

import socket
from typing import Literal, TypeAlias, TypeVar

import msgspec

from tidemill.core import ipc
from tidemill.core.records import Record
from tidemill.sandbox.records import Limits, SandboxError, SandboxLostError

T = TypeVar("T")
Backend: TypeAlias = Literal["bwrap", "runsc", "none"]


class Setup(Record):
    """What a launcher is started with."""

    backend: Backend
    address: str  # its socket, in the abstract namespace
    path: tuple[str, ...]  # sys.path


class Request(Record, omit_defaults=True):
    """One method of a sandbox. The first one, of a connection, is `open` or `attach`."""

    method: Literal["open", "run", "start", "attach", "read", "write", "snapshot", "restore"]
    limits: Limits = Limits()
    network: tuple[str, ...] = ()
    visible: dict[str, str] = {}  # open: folders that the sandbox sees read-only, by their names in /mnt
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    stdin: bytes = b""
    timeout_s: float = 0.0
    path: str = ""
    data: bytes = b""
    stream: str = ""  # start, attach: names the connection that becomes the standard input and output of a process


class Reply(Record, omit_defaults=True):
    """What a method returned, encoded; or how it failed."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    lost: bool = False  # whether the sandbox itself failed


def send(stream: socket.socket, request: Request) -> None:
    stream.sendall(ipc.framed(msgspec.msgpack.encode(request)))


def receive(stream: socket.socket, kind: type[T]) -> T:
    """The value of the next reply, which has a type.

    Raises:
        SandboxError: of the method.
        SandboxLostError: the launcher could not do it.
        OSError: the connection is lost, or its timeout has passed.
    """
    try:
        data = ipc.receive(stream)
    except EOFError:
        raise ConnectionError("the sandbox has ended") from None
    reply = msgspec.msgpack.decode(data, type=Reply)
    if reply.error:
        raise (SandboxLostError if reply.lost else SandboxError)(reply.error)
    return msgspec.msgpack.decode(reply.value, type=kind)
