"""`tidemill sandbox serve`: sandboxes for other machines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tidemill.cli.arguments import Items
from tidemill.cli.output import Json, Result, note
from tidemill.config.base import is_beyond_loopback
from tidemill.config.gateway import GatewayConfig
from tidemill.config.load import load_spec
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command

HIGHEST_PORT = 65535
BODY_S = 300.0
"""Time in which a body must arrive, such as a snapshot of 2 GB."""
app = App(name="sandbox", help="Serve sandboxes to other machines.", help_epilogue="")


@app.command(name="serve")
def serve(
    *items: Items,
    host: Annotated[str, Parameter(name="--host", help="Beyond this machine it needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, Parameter(name="--port", help="0: any free port.")] = 8600,
    token_file: Annotated[
        Path | None, Parameter(name="--token-file", help="Of mode 600, with a token on each line.")
    ] = None,
    most: Annotated[int, Parameter(name="--most", help="Sandboxes at a time.")] = 64,
    idle_s: Annotated[
        float, Parameter(name="--idle-s", help="A sandbox without a request for so many seconds is closed.")
    ] = 1800.0,
    json: Json = False,
) -> Result:
    """Serve sandboxes of this machine to runs with `sandbox.backend = "http"`. SIGTERM or Ctrl-C closes them all.

    [sandbox] of the recipe, or `--sandbox.KEY value`, gives the back-end, and the limits that no client may exceed.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise UserError(f"must be from 0 to {HIGHEST_PORT}", where="--port")
    for option, value in (("--most", most), ("--idle-s", idle_s)):
        if not 0 < value < float("inf"):
            raise UserError("must be above 0", where=option)
    if is_beyond_loopback(host) and token_file is None:
        hint = "write a token into a file of mode 600 and name it: --token-file FILE"
        raise UserError(f"{host} is open to other machines without tokens", where="--host", hint=hint)
    config = load_spec(items, purpose="read").sandbox
    try:
        from tidemill.jobs.sandbox_server import run_sandbox_server
    except ImportError as error:
        what = f"the server needs starlette and uvicorn ({error})"
        raise UserError(what, where="tidemill sandbox serve", hint=install_command("gateway")) from error
    place = GatewayConfig(host=host, port=port, token_file=token_file, body_s=BODY_S, idle_s=idle_s)

    def show(url: str) -> None:
        note(f"sandboxes are served at {url}")

    served = asyncio.run(run_sandbox_server(config, place, most=most, idle_s=idle_s, show=show))
    return Result(data=dict(served), text=f"{served['opened']} sandboxes were opened")
