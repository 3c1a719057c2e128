"""How a worker process hears that its machine goes: the cloud's metadata service, and SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import httpx2

from tidemill.pool.notices import CLOUDS, Endpoint, Notice, detect, watch

LONGEST_ANSWER = 65536  # bytes; what a metadata service says is far shorter
DETECTIONS = 3
DETECT_AGAIN_S = 20.0  # the service of a machine that just started may not answer yet


class HttpFetch:
    """Requests in plain HTTP to a metadata service: no proxy, no redirect, and the deadline is for the whole answer."""

    def __init__(self) -> None:
        # What the environment says of proxies must not lead a machine's own questions elsewhere; there is no TLS.
        self._client = httpx2.AsyncClient(trust_env=False, follow_redirects=False, verify=False)

    async def __call__(self, method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        body = b""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, url, headers=dict(headers), timeout=timeout_s) as response,
            ):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > LONGEST_ANSWER:
                        raise OSError(f"{url}: the answer is longer than {LONGEST_ANSWER} bytes")
        except httpx2.HTTPError as error:
            raise OSError(f"{url}: {error!r}") from error
        return response.status_code, body

    async def close(self) -> None:
        await self._client.aclose()


@contextmanager
def on_sigterm(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` on the event loop at each SIGTERM instead of ending the process. Only in the main thread."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def tell_notices(
    tell: Callable[[Notice], None],
    *,
    sigterm_grace_s: float | None,
    endpoints: Mapping[str, Endpoint] | None = None,
    unix_s: Callable[[], float] = time.time,
) -> None:
    """Pass on every notice there is, until cancelled: of the first cloud found, and SIGTERM as one.

    Args:
        sigterm_grace_s: what whoever sends SIGTERM leaves between it and SIGKILL; None leaves SIGTERM as it is (only
            the main thread can change it).
        endpoints: by name of the cloud; by default the link-local address of all.
    """
    if endpoints is None:
        endpoints = dict.fromkeys(CLOUDS, Endpoint())
    fetch = HttpFetch()
    try:
        with ExitStack() as stack:
            if sigterm_grace_s is not None:
                notice = Notice(seconds_left=sigterm_grace_s, cause="the process was sent SIGTERM")
                stack.enter_context(on_sigterm(lambda: tell(notice)))
            await _tell_from_cloud(tell, fetch, endpoints, unix_s)
            await asyncio.Event().wait()  # for SIGTERM; whoever started this ends it
    finally:
        await fetch.close()


async def _tell_from_cloud(
    tell: Callable[[Notice], None], fetch: HttpFetch, endpoints: Mapping[str, Endpoint], unix_s: Callable[[], float]
) -> None:
    for again in range(DETECTIONS):
        cloud = await detect(fetch, endpoints)
        if cloud is not None:
            tell(await watch(cloud, fetch, endpoints[cloud.name], unix_s=unix_s))
            return
        if again < DETECTIONS - 1:
            await asyncio.sleep(DETECT_AGAIN_S)
