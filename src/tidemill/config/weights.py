"""How weights travel from the trainer to the workers on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import ON_RAY, Config, is_beyond_loopback


class WeightsConfig(Config):
    """Only with runtime = "ray"."""

    transport: Annotated[Literal["object_store", "shm", "http"], ON_RAY] = "object_store"
    """object_store: Ray's; every worker pulls. shm: the same, but one worker of a machine pulls, and all of them share
    its snapshot in memory. http: from a server in the trainer's process. Workers of several GPUs share snapshots with
    each of them. Workers need Ray in every case."""
    threads: Annotated[int, ON_RAY] = Field(1, ge=1)
    """Threads that encode or apply a difference of two versions, in the trainer's process and in each worker."""
    lane: Literal["none", "collective"] = "none"
    """How a reserved engine in a process of its own gets weights. none: as the preemptible workers, which always pull.
    collective: broadcast tensor by tensor (NCCL between GPUs, gloo else)."""
    host: str = "127.0.0.1"
    """http: address on which the trainer's process listens."""
    port: int = Field(0, ge=0, le=65535)
    """http: its port; 0: any free one. With trainer.shards each shard needs one of its own, so that only 0 works."""
    url: str = ""
    """http: address under which workers reach the server, such as "http://trainer.example:8000"; empty: that of host
    and port."""
    token_env: str = "TIDEMILL_WEIGHTS_TOKEN"
    """http: name of the environment variable with the token, on the trainer's machine; needed beyond loopback. Only the
    name is stored."""

    @property
    def beyond_loopback(self) -> bool:
        return is_beyond_loopback(self.host)

    def issues(self) -> Iterator[str]:
        if self.transport != "http" and (self.port or self.url or self.beyond_loopback):
            yield 'host, port and url belong to transport = "http"; set it, or leave them out'
        if self.host in ("0.0.0.0", "::") and not self.url:
            yield f"host = {self.host!r} is no address that workers could use; set url, too"
        if self.url and not self.url.startswith(("http://", "https://")):
            yield f'url: {self.url!r} is no address; write for example "http://trainer.example:8000"'
