"""Programs that try to leave a sandbox. Each prints `out` if it got out; names in braces are filled in by the test."""

from __future__ import annotations

CALL = """\
import ctypes, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
numbers = NUMBERS
def call(*arguments):
    number = numbers[0 if platform.machine() == "x86_64" else 1]
    result = libc.syscall(number, *arguments)
    return result, ctypes.get_errno()
"""


def calling(x86: int, arm: int) -> str:
    """Defines `call`, for the number on each architecture."""
    return CALL.replace("NUMBERS", f"({x86}, {arm})")


def refused(x86: int, arm: int, arguments: str) -> str:
    """A system call that must fail with EPERM, whatever its arguments: any other answer means that it was reached."""
    return calling(x86, arm) + f"result, error = call({arguments})\nprint('in' if error == 1 else 'out')\n"


SYSTEM_CALLS = {
    "mount": refused(165, 40, "b'x', b'/tmp', b'tmpfs', 0, None"),
    "umount": refused(166, 39, "b'/tmp', 0"),
    "open_tree": refused(428, 428, "-100, b'/', 1"),
    "fsopen": refused(430, 430, "b'tmpfs', 0"),
    "pivot_root": refused(155, 41, "b'/tmp', b'/tmp'"),
    "chroot": refused(161, 51, "b'/tmp'"),
    "unshare a user namespace": refused(272, 97, "0x10000000"),
    "unshare mounts": refused(272, 97, "0x20000"),
    "clone into a user namespace": refused(56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
    "setns": refused(308, 268, "os.open('/proc/self/ns/net', os.O_RDONLY), 0"),
    "ptrace": refused(101, 117, "0, 0, 0, 0"),
    "process_vm_readv": refused(310, 270, "os.getpid(), 0, 0, 0, 0, 0"),
    "process_vm_writev": refused(311, 271, "os.getpid(), 0, 0, 0, 0, 0"),
    "pidfd_getfd": refused(438, 438, "0, 0, 0"),
    "io_uring_setup": refused(425, 425, "1, ctypes.create_string_buffer(256)"),
    "bpf": refused(321, 280, "0, 0, 0"),
    "perf_event_open": refused(298, 241, "0, 0, -1, -1, 0"),
    "userfaultfd": refused(323, 282, "1"),
    "keyctl": refused(250, 219, "0, -3, 1"),
    "add_key": refused(248, 217, "b'user', b'a', b'b', 1, -3"),
    "request_key": refused(249, 218, "b'user', b'a', 0, -3"),
    "name_to_handle_at": refused(303, 264, "-100, b'/', 0, 0, 0"),
    "open_by_handle_at": refused(304, 265, "-100, 0, 0"),
    "init_module": refused(175, 105, "0, 0, b''"),
    "finit_module": refused(313, 273, "0, b'', 0"),
    "kexec_load": refused(246, 104, "0, 0, 0, 0"),
    "reboot": refused(169, 142, "0, 0, 0, 0"),
    "swapon": refused(167, 224, "b'/work/x', 0"),
    "set the clock": refused(227, 112, "0, 0"),
    "set the host name": refused(170, 161, "b'x', 1"),
    "read the kernel's log": refused(103, 116, "3, 0, 0"),
    "personality": refused(135, 92, "0x0040000"),
    "memfd_create": refused(319, 279, "b'x', 0"),
    "System V shared memory": refused(29, 194, "0, 1 << 30, 0o1600"),
    "message queues": refused(240, 180, "b'x', 0o102, 0o600, 0"),
}

FILES = {
    "read a file of the host": "print('out' if open('{secret}').read() else 'in')",
    "list the folder of a file of the host": "import os\nprint('out' if os.listdir(os.path.dirname('{secret}')) else 'in')",
    "read the users of the host": "open('/etc/passwd').read(); print('out')",
    "read home folders": "import os\nprint('out' if set(os.listdir('/root')) - {'.pyenv'} else 'in')",
    "write to /usr": "open('/usr/local/bin/probe', 'w').write('x'); print('out')",
    "write beside the interpreter": "import os, sys\nopen(os.path.dirname(os.__file__) + '/probe.py', 'w'); print('out')",
    "write to /": "open('/probe', 'w').write('x'); print('out')",
    "write to /etc": "open('/etc/probe', 'w').write('x'); print('out')",
    "remount as writable": "import subprocess\nprint('out' if subprocess.run(['mount', '-o', 'remount,rw', '/usr']).returncode == 0 else 'in')",
    "make a device": "import os, stat\nos.mknod('/work/disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0)); open('/work/disk', 'rb').read(1); print('out')",
    "read memory of the kernel": "open('/proc/kcore', 'rb').read(16); print('out')",
    "read memory of the machine": "open('/dev/mem', 'rb').read(16); print('out')",
    "set the program for crashes": "import os\nos.write(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY), b'|/work/x'); print('out')",
    "sysrq": "import os\nos.write(os.open('/proc/sysrq-trigger', os.O_WRONLY), b'h'); print('out')",
    "set a user's maps": "import os\nos.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1'); print('out')",
    "find cgroups": "import os\nprint('out' if os.path.exists('/sys/fs/cgroup') else 'in')",
    "become root": "import os\nos.setuid(0); print('out')",
    "become another user": "import os\nos.setuid(65534); print('out')",
    "run a set-uid program": "import subprocess\nprint('out' if b'\\n0\\n' in subprocess.run(['su', '-c', 'echo; id -u'], input=b'', capture_output=True).stdout else 'in')",
    "a set-uid file of one's own": "import os, subprocess, shutil\nshutil.copy('/usr/bin/id', '/work/id'); os.chmod('/work/id', 0o4755)\nprint('out' if subprocess.run(['/work/id', '-u'], capture_output=True).stdout == b'0\\n' else 'in')",
    "raise a limit": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100000, 100000)); print('out')",
}

PROCESSES = {
    "see processes of the host": "import os\nprint('out' if len([each for each in os.listdir('/proc') if each.isdigit()]) > 8 else 'in')",
    "read a variable of the caller": """\
import glob
text = b""
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/task/*/environ"):
    try: text += open(path, "rb").read()
    except OSError: pass
print("out" if b"{variable}"[::-1] in text else "in")""",
    "kill everything": "import os, signal\nos.kill({caller}, signal.SIGTERM); print('out')",
    "inherited descriptors": """\
import os
known = {os.readlink(f"/proc/self/fd/{each}") for each in (0, 1, 2)}
rest = [each for each in os.listdir("/proc/self/fd") if int(each) > 2]
open_ones = []
for each in rest:
    try: open_ones.append(os.readlink(f"/proc/self/fd/{each}"))
    except OSError: pass
print("out" if [each for each in open_ones if not each.startswith("/proc")] else "in")""",
    "a terminal": "open('/dev/tty'); print('out')",
    "write to the caller's terminal": calling(16, 29) + "print('in' if call(0, 0x5412, b'x')[1] == 1 else 'out')",
    "clone3": calling(435, 435) + "print('in' if call(0, 0)[1] == 38 else 'out')",
    "an unknown system call": calling(1000, 1000) + "print('in' if call(0, 0)[1] == 38 else 'out')",
    "the x32 interface": calling(0x40000000 + 39, 172)
    + """\
if os.fork() == 0:
    os._exit(0 if call()[0] > 0 and platform.machine() == "x86_64" else 1)
print("out" if os.wait()[1] == 0 else "in")""",
    "the 32-bit interface": calling(0, 0)
    + """\
import mmap
if platform.machine() == "x86_64" and os.fork() == 0:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    os._exit(0 if function() > 0 else 1)
print("out" if platform.machine() == "x86_64" and os.wait()[1] == 0 else "in")""",
}

NETWORK = {
    "connect to a server of the host": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2); print('out')",
    "connect to the metadata server": "import socket\nsocket.create_connection(('169.254.169.254', 80), 2); print('out')",
    "send to the internet": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53)); print('out')",
    "connect to an abstract socket of the host": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{address}'); print('out')",
    "raw packets": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('out')",
    "sockets of virtual machines": "import socket\nsocket.socket(40, socket.SOCK_STREAM); print('out')",
    "cryptography of the kernel": "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET); print('out')",
    "netfilter": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12); print('out')",
    "set up an interface": """\
import socket, fcntl, struct
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(link, 0x8916, struct.pack("16sH2s4s8x", b"lo", socket.AF_INET, b"", bytes([127, 0, 0, 9]))); print("out")""",
}

PROBES = SYSTEM_CALLS | FILES | PROCESSES | NETWORK

WITHOUT_SANDBOX = (
    "read a file of the host",
    "list the folder of a file of the host",
    "read the users of the host",
    "see processes of the host",
    "read a variable of the caller",
    "connect to a server of the host",
    "connect to an abstract socket of the host",
    "open_tree",
    "memfd_create",
    "ptrace",
    "personality",
    "clone3",
    "unshare a user namespace",
    "keyctl",
)
"""Probes that harm nothing, and get out without a sandbox: they show that a probe can fail."""
