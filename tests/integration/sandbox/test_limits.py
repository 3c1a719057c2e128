"""Limits of a sandbox: of all its processes together, and of its files and output."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import Finished, Sandbox, SandboxError, open_sandbox

SMALL = {"memory_mb": 128, "processes": 16, "cpu_s": 2.0, "wall_s": 6.0, "scratch_mb": 8, "scratch_files": 100}


@contextmanager
def small(**changed: float) -> Iterator[Sandbox]:
    need_bubblewrap()
    with closing(open_sandbox(SandboxConfig(**{**SMALL, **changed}))) as sandbox:
        yield sandbox


def python(sandbox: Sandbox, program: str) -> Finished:
    return sandbox.run(["python3", "-c", program])


def test_a_process_gets_no_more_memory_than_the_sandbox_has() -> None:
    with small() as sandbox:
        finished = python(sandbox, "x = bytearray(1 << 28)")

    assert finished.code == 1
    assert b"MemoryError" in finished.stderr


def test_several_processes_together_are_ended_when_they_use_too_much_memory() -> None:
    with small() as sandbox:
        finished = python(sandbox, FORKS.format(count=4, work="x = bytearray(b'x' * (60 << 20)); time.sleep(9)"))

    assert finished.ended == "memory"
    assert finished.wall_s < SMALL["wall_s"]


def test_shared_memory_counts() -> None:
    with small(memory_mb=100) as sandbox:
        assert python(sandbox, SHARED_MEMORY).ended == "memory"


def test_pages_that_forked_processes_share_count_once() -> None:
    with small() as sandbox:
        program = "x = bytearray(b'x' * (60 << 20))\n" + FORKS.format(count=6, work="time.sleep(0.5)")
        finished = python(sandbox, program)

    assert (finished.code, finished.ended) == (0, "")


@pytest.mark.parametrize(
    ("work", "limit"), [("max(iter(int, 1))", "cpu"), ("x = bytearray(b'x' * (60 << 20)); time.sleep(9)", "memory")]
)
def test_processes_whose_names_are_no_text_count(work: str, limit: str) -> None:
    with small(cpu_s=1.0) as sandbox:
        finished = python(sandbox, FORKS.format(count=4, work=RENAME + work))

    assert finished.ended == limit


def test_processor_time_is_added_up_over_processes() -> None:
    with small(cpu_s=1.0) as sandbox:
        finished = python(sandbox, FORKS.format(count=4, work="while True: pass"))

    assert finished.ended == "cpu"
    assert 0.9 < finished.cpu_s < 2.0


def test_processor_time_of_processes_that_have_ended_counts() -> None:
    with small(cpu_s=1.0) as sandbox:
        finished = python(sandbox, SHORT_PROCESSES)

    assert finished.ended == "cpu"


def test_processor_time_is_exact_for_short_commands_at_the_same_time() -> None:
    def work(_: int) -> float:
        with small() as sandbox:
            finished = python(sandbox, "import time\nwhile time.process_time() < 0.2: pass")
            return finished.cpu_s

    with ThreadPoolExecutor(12) as threads:
        used = list(threads.map(work, range(12)))

    assert all(0.2 <= each < 0.4 for each in used), used


def test_a_fork_bomb_gets_no_more_processes_than_the_limit() -> None:
    with small() as sandbox:
        finished = python(sandbox, FORK_BOMB)

    assert 8 <= int(finished.stdout) <= SMALL["processes"]


def test_two_sandboxes_do_not_share_the_limit_of_processes() -> None:
    with small() as one, small() as other:
        assert [int(python(each, FORK_BOMB).stdout) for each in (one, other)] == [
            int(python(one, FORK_BOMB).stdout)
        ] * 2


def test_threads_count_as_processes() -> None:
    with small() as sandbox:
        finished = python(
            sandbox,
            "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(1,)).start()",
        )

    assert b"can't start new thread" in finished.stderr


@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
def test_files_beyond_the_limit_are_refused_by_the_file_system(folder: str) -> None:
    with small() as sandbox:
        finished = python(sandbox, FILL.format(folder=folder))

    assert finished.stdout == b"28 8\n"  # ENOSPC, after 8 files of a megabyte


def test_the_number_of_files_is_limited() -> None:
    with small() as sandbox:
        finished = python(sandbox, MANY_FILES)

    assert finished.stdout == b"28 100\n"


def test_output_beyond_the_limit_is_discarded_and_counted() -> None:
    with small(output_kb=10) as sandbox:
        finished = sandbox.run(["sh", "-c", "head -c 1000000 /dev/zero; head -c 500000 /dev/zero >&2; echo end"])

    assert [len(finished.stdout), len(finished.stderr)] == [10240, 10240]
    assert finished.discarded_bytes == 1_500_004 - 20480
    assert finished.code == 0


def test_a_gigabyte_of_output_does_not_grow_this_process() -> None:
    with small(cpu_s=30.0, wall_s=60.0) as sandbox:
        sandbox.run(["sh", "-c", "head -c 2000000 /dev/zero"])
        before = resident_bytes()
        finished = sandbox.run(["sh", "-c", "head -c 1000000000 /dev/zero"])
        grown = resident_bytes() - before

    assert finished.discarded_bytes == 1_000_000_000 - (1 << 20)
    assert grown < 2 << 20


def test_a_command_is_ended_at_its_deadline() -> None:
    with small() as sandbox:
        began = time.monotonic()
        finished = sandbox.run(["sh", "-c", "trap '' TERM; echo begun; sleep 60"], timeout_s=0.5)

    assert (finished.ended, finished.stdout) == ("wall", b"begun\n")
    assert time.monotonic() - began < 3


def test_a_command_that_stops_itself_is_ended() -> None:
    with small() as sandbox:
        finished = sandbox.run(["sh", "-c", "kill -STOP $$"], timeout_s=0.5)

    assert finished.ended == "wall"


def test_processes_that_a_command_leaves_behind_are_ended() -> None:
    with small() as sandbox:
        sandbox.run(
            [
                "sh",
                "-c",
                "setsid sh -c 'while true; do date >> /work/log; sleep 0.02; done' >/dev/null 2>&1 & sleep 0.2",
            ]
        )
        first = sandbox.read("log")
        time.sleep(0.2)

        assert first
        assert sandbox.read("log") == first
        left = sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | grep -ac 'work/lo[g]'"])  # not this command
        assert left.stdout.strip() == b"0"


def test_files_stay_for_the_next_command_and_variables_do_not() -> None:
    with small() as sandbox:
        sandbox.run(["sh", "-c", "echo kept > file; export NAME=x; cd /tmp"])

        assert sandbox.run(["sh", "-c", "cat file; echo $NAME; pwd"]).stdout == b"kept\n\n/work\n"


def test_input_variables_and_exit_codes_arrive() -> None:
    with small() as sandbox:
        finished = sandbox.run(["sh", "-c", "cat; echo $NAME; exit 7"], stdin=b"x" * 300_000, env={"NAME": "value"})

    assert (len(finished.stdout), finished.code) == (300_006, 7)


@pytest.mark.parametrize(
    ("argv", "env", "what"),
    [
        ([], {}, "empty"),
        (["echo", "a\0b"], {}, "NUL"),
        (["echo", "\ud800"], {}, "encoded"),
        (["echo", "x" * 200_000], {}, "too long"),
        (["true"], {"a=b": "c"}, "no name"),
    ],
)
def test_a_command_that_cannot_be_started_loses_nothing(argv: list[str], env: dict[str, str], what: str) -> None:
    with small() as sandbox:
        with pytest.raises(SandboxError, match=what):
            sandbox.run(argv, env=env)
        assert sandbox.run(["true"]).code == 0


def test_texts_in_the_place_of_lists_and_bytes_are_refused() -> None:
    wrong: Any = 3
    with small() as sandbox:
        for arguments in ({"argv": "ls -l"}, {"argv": ["echo", wrong]}, {"argv": ["cat"], "stdin": "text"}):
            with pytest.raises(TypeError):
                sandbox.run(**arguments)
        with pytest.raises(TypeError, match="encode"):
            sandbox.write("file", wrong)
        assert sandbox.run(["true"]).code == 0


def test_paths_may_begin_with_the_folder_and_a_full_disk_is_named() -> None:
    with small() as sandbox:
        sandbox.write("/work/folder/file", b"x")
        assert sandbox.read("folder/file") == b"x"
        with pytest.raises(SandboxError, match="no space left"):
            sandbox.write("large", bytes(1 << 28))


def test_deep_folders_cannot_be_saved_but_lose_nothing() -> None:
    with small(scratch_files=4000) as sandbox:
        python(sandbox, "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')")
        with pytest.raises(SandboxError, match="too deeply"):
            sandbox.snapshot()
        assert sandbox.run(["true"]).code == 0


def test_a_command_that_closes_its_folder_is_followed_by_others() -> None:
    with small() as sandbox:
        python(sandbox, "import os\nfor each in ('/work', '/tmp', '/dev/shm'): os.chmod(each, 0)")
        assert sandbox.run(["sh", "-c", "echo x > a; cat a"]).stdout == b"x\n"


def test_a_command_that_does_not_exist_is_its_own_mistake() -> None:
    with small() as sandbox:
        assert sandbox.run(["nothing-of-that-name"]).code == 127


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


FORKS = """\
import os, time
for _ in range({count}):
    if os.fork() == 0:
        {work}
        os._exit(0)
for _ in range({count}): os.wait()
"""
RENAME = "import ctypes; ctypes.CDLL(None).prctl(15, bytes([255, 254]), 0, 0, 0); "
SHARED_MEMORY = """\
import mmap, time
memory = mmap.mmap(-1, 400 << 20)
for at in range(0, 400 << 20, 4096): memory[at] = 1
time.sleep(5)
"""
SHORT_PROCESSES = """\
import os
while True:
    if os.fork() == 0:
        sum(range(10**6))
        os._exit(0)
    os.wait()
"""
MANY_FILES = """\
try:
    for number in range(1000): open(f"/work/{number}", "w").close()
except OSError as error: print(error.errno, number)
"""
FORK_BOMB = """\
import os, time
count = 1
try:
    while True:
        if os.fork() == 0: time.sleep(30)
        count += 1
except OSError: print(count)
"""
FILL = """\
import os
try:
    for number in range(100):
        with open(f"{folder}/{{number}}", "wb", 0) as file: assert file.write(bytes(1 << 20)) == 1 << 20
except (OSError, AssertionError) as error: print(getattr(error, "errno", 28), number)
"""
