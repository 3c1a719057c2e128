"""Several workers that the controller sees as one: the engines of all shards of a trainer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

import msgspec

from tidemill.core.protocols import Worker
from tidemill.core.records import (
    EngineWork,
    GenerateRequest,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    WorkerReport,
    WorkerStatus,
)

REMEMBERED = 4096
"""Samples whose next turn goes to the engine of the last one."""
SUMMED = (
    *("running", "queued", "free_slots", "tokens_per_s"),
    *("prompt_tokens_computed", "prompt_tokens_reused", "tokens_generated"),
)


class WorkerGroup:
    """Implements `core.protocols.Worker`. A sample goes to the member that has the fewest; its siblings follow it, so
    that a prompt is computed once. The first error of a member is the group's.

    Args:
        members: all load a version at the same time, as shards must.
    """

    def __init__(self, members: Sequence[Worker]) -> None:
        self._members = members
        self._places: dict[SampleId, int] = {}  # of unfinished samples
        self._last: OrderedDict[SampleId, int] = OrderedDict()  # where turns ended, the newest last
        self._statuses: dict[int, WorkerStatus] = {}  # the newest
        self._waiting: dict[int, asyncio.Task[WorkerReport | None]] = {}

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        shares = defaultdict[int, list[GenerateRequest]](list)
        loads = [0] * len(self._members)
        for place in self._places.values():
            loads[place] += 1
        groups = defaultdict[bytes, list[GenerateRequest]](list)
        for request in requests:
            if request.sample_id not in self._last:
                groups[request.prompt_ids].append(request)
            else:  # the engine of its last turn may have its keys and values
                place = self._last.pop(request.sample_id)
                loads[place] += 1
                shares[place].append(request)
                self._places[request.sample_id] = place
        for siblings in groups.values():
            place = loads.index(min(loads))
            loads[place] += len(siblings)
            shares[place] += siblings
            self._places |= {request.sample_id: place for request in siblings}
        await asyncio.gather(*(self._members[place].submit(share) for place, share in shares.items()))

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        shares = defaultdict[int, list[SampleId]](list)
        for sample_id in sample_ids:
            if (place := self._places.get(sample_id)) is not None:
                shares[place].append(sample_id)
        await asyncio.gather(*(self._members[place].abort(share) for place, share in shares.items()))

    async def load(self, version: PolicyVersion) -> Loaded:
        """The slowest member's seconds, and the first one's probe: all members compute the same."""
        loaded = await asyncio.gather(*(member.load(version) for member in self._members))
        return msgspec.structs.replace(loaded[0], swap_s=max(each.swap_s for each in loaded))

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """The first member's."""
        return await self._members[0].run_probe(token_ids)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        """A report of any member, with the status of all."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        while (left_s := until_s - clock()) > 0:
            for place, member in enumerate(self._members):
                if place not in self._waiting:
                    self._waiting[place] = task = asyncio.create_task(member.next_report(left_s))
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark it as retrieved
            await asyncio.wait(self._waiting.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for place, task in list(self._waiting.items()):
                if task.done():
                    del self._waiting[place]
                    if (report := task.result()) is not None:
                        return self._combined(place, report)
        return None

    async def close(self) -> None:
        self._cancel()
        await asyncio.gather(*(member.close() for member in self._members))

    def kill(self) -> None:
        self._cancel()
        for member in self._members:
            member.kill()

    def _cancel(self) -> None:
        for task in self._waiting.values():
            task.cancel()
        self._waiting.clear()

    def _combined(self, place: int, report: WorkerReport) -> WorkerReport:
        for delta in report.deltas:
            if delta.finish is not None and self._places.pop(delta.sample_id, None) is not None:
                self._last[delta.sample_id] = place
                if len(self._last) > REMEMBERED:
                    self._last.popitem(last=False)
        self._statuses[place] = report.status
        statuses = list(self._statuses.values())
        sums = {name: sum(getattr(each, name) for each in statuses) for name in SUMMED}
        work = EngineWork(
            **{name: sum(getattr(each.work, name) for each in statuses) for name in EngineWork.__struct_fields__}
        )
        version = min(each.version for each in statuses)
        status = msgspec.structs.replace(report.status, version=version, work=work, **sums)
        return msgspec.structs.replace(report, status=status)
