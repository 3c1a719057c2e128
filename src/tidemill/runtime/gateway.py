"""`tidemill serve`: the engines, the server in front of them, and their end."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.gateway.app import Gateway
from tidemill.gateway.requests import Call
from tidemill.gateway.server import listen, serving
from tidemill.runtime.serving import served_fleet
from tidemill.runtime.train import runtime_of
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory


def write_hermes(calls: Sequence[Call]) -> str:
    """Tool calls as Hermes and Qwen models write them."""
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(each.name)}, "arguments": {each.arguments}}}\n</tool_call>'
        for each in calls
    )


async def run_gateway(spec: RunSpec, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Serve until SIGINT or SIGTERM, then finish the requests that are being answered.

    Raises:
        UserError: the model, the pool, the keys or the address cannot be used.
    """
    runtime_of(spec).check(spec)
    listener = listen(spec.gateway)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        folder = spec.run.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-serve-")))
        run = stack.enter_context(RunDirectory.open(folder))
        recorder = stack.enter_context(Recorder(run, spec, stream=None))
        ending = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ending.set)
            stack.callback(loop.remove_signal_handler, number)
        served = await stack.enter_async_context(served_fleet(spec, run, recorder, stop))
        gateway = Gateway(served, spec.gateway, write_calls=write_hermes)
        collecting = asyncio.create_task(served.collect())
        async with serving(gateway.app(), listener, spec.gateway):
            host, port = listener.getsockname()[:2]
            progress(f"{served.name} is served at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            await asyncio.wait(
                {collecting, ended := asyncio.create_task(ending.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            ended.cancel()
        stop.set()
        await collecting
    return {"requests": gateway.requests}
