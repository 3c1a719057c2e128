from __future__ import annotations

import subprocess
import sys

LOOK_WHILE_CHILDREN_END = """
import os, signal, time
from tidemill.extensions.fork_server import child_processes

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
