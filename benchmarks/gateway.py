"""The gateway's own cost: CPU time for each streamed token, the delay of a chunk, and memory of idle sessions.

    python -m benchmarks.gateway [--streams 64] [--tokens 400] [--sessions 2000]

The server's process has everything but an engine: `tidemill serve`'s fleet and collector over an engine that computes
nothing and gives every sample a token each tick. Its thread's CPU time is not counted. The clients are another process.
*Delay* of a chunk: from the engine's tick in which its token was made until the client has it. Checked: every stream
has all its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx2
import torch

from benchmarks.idle_sessions import idle_sessions
from benchmarks.measuring import print_records, write_result
from benchmarks.origin import parsed
from benchmarks.stopping import interruptible
from tidemill.config.gateway import GatewayConfig
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, EngineCapabilities, EngineStatus, LoopClock
from tidemill.core.records import (
    EngineWork,
    GenerateRequest,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    TokenDelta,
    pack_logprobs,
    pack_tokens,
)
from tidemill.data.build_task import served_task
from tidemill.gateway.app import Gateway
from tidemill.gateway.server import listen, serving
from tidemill.jobs.gateway import write_hermes
from tidemill.jobs.serving import NoReward, served_fleet, serving_spec
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import RuntimeBackend
from tidemill.runtime.compute import ComputeThread
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

TICK_S = 0.02
AIM_CPU_MS, AIM_DELAY_S, AIM_SESSION_KB = 0.2, TICK_S + 0.05, 50
DEADLINE_S = 300.0
VERSION = PolicyVersion(number=0, digest="none")


class IdleEngine:
    """Implements `core.protocols.Engine` without a model: a token for every sample in each tick, whose number is the
    millisecond at which it was made."""

    capabilities = EngineCapabilities(
        name="idle", batch_invariant=True, logprobs=True, keeps_kv=True, lora=True, draws="position"
    )

    def __init__(self, slots: int) -> None:
        self._slots, self._open, self._made = slots, dict[SampleId, tuple[GenerateRequest, int]](), 0
        self.cpu_s = 0.0  # of its thread

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._open |= {request.sample_id: (request, 0) for request in requests}

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        if self._open:
            time.sleep(TICK_S)
        deltas, token = [], pack_tokens([int(time.monotonic() * 1000) % (1 << 30)])
        for sample_id, (request, length) in list(self._open.items()):
            last = length + 1 >= request.sampling.max_new_tokens
            deltas.append(
                TokenDelta(
                    sample_id=sample_id,
                    lease_id=request.lease_id,
                    attempt=request.attempt,
                    start=length,
                    token_ids=token,
                    logprobs=pack_logprobs([-1.0]),
                    version=VERSION,
                    finish="length" if last else None,
                )
            )
            self._open[sample_id] = (request, length + 1)
            if last:
                del self._open[sample_id]
        self._made += len(deltas)
        self.cpu_s = time.thread_time()
        return deltas

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        for sample_id in sample_ids:
            self._open.pop(sample_id, None)
        return []

    def load(self, version: PolicyVersion) -> None:
        """Nothing to do."""

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return b""

    def status(self) -> EngineStatus:
        return EngineStatus(
            version=VERSION,
            running=len(self._open),
            queued=0,
            free_slots=self._slots - len(self._open),
            tokens_generated=self._made,
            prompt_tokens_computed=0,
            prompt_tokens_reused=0,
            work=EngineWork(),
        )


class Still:
    """A trainer that never trains."""

    version = VERSION


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--sessions", type=int, default=2000)
    options = parsed(parser)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, options.streams), daemon=True)
    server.start()
    try:
        assert ours.poll(DEADLINE_S), "the server does not start"
        port = ours.recv()
        figures = asyncio.run(measure(port, ours, options.streams, options.tokens))
    finally:
        server.kill()
        server.join()
    idle = idle_sessions(options.sessions)
    print_records("gateway: streams of an engine that computes nothing", [figures])
    print_records("gateway: sessions that wait for a request", [idle])
    reached = {
        f"at most {AIM_CPU_MS:g} ms CPU for a streamed token": figures["cpu_ms_per_token"] <= AIM_CPU_MS,
        f"at most {AIM_SESSION_KB} KB for an idle session": idle["kb_per_session"] <= AIM_SESSION_KB,
        f"delay of a chunk at most {AIM_DELAY_S:g} s (99 %)": figures["delay_p99_s"] <= AIM_DELAY_S,
    }
    for aim, found in reached.items():
        print(f"{'reached' if found else 'MISSED '}  {aim}")
    write_result("gateway", {**figures, "idle_sessions": idle, "aims": reached})
    return 0 if all(reached.values()) else 1


async def measure(port: int, server: Connection, streams: int, tokens: int) -> dict[str, Any]:
    """Warm up with one stream, then all at once."""
    limits = httpx2.Limits(max_connections=streams)
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, limits=limits, trust_env=False
    ) as client:
        await one(client, 20)
        server.send("cpu")
        before = server.recv()
        began_s = time.monotonic()
        found = await asyncio.gather(*(one(client, tokens) for _ in range(streams)))
        took_s = time.monotonic() - began_s
        server.send("cpu")
        after = server.recv()
    delays = [delay for stream in found for delay in stream]
    check_streams(found, streams=streams, tokens=tokens, took_s=took_s)
    return {
        "streams": streams,
        "tokens": len(delays),
        "tick_s": TICK_S,
        "tokens_per_s": len(delays) / took_s,
        "cpu_ms_per_token": (after - before) / len(delays) * 1000,
        "delay_median_s": median(delays),
        "delay_p99_s": quantiles(delays, n=100)[98],
        "delay_max_s": max(delays),
    }


def check_streams(found: Sequence[Sequence[float]], *, streams: int, tokens: int, took_s: float) -> None:
    """Raises RuntimeError: a stream lost tokens, or fewer than half of the streams were open at a time, on average.

    Args:
        found: the delays of the tokens of each stream.
    """
    if [len(stream) for stream in found] != [tokens] * streams:
        raise RuntimeError("a stream has lost tokens")
    if streams * tokens * TICK_S / took_s < streams / 2:
        raise RuntimeError(f"{streams} streams of {tokens} tokens took {took_s:.0f} s: they were not open at once")


async def one(client: httpx2.AsyncClient, tokens: int) -> list[float]:
    """Delays of the chunks of a stream."""
    body = {"model": "run", "prompt": "1+1=", "max_tokens": tokens, "stream": True, "return_token_ids": True}
    delays = list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                now_ms = time.monotonic() * 1000
                for made in json.loads(line[6:])["choices"][0]["token_ids"]:
                    delays.append((now_ms % (1 << 30) - made) / 1000)
    return delays


def serve(pipe: Connection, streams: int) -> None:
    """The server's process; answers "cpu" with the CPU seconds of all threads but the engine's."""
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, streams))


async def _serve(pipe: Connection, streams: int) -> None:
    given = RunSpec.model_validate(
        {"model": {"source": "char"}, "engine": {"slots": streams, "tick_s": TICK_S}, "telemetry": {"live": False}}
    )
    spec = serving_spec(given, None)
    engine = IdleEngine(streams)

    @asynccontextmanager
    async def backend(
        spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
    ) -> AsyncIterator[RuntimeBackend]:
        compute = ComputeThread()
        worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=TICK_S)
        yield RuntimeBackend(
            trainer=Still(),  # type: ignore[arg-type]
            checkpoints=None,  # type: ignore[arg-type]
            local=worker,
            task=served_task(),
            codec=LooseCodec(load_codec(resolve(spec.model, progress=lambda _: None))),  # type: ignore[arg-type]
            scorer=NoReward(),
            eval_scorer=NoReward(),
            threads=1,
            context_tokens=1 << 20,
        )
        await worker.close()
        await compute.close()

    def answer() -> None:
        while pipe.recv():
            pipe.send(time.process_time() - engine.cpu_s)

    with tempfile.TemporaryDirectory() as folder:
        config = GatewayConfig(port=0)
        listener = listen(config)
        with RunDirectory.open(Path(folder)) as run, Recorder(run, spec, stream=None) as recorder:
            async with served_fleet(spec, run, recorder, asyncio.Event(), open_backend=backend) as served:
                collecting = asyncio.create_task(served.collect())
                async with serving(Gateway(served, config, write_calls=write_hermes).app(), listener, config):
                    pipe.send(listener.getsockname()[1])
                    threading.Thread(target=answer, daemon=True).start()
                    await collecting


class LooseCodec:
    """A codec that decodes any number as a letter; otherwise that of the model."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._codec.decode([token_id % 8 for token_id in token_ids])
        return text


if __name__ == "__main__":
    sys.exit(interruptible(main))
