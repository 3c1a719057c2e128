"""The filter of system calls, executed as the kernel executes it, for both architectures."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from tidemill.core.errors import UserError
from tidemill.sandbox.seccomp import ALLOW, ERROR, KILL, REFUSED, seccomp_program

X86_64, AARCH64, I386 = 0xC000_003E, 0xC000_00B7, 0x4000_0003
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
NEW_USER, VFORK = 0x1000_0000, 0x4111


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns for a call."""
    arguments += (0,) * (6 - len(arguments))
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *arguments)
    program = list(struct.iter_unpack("<HBBI", seccomp_program(machine)))
    position, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        match code:
            case 0x20:  # load a word of the data
                (value,) = struct.unpack_from("<I", data, constant)
            case 0x15:  # jump if equal
                position += if_true if value == constant else if_false
            case 0x35:  # jump if at least
                position += if_true if value >= constant else if_false
            case 0x45:  # jump if a bit is set
                position += if_true if value & constant else if_false
            case 0x06:
                return int(constant)
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize(
    ("machine", "calls"),
    [
        ("x86_64", {"read": 0, "openat": 257, "execve": 59, "clone": 56, "futex": 202, "wait4": 61}),
        ("aarch64", {"read": 63, "openat": 56, "execve": 221, "clone": 220, "futex": 98, "wait4": 260}),
    ],
)
def test_usual_calls_are_allowed(machine: str, calls: dict[str, int]) -> None:
    assert {name: decide(machine, number) for name, number in calls.items()} == dict.fromkeys(calls, ALLOW)


@pytest.mark.parametrize(
    ("machine", "mount", "unshare", "ptrace", "setns"), [("x86_64", 165, 272, 101, 308), ("aarch64", 40, 97, 117, 268)]
)
def test_calls_that_leave_a_sandbox_are_refused(
    machine: str, mount: int, unshare: int, ptrace: int, setns: int
) -> None:
    assert {decide(machine, number) for number in (mount, unshare, ptrace, setns)} == {ERROR | errno.EPERM}


@pytest.mark.parametrize(("machine", "clone"), [("x86_64", 56), ("aarch64", 220)])
def test_a_fork_may_not_make_namespaces(machine: str, clone: int) -> None:
    assert decide(machine, clone, VFORK) == ALLOW
    assert decide(machine, clone, VFORK | NEW_USER) == ERROR | errno.EPERM
    assert decide(machine, 435) == ERROR | errno.ENOSYS  # clone3


@pytest.mark.parametrize(("machine", "socket", "ioctl"), [("x86_64", 41, 16), ("aarch64", 198, 29)])
def test_sockets_and_terminals_are_limited(machine: str, socket: int, ioctl: int) -> None:
    assert [decide(machine, socket, family) for family in (1, 2, 10)] == [ALLOW] * 3
    assert decide(machine, socket, 17) == ERROR | errno.EAFNOSUPPORT  # AF_PACKET
    assert decide(machine, socket, 16, 3, 0) == ALLOW  # AF_NETLINK, which lists interfaces
    assert decide(machine, socket, 16, 3, 12) == ERROR | errno.EAFNOSUPPORT  # netfilter
    assert decide(machine, ioctl, 0, 0x5401) == ALLOW
    assert decide(machine, ioctl, 0, 0x5412) == ERROR | errno.EPERM  # TIOCSTI


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_other_interfaces_end_the_process_and_new_calls_do_not_exist(machine: str) -> None:
    assert decide(machine, 20, architecture=I386) == KILL
    assert decide(machine, 0x4000_0000 + 39) == KILL
    assert decide(machine, 462) == ERROR | errno.ENOSYS


@pytest.mark.parametrize(("machine", "header", "column"), [("x86_64", HEADERS[0], 0), ("aarch64", HEADERS[1], 1)])
def test_refused_numbers_are_those_of_the_kernels_headers(machine: str, header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header}")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    }
    for name, refused in REFUSED.items():
        if name in numbers:
            assert refused[column] == numbers[name], name
    known = [name for name, refused in REFUSED.items() if refused[column] is not None and name in numbers]
    assert len(known) > 50


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UserError, match="riscv64"):
        seccomp_program("riscv64")
