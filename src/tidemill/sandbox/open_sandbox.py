"""Opens a sandbox of the configured back-end.

Every environment process imports this module: what takes long to import is imported on use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidemill.core.errors import UserError
from tidemill.sandbox.local import LocalSandbox, launcher
from tidemill.sandbox.records import MEGABYTE, Limits, Sandbox, SandboxError

if TYPE_CHECKING:
    from tidemill.config.sandbox import SandboxConfig

WHERE = "sandbox.backend"
CHECK_S = 10.0
log = logging.getLogger(__name__)


def open_sandbox(config: SandboxConfig | None = None) -> Sandbox:
    """A new, empty sandbox; with the default settings if none are given. Close it, or use `contextlib.closing`.

    Raises:
        UserError: the back-end does not work on this machine.
        SandboxError: the sandbox cannot be made.
    """
    if config is None:
        from tidemill.config.sandbox import SandboxConfig

        config = SandboxConfig()
    limits, network = limits_of(config), () if config.network == "none" else config.network
    if config.backend == "http":
        if not (token := os.environ.get(config.token_env, "")):
            hint = f"set {config.token_env} to the server's token"
            raise UserError("the server's token is missing", where="sandbox.token_env", hint=hint)
        from tidemill.sandbox.remote import RemoteSandbox

        return RemoteSandbox(config.url, token, limits, network)
    return LocalSandbox(launcher(config.backend).address, limits, network)


def open_local_sandbox(config: SandboxConfig, visible: Mapping[str, str]) -> LocalSandbox:
    """A sandbox in which a program can be started.

    Args:
        visible: folders that it sees read-only, by their names in /mnt. Without a sandbox they are where they are.

    Raises:
        UserError: the back-end does not work on this machine, or is a server.
        SandboxError: the sandbox cannot be made.
    """
    if config.backend == "http":
        raise UserError("programs that stay in a sandbox need a local one", where=WHERE, hint='set it to "bwrap"')
    network = () if config.network == "none" else config.network
    return LocalSandbox(launcher(config.backend).address, limits_of(config), network, visible)


def limits_of(config: SandboxConfig) -> Limits:
    return Limits(
        memory_bytes=int(config.memory_mb * MEGABYTE),
        processes=config.processes,
        cpu_s=config.cpu_s,
        wall_s=config.wall_s,
        scratch_bytes=int(config.scratch_mb * MEGABYTE),
        scratch_files=config.scratch_files,
        output_bytes=int(config.output_kb * 1024),
    )


def check_sandbox(config: SandboxConfig) -> None:
    """Run a command in a sandbox.

    Raises:
        UserError: it does not work on this machine.
    """
    if config.backend == "none":
        log.warning('sandbox.backend = "none": what the model writes runs with all rights of this user')
    try:
        sandbox = open_sandbox(config)
        try:
            finished = sandbox.run(["python3", "-c", "print(6 * 7)"], timeout_s=CHECK_S)
        finally:
            sandbox.close()
    except SandboxError as error:
        raise UserError(str(error), where=WHERE, hint=_hint(config)) from error
    if finished.stdout != b"42\n":
        how = finished.stderr.decode(errors="replace").strip() or f"exit code {finished.code} {finished.ended}"
        raise UserError(f"Python does not run in a sandbox: {how[-300:]}", where=WHERE, hint=_hint(config))


def _hint(config: SandboxConfig) -> str:
    if config.backend == "http":
        return "check sandbox.url and the server's log"
    return "`tidemill doctor` says which back-ends work here, and why the others do not"
