"""Reads published blobs over HTTP, large ones by several ranges at the same time."""

from __future__ import annotations

import asyncio
import re

import httpx2

from tidemill.core.errors import WeightsError
from tidemill.weights.snapshot import Blob, Missing, allocate

RANGE_BYTES = 64 << 20
AT_ONCE = 4
SILENCE_S = 30.0
"""Longest wait for the next bytes; the whole pull has the deadline of the puller."""
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class HttpReader:
    """Implements `weights.snapshot.BlobSource`.

    Args:
        url: of the server, such as "http://10.0.0.5:8000".
    """

    def __init__(self, url: str, token: str, *, silence_s: float = SILENCE_S) -> None:
        self._blobs = f"{url.rstrip('/')}/v1/blobs"
        self._client = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {token}"}, timeout=silence_s, trust_env=False
        )
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def get(self, name: str) -> Blob:
        try:
            first = allocate(RANGE_BYTES)
            nbytes, total = await self._read(name, 0, first)
            if total == nbytes:
                return first[:nbytes]
            blob = allocate(total)
            blob[:nbytes] = first[:nbytes]
            rest = range(nbytes, total, RANGE_BYTES)
            async with asyncio.TaskGroup() as tasks:
                for start in rest:
                    tasks.create_task(self._fill(name, start, blob[start : start + RANGE_BYTES], total))
        except (httpx2.HTTPError, WeightsError) as error:
            raise _told(name, error) from error
        except ExceptionGroup as group:
            raise _told(name, group.exceptions[0]) from group
        return blob

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _fill(self, name: str, start: int, buffer: Blob, total: int) -> None:
        """Read exactly a range. Raises WeightsError, httpx2.HTTPError."""
        async with self._at_once:
            found = await self._read(name, start, buffer)
        if found != (len(buffer), total):
            raise WeightsError(f"{name} changed while it was read: {found[0]} of {found[1]} bytes")

    async def _read(self, name: str, start: int, buffer: Blob) -> tuple[int, int]:
        """Read from `start` until the buffer is full or the blob ends; the bytes read, and those of the blob. Raises
        WeightsError (the server refuses, or its answer is not what its headers say), httpx2.HTTPError."""
        wanted = {"range": f"bytes={start}-{start + len(buffer) - 1}"}
        async with self._client.stream("GET", f"{self._blobs}/{name}", headers=wanted) as answer:
            if answer.status_code == 404:
                raise Missing(f"there is no {name}")
            if answer.status_code == 401:
                raise WeightsError(f"{name}: the publisher refuses the token")
            found = CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
            if answer.status_code != 206 or found is None:
                raise WeightsError(f"{name}: the publisher answers {answer.status_code}")
            first, last, total = map(int, found.groups())
            nbytes = last - first + 1
            if first != start or nbytes > len(buffer):
                raise WeightsError(f"{name}: the publisher answers with other bytes than those wanted")
            at = 0
            async for piece in answer.aiter_raw():
                if at + len(piece) > nbytes:
                    raise WeightsError(f"{name}: more bytes than announced")
                buffer[at : at + len(piece)] = memoryview(piece)
                at += len(piece)
        if at != nbytes:
            raise WeightsError(f"{name}: {at} of {nbytes} bytes arrived")
        return nbytes, total


def _told(name: str, error: Exception) -> WeightsError:
    if isinstance(error, WeightsError):
        return error
    return WeightsError(f"{name}: the publisher does not answer ({str(error) or type(error).__name__})")
