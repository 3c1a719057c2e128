"""The bundle of a command for gVisor (`runsc run`), by the runtime specification of the Open Container Initiative.

`runsc do` is not used: it shows the files of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.sandbox.bubblewrap import IMAGE, PATH, USER, WORK
from tidemill.sandbox.records import Limits

OPEN_FILES = 256
NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


def bundle_config(slot: str, argv: Sequence[str], env: Mapping[str, str], limits: Limits) -> dict[str, Any]:
    """The content of config.json.

    Args:
        slot: folder with `work`, `tmp`, `shm` and `mnt`.
    """
    variables = {"PATH": PATH, "HOME": WORK, "LANG": "C.UTF-8", **env}
    rlimits = {
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.scratch_bytes,
        "RLIMIT_DATA": limits.memory_bytes,
    }
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": USER, "gid": USER},
            "args": list(argv),
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": WORK,
            "capabilities": {},
            "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in rlimits.items()],
            "noNewPrivileges": True,
        },
        "root": {"path": IMAGE, "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
            *(
                {"destination": path, "type": "bind", "source": f"{slot}/{name}", "options": ["bind", "rw", "nosuid"]}
                for name, path in (("work", WORK), ("tmp", "/tmp"), ("shm", "/dev/shm"))
            ),
            {"destination": "/mnt", "type": "bind", "source": f"{slot}/mnt", "options": ["rbind", "ro", "nosuid"]},
        ],
        "linux": {
            "namespaces": [{"type": name} for name in NAMESPACES],
            "resources": {"pids": {"limit": limits.processes}, "memory": {"limit": limits.memory_bytes}},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/sysrq-trigger"],
            "readonlyPaths": ["/proc/sys"],
        },
    }
