"""`tidemill.watch`: the live page of a run, in a notebook or at a URL."""

from __future__ import annotations

import atexit
import html
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.api.entry import entry_point
from tidemill.api.run import Run
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command

if TYPE_CHECKING:
    from tidemill.dashboard.serve import BackgroundServer

_SERVED = dict[Path, "Watch"]()
"""The open pages by folder."""


class Watch:
    """The live page of a run or of the runs below a folder, served by this process until it ends or `close` is called.

    Attributes:
        url: of the page, for a browser on this machine.
        height: in a notebook, in pixels.
    """

    def __init__(self, path: Path, server: BackgroundServer, *, height: int) -> None:
        self.url, self.height = server.url, height
        self._path, self._server = path, server

    def close(self) -> None:
        """Stop serving the page. A second call does nothing."""
        if _SERVED.get(self._path) is self:
            del _SERVED[self._path]
        self._server.close()

    def __repr__(self) -> str:
        return f"tidemill.watch at {self.url}"

    def _repr_html_(self) -> str:
        url, port = html.escape(self.url), self.url.rstrip("/").rpartition(":")[2]
        return (
            f'<iframe src="{url}" width="100%" height="{self.height:d}" style="border: 1px solid #8884"></iframe>'
            f'<p><a href="{url}" target="_blank">{url}</a> (if nothing is shown, the kernel is on another machine: '
            f"forward its port {port}, as with <code>ssh -L {port}:localhost:{port}</code>)</p>"
        )


@entry_point
def watch(run: str | Path | Run, *, port: int | None = None, height: int = 800) -> Watch:
    """Show the live page of a run: inline in a notebook; elsewhere its URL is printed. The run may be in progress, in
    another process too. A second call for the same run shows the same page.

    Args:
        run: a run directory, a folder with runs, or a `Run`.
        port: of this machine; by default 8300, or the next free one.
        height: of the page in a notebook, in pixels.

    Raises:
        UserError: there is no run, the port is taken, or the extra `watch` is not installed.
    """
    try:
        from tidemill.dashboard.runs import WatchedFolder
        from tidemill.dashboard.serve import BackgroundServer, listen_to_watchers, watching
    except ImportError as error:
        what = f"the pages need starlette and uvicorn ({error})"
        raise UserError(what, where="tidemill.watch", hint=install_command("watch")) from error
    path = Path(run.path if isinstance(run, Run) else run).resolve()
    shown = _SERVED.get(path)
    if shown is None:
        folder, listener = WatchedFolder(path), listen_to_watchers("127.0.0.1", port, keys=("host", "port"))
        pages = watching(folder, listener, token_file=None, framed=True)
        shown = _SERVED[path] = Watch(path, BackgroundServer(pages), height=height)
        atexit.register(shown.close)
    shown.height = height
    kernel: Any = sys.modules.get("IPython")
    if kernel is None or not hasattr(kernel.get_ipython(), "kernel"):
        print(f"{path.name} is shown at {shown.url}")  # noqa: T201 - the result of the call outside of notebooks
    return shown
