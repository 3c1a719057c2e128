"""`tidemill watch RUN|FOLDER`: the pages of runs, while they happen or afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tidemill.cli.output import Json, Result, note
from tidemill.config.base import is_beyond_loopback
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command

HIGHEST_PORT = 65535


def watch(
    path: Annotated[Path, Parameter(name="RUN_OR_FOLDER")],
    /,
    *,
    port: Annotated[int | None, Parameter(name="--port", help="Default: 8300, or the next free one; 0: any.")] = None,
    host: Annotated[str, Parameter(name="--host", help="Beyond this machine it needs --token-file.")] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        Parameter(name="--token-file", help="Of mode 600, with lines `read TOKEN` and `act TOKEN`."),
    ] = None,
    wait: Annotated[bool, Parameter(name="--wait", negative=(), help="Wait for a run to start there.")] = False,
    no_open: Annotated[bool, Parameter(name="--no-open", negative=(), help="Do not open a browser.")] = False,
    json: Json = False,
) -> Result:
    """Show a run, or all runs below a folder, in the browser: curves, machines, samples, costs. Ctrl-C ends it.

    It only reads the files of the runs, which may be in progress, finished or copied. Buttons of the page write
    requests to RUN/control, and verdicts go to RUN/checks.

    Parameters
    ----------
    path
        A run directory, or a folder with runs.
    """
    if port is not None and not 0 <= port <= HIGHEST_PORT:
        raise UserError(f"must be from 0 to {HIGHEST_PORT}", where="--port")
    try:
        from tidemill.dashboard.serve import open_browser
        from tidemill.dashboard.serve import watch as serve
    except ImportError as error:
        what = f"the pages need starlette and uvicorn ({error})"
        raise UserError(what, where="tidemill watch", hint=install_command("watch")) from error
    urls = list[str]()

    def show(url: str) -> None:
        urls.append(url)
        note(f"{path} is shown at {url}")
        if is_beyond_loopback(host):
            note("connections are not encrypted; from another machine rather use ssh -L, or a proxy with TLS")
        if not no_open and token_file is None:
            open_browser(url)

    asyncio.run(serve(path, host=host, port=port, token_file=token_file, wait=wait, show=show))
    return Result(data={"url": urls[0]})
