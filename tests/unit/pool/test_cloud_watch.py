"""Termination notices over real HTTP from a fake metadata service on loopback."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from tests.metadata_service import Headers, MetadataService, aws, azure, google, serving
from tidemill.pool.cloud_watch import HttpFetch, watch_cloud_notices
from tidemill.pool.notices import CLOUDS, Endpoint, Notice, detect, watch

NOW_UNIX_S = 1_789_722_000.0  # 2026-09-18T09:00:00Z
AZURE = """{"DocumentIncarnation": 1, "Events": [{"EventId": "1", "EventType": "Preempt", "ResourceType":
"VirtualMachine", "Resources": ["worker_3"], "EventStatus": "Scheduled", "NotBefore":
"Fri, 18 Sep 2026 09:00:30 GMT"}]}"""
GOING = {
    "aws": (aws('{"action": "terminate", "time": "2026-09-18T09:02:00Z"}'), 120.0),
    "google": (google("TRUE"), 29.98),
    "azure": (azure(AZURE), 30.0),
}


def at(service: MetadataService, *, timeout_s: float = 1.0) -> Endpoint:
    return Endpoint(base=service.base, timeout_s=timeout_s, interval_s=0.02)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("not within 5 s")


@asynccontextmanager
async def fetching() -> AsyncIterator[HttpFetch]:
    fetch = HttpFetch()
    try:
        yield fetch
    finally:
        await fetch.close()


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_cloud_is_detected_and_its_notice_received(name: str) -> None:
    answer, seconds_left = GOING[name]
    async with serving(MetadataService(answer)) as service, fetching() as fetch:
        cloud = await detect(fetch, dict.fromkeys(CLOUDS, at(service)))
        assert cloud is CLOUDS[name]
        async with asyncio.timeout(5.0):
            notice = await watch(cloud, fetch, at(service), unix_s=lambda: NOW_UNIX_S)
    assert notice.seconds_left == pytest.approx(seconds_left)


@pytest.mark.parametrize(
    "ill",
    [
        MetadataService(raw=b"\x00\xff garbage\r\n\r\n"),
        MetadataService(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ntorn"),
        MetadataService(raw=b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\ntorn"),
        MetadataService(raw=b""),
        MetadataService(lambda method, path, headers: (500, "TRUE")),
        MetadataService(lambda method, path, headers: (302, "")),
        MetadataService(lambda method, path, headers: (200, "<html>\nlog in</html>")),
        MetadataService(google("TRUE"), slow_s=5.0),
    ],
    ids=["garbage", "torn", "not gzip", "hangs up", "500", "redirect", "portal", "slow"],
)
async def test_a_faulty_service_gives_no_notice_and_the_watch_continues(ill: MetadataService) -> None:
    async with serving(replace(ill, asked=[])) as service, fetching() as fetch:
        assert await detect(fetch, dict.fromkeys(CLOUDS, at(service)), timeout_s=0.2) is None
        looking = asyncio.create_task(
            watch(CLOUDS["google"], fetch, at(service, timeout_s=0.1), unix_s=lambda: NOW_UNIX_S, longest_s=0.05)
        )
        asked = len(service.asked)
        await until(lambda: len(service.asked) >= asked + 3)
        assert not looking.done()
        service.raw, service.slow_s, service.answer = None, 0.0, google("TRUE")  # it recovers
        async with asyncio.timeout(5.0):
            assert (await looking).seconds_left > 29


async def test_an_unreachable_service_gives_no_notice() -> None:
    async with serving(MetadataService()) as service, fetching() as fetch:
        pass  # the port is free again
    async with fetching() as fetch:
        with pytest.raises(OSError):
            await fetch("GET", service.base + "/", {}, 1.0)
        assert await detect(fetch, dict.fromkeys(CLOUDS, at(service))) is None


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(MetadataService(google("FALSE"))) as service, serving(MetadataService()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.base)
        async with fetching() as fetch:
            headers = {"Metadata-Flavor": "Google"}
            url = service.base + "/computeMetadata/v1/instance/preempted"
            assert await fetch("GET", url, headers, 1.0) == (200, b"FALSE")
        assert proxy.asked == []


@asynccontextmanager
async def watching(
    notices: list[Notice], answer: Callable[[str, str, Headers], tuple[int, str]]
) -> AsyncIterator[MetadataService]:
    async with serving(MetadataService(answer)) as service:
        endpoints = dict.fromkeys(CLOUDS, at(service))
        task = asyncio.create_task(watch_cloud_notices(notices.append, endpoints=endpoints, unix_s=lambda: NOW_UNIX_S))
        try:
            yield service
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_the_notice_of_the_cloud_is_passed_on() -> None:
    notices: list[Notice] = []
    async with watching(notices, aws(None)) as service:
        await until(lambda: "GET /latest/meta-data/spot/instance-action" in service.asked)
        assert notices == []
        service.answer = GOING["aws"][0]
        await until(lambda: len(notices) == 1)
        assert notices[0].seconds_left == 120.0


async def test_sigterm_is_not_handled() -> None:
    notices: list[Notice] = []
    before = signal.getsignal(signal.SIGTERM)
    async with watching(notices, GOING["google"][0]):
        await until(lambda: len(notices) == 1)
        assert signal.getsignal(signal.SIGTERM) is before


async def test_without_a_cloud_detection_is_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.pool.cloud_watch.DETECT_AGAIN_S", 0.01)
    notices: list[Notice] = []
    async with watching(notices, lambda method, path, headers: (404, "")) as service:
        await until(lambda: len(service.asked) >= 3 * len(CLOUDS))
        await asyncio.sleep(0.1)
        assert len(service.asked) == 3 * len(CLOUDS)
    assert notices == []
