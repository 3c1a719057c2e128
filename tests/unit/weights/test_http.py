"""Weights over HTTP when something is wrong: a clear error within a deadline, and the version in use stays."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx2
import numpy as np
import pytest

from tests.published import compute, publish, snapshot, tensors_of, version
from tidemill.core.errors import UserError, WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.weights.http_reader import HttpReader
from tidemill.weights.http_server import HttpTransport
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Snapshot
from tidemill.weights.store import WeightStore

TOKEN = "secret"
MEGABYTE = 1 << 20
OTHER_PUBLISHER = """\
import asyncio, sys
import numpy as np
from tidemill.weights.http_server import HttpTransport
async def main():
    transport = HttpTransport("127.0.0.1", 0, "secret")
    await transport.put("large.snapshot", np.zeros(1 << 30, np.uint8))
    print(transport.port, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@asynccontextmanager
async def server() -> AsyncIterator[HttpTransport]:
    transport = HttpTransport("127.0.0.1", 0, TOKEN)
    try:
        yield transport
    finally:
        await transport.close()


def url(transport: HttpTransport) -> str:
    return f"http://127.0.0.1:{transport.port}"


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def fake_server(handler: Handler) -> AsyncIterator[str]:
    """A server that answers as `handler` does."""

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    fake = await asyncio.start_server(attend, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{fake.sockets[0].getsockname()[1]}"
    finally:
        fake.close()


async def test_only_who_has_the_token_reads() -> None:
    async with server() as transport:
        await transport.put("a.snapshot", np.arange(10, dtype=np.uint8))
        for token in ("wrong", f"{TOKEN}x"):
            reader = HttpReader(url(transport), token)
            with pytest.raises(WeightsError, match="refuses the token"):
                await reader.get("a.snapshot")
            await reader.close()
        async with httpx2.AsyncClient(base_url=url(transport), trust_env=False) as client:
            assert (await client.get("/v1/blobs/a.snapshot")).status_code == 401
            assert (await client.get("/v1/blobs/unknown")).status_code == 401


@pytest.mark.parametrize(
    ("wanted", "status", "content"),
    [("", 200, 10), ("bytes=0-3", 206, 4), ("bytes=8-100", 206, 2), ("bytes=10-12", 416, None), ("lines=1", 416, None)],
)
async def test_ranges(wanted: str, status: int, content: int | None) -> None:
    async with server() as transport, httpx2.AsyncClient(base_url=url(transport), trust_env=False) as client:
        await transport.put("a.snapshot", np.arange(10, dtype=np.uint8))
        headers = {"authorization": f"Bearer {TOKEN}", **({"range": wanted} if wanted else {})}
        answer = await client.get("/v1/blobs/a.snapshot", headers=headers)

        assert answer.status_code == status
        if content is not None:
            assert len(answer.content) == content


async def test_a_reader_that_reads_slowly_delays_no_other() -> None:
    async with server() as transport:
        await transport.put("large.snapshot", np.zeros(64 * MEGABYTE, np.uint8))
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", transport.port)
        authorization = f"authorization: Bearer {TOKEN}\r\n"
        slow_writer.write(f"GET /v1/blobs/large.snapshot HTTP/1.1\r\nhost: x\r\n{authorization}\r\n".encode())
        await slow.read(1)
        reader = HttpReader(url(transport), TOKEN)

        async with asyncio.timeout(20):
            assert len(await reader.get("large.snapshot")) == 64 * MEGABYTE
        slow_writer.close()
        await reader.close()


ANSWER = b"HTTP/1.1 206 Partial Content\r\ncontent-length: %d\r\ncontent-range: bytes 0-%d/%d\r\n\r\n%s"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ANSWER % (100, 99, 100, b"x" * 50), "does not answer"),
        (ANSWER % (50, 99, 100, b"x" * 50), "50 of 100 bytes"),
        (ANSWER % (0, 1 << 40, 1 << 41, b""), "other bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "answers 200"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "answers 503"),
        (b"no http\r\n\r\n", "does not answer"),
        (b"", "does not answer"),
    ],
)
async def test_torn_answers_are_errors(answer: bytes, message: str) -> None:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with fake_server(handler) as address:
        reader = HttpReader(address, TOKEN)
        with pytest.raises(WeightsError, match=message):
            await reader.get("a.snapshot")
        await reader.close()


async def test_a_silent_publisher_has_a_deadline() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER % (100, 99, 100, b"x"))
        await reader.read()

    async with fake_server(handler) as address:
        reader = HttpReader(address, TOKEN, silence_s=0.3)
        began_s = time.monotonic()
        with pytest.raises(WeightsError, match="does not answer"):
            await reader.get("a.snapshot")
        assert time.monotonic() - began_s < 3
        await reader.close()


async def test_the_version_in_use_stays_when_the_publisher_ends() -> None:
    transport, held = HttpTransport("127.0.0.1", 0, TOKEN), list[Snapshot]()
    reader = HttpReader(url(transport), TOKEN, silence_s=1.0)
    puller = Puller(reader, compute(), clock=LoopClock(), timeout_s=5.0, retry_pause_s=0.01)
    store = WeightStore(transport, compute=compute())
    await publish(store, 1)
    puller.swap(await puller.prepare(version(1)), held.extend)
    await publish(store, 2)
    await transport.close()

    with pytest.raises(WeightsError, match="version 2"):
        await puller.prepare(version(2))
    assert tensors_of(held[-1].buffer) == tensors_of(snapshot(1))
    await reader.close()


async def test_a_publisher_killed_during_a_transfer_is_an_error() -> None:
    program = [sys.executable, "-c", OTHER_PUBLISHER]
    publisher = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    assert publisher.stdout is not None
    port = int(await publisher.stdout.readline())
    reader = HttpReader(f"http://127.0.0.1:{port}", TOKEN, silence_s=2.0)
    reading = asyncio.create_task(reader.get("large.snapshot"))
    await asyncio.sleep(0.05)
    publisher.kill()
    await publisher.wait()

    with pytest.raises(WeightsError, match="does not answer"):
        async with asyncio.timeout(10):
            await reading
    await reader.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        HttpTransport("192.0.2.1", 0, TOKEN)
