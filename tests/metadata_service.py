"""A cloud's metadata service on loopback, with valid or broken answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Headers = dict[str, str]
TOKEN = "AQAEAL=="


@dataclass
class MetadataService:
    """`answer` gets method, path with query, and headers (names in lower case); returns status and body.

    `raw` is sent unchanged in place of any answer; `slow_s` delays it.
    """

    answer: Callable[[str, str, Headers], tuple[int, str]] = lambda method, path, headers: (404, "")
    raw: bytes | None = None
    slow_s: float = 0.0
    base: str = ""
    asked: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, path, _ = first.split(" ")
                self.asked.append(f"{method} {path}")
                await asyncio.sleep(self.slow_s)
                if self.raw is not None:
                    writer.write(self.raw)
                    break
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                status, body = self.answer(method, path, headers)
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        finally:
            writer.close()


@asynccontextmanager
async def serving(service: MetadataService) -> AsyncIterator[MetadataService]:
    """Serve at `service.base` inside the context."""
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    service.base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield service
    finally:
        server.close()


def aws(instance_action: str | None) -> Callable[[str, str, Headers], tuple[int, str]]:
    def answer(method: str, path: str, headers: Headers) -> tuple[int, str]:
        if path == "/latest/api/token":
            if method != "PUT" or not headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return 400, ""
            return 200, TOKEN
        if headers.get("x-aws-ec2-metadata-token") != TOKEN:
            return 401, ""
        if (method, path) != ("GET", "/latest/meta-data/spot/instance-action") or instance_action is None:
            return 404, "<html>Not Found</html>"
        return 200, instance_action

    return answer


def google(preempted: str) -> Callable[[str, str, Headers], tuple[int, str]]:
    def answer(method: str, path: str, headers: Headers) -> tuple[int, str]:
        if headers.get("metadata-flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header."
        return (200, preempted) if (method, path) == ("GET", "/computeMetadata/v1/instance/preempted") else (404, "")

    return answer


def azure(scheduled_events: str, name: str = "worker_3") -> Callable[[str, str, Headers], tuple[int, str]]:
    def answer(method: str, path: str, headers: Headers) -> tuple[int, str]:
        if headers.get("metadata") != "true" or method != "GET":
            return 400, '{"error": "Bad request."}'
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return 200, scheduled_events
        if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return 200, name
        return 404, ""

    return answer
