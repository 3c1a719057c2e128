"""Scores answers with functions of other packages, some of which evaluate an answer as Python.

Runs in a sandbox, in the environment that has those packages, and imports nothing of Tidemill. A message of
`multiprocessing.connection` is a MessagePack map. The first one is {"ready": true} or {"error": text}. Then every
request {"entry": pickle, "answer": text, "timeout_s": number} is answered by {"score": number}, {"error": text} or
{"late": true}.

Answers are scored in a forked worker. A worker that has scored an answer that could run code is killed, so that what
the answer changed in it ends there. Other answers share a worker: a fork takes longer than most scores.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import json
import os
import pickle
import re
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

GIVEN: dict[str, Any] = json.loads(sys.argv[1])
sys.path += GIVEN["path"]
import msgspec  # noqa: E402 -- it is on that path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PR_SET_DUMPABLE = 4
MOST_FILES = 256
MOST_GROWTH_BYTES = 32 << 20
"""A worker that takes this much more memory is replaced, so that an answer does not use up that of the next ones."""
LONGEST_ERROR = 500
NO_CODE = re.compile(r"[0-9\s+\-*/^.,:;=<>!%|&()\[\]{}]*|[A-Za-z0-9\s+\-*/^.,:;=<>!?|&]*", re.ASCII)
"""Without names, or without anything that calls one."""
REFUSED_EVENTS = frozenset({"gc", "ctypes", "mmap", "os", "pty", "shutil", "signal", "socket", "subprocess", "syslog"})
HARMLESS_EVENTS = frozenset({"os.listdir", "os.scandir", "os.putenv", "os.unsetenv"})
REFUSED_FUNCTIONS = "breakpoint compile delattr dir eval exec getattr globals input locals open setattr vars"
REFUSED_OBJECTS = "copyright credits exit help license object quit super type doctest lambdify preview source test"
FRAMES = "ag_frame cr_frame f_back f_builtins f_globals f_locals gi_frame mro tb_frame"
REFUSED_NAMES = frozenset(f"{REFUSED_FUNCTIONS} {REFUSED_OBJECTS} {FRAMES}".split())
"""Besides names that begin with an underscore."""
CHANGES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR"})
"""Operations that change an object."""
HAS_SOLUTIONS = "reasoning_gym."
"""Modules that evaluate answers where their variables, the right answer among them, have names."""
MAKE_CODE = frozenset({"collections", "dataclasses", "enum", "functools", "typing"})
"""Modules that run code which they have made themselves."""

Check = Callable[[Any, str], float]


def reasoning_gym(name: str, settings: dict[str, Any]) -> Check:
    import reasoning_gym as package

    dataset = package.create_dataset(name, **settings)
    with suppress(Exception):  # imports and caches what every worker would; the answer is the package's own
        entry = dataset[0]
        dataset.score_answer(str(entry["answer"]), entry)
    return lambda entry, answer: float(dataset.score_answer(answer, entry))


def math_verify() -> Check:
    import math_verify as package

    def check(expected: str, completion: str) -> float:
        gold = package.parse(expected, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify finds no expression in the answer {expected[:40]!r}")
        return float(package.verify(gold, package.parse(completion, parsing_timeout=None), timeout_seconds=None))

    check("1", "$1$")  # imports the rest
    return check


CHECKS: dict[str, Callable[..., Check]] = {"reasoning_gym": reasoning_gym, "math_verify": math_verify}


def main() -> None:
    source, sink = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a package prints is no message
    if sys.platform == "linux":  # a worker may not read or write the memory of this process
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        check = CHECKS[GIVEN["check"]](**GIVEN["params"])
    except BaseException as error:  # noqa: BLE001 -- of the package
        _send(sink, {"error": _text(error)})
        return
    gc.collect()
    gc.freeze()  # the collector would write to pages that workers share
    _send(sink, {"ready": True})
    workers = Workers(check, memory_bytes=GIVEN["memory_bytes"])
    with suppress(EOFError):
        while True:
            request = msgspec.msgpack.decode(source.recv_bytes())
            _send(sink, workers.score(request))
            workers.prepare()
    workers.close()


class Workers:
    """One worker at a time, forked before it is needed."""

    def __init__(self, check: Check, *, memory_bytes: int) -> None:
        self._check, self._memory_bytes = check, memory_bytes
        self._worker: CheckWorker | None = None
        self.prepare()

    def prepare(self) -> None:
        if self._worker is None:
            self._worker = CheckWorker(self._check, memory_bytes=self._memory_bytes)

    def score(self, request: dict[str, Any]) -> dict[str, Any]:
        self.prepare()
        assert self._worker is not None
        reply = self._worker.score(request)
        clean = "score" in reply and _runs_no_code(request["answer"])
        if not clean or self._worker.grown_bytes() > MOST_GROWTH_BYTES:
            self.close()
        return reply

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class CheckWorker:
    """A process that scores answers one after the other."""

    def __init__(self, check: Check, *, memory_bytes: int) -> None:
        requests, self._requests = Pipe(duplex=False)
        # Packets, because a worker that an answer has changed could send a part of a message.
        self._replies, replies = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._first_bytes = _size_bytes("self")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _confine({requests.fileno(), replies.fileno()}, memory_bytes=self._first_bytes + memory_bytes)
                _score_all(check, requests, replies)
            finally:
                os._exit(1)
        requests.close()
        replies.close()

    def score(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._requests.send_bytes(msgspec.msgpack.encode([request["entry"], request["answer"]]))
            self._replies.settimeout(request["timeout_s"])
            reply = self._replies.recv(1 + LONGEST_ERROR)
            if reply[:1] == b"v":
                return {"score": struct.unpack("<d", reply[1:])[0]}
            return {"error": reply[1:].decode(errors="replace") or "the process that scored it ended"}
        except TimeoutError:
            return {"late": True}
        except (OSError, struct.error):
            return {"error": "the process that scored it ended"}

    def grown_bytes(self) -> int:
        """Memory that it took since it was forked."""
        return _size_bytes(str(self.pid)) - self._first_bytes

    def kill(self) -> None:
        for kill in (os.kill, os.killpg):
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._requests.close()
        self._replies.close()


def _confine(descriptors: set[int], *, memory_bytes: int) -> None:
    """Leave a worker its connections, and neither files, processes nor memory that outlive an answer."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for descriptor in set(range(3, MOST_FILES)) - descriptors:
        with suppress(OSError):  # it is not open
            os.close(descriptor)
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with suppress(ValueError):  # a lower limit is in force
            resource.setrlimit(kind, (value, value))
    sys.addaudithook(_refuse)


def _score_all(check: Check, requests: Connection, replies: socket.socket) -> NoReturn:
    with suppress(EOFError):
        while True:
            entry, answer = msgspec.msgpack.decode(requests.recv_bytes())
            try:
                replies.send(b"v" + struct.pack("<d", check(pickle.loads(entry), answer)))
            except BaseException as error:  # noqa: BLE001 -- of the package
                replies.send(b"e" + _text(error).encode(errors="replace")[:LONGEST_ERROR])
    os._exit(0)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """A hook that makes it harder for an answer to run code. It is no border: that is the sandbox."""
    if event == "exec":
        code = arguments[0]
        caller = sys._getframe(1).f_globals.get("__name__") or ""
        if code.co_filename.startswith("<") and caller not in MAKE_CODE:
            for each in _codes(code):
                for name in each.co_names:
                    private = name.startswith("_") and name != "_lambdifygenerated"
                    if name in REFUSED_NAMES or private or caller.startswith(HAS_SOLUTIONS):
                        raise PermissionError(f"an answer may not use {name}")
                if changes := {step.opname for step in dis.get_instructions(each)} & CHANGES:
                    raise PermissionError(f"an answer may not run {min(changes)}")
    elif event == "open":
        mode, flags = arguments[1], arguments[2]
        if (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(mode or "") & set("wax+"):
            os._exit(1)
    elif event.partition(".")[0] in REFUSED_EVENTS and event not in HARMLESS_EVENTS:
        os._exit(1)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _runs_no_code(answer: str) -> bool:
    """Whether an answer runs no code even if it is evaluated as Python, and texts in it are evaluated again."""
    if NO_CODE.fullmatch(answer):
        return True
    with suppress(ValueError, RecursionError):
        return all(map(NO_CODE.fullmatch, _texts(json.loads(answer))))
    return False


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.items() if isinstance(value, dict) else value:
            yield from _texts(list(each) if isinstance(each, tuple) else each)


def _size_bytes(process: str) -> int:
    """Address space of a process; 0: it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[0]) * PAGE_BYTES
    return 0


def _send(sink: Connection, message: dict[str, Any]) -> None:
    sink.send_bytes(msgspec.msgpack.encode(message))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:LONGEST_ERROR]


if __name__ == "__main__":
    main()
