"""The mailbox: one reader, which can be cancelled at any time."""

from __future__ import annotations

import asyncio

from tests.doubles.samples import make_report
from tests.virtual_time import run_virtual
from tidemill.controller.waiting import Mailbox
from tidemill.core.protocols import with_deadline


def test_messages_are_taken_together_after_a_notification() -> None:
    async def exchange() -> list[int]:
        mailbox = Mailbox()
        mailbox.put_reports([make_report()])
        mailbox.put_reports([make_report(), make_report()])
        return [len((await mailbox.take(1.0)).reports) for _ in range(2)]

    assert run_virtual(exchange()) == [3, 0]


def test_a_reader_cancelled_during_a_notification_ends() -> None:
    async def cancelled() -> bool:
        mailbox = Mailbox()

        async def read() -> None:
            while True:
                await mailbox.take(5.0)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        mailbox.notify()
        await asyncio.sleep(0)  # the reader was woken and has not run yet
        reader.cancel()
        await asyncio.wait({reader}, timeout=1.0)
        return reader.done()

    assert run_virtual(cancelled())


def test_a_wait_cancelled_while_its_result_arrives_ends() -> None:
    async def cancelled() -> bool:
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await with_deadline(result, timeout_s=5.0, awaited="a result", look_at="nothing")
            await asyncio.sleep(60.0)

        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0.1)
        result.set_result(None)
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait({waiter}, timeout=1.0)
        return waiter.done()

    assert run_virtual(cancelled())
