"""A server of sandboxes (`tidemill sandbox serve`) on a thread of a test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tidemill.config.gateway import GatewayConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.dashboard.serve import BackgroundServer
from tidemill.jobs.sandbox_server import serving_sandboxes

TOKEN = "a-token"


@contextmanager
def sandbox_server(*, most: int = 8, idle_s: float = 60.0, **limits: Any) -> Iterator[str]:
    """Its URL."""
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder, "tokens")
        token_file.touch(mode=0o600)
        token_file.write_text(f"{TOKEN}\n")
        config = SandboxConfig.model_validate(limits)

        @asynccontextmanager
        async def serve() -> AsyncIterator[str]:
            place = GatewayConfig(port=0, token_file=token_file)
            async with serving_sandboxes(config, place, most=most, idle_s=idle_s) as (_, url):
                yield url

        server = BackgroundServer(serve())
        try:
            yield server.url
        finally:
            server.close()
