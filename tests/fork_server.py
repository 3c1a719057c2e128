"""Imports what a run needs and forks for each request; `tests/forked.py` is its client.

    python -m tests.fork_server SOCKET       the number of an inherited Unix socket; exits when the other end is closed

Importing takes a process several seconds, forking milliseconds. Signals kill a fork like any other process. Unlike
processes started by a user, all forks have the same hash seed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTED = (
    "transformers.models.llama.modeling_llama",  # what every tested model is; loaded by name otherwise
    "tidemill.cli.evaluate",
    "tidemill.cli.train_command",
    "tidemill.jobs.train",
    "tidemill.pipeline.execution",
    "tidemill.planner.forecast",
)
MAX_REQUEST_BYTES = 1 << 17


def serve(control: socket.socket) -> None:
    """Serve one request after another; each brings three files: for the report, standard output and standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session
    while True:
        text, files, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
        if not text:
            return
        if os.fork() == 0:
            control.close()
            attend(json.loads(text), socket.socket(fileno=files[0]), files[1:])
        for file in files:
            os.close(file)
        while os.waitpid(-1, os.WNOHANG) != (0, 0):  # reap finished attendants
            pass


def attend(request: dict[str, Any], report: socket.socket, streams: list[int]) -> None:
    """In an intermediate process: start the requested one, report its id, wait for it and report how it ended."""
    pid = os.fork()
    if pid == 0:
        report.close()
        become(request, streams)
    report.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    report.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Run as the requested process until it ends."""
    os.setsid()  # so that every process it starts can be found
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], request["file_bytes"]))
    module, _, function = request["target"].partition(":")
    sys.argv = [module, *request["argv"]]
    sys.exit(getattr(import_module(module), function)())


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    # A fork has one thread: a lock held by another thread would never be released.
    assert threading.active_count() == 1
    assert not Path("/proc/self/task").exists() or len(list(Path("/proc/self/task").iterdir())) == 1
    gc.collect()
    gc.freeze()  # else a fork collects all that was imported when it ends, which takes more than a second
    serve(socket.socket(fileno=int(sys.argv[1])))
