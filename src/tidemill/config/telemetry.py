"""`[telemetry]`: what a run writes and shows besides its results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.addresses import ENVIRONMENT_VARIABLE, server_url_issues
from tidemill.config.base import Config, NameOrFunction, is_beyond_loopback

AlertEvent = Literal[
    "checkpoint", "control", "crash", "environment_warning", "evaluation", "eviction", "guard", "guard_probe",
    "join_failed", "quarantine", "reward_failed", "session_end", "session_start", "stalled", "waiting", "worker_health",
]  # fmt: skip


class AlertConfig(Config):
    url: str = ""
    """URL that alerts are posted to as JSON; its `text` is one line, as Slack and compatible services show it."""
    url_env: str = ""
    """Name of an environment variable with the URL, if the URL itself is a secret, as those of Slack."""
    events: tuple[AlertEvent, ...] = Field(("guard", "worker_health", "session_end"), min_length=1)
    """Events that are sent; their meaning is in docs/reference/metrics.md."""

    def issues(self) -> Iterator[str]:
        if bool(self.url) == bool(self.url_env):
            yield "an alert needs either url or url_env; set one of them"
        elif self.url:
            yield from server_url_issues(self.url, "", needed_by="an alert")
        if self.url_env and not ENVIRONMENT_VARIABLE.fullmatch(self.url_env):
            yield "url_env is not the name of an environment variable; put the URL into a variable and name it here"


class TelemetryConfig(Config):
    live: bool = True
    """Show a live view when standard error is a terminal. false: plain lines."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Additional loggers; each needs its extra installed."""
    callbacks: tuple[Annotated[str, NameOrFunction("callback")], ...] = ()
    """Classes derived from tidemill.Callback, as `path/file.py:Class`, `package.module:Class` or entry points."""
    alerts: tuple[AlertConfig, ...] = ()
    """Webhooks that events of the run are posted to. They never delay or end the run."""
    samples_per_step: int = Field(0, ge=0)
    """Number of samples logged per step; 0: all."""
    token_details: int = Field(8, ge=0)
    """Number of logged samples per step whose tokens also get the trainer's logprobs and entropies."""
    port: int | None = Field(None, ge=0, le=65535)
    """Serve the newest metrics to Prometheus at this port of `host`; 0: any free port. Needs the extra `watch`."""
    host: str = "127.0.0.1"
    """Address of that endpoint; another one than of this machine's loopback needs `token_file`."""
    token_file: Path | None = None
    """Tokens of its readers, one a line as `read TOKEN`; only its owner may read the file."""
    project: str = "tidemill"
    """Project of the run in W&B and trackio."""
    tags: tuple[str, ...] = ()
    """Tags of the run in W&B."""
    group: str = ""
    """Group of the run in W&B and trackio."""

    def issues(self) -> Iterator[str]:
        if is_beyond_loopback(self.host) and self.token_file is None:
            yield f"host = {self.host!r} is open to other machines without tokens; set token_file, or leave host out"
