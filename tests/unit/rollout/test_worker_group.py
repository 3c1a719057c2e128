"""Several engines that the controller sees as one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.engine_requests import VERSION, request
from tidemill.core.errors import WorkerLost
from tidemill.core.records import (
    EngineWork,
    GenerateRequest,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    TokenDelta,
    WorkerReport,
    WorkerStatus,
    pack_logprobs,
    pack_tokens,
)
from tidemill.rollout.worker_group import WorkerGroup

DEADLINE_S = 5.0


class Member:
    """Keeps what it is given, and reports what a test puts into its mailbox."""

    def __init__(self, swap_s: float = 0.0) -> None:
        self.submitted: list[GenerateRequest] = []
        self.aborted: list[SampleId] = []
        self.mailbox: asyncio.Queue[WorkerReport | Exception] = asyncio.Queue()
        self.swap_s, self.loads, self.ended = swap_s, 0, ""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.submitted += requests

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        self.aborted += sample_ids

    async def load(self, version: PolicyVersion) -> Loaded:
        self.loads += 1
        return Loaded(version=version, swap_s=self.swap_s, rollout_logprobs=True)

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return b""

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        try:
            async with asyncio.timeout(timeout_s):
                found = await self.mailbox.get()
        except TimeoutError:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        self.ended = "closed"

    def kill(self) -> None:
        self.ended = "killed"

    def report(self, *, running: int, generated: int, ended: Sequence[SampleId] = (), version: int = 0) -> None:
        deltas = tuple(
            TokenDelta(
                sample_id=sample_id,
                lease_id="local",
                attempt=0,
                start=0,
                token_ids=pack_tokens([1]),
                logprobs=pack_logprobs([-1.0]),
                version=VERSION,
                finish="stop",
            )
            for sample_id in ended
        )
        status = WorkerStatus(
            worker_id="local",
            version=version,
            running=running,
            queued=0,
            free_slots=4 - running,
            tokens_per_s=10.0,
            tokens_generated=generated,
            work=EngineWork(passes=generated),
        )
        self.mailbox.put_nowait(WorkerReport(lease_id="local", deltas=deltas, status=status))


def groups(count: int, size: int = 4) -> list[GenerateRequest]:
    return [request([7, number], index=index) for number in range(count) for index in range(size)]


async def test_siblings_stay_together_and_groups_are_spread() -> None:
    members = [Member(), Member(), Member()]
    await WorkerGroup(members).submit(groups(6))

    assert [len(member.submitted) for member in members] == [8, 8, 8]
    for member in members:
        assert len({each.prompt_ids for each in member.submitted}) == 2


async def test_new_samples_go_where_samples_have_ended() -> None:
    members = [Member(), Member()]
    group = WorkerGroup(members)
    await group.submit(groups(2))
    members[1].report(running=0, generated=4, ended=[each.sample_id for each in members[1].submitted])
    assert await group.next_report(DEADLINE_S) is not None
    more = [request([9], index=index) for index in range(4)]
    await group.submit(more)

    assert members[1].submitted[4:] == more
    await group.close()


async def test_the_next_turn_of_a_sample_goes_where_the_last_one_was() -> None:
    members = [Member(), Member(), Member()]
    group = WorkerGroup(members)
    first = groups(6)
    await group.submit(first)
    places = {one.sample_id: place for place, each in enumerate(members) for one in each.submitted}
    for member in members:
        member.report(running=0, generated=1, ended=[one.sample_id for one in member.submitted])
        assert await group.next_report(DEADLINE_S) is not None
    for member in members:
        member.submitted.clear()
    for one in reversed(first):
        await group.submit([one])

    again = {one.sample_id: place for place, each in enumerate(members) for one in each.submitted}
    assert again == places
    await group.close()


async def test_an_abort_reaches_the_member_that_has_the_sample() -> None:
    members = [Member(), Member()]
    group = WorkerGroup(members)
    await group.submit(groups(2))
    wanted = [members[1].submitted[0].sample_id, members[0].submitted[2].sample_id]
    await group.abort([*wanted, request([1]).sample_id])

    assert [member.aborted for member in members] == [wanted[1:], wanted[:1]]


async def test_all_members_load_and_the_slowest_counts() -> None:
    members = [Member(swap_s=1.0), Member(swap_s=3.0)]
    loaded = await WorkerGroup(members).load(VERSION)

    assert [member.loads for member in members] == [1, 1]
    assert (loaded.version, loaded.swap_s) == (VERSION, 3.0)


async def test_a_report_has_the_status_of_all_members() -> None:
    members = [Member(), Member()]
    group = WorkerGroup(members)
    members[0].report(running=3, generated=30, version=2)
    first = await group.next_report(DEADLINE_S)
    members[1].report(running=1, generated=5, version=1)
    second = await group.next_report(DEADLINE_S)

    assert first is not None and second is not None
    status = second.status
    assert (status.running, status.free_slots, status.tokens_generated, status.version) == (4, 4, 35, 1)
    assert (status.work.passes, status.tokens_per_s) == (35, 20.0)
    await group.close()


async def test_no_report_is_lost_when_several_arrive_or_a_wait_ends() -> None:
    members = [Member(), Member()]
    group = WorkerGroup(members)
    assert await group.next_report(0.01) is None
    for member in members:
        for _ in range(3):
            member.report(running=1, generated=1)
    found = [await group.next_report(DEADLINE_S) for _ in range(6)]

    assert None not in found
    await group.close()
    assert [member.ended for member in members] == ["closed", "closed"]


async def test_the_error_of_a_member_is_the_groups() -> None:
    members = [Member(), Member()]
    group = WorkerGroup(members)
    members[1].mailbox.put_nowait(WorkerLost("its machine burnt"))

    with pytest.raises(WorkerLost, match="burnt"):
        await group.next_report(DEADLINE_S)
    group.kill()
    assert [member.ended for member in members] == ["killed", "killed"]
