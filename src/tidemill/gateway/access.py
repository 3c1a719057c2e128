"""Who may ask, and how much: keys, browsers, sizes, times."""

from __future__ import annotations

import asyncio
import hmac
import logging
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request

from tidemill.core.errors import UserError
from tidemill.gateway.errors import AUTHENTICATION, RATE, ApiError

T = TypeVar("T")

LOG = logging.getLogger("tidemill.gateway")
LOCAL_NAMES = {"127.0.0.1", "::1", "localhost"}
DISCARD_S, DISCARDED_BYTES = 0.5, 1 << 20
WORDS = 2
"""Of a line: right and key."""
SINGLE = ("host", "authorization", "origin", "idempotency-key", "content-encoding", "content-length")
"""Headers with one value. A proxy in front may read another one of two values than the gateway."""


@contextmanager
def logged_to(handler: logging.Handler) -> Iterator[None]:
    """Write a line for each request while the block runs: id, route, status and time, no text and no key."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.propagate = True
        handler.close()


class Keys:
    """The keys of clients, read again whenever the file changes.

    Args:
        file: None lets every client of this machine in, if it is no web page of another site.
        where: the setting that names the file, for errors.
        rights: words of which one stands before each key; a key has the rights before its own, too. Without them each
            line is a key.

    Raises:
        UserError: the file cannot be read, has no key, or others can read it.
    """

    def __init__(self, file: Path | None, *, where: str = "gateway.token_file", rights: Sequence[str] = ("",)) -> None:
        self._file, self._where, self._rights = file, where, tuple(rights)
        self._stamp = _stamp(file) if file is not None else ()
        self._keys = self._read(file) if file is not None else {}

    def check(self, request: Request, right: str = "") -> str:
        """The client's key; empty without keys.

        Raises:
            ApiError: it has no valid key or not this right, or is a web page of another site.
        """
        if self._file is None:
            if _host(f"//{request.headers.get('host', '')}") not in LOCAL_NAMES:  # a name redirected to this machine
                raise ApiError(403, "without keys only this machine's own names are served", code="forbidden_host")
            origin = request.headers.get("origin")
            if origin is not None and _host(origin) not in LOCAL_NAMES:
                raise ApiError(403, "pages of other sites are not served", code="forbidden_origin")
            return ""
        if (stamp := _stamp(self._file)) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = self._read(self._file)
            except UserError as error:
                LOG.warning("the keys are not read again, and those of before stay valid: %s", error)
        given = bearer(request).encode()
        found = [granted for key, granted in self._keys.items() if hmac.compare_digest(given, key)]  # compares with all
        if not found:
            raise ApiError(401, "wrong or missing key", kind=AUTHENTICATION, code="invalid_api_key")
        if self._rights.index(right or self._rights[0]) > self._rights.index(found[0]):
            raise ApiError(403, f"this key may not {right}", kind=AUTHENTICATION, code="forbidden_key")
        return given.decode()

    def _read(self, file: Path) -> dict[bytes, str]:
        """The right of each key."""
        form = " or ".join(f"`{right} TOKEN`" if right else "a key" for right in self._rights)
        try:
            mode = file.stat().st_mode
            lines = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
        except OSError as error:
            hint = f"name a file with {form} on each line"
            raise UserError(f"{file}: {error.strerror}", where=self._where, hint=hint) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            what = f"others can read {file} (mode {stat.S_IMODE(mode):o})"
            raise UserError(what, where=self._where, hint=f"chmod 600 {file}")
        if not lines:
            raise UserError(f"{file} has no key", where=self._where, hint=f"write {form} on a line of its own")
        keys = dict[bytes, str]()
        for line in lines:
            words = [b"", line] if self._rights == ("",) else line.split()
            right = words[0].decode(errors="replace")
            if right not in self._rights or len(words) != WORDS:
                hint = f"write {form} on each line"
                raise UserError(f"{file} has a line that is no right and key", where=self._where, hint=hint)
            keys[words[1]] = max(right, keys.get(words[1], right), key=self._rights.index)
        return keys


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes whenever the file, its place or its mode does."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def bearer(request: Request) -> str:
    """The key that a request carries, empty without one."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def refuse_repeated(request: Request) -> None:
    """Raises ApiError: a header that has one value is there twice."""
    for name in SINGLE:
        if len(request.headers.getlist(name)) > 1:
            raise ApiError(400, f"the header {name} is there more than once", param=name, code="repeated_header")


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class Limits:
    """Requests that are being answered, by key."""

    def __init__(self, most: int) -> None:
        self._most, self._open = most, Counter[str]()

    @property
    def open(self) -> int:
        return self._open.total()

    def enter(self, key: str) -> Callable[[], None]:
        """Count a request; returns what ends it. Raises ApiError: the key has too many requests."""
        if self._open[key] >= self._most:
            message = f"{self._most} requests of this key are being answered"
            raise ApiError(429, message, kind=RATE, code="rate_limit_exceeded")
        self._open[key] += 1

        def leave() -> None:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

        return leave


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """Raises ApiError: the client has left; `work` is cancelled."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(leaving())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left", code="client_disconnected")
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def body_of(request: Request, *, most_bytes: int, timeout_s: float) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is too large, encoded, or does not arrive in time.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "an encoded body is not accepted", param="content-encoding", code="unsupported_encoding")
    try:
        announced = int(request.headers.get("content-length", 0))
    except ValueError:
        announced = 0
    parts, size = list[bytes](), announced
    try:
        async with asyncio.timeout(timeout_s):
            if announced <= most_bytes:
                size = 0
                async for part in request.stream():
                    size += len(part)
                    parts.append(part)
                    if size > most_bytes:
                        break
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client has left", code="client_disconnected") from error
    if size > most_bytes:
        raise ApiError(413, f"the body has more than {most_bytes} bytes", code="request_too_large")
    request.state.read = True
    return b"".join(parts)


async def discard_body(request: Request) -> None:
    """Read what is left of a request's body, within DISCARD_S and up to DISCARDED_BYTES.

    A connection that is closed with unread bytes is reset, and the client may then lose the answer. A body that the
    client sends only if asked (`Expect: 100-continue`) is not asked for.
    """
    if getattr(request.state, "read", False) or "expect" in request.headers:
        return
    left = DISCARDED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
