"""Who may ask: keys, headers, other sites, limits."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from starlette.requests import Request

from tests.unit.gateway.scripted import (
    CHAT,
    DEADLINE_S,
    Scripted,
    chat,
    gateway,
    until,
)
from tidemill.core.errors import UserError
from tidemill.gateway.access import Keys
from tidemill.gateway.errors import ApiError


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Host: localhost", "invalid_http"),
        ("Content-Length: 3", "invalid_http"),
        ("Authorization: Bearer b", "repeated_header"),
        ("Origin: http://localhost", "repeated_header"),
        ("Content-Encoding: identity", "repeated_header"),
        ("Idempotency-Key: b", "repeated_header"),
    ],
)
async def test_a_header_with_one_value_is_refused_if_it_has_two(header: str, code: str) -> None:
    name = header.partition(":")[0]
    first = {"Host": "localhost", "Content-Length": "2"} | ({} if name in ("Host", "Content-Length") else {name: "a"})
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{key}: {value}" for key, value in first.items()), header, "", "{}"]
    async with gateway(Scripted()) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(DEADLINE_S):
            head, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            error = json.loads(await reader.readuntil(b"}}"))["error"]
        writer.close()
    assert b"400" in head
    assert error["code"] == code


async def test_keys_are_checked_before_the_body_and_read_again_when_they_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    file.chmod(0o600)
    async with gateway(Scripted(), token_file=file) as client:

        async def status(key: str) -> int:
            return (await client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})).status_code

        assert [await status(key) for key in ("first", "second", "third", "-")] == [200, 200, 401, 401]
        file.write_text("third\n")
        os.utime(file, (1, 1))
        assert [await status(key) for key in ("first", "third")] == [401, 200]
        wrong = await client.post(CHAT, content=b"{")
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert wrong.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(("mode", "text", "what"), [(0o644, "key", "others can read"), (0o600, " \n", "has no key")])
def test_key_files_that_are_refused(tmp_path: Path, mode: int, text: str, what: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UserError, match=what):
        Keys(file)
    with pytest.raises(UserError, match="No such file"):
        Keys(tmp_path / "missing")


async def test_without_keys_pages_of_other_sites_are_not_served() -> None:
    async with gateway(Scripted()) as client:
        foreign = await client.post(CHAT, json=chat(), headers={"origin": "https://evil.example"})
        rebound = await client.post(CHAT, json=chat(), headers={"host": "evil.example"})
        own = await client.post(CHAT, json=chat(), headers={"origin": "http://localhost:3000"})

    assert [answer.status_code for answer in (foreign, rebound, own)] == [403, 403, 200]
    assert "access-control-allow-origin" not in own.headers


async def test_too_many_requests_of_a_key_are_told_when_to_come_again() -> None:
    served = Scripted()
    served.go_on.clear()
    async with gateway(served, concurrency=2) as client:
        streams = [asyncio.create_task(client.post(CHAT, json=chat(stream=True))) for _ in range(2)]
        await until(lambda: len(served.requested) == 2)
        refused = await client.post(CHAT, json=chat())
        served.go_on.set()
        assert [(await stream).status_code for stream in streams] == [200, 200]
        after = await client.post(CHAT, json=chat())

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert after.status_code == 200


async def test_a_body_that_does_not_arrive_is_an_error() -> None:
    async with gateway(Scripted(), body_s=0.2) as client:
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        async with asyncio.timeout(DEADLINE_S):
            status = await reader.readline()
        writer.close()

    assert b"408" in status


@pytest.mark.parametrize("headers", [{"host": "[bad"}, {"origin": "http://["}], ids=["host", "origin"])
async def test_addresses_that_are_none_are_foreign(headers: dict[str, str]) -> None:
    async with gateway(Scripted()) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 403


def test_keys_are_read_again_once_nobody_else_can_read_them(tmp_path: Path) -> None:
    def allowed(key: str) -> bool:
        try:
            request = Request({"type": "http", "headers": [(b"authorization", f"bearer {key}".encode())]})
            return keys.check(request) == key
        except ApiError:
            return False

    file = tmp_path / "keys"
    file.write_text("old\n")
    file.chmod(0o600)
    keys = Keys(file)
    new = tmp_path / "new"
    new.write_text("new\n")
    new.chmod(0o644)
    new.replace(file)
    assert (allowed("old"), allowed("new")) == (True, False)
    file.chmod(0o600)
    assert (allowed("old"), allowed("new")) == (False, True)
    file.unlink()
    assert allowed("new")
