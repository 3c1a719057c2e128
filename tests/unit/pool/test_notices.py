"""The pollers and the watch in virtual time; and over real HTTP, from a fake metadata service on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.metadata_service import Headers, MetadataService, aws, azure, google, serving
from tests.virtual_time import run_virtual
from tidemill.pool.notices import (
    CLOUDS,
    Endpoint,
    Fetch,
    HttpFetch,
    MetadataError,
    Notice,
    detect,
    watch,
    watch_cloud_notices,
)

NOW_UNIX_S = 1_789_722_000.0  # 2026-09-18T09:00:00Z
AT = Endpoint(interval_s=5.0)
EVENT = {
    "EventId": "C1BF8322-4CBF-4FC4-9C45-B40CF3106D0E",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["worker_2", "worker_3"],
    "EventStatus": "Scheduled",
    "NotBefore": "Fri, 18 Sep 2026 09:00:30 GMT",
    "Description": "",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}


def events(*changes: dict[str, Any]) -> str:
    return json.dumps({"DocumentIncarnation": 7, "Events": [{**EVENT, **change} for change in changes]})


def fetching(answer: Callable[[str, str, dict[str, str]], tuple[int, str]]) -> Fetch:
    async def fetch(method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        assert url.startswith("http://169.254.169.254/")
        path = url.removeprefix("http://169.254.169.254")
        status, body = answer(method, path, {name.lower(): value for name, value in headers.items()})
        return status, body.encode()

    return fetch


def ask(cloud: str, answer: Callable[[str, str, dict[str, str]], tuple[int, str]]) -> Notice | None:
    return run_virtual(_ask(cloud, fetching(answer)))


async def _ask(cloud: str, fetch: Fetch) -> Notice | None:
    return await CLOUDS[cloud].ask(fetch, AT, lambda: NOW_UNIX_S)


@pytest.mark.parametrize(
    ("text", "seconds_left", "action"),
    [
        ('{"action": "terminate", "time": "2026-09-18T09:02:00Z"}', 120.0, "terminate"),
        ('{"action": "stop", "time": "2026-09-18T09:01:00"}', 60.0, "stop"),  # UTC, said or not
        ('{"action": "stop", "time": "2026-09-18T08:59:00Z"}', 0.0, "stop"),
        ('{"action": "hibernate", "time": "2026-09-18T09:02:00Z"}', 0.0, "hibernate"),  # begins at once
        ('{"action": "terminate", "time": "soon"}', 0.0, "terminate"),
        ('{"action": "terminate"}', 0.0, "terminate"),
    ],
)
def test_aws(text: str, seconds_left: float, action: str) -> None:
    notice = ask("aws", aws(text))
    assert notice is not None
    assert notice.seconds_left == seconds_left
    assert action in notice.cause


def test_google_grace_period_minus_one_poll_interval() -> None:
    assert ask("google", google("TRUE\n")) == Notice(seconds_left=25.0, cause="Google preempts the spot VM")


@pytest.mark.parametrize(
    ("text", "seconds_left"),
    [
        (events({}), 30.0),
        (events({"NotBefore": "2026-09-18T09:00:40Z"}), 40.0),
        (events({"NotBefore": "", "EventStatus": "Started"}), 0.0),
        (events({"EventType": "Terminate", "NotBefore": "Fri, 18 Sep 2026 09:05:00 GMT"}), 300.0),
        (events({"EventType": "Terminate", "NotBefore": "Fri, 18 Sep 2026 09:05:00 GMT"}, {}), 30.0),  # the first
    ],
)
def test_azure(text: str, seconds_left: float) -> None:
    notice = ask("azure", azure(text))
    assert notice is not None
    assert notice.seconds_left == seconds_left
    assert notice.cause in ("Azure: Preempt", "Azure: Terminate")


@pytest.mark.parametrize(
    ("cloud", "answer"),
    [
        ("aws", aws(None)),
        ("google", google("FALSE")),
        ("azure", azure(events())),
        ("azure", azure(events({"EventType": "Freeze"}, {"EventType": "Reboot"}))),
        ("azure", azure(events({"Resources": ["worker_30"]}))),  # another machine of the scale set
        ("azure", azure(events({"Resources": "worker_3 and others"}))),
    ],
)
def test_no_notice(cloud: str, answer: Callable[[str, str, dict[str, str]], tuple[int, str]]) -> None:
    assert ask(cloud, answer) is None


@pytest.mark.parametrize(
    ("cloud", "answer"),
    [
        ("aws", aws("soon")),
        ("aws", aws("[1]")),
        ("aws", aws('{"action": "dance"}')),
        ("aws", lambda method, path, headers: (500, "")),
        ("aws", lambda method, path, headers: (200, "")),
        ("aws", lambda method, path, headers: (200, "<html>\nlog in</html>")),
        ("google", google("maybe")),
        ("google", lambda method, path, headers: (503, "FALSE")),
        ("azure", azure("nothing")),
        ("azure", azure('{"Events": 3}')),
        ("azure", azure(events({}), name="<html>")),
        ("azure", azure(events({}), name="")),
    ],
)
def test_a_malformed_answer_raises(cloud: str, answer: Callable[[str, str, dict[str, str]], tuple[int, str]]) -> None:
    with pytest.raises(MetadataError):
        ask(cloud, answer)


def test_a_request_that_hangs_times_out() -> None:
    async def fetch(method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        await asyncio.sleep(1e9)
        return 200, b"TRUE"

    async def run() -> float:
        with pytest.raises(TimeoutError):
            await _ask("google", fetch)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == AT.timeout_s


class Script:
    """Returns its answers in order, then repeats the last; records the time of each request."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.times_s = list(answers), list[float]()

    async def __call__(self, method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        self.times_s.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        if answer == "hangs":
            await asyncio.sleep(1e9)
        return (200, answer.encode()) if isinstance(answer, str) else (500, b"")


def watched(script: Script) -> Notice:
    return run_virtual(watch(CLOUDS["google"], script, AT, unix_s=lambda: NOW_UNIX_S))


def test_watch_polls_until_a_notice() -> None:
    script = Script("FALSE", "FALSE", "TRUE")
    assert watched(script).seconds_left == 25.0
    assert script.times_s == [0.0, 5.0, 10.0]


def test_watch_backs_off_after_errors() -> None:
    script = Script(OSError("no route"), "hangs", 500, "garbage", "FALSE", "TRUE")
    assert watched(script).seconds_left == 25.0
    # Waits of 10 s after each fault (twice 5 s, and 10 s at most), 2 s of it hanging; then 5 s again.
    assert script.times_s == [0.0, 10.0, 22.0, 32.0, 42.0, 47.0]


def test_detect_finds_each_cloud() -> None:
    endpoints = dict.fromkeys(CLOUDS, AT)
    for name, answer in (("aws", aws(None)), ("google", google("FALSE")), ("azure", azure(events()))):
        found = run_virtual(detect(fetching(answer), endpoints))
        assert found is CLOUDS[name]


@pytest.mark.parametrize("answer", [OSError("no route"), "hangs", "<html>\nlog in</html>", 500])
def test_detect_returns_none_within_a_second(answer: object) -> None:
    async def run() -> float:
        assert await detect(Script(answer), dict.fromkeys(CLOUDS, AT)) is None
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) <= 1.0


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
async def http_fetching() -> AsyncIterator[HttpFetch]:
    fetch = HttpFetch()
    try:
        yield fetch
    finally:
        await fetch.close()


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_cloud_is_detected_and_its_notice_received(name: str) -> None:
    answer, seconds_left = GOING[name]
    async with serving(MetadataService(answer)) as service, http_fetching() as fetch:
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
    async with serving(replace(ill, asked=[])) as service, http_fetching() as fetch:
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
    async with serving(MetadataService()) as service, http_fetching() as fetch:
        pass  # the port is free again
    async with http_fetching() as fetch:
        with pytest.raises(OSError):
            await fetch("GET", service.base + "/", {}, 1.0)
        assert await detect(fetch, dict.fromkeys(CLOUDS, at(service))) is None


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(MetadataService(google("FALSE"))) as service, serving(MetadataService()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.base)
        async with http_fetching() as fetch:
            headers = {"Metadata-Flavor": "Google"}
            url = service.base + "/computeMetadata/v1/instance/preempted"
            assert await fetch("GET", url, headers, 1.0) == (200, b"FALSE")
        assert proxy.asked == []


@asynccontextmanager
async def watching(
    notices: list[Notice],
    answer: Callable[[str, str, Headers], tuple[int, str]],
    detected: Callable[[str], None] = lambda why: None,
) -> AsyncIterator[MetadataService]:
    async with serving(MetadataService(answer)) as service:
        endpoints = dict.fromkeys(CLOUDS, at(service))
        task = asyncio.create_task(
            watch_cloud_notices(notices.append, detected, endpoints=endpoints, unix_s=lambda: NOW_UNIX_S)
        )
        try:
            yield service
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_the_notice_of_the_cloud_is_passed_on() -> None:
    notices: list[Notice] = []
    detected: list[str] = []
    async with watching(notices, aws(None), detected.append) as service:
        await until(lambda: "GET /latest/meta-data/spot/instance-action" in service.asked)
        assert notices == []
        assert detected == [""]
        service.answer = GOING["aws"][0]
        await until(lambda: len(notices) == 1)
        assert notices[0].seconds_left == 120.0


async def test_sigterm_is_not_handled() -> None:
    notices: list[Notice] = []
    before = signal.getsignal(signal.SIGTERM)
    async with watching(notices, GOING["google"][0]):
        await until(lambda: len(notices) == 1)
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("gke", "why"),
    [
        (False, "no metadata service of AWS, Google or Azure answers"),
        (True, "Workload Identity of GKE hides the notices of Google's metadata service"),
    ],
)
async def test_without_a_cloud_detection_is_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch, gke: bool, why: str
) -> None:
    monkeypatch.setattr("tidemill.pool.notices.DETECT_AGAIN_S", 0.01)
    notices: list[Notice] = []
    detected: list[str] = []

    def answer(method: str, path: str, headers: Headers) -> tuple[int, str]:
        return (200, "cluster-1") if gke and path.endswith("/attributes/cluster-name") else (404, "")

    async with watching(notices, answer, detected.append) as service:
        await until(lambda: bool(detected))
        assert len(service.asked) == 3 * len(CLOUDS) + 1
    assert notices == []
    assert detected == [why]
