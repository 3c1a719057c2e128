"""Watches the metadata service of the cloud that this machine runs on, over plain HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import httpx2

from tidemill.pool.notices import CLOUDS, Endpoint, Notice, detect, watch

DETECTIONS = 3
DETECT_AGAIN_S = 20.0
"""The metadata service of a machine that just started may not answer yet."""


class HttpFetch:
    """Plain HTTP requests to a metadata service: no proxy, no redirects, one deadline for the whole answer."""

    def __init__(self) -> None:
        # Proxies of the environment must not get requests that concern this machine; the service has no TLS.
        self._client = httpx2.AsyncClient(trust_env=False, follow_redirects=False, verify=False)

    async def __call__(self, method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, url, headers=dict(headers), timeout=timeout_s)
        except httpx2.HTTPError as error:
            raise OSError(f"{url}: {error!r}") from error
        return response.status_code, response.content

    async def close(self) -> None:
        await self._client.aclose()


async def watch_cloud_notices(
    on_notice: Callable[[Notice], None],
    *,
    endpoints: Mapping[str, Endpoint] | None = None,
    unix_s: Callable[[], float] = time.time,
) -> None:
    """Wait for the termination notice of the first cloud that is detected; return at once if there is none.

    Args:
        endpoints: by name of the cloud; by default the link-local address for all.
    """
    if endpoints is None:
        endpoints = dict.fromkeys(CLOUDS, Endpoint())
    fetch = HttpFetch()
    try:
        for attempt in range(DETECTIONS):
            cloud = await detect(fetch, endpoints)
            if cloud is not None:
                on_notice(await watch(cloud, fetch, endpoints[cloud.name], unix_s=unix_s))
                return
            if attempt < DETECTIONS - 1:
                await asyncio.sleep(DETECT_AGAIN_S)
    finally:
        await fetch.close()
