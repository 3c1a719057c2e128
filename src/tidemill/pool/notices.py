"""Eviction notices from the metadata endpoints of AWS, Google and Azure, polled by a worker on the machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias

import httpx2

from tidemill.core.errors import TidemillError
from tidemill.core.records import Record

LINK_LOCAL = "http://169.254.169.254"
"""The metadata address of all three clouds, reachable only from the machine itself."""
DETECTIONS = 3
DETECT_AGAIN_S = 20.0
"""The metadata service of a machine that just started may not answer yet."""
DETECTED_S = 2 * DETECTIONS * DETECT_AGAIN_S  # after this long it is certainly known whether there is a cloud
GOOGLE_GRACE_S = 30.0  # from `preempted` to the shutdown
AZURE_API = "2020-07-01"
GKE_CLUSTER = "/computeMetadata/v1/instance/attributes/cluster-name"


class MetadataError(TidemillError):
    """An endpoint did not answer as documented."""


class NotFoundError(MetadataError):
    """Status 404."""


class Notice(Record):
    """The machine will be taken."""

    seconds_left: float  # 0 if it ends now or the time is unknown
    cause: str  # for the event log


Fetch: TypeAlias = Callable[[str, str, Mapping[str, str], float], Awaitable[tuple[int, bytes]]]
"""Return status and body for method, URL, headers and seconds. Raises OSError: no answer, including TimeoutError."""


class Endpoint(Record):
    """Address and timing of a metadata service."""

    base: str = LINK_LOCAL
    timeout_s: float = 2.0  # per request
    interval_s: float = 2.0  # between polls


Ask: TypeAlias = Callable[[Fetch, Endpoint, Callable[[], float]], Awaitable[Notice | None]]
"""Poll once; the last argument returns the Unix time in seconds. Raises MetadataError or OSError."""
Probe: TypeAlias = Callable[[Fetch, Endpoint], Awaitable[object]]
"""Succeed on a machine of this cloud; elsewhere raise MetadataError or OSError."""


class Cloud(Record):
    name: str
    probe: Probe
    ask: Ask


async def probe_aws(fetch: Fetch, at: Endpoint) -> str:
    """Return a session token of the metadata service version 2 (EC2 user guide, "Use IMDSv2")."""
    path, headers = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = await _request(fetch, at, path, headers, method="PUT")
    if not token or not token.isascii() or not token.isprintable():
        raise MetadataError(f"{at.base}: no session token")
    return token


async def ask_aws(fetch: Fetch, at: Endpoint, unix_s: Callable[[], float]) -> Notice | None:
    """`spot/instance-action` (EC2 user guide, "Spot Instance interruption notices"): 404 without a notice."""
    headers = {"X-aws-ec2-metadata-token": await probe_aws(fetch, at)}
    path = "/latest/meta-data/spot/instance-action"
    try:
        text = await _request(fetch, at, path, headers)
    except NotFoundError:
        return None
    tree = _json(text, at, path)
    action = tree.get("action")
    if action not in ("stop", "terminate", "hibernate"):
        raise MetadataError(f"{at.base}{path}: unknown action: {text[:100]!r}")
    cause = f"AWS reclaims the spot instance ({action})"
    # Hibernation starts at once, regardless of the time given.
    return Notice(seconds_left=0.0 if action == "hibernate" else _seconds_to(tree.get("time"), unix_s()), cause=cause)


async def probe_google(fetch: Fetch, at: Endpoint) -> str:
    """TRUE once the instance is being preempted, else FALSE (Compute Engine, "Create and use preemptible VMs")."""
    text = (await _request(fetch, at, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})).strip()
    if text not in ("TRUE", "FALSE"):
        raise MetadataError(f"{at.base}: `preempted` is neither TRUE nor FALSE: {text[:100]!r}")
    return text


async def ask_google(fetch: Fetch, at: Endpoint, unix_s: Callable[[], float]) -> Notice | None:
    """The endpoint gives no time: assume the 30 s grace period minus one poll interval."""
    if await probe_google(fetch, at) == "FALSE":
        return None
    return Notice(seconds_left=max(0.0, GOOGLE_GRACE_S - at.interval_s), cause="Google preempts the spot VM")


async def probe_azure(fetch: Fetch, at: Endpoint) -> str:
    """Return this machine's name as used in scheduled events (Azure Instance Metadata Service)."""
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = (await _request(fetch, at, path, {"Metadata": "true"})).strip()
    if not name or len(name) > 200 or not name.isprintable() or "<" in name:
        raise MetadataError(f"{at.base}: not a machine name: {name[:100]!r}")
    return name


async def ask_azure(fetch: Fetch, at: Endpoint, unix_s: Callable[[], float]) -> Notice | None:
    """Scheduled events of the types Preempt and Terminate (Azure, "Scheduled Events for Linux VMs").

    All machines of a scale set see each other's events. The first request enables the service and may take two
    minutes. `NotBefore` is empty once an event has started.
    """
    path = f"/metadata/scheduledevents?api-version={AZURE_API}"
    events = _json(await _request(fetch, at, path, {"Metadata": "true"}), at, path).get("Events")
    if not isinstance(events, list):
        raise MetadataError(f"{at.base}{path}: no list of events")
    ending = [each for each in events if isinstance(each, dict) and each.get("EventType") in ("Preempt", "Terminate")]
    if not ending:
        return None
    name = await probe_azure(fetch, at)
    notices = [
        Notice(seconds_left=_seconds_to(each.get("NotBefore"), unix_s()), cause=f"Azure: {each['EventType']}")
        for each in ending
        if isinstance(each.get("Resources"), list) and name in each["Resources"]
    ]
    return min(notices, key=lambda notice: notice.seconds_left, default=None)


CLOUDS = {
    "aws": Cloud(name="aws", probe=probe_aws, ask=ask_aws),
    "google": Cloud(name="google", probe=probe_google, ask=ask_google),
    "azure": Cloud(name="azure", probe=probe_azure, ask=ask_azure),
}


async def detect(fetch: Fetch, endpoints: Mapping[str, Endpoint], *, timeout_s: float = 1.0) -> Cloud | None:
    """Return this machine's cloud, or None if no endpoint answers as expected within `timeout_s` seconds.

    Probes all clouds concurrently. `endpoints` maps the cloud's name to its address.
    """

    async def answers(name: str) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await CLOUDS[name].probe(fetch, endpoints[name])
        except (MetadataError, OSError):
            return False
        return True

    found = await asyncio.gather(*(answers(name) for name in endpoints))
    return next((CLOUDS[name] for name, here in zip(endpoints, found, strict=True) if here), None)


async def watch(
    cloud: Cloud, fetch: Fetch, at: Endpoint, *, unix_s: Callable[[], float], longest_s: float = 10.0
) -> Notice:
    """Poll every `interval_s` seconds until a notice appears, and return it.

    After a missing or malformed answer the interval doubles, up to `longest_s` seconds, until the next valid answer.
    """
    wait_s = at.interval_s
    while True:
        try:
            notice = await cloud.ask(fetch, at, unix_s)
        except (MetadataError, OSError):
            wait_s = min(2 * wait_s, max(longest_s, at.interval_s))
        else:
            if notice is not None:
                return notice
            wait_s = at.interval_s
        await asyncio.sleep(wait_s)


async def _request(fetch: Fetch, at: Endpoint, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """The answer's text. Raises MetadataError: its status is not 200."""
    async with asyncio.timeout(at.timeout_s):
        status, body = await fetch(method, at.base + path, headers, at.timeout_s)
    if status != 200:
        raise (NotFoundError if status == 404 else MetadataError)(f"{at.base}{path}: status {status}")
    return body.decode(errors="replace")


def _json(text: str, at: Endpoint, path: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise MetadataError(f"{at.base}{path}: not JSON: {text[:100]!r}") from error
    if not isinstance(tree, dict):
        raise MetadataError(f"{at.base}{path}: not a JSON object: {text[:100]!r}")
    return tree


def _seconds_to(time: Any, now_unix_s: float) -> float:
    """Seconds until `2026-09-18T08:22:00Z` or `Mon, 19 Sep 2026 18:29:47 GMT`; 0 if past or not a time."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse(time)
        except (ValueError, TypeError, OverflowError):
            continue
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(0.0, moment.timestamp() - now_unix_s)
    return 0.0


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
    on_detected: Callable[[str], None],
    *,
    endpoints: Mapping[str, Endpoint] | None = None,
    unix_s: Callable[[], float] = time.time,
) -> None:
    """Wait for the termination notice of the first cloud that is detected; return if there is none.

    Args:
        on_detected: called once, with an empty text or the reason why no cloud announces the end of this machine.
        endpoints: by name of the cloud; by default the link-local address for all.
    """
    endpoints = endpoints or dict.fromkeys(CLOUDS, Endpoint())
    fetch = HttpFetch()
    try:
        for attempt in range(DETECTIONS):
            cloud = await detect(fetch, endpoints)
            if cloud is not None:
                on_detected("")
                on_notice(await watch(cloud, fetch, endpoints[cloud.name], unix_s=unix_s))
                return
            if attempt < DETECTIONS - 1:
                await asyncio.sleep(DETECT_AGAIN_S)
        on_detected(await _without_notices(fetch, endpoints["google"]))
    finally:
        await fetch.close()


async def _without_notices(fetch: Fetch, google: Endpoint) -> str:
    """Why no cloud was detected."""
    try:  # GKE's metadata server has the cluster's name, and only part of the machine's metadata
        await _request(fetch, google, GKE_CLUSTER, {"Metadata-Flavor": "Google"})
    except (MetadataError, OSError):
        return "no metadata service of AWS, Google or Azure answers"
    return "Workload Identity of GKE hides the notices of Google's metadata service"
