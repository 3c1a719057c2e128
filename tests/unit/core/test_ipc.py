from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest

from tidemill.core import ipc

LOOK_WHILE_CHILDREN_END = """
import os, signal, time
from tidemill.core.ipc import child_processes

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # an ended child is gone at once, although this process waits for none

def fork():
    if pid := os.fork():
        return pid
    signal.pause()
    os._exit(0)

ending, staying = [], set()
for _ in range(400):  # more than the kernel's list of children gives in one read
    ending.append(fork())
    staying.add(fork())
if not (killer := os.fork()):
    for pid in ending:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.0003)
    os._exit(0)
missed, killing = set(), True
try:
    while killing:
        found = set(child_processes())
        killing = killer in found
        missed |= staying - found
finally:
    for pid in staying:
        os.kill(pid, signal.SIGKILL)
print(len(missed))
"""


def test_no_child_is_missed_while_others_end() -> None:
    command = [sys.executable, "-c", LOOK_WHILE_CHILDREN_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n", done.stderr


KILL = """
import subprocess
from tidemill.core import ipc

ipc.adopt_descendants()
for command in ("sleep 60 & echo $!; wait", "sleep 60 >&2 & echo $!"):  # a parent that waits, and one that ends
    started = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)
    print(started.stdout.readline().decode().strip())
ipc.kill_children()
print(ipc.child_processes())
"""


def test_killing_leaves_no_descendant() -> None:
    command = [sys.executable, "-c", KILL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    *pids, left = done.stdout.splitlines()
    assert (len(pids), left) == (2, "[]"), done.stderr
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize("data", [b"", b"abc", bytes(100_000)])
def test_messages_are_those_of_multiprocessing(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, Connection(theirs.detach()) as connection:
        ours.sendall(ipc.framed(data))
        assert connection.recv_bytes() == data
        connection.send_bytes(data)
        assert ipc.receive(ours) == data


def test_whole_messages_are_taken_from_a_buffer() -> None:
    sent = ipc.framed(b"one") + ipc.framed(b"") + ipc.framed(b"two")
    buffer, messages = bytearray(), list[bytes]()
    for byte in sent[:-1]:
        buffer.append(byte)
        messages += ipc.take(buffer)
    assert messages == [b"one", b""]
    buffer += sent[-1:]
    assert list(ipc.take(buffer)) == [b"two"]
    assert not buffer


@pytest.mark.parametrize(
    ("sent", "error", "text"),
    [
        (b"", EOFError, "closed|bytes read"),
        (b"\0\0", EOFError, "closed|bytes read"),
        (b"\0\0\0\5abc", EOFError, "closed|bytes read"),
        (b"\0\0\0\7", ValueError, "a message of 7 bytes; at most 6 are accepted"),
    ],
)
async def test_a_message_that_does_not_come(sent: bytes, error: type[Exception], text: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(error, match=text):
            ipc.receive(ours, 6)
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    reader.feed_eof()
    with pytest.raises(error, match=text):
        await ipc.read(reader, 6)


def test_a_process_that_does_not_end_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    began_s = time.monotonic()
    ipc.wait_or_kill(process, 0.2)
    assert process.returncode == -9
    assert time.monotonic() - began_s < 10


def test_a_process_and_its_state_are_found_by_number() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            stats = dict(ipc.process_stats())
            assert stats[process.pid][1] == str(os.getpid()).encode()
            assert process.pid in ipc.child_processes()
        finally:
            process.kill()
    assert process.pid not in ipc.child_processes()


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("exec sleep 60", -signal.SIGKILL)])
def test_a_process_that_does_not_end_in_time_is_killed(command: str, code: int) -> None:
    process = subprocess.Popen(["sh", "-c", command])
    ipc.wait_or_kill(process, 0.5)
    assert process.returncode == code
