"""What actors share: how their process starts and ends, their placement, and how they serve requests."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx2
import ray
import ray._private.utils
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidemill.core.errors import TidemillError, UserError
from tidemill.core.records import GenerateRequest, Loaded, PolicyVersion, SampleId, WorkerReport
from tidemill.pool.notices import CLOUDS, Endpoint, Notice, detect, watch
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.cluster.ray_calls import blocking, let_go
from tidemill.runtime.cluster.wire import answering, decode

HOOK = f"{__name__}.prepare"
"""Given to Ray as its `worker_process_setup_hook`."""

SIGTERM_GRACE_S = 5.0
"""What a SIGTERM leaves: Ray itself kills so long after one."""

PR_SET_PDEATHSIG = 1
_pipes: list[tuple[int, int]] = []


def prepare() -> None:
    """Runs in the main thread of a new worker process, the only one that may choose what signals do."""
    if sys.platform == "linux":  # the parent is the node's own server; without it the process may linger for minutes
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGTERM, _stay)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _pipes.append((reading, writing))
    # Ray would install its own handler after this hook, one that ends the process at once.
    ray._private.utils.set_sigterm_handler = lambda handler: None


def signals() -> int:
    """A file descriptor that can be read once a signal has come (one byte each, its number)."""
    assert _pipes, f"{HOOK} has not run in this process"
    return _pipes[0][0]


def _stay(number: int, frame: FrameType | None) -> None:
    """A warned worker uses its grace period; see `signals`."""


PLACE_S = 60.0


@asynccontextmanager
async def placed(
    actor: type, *, cpus: float, gpus: float, selector: Mapping[str, str], who: str, keys: tuple[str, str]
) -> AsyncIterator[Any]:
    """The handle of a new actor; it and its place end with the block.

    Args:
        selector: labels of the nodes it may be on.
        who: its role, in words.
        keys: where its CPUs and its GPUs are configured.

    Raises:
        UserError: no node has the room.
    """
    need = {"CPU": cpus, "GPU": gpus}
    bundle = {kind: amount for kind, amount in need.items() if amount} or {"CPU": 0.001}
    group = placement_group([bundle], strategy="PACK", bundle_label_selector=[dict(selector)])
    try:
        found = await blocking(lambda: group.wait(PLACE_S), awaited=f"a place for the {who}", timeout_s=PLACE_S + 10)
        if not found:
            wanted = " and ".join(f"{amount:g} free {kind}" for kind, amount in bundle.items())
            labels = " and ".join(f"{key}={value}" for key, value in selector.items()) or "any label"
            raise UserError(
                f"no node with label {labels} has {wanted} for the {who}",
                where=keys[0].partition(".")[0],
                hint=f"lower {' or '.join(keys)}, change ray.reserved_selector, or add a node",
            )
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        handle = ray.remote(actor).options(scheduling_strategy=where, max_task_retries=0, **options).remote()
        try:
            yield handle
        finally:
            await let_go(lambda: ray.kill(handle, no_restart=True), awaited=f"the {who}'s end")
    finally:
        await let_go(lambda: remove_placement_group(group), awaited=f"the end of the {who}'s place")


P = ParamSpec("P")
S = TypeVar("S", bound="Asked")

AT_ONCE = 64
"""Reports in one answer, at most."""


def asked(
    method: Callable[Concatenate[S, P], Awaitable[object]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, bytes]]:
    """A method that other processes call: it returns an encoded `Answer`, and is a sign of life of whoever calls."""
    answer = answering(method)

    @functools.wraps(method)
    async def call(self: S, *args: P.args, **kwargs: P.kwargs) -> bytes:
        self.under_way += 1
        try:
            return await answer(self, *args, **kwargs)
        finally:
            self.under_way -= 1
            self.asked_s = time.monotonic()

    return call  # type: ignore[return-value]  # wraps keeps the first argument's name, which no caller uses


class Asked:
    """Base of the actors whose methods are coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0  # calls
        self.asked_s = time.monotonic()  # when the last call ended

    @property
    def forgotten_s(self) -> float:
        """How long nobody has asked for anything."""
        return 0.0 if self.under_way else time.monotonic() - self.asked_s


class Serving(Asked):
    """Base of the actors that generate."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: EngineWorker | None = None
        self.tasks: set[asyncio.Task[Any]] = set()

    def served(self) -> EngineWorker:
        if self.worker is None:
            raise TidemillError("this actor has not been started")
        return self.worker

    @asked
    async def submit(self, requests: bytes) -> None:
        await self.served().submit(decode(requests, list[GenerateRequest]))

    @asked
    async def abort(self, sample_ids: bytes) -> None:
        await self.served().abort(decode(sample_ids, list[SampleId]))

    @asked
    async def load(self, version: bytes) -> Loaded:
        return await self.served().load(decode(version, PolicyVersion))

    @asked
    async def notice(self, seconds: float) -> None:
        self.served().notice(seconds)

    @asked
    async def next_reports(self, timeout_s: float) -> list[WorkerReport]:
        """Everything there is to say, after waiting for the first of it.

        Raises:
            Exception: what the engine raised, once its last reports are delivered.
        """
        first = await self.served().next_report(timeout_s)
        reports = [] if first is None else [first]
        with suppress(Exception):  # raised again by the next call
            while reports and len(reports) < AT_ONCE and (more := await self.served().next_report(0.0)) is not None:
                reports.append(more)
        return reports

    @asked
    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()


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
