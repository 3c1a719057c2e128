"""Connections: deadlines, a limit, and their end."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.unit.gateway.scripted import (
    CHAT,
    DEADLINE_S,
    Scripted,
    chat,
    gateway,
    until,
)


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "later"])
async def test_a_connection_without_whole_headers_is_closed(before: bytes) -> None:
    async with gateway(Scripted(), header_s=0.3) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        async with asyncio.timeout(DEADLINE_S):
            if before:
                writer.write(before)
                assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.5)  # an idle connection has more time
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
            began_s = time.monotonic()
            assert await reader.read() == b""
        writer.close()
        assert time.monotonic() - began_s < 3


async def test_a_connection_too_many_is_told_so() -> None:
    async with gateway(Scripted(), connections=1) as client:
        assert (await client.get("/health")).status_code == 200  # its connection stays open
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        async with asyncio.timeout(DEADLINE_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert (await client.get("/health")).status_code == 200

    assert head.startswith(b"HTTP/1.1 503")
    assert json.loads(body)["error"]["code"] == "too_many_connections"


async def test_a_client_that_does_not_read_loses_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    served = Scripted("x" * 200_000, step=200)
    served.context_tokens = 300_000
    async with gateway(served, idle_s=1.0) as client:
        body = json.dumps(chat(stream=True, logprobs=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=1024)
        writer.write(head + body)
        await until(lambda: served.closed == 1)
        assert (await client.post(CHAT, json=chat("Hi", max_tokens=3))).status_code == 200
        writer.close()

    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_connection_whose_body_was_not_read_is_closed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    async with gateway(Scripted(), token_file=keys) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 401")  # and the end
        writer.close()
