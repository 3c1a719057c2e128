"""`tidemill serve`: the engines, the server in front of them, and their end."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import sampling_params
from tidemill.controller.samples import Sample, TokenObserver
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import SamplingParams
from tidemill.gateway.access import logged_to
from tidemill.gateway.app import Gateway
from tidemill.gateway.backend import CompletionRequest, TokenChunk
from tidemill.gateway.errors import ApiError
from tidemill.gateway.requests import Call, CompletionParams
from tidemill.gateway.server import address, listen, serving
from tidemill.gateway.session import Session, SessionLog
from tidemill.gateway.session_routes import PATH
from tidemill.gateway.sessions import Sessions
from tidemill.jobs.placed_run import with_chosen_ranks
from tidemill.jobs.serving import ServedModel, served_fleet
from tidemill.models.codec import TextCodec
from tidemill.models.turn_format import turn_format
from tidemill.runtime.backend import RuntimeBackend
from tidemill.runtime.memory_check import check_memory, known_models
from tidemill.runtime.runtimes import runtime_of
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
    check_memory(spec, "serve", note=progress)
    spec, _ = with_chosen_ranks(spec, known_models(spec, None, fetch=True))
    runtime_of(spec).check(spec)
    listener = listen(spec.gateway)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        folder = spec.run.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-serve-")))
        run = stack.enter_context(RunDirectory.open(folder))
        recorder = stack.enter_context(Recorder(run, spec, stream=None))
        recorder.expect(0)
        stack.enter_context(logged_to(logging.StreamHandler()))
        ending = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ending.set)
            stack.callback(loop.remove_signal_handler, number)
        served = await stack.enter_async_context(served_fleet(spec, run, recorder, stop))
        gateway = Gateway(served, spec.gateway, write_calls=write_hermes)
        collecting = asyncio.create_task(served.collect())
        async with serving(gateway.app(), listener, spec.gateway):
            progress(f"{served.name} is served at {address(listener)}/v1")
            await asyncio.wait(
                {collecting, ended := asyncio.create_task(ending.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            ended.cancel()
        stop.set()
        await collecting
    return {"requests": gateway.requests}


class SessionFeed(TokenObserver):
    """Hands the tokens of samples in flight to their sessions, report by report."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def tokens_added(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            ids = bytes(sample.token_ids)
            logprobs = bytes(sample.logprobs)
            self._sessions.receive(sample.sample_id, sample.turns.start, ids, logprobs, sample.length)


class ServedSessions(ServedModel):
    """Implements `gateway.backend.Served` for the sessions of a run."""

    def __init__(
        self,
        name: str,
        codec: TextCodec,
        turns: TurnFormat,
        sessions: Sessions,
        sampling: SamplingParams,
        fleet: Fleet,
        *,
        context_tokens: int,
    ) -> None:
        super().__init__(name, codec, turns, context_tokens=context_tokens, defaults=sampling)
        self._sessions, self._fleet = sessions, fleet

    @property
    def ready(self) -> bool:
        return self._fleet.engine_count > 0

    @property
    def figures(self) -> dict[str, float]:
        return {"workers": float(self._fleet.engine_count)}

    def refuse(self, params: CompletionParams, key: str) -> None:
        """Raises ApiError: there is no session, or it does not take the request."""
        self._sessions.refuse(params, self._session(key))

    async def generate(self, requested: CompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        async with aclosing(self._sessions.generate(self._session(requested.key), requested)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _session(self, key: str) -> Session:
        if (session := self._sessions.find(key)) is None:
            message = "this model is trained: open a session, and use its key"
            raise ApiError(400, message, code="session_required")
        return session


@asynccontextmanager
async def training_sessions(
    spec: RunSpec, backend: RuntimeBackend, run: RunDirectory, recorder: Recorder, fleet: Fleet
) -> AsyncIterator[tuple[Sessions, TokenObserver]]:
    """The sessions of a run and their gateway, while the block runs.

    Raises:
        UserError: the keys or the address cannot be used.
    """
    codec = backend.codec
    assert isinstance(codec, TextCodec)
    sampling = sampling_params(spec, codec, backend.task.default_stop_strings)
    turns = turn_format(codec, spec.env, chat_template=spec.model.chat_template)
    log = SessionLog(run.path / "sessions.jsonl")
    sessions = Sessions(
        turns,
        log,
        secret=_secret(run.path / "gateway.secret"),
        sampling=sampling,
        idle_s=spec.gateway.session_idle_s,
        turns=spec.gateway.session_turns,
        write_calls=write_hermes,
    )
    name = spec.gateway.name or spec.run.name
    served = ServedSessions(name, codec, turns, sessions, sampling, fleet, context_tokens=backend.context_tokens)
    listener = listen(spec.gateway)
    gateway = Gateway(served, spec.gateway, write_calls=write_hermes, sessions=sessions)
    with closing(log), logged_to(logging.FileHandler(run.path / "gateway.log", encoding="utf-8")):
        async with serving(gateway.app(), listener, spec.gateway):
            recorder.note(f"sessions are opened at {address(listener)}{PATH}")
            try:
                yield sessions, SessionFeed(sessions)
            finally:
                await sessions.close()


def _secret(path: Path) -> bytes:
    """The secret of a run's session keys, made with its first session."""
    if not path.exists():
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32))
        new.replace(path)
    return path.read_bytes()
