"""The pollers and the watch in virtual time; over real HTTP they are in tests/unit/runtime/test_notices.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.metadata_service import aws, azure, google
from tests.virtual_time import run_virtual
from tidemill.pool.notices import CLOUDS, Endpoint, Fetch, MetadataError, Notice, detect, watch

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
