"""The sandbox: where code runs that a model wrote, and its limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from tidemill.config.base import Config

MOST_PAIRS = 64
HOST_AND_PORT = re.compile(r"[A-Za-z0-9.-]+:[1-9][0-9]{0,4}")


class SandboxConfig(Config):
    backend: Literal["bwrap", "runsc", "http", "none"] = "bwrap"
    """bwrap: Linux namespaces by bubblewrap; the kernel is shared. runsc: gVisor. http: a server of sandboxes at `url`.
    none: no sandbox; the code can do whatever this user can."""
    network: Literal["none"] | tuple[str, ...] = "none"
    """"HOST:PORT" pairs that the code may connect to by TCP, as a list or in one text separated by commas; the
    addresses of a cloud's metadata are refused."""
    url: str = ""
    """http: address of the server."""
    token_env: str = "TIDEMILL_SANDBOX_TOKEN"
    """http: name of the environment variable with the server's token. Only the name is stored."""
    memory_mb: float = Field(512.0, gt=0)
    """Memory of all processes of a sandbox together, in MB."""
    processes: int = Field(64, ge=4)
    """Processes and threads of a sandbox."""
    cpu_s: float = Field(10.0, gt=0)
    """Processor time of a command, in seconds."""
    wall_s: float = Field(30.0, gt=0)
    """Time of a command, in seconds."""
    scratch_mb: float = Field(64.0, gt=0, le=2048)
    """Files of a sandbox, in MB; they are in memory."""
    scratch_files: int = Field(4096, ge=1)
    """Number of files of a sandbox."""
    output_kb: float = Field(1024.0, gt=0)
    """Output of a command that is kept, in kB: of standard output, and of standard error."""

    @field_validator("network", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if isinstance(value, str) and value != "none":
            return tuple(value.split(","))
        return tuple(value) if isinstance(value, list) else value  # strict mode takes no list after a validator

    def issues(self) -> Iterator[str]:
        if (self.backend == "http") != bool(self.url):
            yield 'backend = "http" and sandbox.url belong together; set both or neither'
        for each in self.network if self.network != "none" else ():
            if not HOST_AND_PORT.fullmatch(each) or int(each.rpartition(":")[2]) > 65535:
                yield f'network: {each!r} is not "HOST:PORT"; write for example "pypi.org:443"'
            elif each.startswith("127.") and not each.startswith("127.0.0.1:"):
                yield f"network: {each!r}: write localhost for this machine"
        pairs = [each.replace("127.0.0.1", "localhost") for each in self.network if self.network != "none"]
        if len(set(pairs)) < len(pairs) or len(pairs) > MOST_PAIRS:
            yield f"network: pairs must differ, and be at most {MOST_PAIRS}"
        if self.network != "none" and self.backend == "runsc":
            yield 'network needs backend = "bwrap"; with runsc there is none'
