"""The HTTP gateway of `tidemill serve` and of training sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tidemill.config.base import NEUTRAL, Config, is_beyond_loopback


class GatewayConfig(Config):
    host: Annotated[str, NEUTRAL] = "127.0.0.1"
    """Address on which it listens. Beyond this machine it needs token_file."""
    port: Annotated[int, NEUTRAL] = Field(8000, ge=0, le=65535)
    """0: any free port."""
    token_file: Annotated[Path | None, NEUTRAL] = None
    """File of mode 600 with the keys of clients, one on each line; read again when it changes."""
    name: str = ""
    """Name of the model for clients; empty: that of the run."""
    sessions: bool = False
    """Training: the samples are sessions of clients, which send their requests here."""
    session_idle_s: float = Field(600.0, gt=0)
    """A session without a request for so long is left out of its group, in seconds."""
    session_turns: int = Field(16, ge=1)
    """Answers of a session, counting each of several to one request."""
    body_mb: Annotated[float, NEUTRAL] = Field(8.0, gt=0)
    """Largest body of a request, in MB."""
    concurrency: Annotated[int, NEUTRAL] = Field(256, ge=1)
    """Requests of one key that are answered at the same time; more get status 429."""
    connections: Annotated[int, NEUTRAL] = Field(1024, ge=1)
    """Open connections; more are refused."""
    header_s: Annotated[float, NEUTRAL] = Field(10.0, gt=0)
    """Time in which the headers of a request must arrive, in seconds."""
    body_s: Annotated[float, NEUTRAL] = Field(30.0, gt=0)
    """The same for its body."""
    idle_s: Annotated[float, NEUTRAL] = Field(60.0, gt=0)
    """After this time a connection without a request is closed, and one whose client does not read, in seconds."""
    stall_s: Annotated[float, NEUTRAL] = Field(600.0, gt=0)
    """`tidemill serve`: a request that gets no token for so long, in seconds, gets status 503."""

    @property
    def beyond_loopback(self) -> bool:
        return is_beyond_loopback(self.host)

    def issues(self) -> Iterator[str]:
        if self.beyond_loopback and self.token_file is None:
            yield f"host = {self.host!r} is open to other machines without keys; set token_file, or leave host out"
