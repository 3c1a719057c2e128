"""The system calls that code in a sandbox may not make, as a program of the kernel's packet filter (BPF).

Refused are calls that a program for computing does not need, and whose code in the kernel has been a way out of
containers: namespaces and mounts, tracing, key rings, io_uring, bpf, modules, clocks; and memory that no process is
charged for. Numbers are those of the kernel's tables (`asm/unistd.h`).
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass, field

from tidemill.core.errors import UserError

# Number on x86-64, number on aarch64; None where the call does not exist.
REFUSED: dict[str, tuple[int, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "sysfs": (139, None),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
LAST = 461
"""The newest system call that the list above was made for (lsm_list_modules, Linux 6.8); later ones do not exist."""
CLONE3 = 435
X32 = 0x4000_0000
"""Set in the numbers of the x32 interface, whose calls have other numbers."""
NAMESPACES = 0x7E02_0000
"""Flags of clone for new namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
NETLINK, ROUTE = 16, 0  # of AF_NETLINK only the protocol that lists interfaces
TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
KILL, ALLOW, ERROR = 0x8000_0000, 0x7FFF_0000, 0x0005_0000


@dataclass
class Machine:
    """System calls of a processor architecture."""

    audit: int  # AUDIT_ARCH_...
    column: int  # in `REFUSED`
    clone: int
    socket: int
    socketpair: int
    ioctl: int


MACHINES = {
    "x86_64": Machine(audit=0xC000_003E, column=0, clone=56, socket=41, socketpair=53, ioctl=16),
    "aarch64": Machine(audit=0xC000_00B7, column=1, clone=220, socket=198, socketpair=199, ioctl=29),
}


@dataclass
class Filter:
    """Instructions, each (code, jump if true, jump if false, constant)."""

    instructions: list[tuple[int, int, int, int]] = field(default_factory=list)

    def load(self, offset: int) -> None:
        self.instructions.append((LOAD, 0, 0, offset))

    def end(self, value: int) -> None:
        self.instructions.append((RETURN, 0, 0, value))

    def end_if(self, test: int, constant: int, value: int) -> None:
        self.instructions.append((test, 0, 1, constant))
        self.end(value)

    def only_for(self, number: int, body: Filter) -> None:
        """Run `body`, which always ends, for one system call; the number is loaded."""
        self.instructions.append((EQUAL, 0, len(body.instructions), number))
        self.instructions += body.instructions

    def __bytes__(self) -> bytes:
        return b"".join(struct.pack("<HBBI", *each) for each in self.instructions)


def seccomp_program(machine_name: str = "") -> bytes:
    """The filter for this machine, or for another architecture.

    Raises:
        UserError: the architecture is not known.
    """
    name = machine_name or platform.machine()
    if name not in MACHINES:
        raise UserError(
            f"there is no filter of system calls for {name}",
            where="sandbox.backend",
            hint='use backend = "http" with a machine of x86_64 or aarch64',
        )
    machine = MACHINES[name]
    program = Filter()
    program.load(ARCHITECTURE)
    program.instructions.append((EQUAL, 1, 0, machine.audit))
    program.end(KILL)  # int 0x80 on x86-64 has the architecture i386
    program.load(NUMBER)
    program.end_if(AT_LEAST, X32, KILL)
    program.end_if(AT_LEAST, LAST + 1, ERROR | errno.ENOSYS)
    program.end_if(EQUAL, CLONE3, ERROR | errno.ENOSYS)  # its flags are in memory; the C library then uses clone
    for numbers in REFUSED.values():
        if (refused := numbers[machine.column]) is not None:
            program.end_if(EQUAL, refused, ERROR | errno.EPERM)
    program.only_for(machine.clone, _argument(0, (ANY_BIT, NAMESPACES)))
    program.only_for(machine.ioctl, _argument(1, *((EQUAL, each) for each in TERMINAL_REQUESTS)))
    for number in (machine.socket, machine.socketpair):
        program.only_for(number, _families())
    program.end(ALLOW)
    return bytes(program)


def _argument(index: int, *refused: tuple[int, int]) -> Filter:
    """Refuse a call by the low half of one of its arguments."""
    body = Filter()
    body.load(ARGUMENTS + 8 * index)
    for test, constant in refused:
        body.end_if(test, constant, ERROR | errno.EPERM)
    body.end(ALLOW)
    return body


def _families() -> Filter:
    body = Filter()
    body.load(ARGUMENTS)
    for family in FAMILIES:
        body.end_if(EQUAL, family, ALLOW)
    body.instructions.append((EQUAL, 1, 0, NETLINK))
    body.end(ERROR | errno.EAFNOSUPPORT)
    body.load(ARGUMENTS + 16)
    body.end_if(EQUAL, ROUTE, ALLOW)
    body.end(ERROR | errno.EAFNOSUPPORT)
    return body
