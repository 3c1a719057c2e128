"""A small root file system with this machine's Python, instead of a base image from a registry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

PROGRAMS = ("bash", "sh", "cat", "env", "find", "grep", "id", "ls", "mkdir", "rm", "sleep", "uname", "useradd")
ACCOUNTS = {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "group": "root:x:0:\n", "shadow": "root:*:::::::\n"}
LOADED = re.compile(r"(/\S+) \(0x")
CACHED = re.compile(
    r"^\s*(?:libdl|libgcc_s|libpthread|librt|libstdc\+\+|libutil)\.so\S* \(.*x86-64.*=> (\S+)", re.MULTILINE
)
"""Libraries of wheels, in the list of `ldconfig -p`."""
LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "turtledemo", "config-*")
PIP = ("pip", "pip-*.dist-info", "setuptools", "setuptools-*.dist-info")


def make_root(root: Path) -> None:
    """Write the programs, Python with pip in /usr/local, and the libraries that they load."""
    for folder in ("dev", "etc", "proc", "root", "sys", "tmp", "usr/bin", "usr/local/bin", "usr/lib", "usr/lib64"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    for name, text in ACCOUNTS.items():
        (root / "etc" / name).write_text(text)
    programs = [Path(path) for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin:/usr/sbin"))]
    for program in programs:
        shutil.copy(program, root / "usr/bin" / program.name)
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}").resolve()
    shutil.copy(python, root / "usr/local/bin/python3")
    (root / "usr/local/bin/python").symlink_to("python3")
    modules = Path(sysconfig.get_paths(vars={"base": sys.base_prefix})["stdlib"])
    copied = root / "usr/local/lib" / modules.name
    shutil.copytree(modules, copied, ignore=LEFT_OUT)
    for pattern in PIP:
        for package in (modules / "site-packages").glob(pattern):
            shutil.copytree(package, copied / "site-packages" / package.name)
    for library in _libraries([*programs, python, *(modules / "lib-dynload").glob("*.so")]):
        # Python's own library may lie beside it, where the loader of the image would not look.
        to = root / library.relative_to("/") if library.is_relative_to("/usr") else root / "usr/lib" / library.name
        if str(library).startswith(("/lib", "/lib64")):
            to = root / "usr" / library.relative_to("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, to)


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """The shared libraries that the programs load."""
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    cached = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return {Path(path) for path in (*LOADED.findall(listed), *CACHED.findall(cached))}
