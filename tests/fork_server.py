"""Has imported what a run needs, and forks for each one that is asked for; `tests/forked.py` talks to it.

    python -m tests.fork_server SOCKET       the number of an inherited Unix socket; ends when its other side is closed

Importing costs a process several seconds, forking milliseconds. A fork dies of a signal like any other process. It
differs from a command that a user types in one thing: all of them have the same seed of hashes.
"""

from __future__ import annotations

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

import transformers.models.llama.modeling_llama  # noqa: F401 (what every tested model is; loaded by name otherwise)

import tidemill.cli.evaluate
import tidemill.cli.train_command
import tidemill.pipeline.execution
import tidemill.runtime.train  # noqa: F401

MAX_REQUEST_BYTES = 1 << 17


def serve(control: socket.socket) -> None:
    """One request after another; each brings three files: where to report to, standard output, standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the tests is theirs
    while True:
        text, files, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
        if not text:
            return
        if os.fork() == 0:
            control.close()
            attend(json.loads(text), socket.socket(fileno=files[0]), files[1:])
        for file in files:
            os.close(file)
        while os.waitpid(-1, os.WNOHANG) != (0, 0):  # attendants that are done
            pass


def attend(request: dict[str, Any], report: socket.socket, streams: list[int]) -> None:
    """In a process between: starts the asked-for one, tells its id, waits for it, and tells how it ended."""
    pid = os.fork()
    if pid == 0:
        report.close()
        become(request, streams)
    report.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    report.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """The asked-for process, to its end."""
    os.setsid()  # so that whatever it starts can be found
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
    # A fork has one thread: a lock that another one held would be held forever.
    assert threading.active_count() == 1
    assert not Path("/proc/self/task").exists() or len(list(Path("/proc/self/task").iterdir())) == 1
    serve(socket.socket(fileno=int(sys.argv[1])))
